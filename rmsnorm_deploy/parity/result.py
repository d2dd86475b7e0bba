"""What parity found: plain data, to and from JSON. The rule ids in `VERDICTS` are stable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.norm_result import Finding, SiteError
from rmsnorm_deploy.parity.ulp import UlpError

FORMAT = 1

PASS = "pass"
PASS_LIKE_EAGER = "pass-better-than-eager"
PASS_LIKE_UNFUSED = "pass-as-exact-as-unfused"
PASS_LIKE_ROUNDING = "pass-as-exact-as-rounding"
FAIL = "fail"
NOT_RUN = "not-run"

ASK_EVALUATOR = "python -m rmsnorm_deploy.parity BUNDLE --backend onnx-reference"

VERDICTS = {
    PASS: "within the budget",
    PASS_LIKE_EAGER: "over the budget, and no worse than the model's own error before export allows",
    PASS_LIKE_UNFUSED: "over the budget, and as exact as the model before fusing is on the same runtime",
    PASS_LIKE_ROUNDING: "over the budget, and no worse than roundings at random make the model itself",
    FAIL: "over the budget, and worse than the model before export and before fusing",
    NOT_RUN: "could not be judged here",
}


@dataclass(frozen=True)
class Budget:
    """The error an output may have, in ULPs of its dtype ``unit``: at most ``max`` anywhere and ``mean`` on average.

    ``computed_in`` is the narrowest float dtype of the model, ``norms``, ``matmuls`` and ``width`` what it was derived
    from (see docs/parity.md).
    """

    unit: str
    computed_in: str
    norms: int
    matmuls: int
    width: int
    max: float
    mean: float


@dataclass(frozen=True)
class SampleRecord:
    """One sample that was tried; ``skipped`` says why it judges nothing (the model itself refuses it)."""

    name: str
    kind: str
    dims: dict[str, int] = field(default_factory=dict)
    skipped: str | None = None


@dataclass(frozen=True)
class Measurement:
    """One output of one backend on one sample. ``eager`` is the error of the model before export on the same input;
    ``unfused`` that of the model before fusing on the same runtime, where it was asked for."""

    backend: str
    sample: str
    output: str
    dtype: str
    verdict: str
    error: UlpError | None
    eager: UlpError | None
    reason: str | None = None
    unfused: UlpError | None = None


@dataclass(frozen=True)
class BackendResult:
    """The worst over all samples and outputs of one backend.

    ``versus_eager`` is the mean error as a ratio to that of the model before export, the median over all measurements:
    below 1 is more exact. ``unfused`` is the error of the model before fusing on the same runtime, over the
    measurements for which it was asked for.
    """

    name: str
    title: str
    verdict: str
    reason: str | None = None
    error: UlpError | None = None
    versus_eager: float | None = None
    worst_sample: str | None = None
    worst_output: str | None = None
    seconds: float = 0.0
    unfused: UlpError | None = None


@dataclass(frozen=True)
class ParityReport:
    """The whole answer. ``ok`` is false when a backend fails, or nothing could be judged (``problem`` says why).

    ``baseline`` is the model before export, whose own error every backend's is held against; None where it cannot run
    here, and ``baseline_problem`` says why. ``narrowed`` has the operators that the oracle could not take to float64,
    which are the same before and after fusing. ``sites`` has every fused norm in every backend that shows it, and
    ``findings`` where a backend that differs does so first.
    """

    oracle: str
    baseline: str | None
    seed: int
    budgets: dict[str, Budget]
    samples: list[SampleRecord]
    backends: list[BackendResult]
    measurements: list[Measurement]
    seconds: float = 0.0
    problem: str | None = None
    baseline_problem: str | None = None
    sites: list[SiteError] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    narrowed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.problem is None and not any(backend.verdict == FAIL for backend in self.backends)

    @property
    def truth(self) -> str:
        """What the model was held against, in words."""
        return f"float64, but for {', '.join(self.narrowed)}" if self.narrowed else "float64"

    def backend(self, name: str) -> BackendResult:
        """The result of one backend; KeyError for a name that was not asked for."""
        return {backend.name: backend for backend in self.backends}[name]

    @property
    def unproved(self) -> str | None:
        """Where no backend here runs the exported model: a sentence that says so, and what would prove it."""
        exported = [backend for backend in self.backends if not backend.name.startswith("pytorch")]
        if not exported or any(backend.verdict != NOT_RUN for backend in exported):
            return None
        ways = ["python -m rmsnorm_deploy.doctor says what is missing"]
        if any(budget.computed_in == "bfloat16" for budget in self.budgets.values()):
            ways = ["an export with --precision fp32", "a machine with an NVIDIA GPU"]
        if any(ASK_EVALUATOR in (backend.reason or "") for backend in exported):
            ways.insert(0, f"{ASK_EVALUATOR} (slow)")
        return f"no backend here runs the exported model; to prove it: {', or '.join(ways)}"

    def summary(self) -> list[str]:
        """A line a backend, the worst first, after a line that gives the verdict."""
        lines = [self.headline()]
        for backend in self.backends:
            lines.append(f"{backend.title}: {backend.verdict}{_figures(backend)}")
        return lines + [finding.text for finding in self.findings]

    def headline(self) -> str:
        """The verdict in one sentence."""
        if self.problem is not None:
            return f"Not proved: {self.problem}"
        failed = [backend.title for backend in self.backends if backend.verdict == FAIL]
        if failed:
            return f"Parity failed on {', '.join(failed)}"
        if self.unproved is not None:
            return f"Not proved: {self.unproved}"
        ran = [backend.title for backend in self.backends if backend.verdict != NOT_RUN]
        judged = sum(sample.skipped is None for sample in self.samples)
        return f"{', '.join(ran)}: same model as before export, on {judged} inputs against {self.truth}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; infinity and NaN are the strings "inf", "-inf" and "nan"."""
        return {"format": FORMAT, "ok": self.ok, "headline": self.headline(), **_plain(dataclasses.asdict(self))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ParityReport:
        """The inverse of `to_json`. Raises InputError for another format."""
        if data.get("format") != FORMAT:
            raise InputError(f"parity.json has format {data.get('format')!r}, this version reads {FORMAT}")
        try:
            return cls(
                oracle=data["oracle"],
                baseline=data["baseline"],
                seed=data["seed"],
                budgets={name: Budget(**_numbers(budget)) for name, budget in data["budgets"].items()},
                samples=[SampleRecord(**sample) for sample in data["samples"]],
                backends=[_restore(BackendResult, backend) for backend in data["backends"]],
                measurements=[_restore(Measurement, measurement) for measurement in data["measurements"]],
                seconds=data["seconds"],
                problem=data["problem"],
                baseline_problem=data["baseline_problem"],
                sites=[SiteError(**_numbers(site)) for site in data.get("sites", ())],
                findings=[_finding(finding) for finding in data.get("findings", ())],
                narrowed=list(data.get("narrowed", ())),
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"parity.json is not one of this package's: {error}") from error


def _figures(backend: BackendResult) -> str:
    if backend.reason:
        return f" ({backend.reason})"
    if backend.error is None:
        return ""
    beside = ""
    if backend.unfused is not None:
        beside = f", before fusing {backend.unfused.max:.3g} and {backend.unfused.mean:.3g}"
    return f" (max {backend.error.max:.3g}, mean {backend.error.mean:.3g} ULP{beside}; worst on {backend.worst_sample})"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    special = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
    return {key: special.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def _finding(record: Mapping[str, Any]) -> Finding:
    values = _numbers(record)
    lists = {name: tuple(values[name]) for name in ("others", "saved")}
    return Finding(**{**values, **lists, "statistics": _numbers(values["statistics"])})


def _restore(kind: type[Any], record: Mapping[str, Any]) -> Any:
    values = dict(record)
    for name in ("error", "eager", "unfused"):
        if isinstance(values.get(name), Mapping):
            error = _numbers(values[name])
            values[name] = UlpError(**{**error, "worst": tuple(error["worst"]), "histogram": tuple(error["histogram"])})
    return kind(**values)
