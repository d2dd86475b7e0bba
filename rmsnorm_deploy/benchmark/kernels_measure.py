"""Takes the contestants of a case in turns, and holds their medians against the bars."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rmsnorm_deploy.benchmark import kernels_cases
from rmsnorm_deploy.benchmark.kernels_cases import COPY, DTYPES, Bar, Case, make_buffers
from rmsnorm_deploy.benchmark.kernels_ort import cores_of
from rmsnorm_deploy.benchmark.kernels_peers import contestants
from rmsnorm_deploy.benchmark.kernels_result import CaseResult, Verdict, timings_of
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable

_TURN_SECONDS = 0.0015
_NAP_SECONDS = 0.004
_MOST_NAPS = 60
# Two cores that have slept run a quarter slower for some 5 ms when they begin together, by what this machine showed.
_RAMP_SECONDS = 0.008
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
    batches = {name: _batch(calls) for name, calls in ready.items()}  # starts all threads, on any core
    with _on_one_core(case.threads):
        samples = _take_turns(ready, batches, turns, settle=case.threads > 1)
    result.timings = timings_of(samples, case.bytes_moved, COPY)
    result.verdicts = [verdict for bar in kernels_cases.BARS for verdict in judge(bar, result)]
    return result


def _take_turns(
    ready: dict[str, list[Call]], batches: dict[str, int], turns: int, settle: bool
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in ready}
    spent = dict.fromkeys(ready, 0.0)
    at = 0  # in the buffers, for all contestants: nobody finds what the one before has just brought into a cache
    for turn in range(turns):
        for name, calls in ready.items():
            if turn >= _LEAST_TURNS and spent[name] > _MOST_SECONDS:
                continue
            count = batches[name]
            if settle:
                _settle()
                at += _ramp(calls, at)
            calls[at % len(calls)]()
            order = [calls[(at + 1 + i) % len(calls)] for i in range(count)]
            began = time.perf_counter()
            for call in order:
                call()
            seconds = time.perf_counter() - began
            samples[name].append(seconds / count)
            spent[name] += seconds
            at += count + 1
    return samples


def _ramp(calls: list[Call], at: int) -> int:
    """Call them in order from ``at`` on until all threads are awake and all cores as fast as they get; how often."""
    until = time.perf_counter() + _RAMP_SECONDS
    count = 0
    while time.perf_counter() < until:
        calls[(at + count) % len(calls)]()
        count += 1
    return count


def _settle() -> None:
    """Sleep until no thread of this process computes: those of a contestant spin for up to 50 ms after its last call,
    on the cores that the next one needs."""
    for _ in range(_MOST_NAPS):
        before = time.process_time()
        time.sleep(_NAP_SECONDS)
        if time.process_time() - before < _NAP_SECONDS / 5:
            return


@contextmanager
def _on_one_core(threads: int) -> Iterator[None]:
    """Keep this thread on the first of a case's cores; the sessions keep theirs on the others.

    The kernel may wake a thread on the core of the one that woke it, and leave it there for milliseconds.
    """
    cores = cores_of(threads)
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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
