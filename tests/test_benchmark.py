"""The benchmark: twins that are the same model with LayerNorm, timings in turn, gains with their source."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from parity_fakes import TokenModel

from rmsnorm_deploy import Bundle, export_model, open_bundle
from rmsnorm_deploy.benchmark import BenchmarkReport, run_benchmark
from rmsnorm_deploy.benchmark.__main__ import main
from rmsnorm_deploy.benchmark.contestants import onnxruntime_call
from rmsnorm_deploy.benchmark.model import _load, compare
from rmsnorm_deploy.benchmark.norm import fused_model, layer_norm_model, typical_norm
from rmsnorm_deploy.benchmark.result import Timing
from rmsnorm_deploy.benchmark.timing import MIN_ROUNDS, interleave, median_interval, quantile
from rmsnorm_deploy.benchmark.tokens import SHAPES, STOCK, TORCH, WITHOUT
from rmsnorm_deploy.benchmark.tokens import main as tokens_main
from rmsnorm_deploy.benchmark.twin import onnx_twin, torch_twin, without_norms
from rmsnorm_deploy.errors import BackendUnavailable, InputError

QUICK = 0.2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(0)
    model = TokenModel()
    for part in model.modules():
        if isinstance(part, torch.nn.RMSNorm):
            torch.nn.init.uniform_(part.weight, 0.5, 1.5)
    args = (torch.randint(0, 50, (2, 7)),)
    return export_model(model, args, out_dir=tmp_path_factory.mktemp("b") / "bundle", check=False)


@pytest.fixture(scope="module")
def report(bundle: Bundle) -> BenchmarkReport:
    return run_benchmark(bundle, seconds=1.0)


class LayerNormModel(TokenModel):
    """What the twin must compute: LayerNorm written out, with the same scales and no bias."""

    def __init__(self, model: TokenModel) -> None:
        torch.nn.Module.__init__(self)
        for name, part in model.named_children():
            setattr(self, name, part)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            batch, length, width = hidden.shape
            parts = block.qkv(norm(block.norm1, hidden)).view(batch, length, 3, block.heads, width // block.heads)
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, length, width)
            hidden = hidden + block.out(mixed)
            hidden = hidden + block.down(F.silu(block.up(norm(block.norm2, hidden))))
        result: torch.Tensor = self.head(norm(self.norm, hidden))
        return result


def norm(module: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + (module.eps or 0)) * module.weight


class NormlessModel(LayerNormModel):
    """The same model with nothing where its norms are."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.norm1 = block.norm2 = torch.nn.Identity()
        self.norm = torch.nn.Identity()
        return TokenModel.forward(self, ids)


def truth(bundle: Bundle, ids: torch.Tensor) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(LayerNormModel(bundle.eager)(ids).numpy())


def test_the_onnx_twin_is_the_model_with_layer_norm(bundle: Bundle) -> None:
    model, count = onnx_twin(bundle.model_path, bundle.manifest["norms"])
    proto = onnx.load_from_string(model)
    onnx.checker.check_model(proto)
    assert count == len(bundle.norms) == 5
    assert sum(node.op_type == "LayerNormalization" for node in proto.graph.node) == 5
    assert not any(node.domain == "rmsnorm_deploy" for node in proto.graph.node)
    assert not proto.functions
    ids = torch.randint(0, 50, (3, 4))
    (got,) = ort.InferenceSession(model).run(None, {"ids": ids.numpy()})
    assert np.allclose(got, truth(bundle, ids), atol=2e-5)


def test_the_torch_twin_is_the_model_with_layer_norm_over_the_same_memory(bundle: Bundle) -> None:
    assert bundle.eager is not None
    twin, count = torch_twin(bundle.eager, bundle.manifest["norms"])
    assert count == 5
    ids = torch.randint(0, 50, (3, 4))
    with torch.no_grad():
        assert np.allclose(twin(ids).numpy(), truth(bundle, ids), atol=2e-5)
    own = {tensor.data_ptr() for tensor in bundle.eager.parameters()}
    assert {tensor.data_ptr() for tensor in twin.parameters()} == own
    assert sum(isinstance(part, torch.nn.RMSNorm) for part in bundle.eager.modules()) == 5


