"""What a comparison of kernels gives, on the CPU and on CUDA: timings, verdicts, and both as data."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rmsnorm_deploy.benchmark.timing import quantile


class AnyCase(Protocol):
    """A named tuple that says what was measured."""

    def _asdict(self) -> dict[str, Any]: ...


CaseT = TypeVar("CaseT", bound=AnyCase)


@dataclass
class Timing:
    """Microseconds a call: the median turn, and the 5th and 95th percentile of turns."""

    name: str
    median: float
    p5: float
    p95: float
    gigabytes: float
    share_of_copy: float | None = None


@dataclass
class Verdict:
    """A bar and what was measured against it; ratio is None where a side of it could not run."""

    what: str
    ratio: float | None
    bar: float
    met: bool | None


@dataclass
class CaseResult(Generic[CaseT]):
    """All contestants of one case, and why others are missing."""

    case: CaseT
    timings: list[Timing] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)


def timings_of(samples: Mapping[str, Sequence[float]], size: int, copy: str, idle: str = "") -> list[Timing]:
    """A timing for each name.

    samples: seconds a call, one for each turn. size: bytes that must move. copy: whose bandwidth the others are a share
    of. idle: who moves nothing.
    """
    timings = []
    for name, seconds in samples.items():
        median, p5, p95 = statistics.median(seconds), quantile(seconds, 0.05), quantile(seconds, 0.95)
        moved, share = (0, None) if name == idle else (size, statistics.median(samples[copy]) / median)
        timings.append(Timing(name, median * 1e6, p5 * 1e6, p95 * 1e6, moved / median / 1e9, share))
    return timings


def to_json(machine: Mapping[str, Any], results: Sequence[CaseResult[Any]]) -> dict[str, Any]:
    """All results and what they were measured on, as plain values."""
    cases = [{**asdict(result), "case": result.case._asdict()} for result in results]
    return {"machine": dict(machine), "cases": cases}


def write_json(data: Mapping[str, Any], path: Path) -> None:
    """What `to_json` returns, as a file."""
    path.write_text(json.dumps(data, indent=1) + "\n")


def print_bars(results: Sequence[CaseResult[Any]]) -> int:
    """Print how many bars were met and missed, and return how many were missed."""
    verdicts = [verdict for result in results for verdict in result.verdicts]
    missed = sum(verdict.met is False for verdict in verdicts)
    print(f"{sum(verdict.met is True for verdict in verdicts)} of {len(verdicts)} bars met, {missed} missed")
    return missed
