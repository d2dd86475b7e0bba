"""Where a backend first differs: in which norm, or between which two.

The norms are walked in the graph's order. What a norm reads is compared with the float64 run of the whole model; then
the norm itself with its own formula on what it read. The first that is wrong by itself is named; where a norm reads
something wrong, and every norm before it is right, the fault is in the span between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rmsnorm_deploy.errors import DeployError
from rmsnorm_deploy.parity.backends import Backend
from rmsnorm_deploy.parity.judge import judge
from rmsnorm_deploy.parity.lone_norm import save_norm, save_span
from rmsnorm_deploy.parity.norm_result import Finding, SiteError
from rmsnorm_deploy.parity.normcheck import (
    NormChecks,
    NormRuns,
    SiteCase,
    budget_of,
    judge_sites,
    run_norms,
    site_error,
)
from rmsnorm_deploy.parity.result import FAIL, Budget
from rmsnorm_deploy.parity.sites import Site
from rmsnorm_deploy.parity.ulp import Array, UlpError

# times the error before fusing: enough to name a place, not to give a verdict; in half precision ONNX Runtime itself
# may round a few times less in one graph than in another
_SUSPICIOUS = 4.0
_SUSPICIOUS_IN_HALF = 12.0


@dataclass(frozen=True)
class Walk:
    """One backend's run of one sample, with what the norms make of it."""

    checks: NormChecks
    backend: Backend
    case: SiteCase
    values: Mapping[str, Array]
    errors: Sequence[SiteError]
    budget: Budget | None

    def differs(self, name: str, site: Site) -> UlpError | None:
        """The error of a value that the model computes, if it's more than the model before fusing explains."""
        if name not in self.values or name not in self.case.truth:
            return None
        error, before = site_error(self.values[name], self.case.truth[name], site.dtype), self.case.before.get(name)
        half = site.dtype in ("float16", "bfloat16")
        if self.budget is not None and not half and judge(error, before, self.budget) == FAIL:
            return error
        if before is None or error.max <= budget_of(site).max:
            return None
        factor = _SUSPICIOUS_IN_HALF if half else _SUSPICIOUS
        suspicious = error.mean > factor * before.mean and error.max > factor * before.max
        return error if suspicious or error.mismatched > before.mismatched else None

    def to_the_end(self) -> Walk:
        """With the model's outputs too, and their error before fusing. Raises DeployError where they cannot be had."""
        values = {**self.values, **self.checks.outputs(self.backend, self.case.sample)}
        before = {**self.case.before, **self.checks.outputs_before(self.case)}
        return replace(self, values=values, case=replace(self.case, before=before))


def bisect(
    checks: NormChecks, runs: NormRuns, case: SiteCase, budget: Budget | None, folder: Path | None = None
) -> Finding:
    """Name where the backend of ``runs`` first differs on ``case``, which need not be one of theirs; the norm or the
    span at fault is saved alone in ``folder``."""
    backend = runs.backend
    here = runs.on(case) or run_norms(checks, backend, [case], runs.alone)
    values: Mapping[str, Array] = {} if isinstance(here.values, str) else here.values[0]
    walk = Walk(checks, backend, case, values, judge_sites(checks, here), budget)
    finding = _first(walk)
    if finding is None and isinstance(here.values, str):
        return _refused(backend, case, here.values)
    if finding is None:
        try:
            walk = walk.to_the_end()
        except DeployError as error:
            return _refused(backend, case, str(error))
        finding = _after_the_last(walk)
    if folder is None:
        return finding
    if finding.value is not None:
        known = {**case.sample.feeds, **walk.values}
        stem = f"{finding.after or 'input'}_to_{finding.before or 'output'}.{backend.name}"
        return replace(finding, saved=save_span(checks, finding.value, known, folder, stem))
    if finding.norm is None:
        return finding
    site = next(site for site in checks.sites.sites if site.name == finding.norm)
    return replace(finding, saved=save_norm(checks, site, values, finding.rule, folder, f"{site.name}.{backend.name}"))


def _refused(backend: Backend, case: SiteCase, problem: str) -> Finding:
    return Finding(backend.name, "refused", f"{backend.title} does not run it: {problem}", case.sample.name)


def _first(walk: Walk) -> Finding | None:
    for site, error in zip(walk.checks.sites.sites, walk.errors, strict=True):
        for name in site.inputs:
            inherited = walk.differs(name, site)
            if inherited is not None and site.problem is None:
                return _span(walk, site, name, inherited)
        if error.verdict == FAIL:
            return _norm(walk, site, error)
    return None