@pytest.mark.parametrize("offset", [0, 1])
def test_the_torch_twin_knows_the_scale_by_what_it_does_and_not_by_its_name(tmp_path: Path, offset: int) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.rand(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (offset + self.scale)

    model = torch.nn.Sequential(torch.nn.Linear(16, 16), Norm())
    made = export_model(model, (torch.randn(4, 16),), out_dir=tmp_path / "b", check=False)
    assert made.eager is not None
    twin, count = torch_twin(made.eager, made.manifest["norms"])
    assert count == 1
    assert isinstance(twin[1], torch.nn.LayerNorm)
    assert twin[1].weight.data_ptr() == model[1].scale.data_ptr()


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("after_cast", [True, False])
def test_half_twins_load_whatever_the_scale_is(tmp_path: Path, scale_dtype: torch.dtype, after_cast: bool) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(16).to(scale_dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * wide.to(x.dtype) if after_cast else (wide * self.weight.float()).to(x.dtype)

    x = torch.randn(4, 16).half()
    made = export_model(Norm(), (x,), out_dir=tmp_path / "b", check=False)
    assert len(made.norms) == 1
    model, _ = onnx_twin(made.model_path, made.manifest["norms"])
    session = ort.InferenceSession(model)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    want = F.layer_norm(x.double(), (16,), made.eager.weight.double(), None, 1e-6)
    assert got.dtype == (np.float32 if after_cast and scale_dtype == torch.float32 else np.float16)
    assert np.allclose(got, want.detach().numpy(), atol=4e-3)


def test_the_twin_finds_weights_in_other_files_without_a_copy(bundle: Bundle, tmp_path: Path) -> None:
    onnx.save(
        onnx.load(bundle.model_path),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="m.data",
        size_threshold=64,
    )
    model, _ = onnx_twin(tmp_path / "m.onnx", bundle.manifest["norms"])
    assert len(model) < (tmp_path / "m.data").stat().st_size
    ids = torch.randint(0, 50, (2, 3))
    onnxruntime_call(model, tmp_path, {"ids": ids}, threads=1)()


def test_a_model_without_norms_has_no_twin(tmp_path: Path) -> None:
    made = export_model(torch.nn.Linear(4, 4), (torch.randn(2, 4),), out_dir=tmp_path / "b", check=False)
    with pytest.raises(InputError, match="no fused norm to exchange"):
        onnx_twin(made.model_path, [])
    assert made.eager is not None
    with pytest.raises(InputError, match="no norm of the model is a module with a weight"):
        torch_twin(made.eager, [])
    measured = run_benchmark(made, seconds=QUICK)
    assert measured.timing("onnxruntime").milliseconds
    assert "no fused norm" in (measured.timing("onnxruntime-layernorm").reason or "")
    assert measured.norm is None


def test_every_contestant_ran_or_says_why(report: BenchmarkReport) -> None:
    for timing in report.timings:
        assert bool(timing.milliseconds) != bool(timing.reason), timing
    ran = {timing.name for timing in report.timings if timing.milliseconds}
    assert {
        "pytorch", "pytorch-layernorm", "onnxruntime", "onnxruntime-unfused", "onnxruntime-layernorm",
        "norm-copy", "norm-pytorch", "norm-pytorch-layernorm", "norm-onnxruntime", "norm-onnxruntime-layernorm",
    } <= ran  # fmt: skip
    for timing in report.timings:
        if timing.milliseconds:
            assert len(timing.milliseconds) >= MIN_ROUNDS
            assert 0 < timing.p5 <= timing.median <= timing.p95
    assert report.exchanged == {"pytorch": 5, "onnxruntime": 5}
    assert report.shapes == {"ids": [2, 7]}


def test_every_gain_has_a_source(report: BenchmarkReport) -> None:
    pairs = {(item.source, item.contender, item.baseline) for item in report.comparisons}
    assert ("fusion", "onnxruntime", "onnxruntime-unfused") in pairs
    assert ("norm", "onnxruntime", "onnxruntime-layernorm") in pairs
    assert ("norm", "norm-pytorch", "norm-pytorch-layernorm") in pairs
    for line, item in zip(report.comparison_lines(), report.comparisons, strict=True):
        assert line.startswith(f"{item.what}: {item.ratio:.2f}x as fast (")
        assert line.endswith("cannot tell from no difference") != item.clear


def test_a_report_survives_json(report: BenchmarkReport) -> None:
    text = json.dumps(report.to_json(), allow_nan=False)
    again = BenchmarkReport.from_json(json.loads(text))
    assert again.comparisons == report.comparisons
    assert again.timing("pytorch").median == pytest.approx(report.timing("pytorch").median, rel=1e-3)
    for broken in ({"format": 2}, {"format": 1}, {"format": 1, "timings": [{}]}):
        with pytest.raises(InputError):
            BenchmarkReport.from_json(broken)


def test_a_bundle_from_disk_has_no_module_to_exchange(bundle: Bundle) -> None:
    measured = run_benchmark(open_bundle(bundle.path), seconds=QUICK)
    assert measured.timing("pytorch").milliseconds
    assert "only in the process that exports it" in (measured.timing("pytorch-layernorm").reason or "")


def test_thread_counts_are_given_back(bundle: Bundle) -> None:
    before = torch.get_num_threads()
    assert run_benchmark(bundle, threads=1, seconds=QUICK).threads == 1
    assert torch.get_num_threads() == before


# --- the clock


def spin(milliseconds: float) -> Callable[[], None]:
    def call() -> None:
        end = time.perf_counter() + milliseconds / 1e3
        while time.perf_counter() < end:
            pass

    return call


def test_calls_take_turns_and_are_told_apart() -> None:
    times = interleave({"one": spin(1), "three": spin(3)}, seconds=0.2)
    assert len(times["one"]) == len(times["three"]) >= MIN_ROUNDS
    assert min(times["one"]) == pytest.approx(1, rel=0.3)
    assert min(times["three"]) == pytest.approx(3, rel=0.3)


def test_every_round_starts_with_another_call() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: (order.append(name), spin(2)())) for name in "abc"}
    interleave(calls, seconds=0)
    rounds = order[-3 * MIN_ROUNDS :]
    assert rounds[:6] in (list("abcbca"), list("bcacab"), list("cababc"))


