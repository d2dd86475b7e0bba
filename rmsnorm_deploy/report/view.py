"""The report's contents as plain rows and sentences: what the HTML and the terminal both show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmsnorm_deploy.benchmark.result import MODEL_GROUP, BenchmarkReport, sentence
from rmsnorm_deploy.parity.backends import BACKENDS
from rmsnorm_deploy.parity.norm_result import SiteError
from rmsnorm_deploy.parity.result import (
    FAIL,
    NOT_RUN,
    PASS,
    PASS_LIKE_EAGER,
    PASS_LIKE_ROUNDING,
    PASS_LIKE_UNFUSED,
    BackendResult,
    Budget,
    ParityReport,
)
from rmsnorm_deploy.parity.ulp import UlpError

Parity = ParityReport | Mapping[str, Any] | None
Benchmark = BenchmarkReport | Mapping[str, Any] | None

# symbol and words beside every colour, so that none depends on it
SYMBOLS = {PASS: "✓", PASS_LIKE_EAGER: "✓", PASS_LIKE_UNFUSED: "✓", PASS_LIKE_ROUNDING: "✓", FAIL: "✗", NOT_RUN: "–"}
WORDS = {
    PASS: "pass",
    PASS_LIKE_EAGER: "pass, as exact as {before}",
    PASS_LIKE_UNFUSED: "pass, as exact as unfused",
    PASS_LIKE_ROUNDING: "pass, as exact as rounding",
    FAIL: "fail",
    NOT_RUN: "not run",
}


@dataclass(frozen=True)
class Verdict:
    """``state`` is "pass", "fail" or "unknown"."""

    state: str
    headline: str
    detail: str


@dataclass(frozen=True)
class NormGroup:
    """Norms that are alike, and how many there are."""

    count: int
    op: str
    row: str
    dtype: str
    epsilon: str
    order: str
    residual: bool


def as_parity(parity: Parity) -> ParityReport | None:
    """A report from itself or its JSON."""
    return parity if parity is None or isinstance(parity, ParityReport) else ParityReport.from_json(parity)


def as_benchmark(benchmark: Benchmark) -> BenchmarkReport | None:
    """A report from itself or its JSON."""
    if benchmark is None or isinstance(benchmark, BenchmarkReport):
        return benchmark
    return BenchmarkReport.from_json(benchmark)


def when(created: str) -> str:
    """The manifest's time as people write it."""
    return created.replace("T", " ").replace("Z", " UTC")


def verdict(parity: ParityReport | None, norms: int) -> Verdict:
    """The answer to "is the deployed model still my model?"."""
    found = "1 RMSNorm is one fused op" if norms == 1 else f"{norms} RMSNorms are one fused op each"
    if norms == 0:
        found = "no RMSNorm was found to fuse"
    if parity is None:
        return Verdict("unknown", "Not checked", f"Parity was left out of this run; {found}.")
    if parity.problem is not None:
        return Verdict("unknown", "Not proved", f"{parity.problem}.")
    judged = sum(sample.skipped is None for sample in parity.samples)
    inputs = f"on {judged} input{'s' * (judged != 1)} against {parity.truth}"
    failed = [backend.title for backend in parity.backends if backend.verdict == FAIL]
    if failed:
        return Verdict(
            "fail",
            "Not the same model",
            f"{listed(failed)} {'computes' if len(failed) == 1 else 'compute'} something else, {inputs}.",
        )
    ran = [b.title for b in parity.backends if b.verdict != NOT_RUN and b.title != parity.baseline]
    if parity.unproved is not None or not ran:
        why = parity.unproved or "only the model before export was judged"
        return Verdict("unknown", "Not proved", f"{why[0].upper()}{why[1:]}. Here {found}.")
    agree = "agrees" if len(ran) == 1 else "agree"
    return Verdict("pass", "The same model", f"{listed(ran)} {agree} with it {inputs}; {found}.")


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them; a name may have a comma of its own."""
    quoted = [f"{name.replace(', ', ' (')})" if ", " in name else name for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def clear_gains(benchmark: BenchmarkReport) -> list[str]:
    """What the whole model gains for certain, in words, as long as the machine was free."""
    if benchmark.busy():
        return []
    own = {timing.name for timing in benchmark.timings if timing.group == MODEL_GROUP}
    return [sentence(item) for item in benchmark.comparisons if item.clear and item.contender in own]


def norm_groups(norms: Sequence[Mapping[str, Any]]) -> list[NormGroup]:
    """Like norms together, the most frequent first."""
    counts = Counter(
        (
            _variant(norm),
            row_text(norm),
            _dtypes(norm),
            f"{norm['epsilon']:.3g}",
            str(norm["scale_order"]).replace("_", " "),
            bool(norm["residual"]) or str(norm["op"]).startswith("Skip"),
        )
        for norm in norms
    )
    return [NormGroup(count, *kind) for kind, count in counts.most_common()]


def _variant(norm: Mapping[str, Any]) -> str:
    extra = [f"eps {norm['epsilon_mode']}"] if norm["epsilon_mode"] != "inside" else []
    extra += ["bias"] if norm["bias"] else []
    return f"{norm['op']} ({', '.join(extra)})" if extra else str(norm["op"])


def _dtypes(norm: Mapping[str, Any]) -> str:
    scale = norm["scale_dtype"]
    return str(norm["dtype"]) if scale == norm["dtype"] else f"{norm['dtype']}, scale {scale}"


def row_text(norm: Mapping[str, Any]) -> str:
    """The normalized axes: "576", "4 x 64"."""
    return " x ".join(str(size) for size in norm["shape"][norm["axis"] :])


def ulps(value: float | None) -> str:
    """An error to three digits; huge ones as powers of ten."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{value:.0f}" if 100 <= value < 1e5 else f"{value:.3g}"


