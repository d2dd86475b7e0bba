"""What the benchmark measured: plain data, to and from JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rmsnorm_deploy.benchmark.timing import quantile
from rmsnorm_deploy.errors import InputError

FORMAT = 1

MODEL_GROUP = "model"
NORM_GROUP = "norm"


@dataclass(frozen=True)
class Timing:
    """One contestant. ``milliseconds`` has a figure a round; empty with ``reason`` when it could not run.

    ``group`` is "model" or "norm" (a single norm at the model's own width), ``backend`` "pytorch" or "onnxruntime".
    """

    name: str
    title: str
    group: str
    backend: str
    milliseconds: list[float] = field(default_factory=list)
    reason: str | None = None

    @property
    def median(self) -> float:
        return quantile(self.milliseconds, 0.5)

    @property
    def p5(self) -> float:
        return quantile(self.milliseconds, 0.05)

    @property
    def p95(self) -> float:
        return quantile(self.milliseconds, 0.95)


@dataclass(frozen=True)
class Comparison:
    """How many times as fast ``contender`` is as ``baseline``: the median over the rounds, and its 95% interval.

    ``source`` says what the difference comes from: "fusion" (one op instead of a chain), "norm" (RMSNorm instead of
    LayerNorm), "kernels" (this package's own) or "backend"; ``what`` says it in words, with where it was measured.
    """

    source: str
    what: str
    contender: str
    baseline: str
    ratio: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the whole interval lies on one side of equal."""
        return self.low > 1.0 or self.high < 1.0


@dataclass(frozen=True)
class BenchmarkReport:
    """All timings of one run, made in turn on one machine, and the comparisons that follow from them."""

    timings: list[Timing]
    comparisons: list[Comparison]
    threads: int
    machine: dict[str, Any]
    shapes: dict[str, list[int]]
    norm: dict[str, Any] | None
    exchanged: dict[str, int]
    seconds: float = 0.0

    def timing(self, name: str) -> Timing:
        """One contestant; KeyError for a name that is none."""
        return {timing.name: timing for timing in self.timings}[name]

    def sentences(self) -> list[str]:
        """The comparisons in words, after a warning when other programs had the machine too."""
        busy = self.busy()
        return ([busy] if busy else []) + self.comparison_lines()

    def comparison_lines(self) -> list[str]:
        """A sentence for each of ``comparisons``, in their order."""
        return [sentence(item) for item in self.comparisons]

    def busy(self) -> str | None:
        """A warning when others kept half of the cores or more busy as the run began."""
        load, cores = self.machine.get("load"), self.machine.get("cores") or 1
        if load is None or load < cores / 2:
            return None
        return f"The machine was busy (others took {load:.1f} of {cores} cores): measure again when it is idle"

    def summary(self) -> list[str]:
        """A line a contestant, then the comparisons in words."""
        return [_line(timing) for timing in self.timings] + self.sentences()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the quantiles worked out beside the raw times."""
        data = dataclasses.asdict(self)
        for record, timing in zip(data["timings"], self.timings, strict=True):
            record["milliseconds"] = [float(f"{value:.5g}") for value in timing.milliseconds]
            if timing.milliseconds:
                record.update(median=timing.median, p5=timing.p5, p95=timing.p95)
        return {"format": FORMAT, **data, "summary": self.sentences()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchmarkReport:
        """The inverse of `to_json`. Raises InputError for another format."""
        if data.get("format") != FORMAT:
            raise InputError(f"benchmark.json has format {data.get('format')!r}, this version reads {FORMAT}")
        known = [item.name for item in dataclasses.fields(Timing)]
        try:
            return cls(
                timings=[Timing(**{key: timing[key] for key in known}) for timing in data["timings"]],
                comparisons=[Comparison(**comparison) for comparison in data["comparisons"]],
                **{key: data[key] for key in ("threads", "machine", "shapes", "norm", "exchanged", "seconds")},
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"benchmark.json is not one of this package's: {error}") from error


def milliseconds(value: float) -> str:
    """Three significant digits with the unit that suits."""
    if value >= 999.5:
        return f"{value / 1e3:.3g} s"
    return f"{value:.3g} ms" if value >= 0.9995 else f"{value * 1e3:.3g} µs"


def _line(timing: Timing) -> str:
    if timing.reason is not None:
        return f"{timing.title}: not run ({timing.reason})"
    spread = f"{milliseconds(timing.p5)} to {milliseconds(timing.p95)}"
    return f"{timing.title}: {milliseconds(timing.median)} ({spread}, {len(timing.milliseconds)} rounds)"


def sentence(item: Comparison) -> str:
    """A comparison in words."""
    figures = f"{item.ratio:.2f}x as fast ({item.low:.2f} to {item.high:.2f})"
    return f"{item.what}: {figures}{'' if item.clear else ', which this run cannot tell from no difference'}"