def test_quantiles_and_the_interval_of_a_median() -> None:
    values = [float(v) for v in range(101)]
    assert (quantile(values, 0.0), quantile(values, 0.5), quantile(values, 1.0)) == (0.0, 50.0, 100.0)
    assert quantile([1.0, 2.0], 0.25) == 1.25
    low, high = median_interval(values)
    assert 38 <= low < 50 < high <= 62
    assert median_interval([5.0]) == (5.0, 5.0)


def test_the_interval_holds_the_median_nineteen_times_in_twenty() -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        low, high = median_interval(random.exponential(size=31).tolist())
        held += low <= np.log(2) <= high
    assert held / 400 > 0.93


def test_ratios_are_taken_round_by_round() -> None:
    drift = [1.0, 10.0, 100.0, 1000.0, 10000.0]
    timings = [
        Timing("pytorch", "a", "model", "pytorch", drift),
        Timing("pytorch-layernorm", "b", "model", "pytorch", [2 * value for value in drift]),
    ]
    (comparison,) = compare(timings)
    assert (comparison.source, comparison.ratio, comparison.low, comparison.high) == ("norm", 2.0, 2.0, 2.0)
    assert comparison.clear


def test_a_busy_machine_is_said_to_be_busy(report: BenchmarkReport) -> None:
    import dataclasses

    busy = dataclasses.replace(report, machine={**report.machine, "load": 1.5, "cores": 2})
    assert "others took 1.5 of 2 cores" in busy.sentences()[0]
    idle = dataclasses.replace(report, machine={**report.machine, "load": 0.1, "cores": 2})
    assert idle.busy() is None


# --- a single norm


@pytest.mark.parametrize(("dtype", "order"), [("float32", "after_cast"), ("float16", "before_cast")])
def test_the_single_norm_is_the_models_own_kind(bundle: Bundle, dtype: str, order: str) -> None:
    records = [
        {**record, "dtype": dtype, "scale_dtype": dtype, "scale_order": order} for record in bundle.manifest["norms"]
    ]
    case = typical_norm({**bundle.manifest, "norms": records}, {"batch": 2, "seq": 7})
    assert case is not None
    assert (case.rows, case.row, case.sites) == (14, [32], 5)
    x = np.random.default_rng(0).standard_normal((14, 32)).astype(dtype)
    (rms,) = ort.InferenceSession(fused_model(case)).run(None, {"x": x})
    (layer,) = ort.InferenceSession(layer_norm_model(case)).run(None, {"x": x})
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    unit = 1e-5 if dtype == "float32" else 4e-3
    assert np.allclose(rms, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + case.epsilon), atol=unit)
    assert np.allclose(layer, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + case.epsilon), atol=unit)


