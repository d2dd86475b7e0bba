"""The GPU benchmark's cases, bars, data and plot, on a clock that needs no GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rmsnorm_deploy.benchmark import kernels, kernels_cuda, kernels_cuda_peers
from rmsnorm_deploy.benchmark.kernels_cuda import measure
from rmsnorm_deploy.benchmark.kernels_cuda_cases import COPY, EMPTY, OURS, Buffers, Case, cases, judge
from rmsnorm_deploy.benchmark.kernels_cuda_plot import most_rows, one_row, plot
from rmsnorm_deploy.benchmark.kernels_result import CaseResult, Timing, to_json
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable


class HostClock:
    """Runs on the CPU, and counts."""

    device = "cpu"

    def __init__(self, cache: int = 1 << 20, free: int = 1 << 30) -> None:
        self.cache, self.free = cache, free
        self.counts: list[int] = []

    def cache_bytes(self) -> int:
        return self.cache

    def free_bytes(self) -> int:
        return self.free

    def prepare(self, calls: Sequence[Call], count: int) -> Call:
        self.counts.append(count)
        return lambda: [calls[i % len(calls)]() for i in range(count)]

    def seconds(self, prepared: Call) -> float:
        began = time.perf_counter()
        prepared()
        return time.perf_counter() - began


def sleeper(seconds: float) -> kernels_cuda_peers.Maker:
    return lambda case, sets, scale: [lambda: time.sleep(seconds)]


def absent(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    raise BackendUnavailable("it is not installed")


def broken(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    raise ValueError("no kernel for this width")


TABLE = {OURS: sleeper(0.001), "torch": kernels_cuda_peers.torch_calls, COPY: kernels_cuda_peers.copy_calls}


def result_of(case: Case, **microseconds: float) -> CaseResult[Case]:
    timings = [Timing(name.replace("_", " "), value, value, value, 1.0) for name, value in microseconds.items()]
    return CaseResult(case, timings)


def test_the_cases_are_those_that_the_figures_are_wanted_for() -> None:
    wanted = cases()
    assert {case.dtype for case in wanted} == {"float32", "float16", "bfloat16"}
    assert (min(case.rows for case in wanted), max(case.rows for case in wanted)) == (1, 32_768)
    assert (min(case.width for case in wanted), max(case.width for case in wanted)) == (128, 262_144)
    assert len(set(wanted)) == len(wanted)
    assert Case(1, 4096, "float16") in wanted


def test_every_contestant_takes_its_turns_and_what_is_absent_says_why() -> None:
    table = {**TABLE, "liger": absent, "quack": broken}
    clock = HostClock()
    result = measure(Case(4, 4096, "float32"), clock, turns=3, contestants=table)
    assert {timing.name for timing in result.timings} == {OURS, "torch", COPY}
    assert result.missing == {"liger": "it is not installed", "quack": "ValueError: no kernel for this width"}
    ours = next(timing for timing in result.timings if timing.name == OURS)
    assert 1000 < ours.median < 100_000
    assert ours.p5 <= ours.median <= ours.p95
    assert ours.gigabytes == pytest.approx(2 * 4 * 4096 * 4 / ours.median / 1e3)
    assert set(clock.counts) == {100}


def test_a_case_without_our_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        measure(Case(1, 128, "float32"), HostClock(), turns=1, contestants={OURS: broken})


def test_buffers_rotate_through_twice_the_cache_and_fit_the_memory() -> None:
    seen: list[int] = []

    def count(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
        seen.append(len(sets))
        return [lambda: None]

    case = Case(16, 4096, "float16")  # 256 KiB
    measure(case, HostClock(cache=1 << 20), turns=1, contestants={OURS: count, COPY: count})
    measure(case, HostClock(cache=1 << 30), turns=1, contestants={OURS: count, COPY: count})
    measure(case, HostClock(cache=1 << 30, free=1 << 20), turns=1, contestants={OURS: count, COPY: count})
    assert seen[::2] == [9, 64, 3]
    none = measure(case, HostClock(free=1 << 18), turns=1, contestants={OURS: count, COPY: count})
    assert none.timings == []
    assert "memory" in none.missing[OURS]
    assert "memory" in kernels_cuda.line_of(none)


def test_bars() -> None:
    large, decode = Case(8192, 4096, "float16"), Case(1, 4096, "float16")
    met = judge(result_of(large, ours=100, torch=130, quack=101, copy=93, empty_kernel=1))
    assert [(verdict.bar, verdict.met) for verdict in met] == [(0.92, True), (1.0, True)]
    assert "quack" in met[1].what
    missed = judge(result_of(large, ours=100, torch=99, copy=91, empty_kernel=1))
    assert [verdict.met for verdict in missed] == [False, False]
    assert [verdict.met for verdict in judge(result_of(decode, ours=1.29, torch=3, copy=1, empty_kernel=1))] == [
        True,
        True,
    ]
    assert [verdict.met for verdict in judge(result_of(decode, ours=1.31, torch=3, copy=1, empty_kernel=1))] == [
        True,
        False,
    ]
    assert judge(result_of(Case(8, 128, "float32"), copy=1)) == []


def test_the_data_survive_json_and_are_drawn(tmp_path: Path) -> None:
    results = [measure(case, HostClock(), 1, TABLE) for case in cases(["float32"], (1, 4), (128, 256))]
    data = json.loads(json.dumps(to_json(kernels_cuda.machine(), results)))
    assert data["machine"]["torch"] == torch.__version__
    own = data["cases"]
    assert {name: [width for width, _ in points] for name, points in one_row(own).items()}[OURS] == [128, 256]
    shares = dict(most_rows(own)["torch"])
    largest = next(case for case in own if case["case"] == {"rows": 4, "width": 256, "dtype": "float32"})
    assert shares[256] == next(item["share_of_copy"] for item in largest["timings"] if item["name"] == "torch")
    plot(data, tmp_path / "plot.svg")
    assert "share of a copy" in (tmp_path / "plot.svg").read_text()


def test_without_a_gpu_the_command_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rmsnorm_deploy.runtime.cuda.no_gpu_reason", lambda: "there is no GPU")
    assert kernels.main(["--cuda", "--dtype", "float16"]) == 3
    assert "there is no GPU" in capsys.readouterr().err


def test_peers_that_are_not_installed_are_named_as_such() -> None:
    with pytest.raises(BackendUnavailable, match="quack is not installed"):
        kernels_cuda_peers.quack_calls(Case(1, 8, "float16"), [], torch.ones(8))
    with pytest.raises(BackendUnavailable, match="no float32 kernel"):
        kernels_cuda_peers.flashinfer_calls(Case(1, 8, "float32"), [], torch.ones(8))
    assert EMPTY in kernels_cuda_peers.CONTESTANTS
