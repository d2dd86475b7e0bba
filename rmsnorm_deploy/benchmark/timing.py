"""Times several calls against each other: in turn, in one run, so that what else the machine does hits all alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Call = Callable[[], Any]

MIN_ROUNDS = 5
MAX_ROUNDS = 300
# where a session's weights happen to lie in memory is worth some percent: each is opened so often, in turn
OPENINGS = 4
_SLICE = 1e-3  # a measurement takes at least this many seconds: shorter calls are repeated within it


def interleave(
    calls: Mapping[str, Call], seconds: float, progress: Callable[[str], None] | None = None
) -> dict[str, list[float]]:
    """Milliseconds a call, one figure a round for each name. Every round runs all calls, starting from another one.

    Runs for about ``seconds``, at least `MIN_ROUNDS` and at most `MAX_ROUNDS` rounds.
    """
    names = list(calls)
    repeats = {name: _repeats(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    with _without_collection():
        for round_number in range(MAX_ROUNDS):
            if round_number >= MIN_ROUNDS and time.perf_counter() > end:
                break
            if progress is not None:
                progress(f"timing, round {round_number + 1}")
            start = round_number % max(len(names), 1)
            for name in names[start:] + names[:start]:
                times[name].append(_measure(calls[name], repeats[name]))
    return times


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lies, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies with 95% confidence, whatever the distribution: between two order statistics."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    middle = (len(ordered) - 1) / 2
    low, high = math.floor(middle - reach), math.ceil(middle + reach)
    return ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


def _repeats(call: Call) -> int:
    """How often ``call`` fits into a slice, after warming up (a slow call once, a quick one until it is steady)."""
    call()
    took = _measure(call, 1)
    if took < 100:
        took = min(took, _measure(call, 1), _measure(call, 1))
    return max(1, math.ceil(_SLICE * 1e3 / max(took, 1e-6)))


def _measure(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e3


@contextmanager
def _without_collection() -> Any:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