def test_a_missing_kernel_is_a_missing_backend(tmp_path: Path) -> None:
    made = export_model(
        torch.nn.Linear(8, 8).bfloat16(), (torch.randn(2, 8).bfloat16(),), out_dir=tmp_path / "b", check=False
    )
    name = made.manifest["signature"]["inputs"][0]["name"]
    feeds = {name: torch.randn(2, 8).bfloat16()}
    with pytest.raises(BackendUnavailable, match="NOT_IMPLEMENTED"):
        onnxruntime_call(made.model_path.read_bytes(), made.path, feeds, threads=1)


# --- the command


def test_the_command_prints_timings_and_json(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle.path), "--seconds", "0.1", "--threads", "1"]) == 0
    assert "ONNX Runtime with LayerNorm: " in capsys.readouterr().out
    assert main([str(bundle.path), "--seconds", "0.1", "--json"]) == 0
    assert BenchmarkReport.from_json(json.loads(capsys.readouterr().out)).timing("onnxruntime").milliseconds


def test_the_command_refuses_what_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not a bundle" in capsys.readouterr().err
    assert main([str(tmp_path), "--threads", "0"]) == 2
    assert "argument --threads: '0' is not a whole number above 0" in capsys.readouterr().err


def test_the_twin_without_norms_computes_all_the_rest(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 50, (2, 7))
    monkeypatch.chdir(bundle.path)  # where the weights are
    session = ort.InferenceSession(without_norms(bundle.model_path), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: ids.numpy()})[0]
    with torch.no_grad():
        expected = NormlessModel(copy.deepcopy(bundle.eager))(ids).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_tokens_times_the_bundle_against_pytorchs_export_and_no_norms(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokens_main([str(bundle.path), "--json", "--seconds", "0.1", "--threads", "1"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [tuple(result["shape"]) for result in results] == list(SHAPES)
    for result in results:
        assert {TORCH, STOCK, WITHOUT} <= set(result["milliseconds"])
        assert all(time["median"] > 0 for time in result["milliseconds"].values())


def test_tokens_widens_bfloat16_in_each_contestant_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (torch.randint(0, 50, (2, 7)),)
    made = export_model(TokenModel().bfloat16(), args, out_dir=tmp_path / "b", check=False, benchmark=False)
    command = [str(made.path), "--seconds", "0.1", "--threads", "1"]
    assert tokens_main(command) == 3
    assert "NOT_IMPLEMENTED" in capsys.readouterr().err
    assert tokens_main([*command, "--widen-bfloat16"]) == 0
    assert "ONNX Runtime, 1 threads, bfloat16 widened; speedup over" in capsys.readouterr().out


def test_a_bfloat16_bundle_cannot_be_timed_on_onnxruntime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = (torch.randint(0, 50, (2, 7)),)
    made = export_model(TokenModel().bfloat16(), args, out_dir=tmp_path / "b", check=False, benchmark=False)
    command = [str(made.path), "--seconds", "0.2", "--threads", "1", "--json"]
    timed = {}
    for options in ([], ["--widen-bfloat16"]):
        assert main([*command, *options]) == 0
        report = BenchmarkReport.from_json(json.loads(capsys.readouterr().out))
        of_runtime = [timing for timing in report.timings if timing.backend == "onnxruntime"]
        timed[bool(options)] = {timing.name for timing in of_runtime if timing.milliseconds}
        assert all(timing.title.endswith(", bf16 widened") == bool(options) for timing in of_runtime)
        missing = {timing.name: timing.reason for timing in report.timings if not timing.milliseconds}
    assert {"onnxruntime", "onnxruntime-unfused", "onnxruntime-layernorm"}.isdisjoint(timed[False])
    assert {"onnxruntime", "onnxruntime-unfused", "onnxruntime-layernorm", "norm-onnxruntime"} <= timed[True]
    assert all("not built" in str(reason) or "module" in str(reason) for reason in missing.values())


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says how busy its cores are")
def test_a_program_that_takes_a_core_is_seen() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        loads = [_load() for _ in range(3)]
    finally:
        spinning.kill()
        spinning.wait()
    assert max(load or 0.0 for load in loads) > 0.7