def _norm(walk: Walk, site: Site, error: SiteError) -> Finding:
    others = tuple(e.norm for e in walk.errors if e.verdict == FAIL and e.norm != site.name)
    inherited = [site_error(walk.values[n], walk.case.truth[n], site.dtype) for n in site.inputs
                 if n in walk.values and n in walk.case.truth]  # fmt: skip
    worst = max(inherited, key=lambda e: e.max, default=None)
    own = max(_pair(error.isolated_max, error.isolated_mean), _pair(error.own_max, error.own_mean))
    also = f"; so {'is' if len(others) == 1 else 'are'} {_listed(others)}" if others else ""
    where = f" ({site.record['location']})" if site.record["location"] else ""
    reads = f", while what it reads is off by {worst.max:.3g} ULP" if worst is not None else ""
    return Finding(
        backend=walk.backend.name,
        rule=error.rule,
        text=f"{walk.backend.title}: {site.name}{where} is wrong: {error.reason}{reads}{also}",
        sample=walk.case.sample.name,
        norm=site.name,
        statistics=statistics(walk.values[site.x]) if site.x in walk.values else {},
        own_max=own[0] if own[0] >= 0 else None,
        own_mean=own[1] if own[0] >= 0 else None,
        inherited_max=worst.max if worst else None,
        inherited_mean=worst.mean if worst else None,
        others=others,
    )


def _pair(top: float | None, mean: float | None) -> tuple[float, float]:
    return (-1.0, -1.0) if top is None else (top, mean or 0.0)


def _span(walk: Walk, site: Site, name: str, error: UlpError) -> Finding:
    after = upstream(walk.checks, name)
    start = after.name if after else "the model's input"
    return Finding(
        backend=walk.backend.name,
        rule="span",
        text=f"{walk.backend.title}: wrong between {start} and {site.name}: what that reads ({name}) is off by "
        f"{error.max:.3g} ULP, and the norms before it are right",
        sample=walk.case.sample.name,
        after=after.name if after else None,
        before=site.name,
        value=name,
        statistics=statistics(walk.values[site.x]) if site.x in walk.values else {},
        inherited_max=error.max,
        inherited_mean=error.mean,
    )


def _after_the_last(walk: Walk) -> Finding:
    last = walk.checks.sites.sites[-1]
    for item in walk.checks.bundle.manifest["signature"]["outputs"]:
        error = walk.differs(item["name"], last)
        if error is None:
            continue
        after = upstream(walk.checks, item["name"])
        text = f"wrong after {after.name if after else 'every norm'}: output {item['name']!r} is off by "
        return Finding(
            backend=walk.backend.name,
            rule="tail",
            text=f"{walk.backend.title}: {text}{error.max:.3g} ULP, and every norm is right",
            sample=walk.case.sample.name,
            after=after.name if after else None,
            value=item["name"],
            inherited_max=error.max,
            inherited_mean=error.mean,
        )
    text = f"every norm and every output is right on {walk.case.sample.name}, against the graph before fusing"
    return Finding(walk.backend.name, "nothing", f"{walk.backend.title}: {text}", walk.case.sample.name)


def upstream(checks: NormChecks, name: str) -> Site | None:
    """The last norm that a value of the graph before fusing follows from without another norm between."""
    graph = checks.sites.reference
    results = {value: site for site in checks.sites.sites if site.y for value in (site.y,)}
    seen, wanted, found = {name}, [name], list[Site]()
    while wanted:
        node = graph.producers.get(wanted.pop())
        for read in node.input if node is not None else ():
            if read in results:
                found.append(results[read])
            elif read and read not in seen:
                seen.add(read)
                wanted.append(read)
    return max(found, key=lambda site: site.depth, default=None)


def statistics(x: Array) -> dict[str, float]:
    """Of the rows of a norm's input: the least and the largest root mean square, zero rows, and the largest value."""
    rows = x.astype(np.float64).reshape(-1, x.shape[-1]) if x.size else np.zeros((0, 1))
    if not len(rows):
        return {"rows": 0.0}
    with np.errstate(over="ignore", invalid="ignore"):
        rms = np.sqrt(np.mean(rows * rows, axis=-1))
        return {
            "rows": float(len(rows)),
            "zero_rows": float((rms == 0).sum()),
            "rms_min": float(rms.min()),
            "rms_max": float(rms.max()),
            "max": float(np.abs(rows).max()),
        }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