def words(backend: BackendResult, parity: ParityReport) -> str:
    """The verdict in words; of the model before export, which is as exact as itself, what it is."""
    baseline = backend.title == parity.baseline and backend.verdict == PASS_LIKE_EAGER
    return "the model before export" if baseline else WORDS[backend.verdict].format(before=before(parity))


def before(parity: ParityReport) -> str:
    """What the model before export is called: "eager", or of an ONNX source "unfused"; "" where it did not run."""
    if parity.baseline is None:
        return ""
    return "eager" if parity.baseline == BACKENDS["pytorch"].title else "unfused"


def ratio_text(backend: BackendResult, parity: ParityReport) -> str:
    """How the mean error compares with that of the model before export, on the median input."""
    ratio = backend.versus_eager
    if ratio is None or parity.baseline is None or backend.title == parity.baseline:
        return ""
    if ratio < 0.9:
        return f"{_times(1 / ratio)} more exact" if ratio > 0.001 else "far more exact"
    return "alike" if ratio < 1.1 else f"{_times(ratio)} less exact"


def unfused_text(backend: BackendResult) -> str:
    """What the model before fusing makes of the inputs on which it was needed beside this one."""
    if backend.unfused is None:
        return ""
    error = backend.unfused
    return f"unfused: {ulps(error.max)} ULP at most, {ulps(error.mean)} on average"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def failure_text(backend: BackendResult) -> str:
    """Why a backend failed, and where it is worst."""
    if backend.reason or backend.error is None:
        return backend.reason or ""
    error = backend.error
    where = f", at {list(error.worst)} got {error.got:.6g}, expected {error.want:.6g}" if error.worst else ""
    return f"worst on {backend.worst_sample}{where}"


def budget_text(budget: Budget) -> str:
    """The budget in a sentence."""
    parts = [f"{budget.norms} norm{'s' * (budget.norms != 1)}"]
    if budget.matmuls:
        parts.append(f"{budget.matmuls} matrix product{'s' * (budget.matmuls != 1)}")
    parts.append(f"rows of {budget.width}")
    own = "" if budget.computed_in == budget.unit else f", computed in {budget.computed_in}"
    return f"{budget.unit}: {ulps(budget.max)} ULP at most and {ulps(budget.mean)} on average ({', '.join(parts)}{own})"


def not_run(parity: ParityReport) -> list[BackendResult]:
    return [backend for backend in parity.backends if backend.verdict == NOT_RUN]


def judged(parity: ParityReport) -> list[BackendResult]:
    """Backends with a verdict, the failing ones first."""
    order = {FAIL: 0, PASS_LIKE_UNFUSED: 1, PASS_LIKE_ROUNDING: 1, PASS_LIKE_EAGER: 1, PASS: 1}
    ran = [backend for backend in parity.backends if backend.verdict != NOT_RUN]
    return sorted(ran, key=lambda backend: order[backend.verdict])


def sites_by_backend(parity: ParityReport) -> dict[str, list[SiteError]]:
    """The norms with a figure, in order, by the backend's title."""
    titles = {backend.name: backend.title for backend in parity.backends}
    found: dict[str, list[SiteError]] = {}
    for site in parity.sites:
        if site.error_mean is not None:
            found.setdefault(titles.get(site.backend, site.backend), []).append(site)
    return found


def depth_text(parity: ParityReport) -> str:
    """What the plot of errors by depth shows, in words."""
    parts = []
    for title, sites in sites_by_backend(parity).items():
        first, last = sites[0], sites[-1]
        parts.append(f"{title}: {ulps(first.error_mean)} ULP at {first.norm}, {ulps(last.error_mean)} at {last.norm}")
    return "; ".join(parts)


def worst_by_sample(parity: ParityReport) -> dict[str, dict[str, UlpError | None]]:
    """The worst error over the outputs, by sample and backend; None where it has no figure (a refused input)."""
    table: dict[str, dict[str, UlpError | None]] = {}
    for item in parity.measurements:
        row = table.setdefault(item.sample, {})
        known = row.get(item.backend)
        if item.backend not in row or (known is not None and item.error is not None and item.error.max > known.max):
            row[item.backend] = item.error
    return table
