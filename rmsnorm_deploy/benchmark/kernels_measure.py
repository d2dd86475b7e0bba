"""Takes the contestants of a case in turns, and holds their medians against the bars."""

from __future__ import annotations

import time

import torch

from rmsnorm_deploy.benchmark import kernels_cases
from rmsnorm_deploy.benchmark.kernels_cases import COPY, DTYPES, Bar, Case, make_buffers
from rmsnorm_deploy.benchmark.kernels_peers import contestants
from rmsnorm_deploy.benchmark.kernels_result import CaseResult, Verdict, timings_of
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable

_TURN_SECONDS = 0.0015
# Threads of the contestant before keep spinning for some milliseconds, on the cores that the next one needs.
_SETTLE_SECONDS = 0.02
# A contestant that has taken this long, as slow ones do, has no more turns than these.
_MOST_SECONDS = 0.25
_LEAST_TURNS = 9


def measure(case: Case, turns: int = 41, compiled: bool = False) -> CaseResult[Case]:
    """Run all contestants of one case in turns; with ``compiled`` torch.compile too, which takes it seconds."""
    result = CaseResult(case)
    torch.set_num_threads(case.threads)
    sets = make_buffers(case)
    scale = (1 + 0.1 * torch.randn(case.width)).to(DTYPES[case.dtype][0])
    ready: dict[str, list[Call]] = {}
    for name, make in contestants(case, compiled).items():
        try:
            ready[name] = make(sets, scale)
        except (BackendUnavailable, ImportError) as error:
            result.missing[name] = str(error)
    samples = _take_turns(ready, turns, _SETTLE_SECONDS if case.threads > 1 else 0.0)
    result.timings = timings_of(samples, case.bytes_moved, COPY)
    result.verdicts = [verdict for bar in kernels_cases.BARS for verdict in judge(bar, result)]
    return result


def _take_turns(ready: dict[str, list[Call]], turns: int, settle: float) -> dict[str, list[float]]:
    batches = {name: _batch(calls) for name, calls in ready.items()}
    samples: dict[str, list[float]] = {name: [] for name in ready}
    spent = dict.fromkeys(ready, 0.0)
    at = dict.fromkeys(ready, 0)
    for turn in range(turns):
        for name, calls in ready.items():
            if turn >= _LEAST_TURNS and spent[name] > _MOST_SECONDS:
                continue
            count, start = batches[name], at[name]
            order = [calls[(start + i) % len(calls)] for i in range(count)]
            time.sleep(settle)
            calls[(start - 1) % len(calls)]()  # wakes the threads again
            began = time.perf_counter()
            for call in order:
                call()
            seconds = time.perf_counter() - began
            samples[name].append(seconds / count)
            spent[name] += seconds
            at[name] = start + count
    return samples


def _batch(calls: list[Call]) -> int:
    """Calls in a turn: enough for the clock, after a few to warm up."""
    for call in calls[:3] * 2:
        call()
    began = time.perf_counter()
    for call in calls[:5]:
        call()
    seconds = (time.perf_counter() - began) / len(calls[:5])
    return max(1, min(2000, int(_TURN_SECONDS / seconds)))


def judge(bar: Bar, result: CaseResult[Case]) -> list[Verdict]:
    """What became of the bar in this case: one verdict, or none where it is another case's."""
    case = result.case
    if (bar.rows, bar.width, bar.dtype, bar.skip) != (case.rows, case.width, case.dtype, case.skip):
        return []
    if case.threads not in bar.threads or case.cold != bar.cold:
        return []
    times = {timing.name: timing.median for timing in result.timings}
    peers = {name: times[name] for name in bar.peers if name in times}
    what = f"{bar.ours} against {min(peers, key=lambda name: peers[name]) if peers else ' or '.join(bar.peers)}"
    if bar.ours not in times or not peers:
        return [Verdict(what, None, bar.factor, None)]
    ratio = min(peers.values()) / times[bar.ours]
    return [Verdict(what, ratio, bar.factor, ratio >= bar.factor)]
