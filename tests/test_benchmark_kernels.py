"""The kernel benchmark: its bars are found, judged as they say, and everything runs once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rmsnorm_deploy.benchmark import kernels, kernels_cases
from rmsnorm_deploy.benchmark.kernels_cases import BARE, COPY, OURS, Bar, Case, make_buffers
from rmsnorm_deploy.benchmark.kernels_measure import judge
from rmsnorm_deploy.benchmark.kernels_peers import contestants
from rmsnorm_deploy.benchmark.kernels_result import CaseResult, Timing
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.native_build import build


def test_each_bar_has_a_case_on_its_own_caches() -> None:
    found = kernels_cases.cases(["float32", "float16", "bfloat16"], [1, 2])
    for bar in kernels_cases.BARS:
        for threads in bar.threads:
            assert Case(bar.rows, bar.width, bar.dtype, bar.skip, threads, bar.cold) in found
    assert all(not case.cold for case in kernels_cases.cases(["float32"], [1], ["warm"]))


@pytest.mark.parametrize(("ours", "met"), [(10.0, True), (14.0, False), (None, None)])
def test_a_bar_takes_the_best_peer(ours: float | None, met: bool | None) -> None:
    bar = Bar(4, 8, "float32", False, OURS, ("a", "b"), 1.5, cold=False)
    result = CaseResult(Case(4, 8, "float32", False, 1, False))
    times = {"a": 15.0, "b": 40.0, **({OURS: ours} if ours else {})}
    result.timings = [Timing(name, time, time, time, 1.0) for name, time in times.items()]
    (verdict,) = judge(bar, result)
    assert verdict.met is met
    assert verdict.ratio == (15.0 / ours if ours else None)
    assert judge(bar._replace(cold=True), result) == []
    assert judge(bar._replace(threads=(2,)), result) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("skip", [False, True])
def test_every_contestant_computes_the_same(dtype: str, skip: bool) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    try:
        build(("cpu",), quiet=True)
    except BackendUnavailable as error:
        pytest.skip(f"the CPU kernels cannot be built here: {error}")
    case = Case(5, 64, dtype, skip, 1, False)
    (item,) = make_buffers(case)
    scale = item.x[0].clone()
    results = {}
    for name, make in contestants(case, compiled=dtype == "float16").items():
        if "memcpy" in name or "ayer_norm" in name or name.endswith(" LayerNormalization"):
            continue
        try:
            (call,) = make([item], scale)
        except BackendUnavailable:
            # ONNX Runtime lacks some of its own ops in bfloat16 alone; torch.compile needs a C++ compiler.
            assert dtype == "bfloat16" or "compile" in name, name
            continue
        item.y.zero_()
        value = call()
        value = value[0] if isinstance(value, tuple) else value
        results[name] = (value if name.startswith("torch") else item.y).double()
    want = results.pop(OURS)
    assert {BARE, "torch rms_norm"} <= set(results)
    for name, got in results.items():
        assert ((got - want).abs() <= 0.02 * want.abs() + 0.02).all(), name


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Bar(4, 64, "float32", False, BARE, (COPY,), 1e9, cold=False, threads=(1,))
    monkeypatch.setattr(kernels_cases, "BARS", (bar,))
    path = tmp_path / "figures.json"
    picture = tmp_path / "figures.svg"
    options = ["--dtype", "float32", "--threads", "1", "--turns", "2", "--json", str(path), "--plot", str(picture)]
    assert kernels.main(options) == 0
    assert "memcpy" in picture.read_text()
    (case,) = json.loads(path.read_text())["cases"]
    assert case["case"]["rows"] == 4
    assert {"memcpy", "torch rms_norm"} <= {timing["name"] for timing in case["timings"]}
    if BARE not in case["missing"]:
        assert kernels.main([*options, "--check"]) == 1
