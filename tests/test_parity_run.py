"""The verdicts: a clean model passes on every seed, a planted fault fails, and whatever cannot run says why."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from parity_fakes import Block, FakeBundle, TokenModel, edit_model, make_bundle, onnx_only

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.parity import ParityReport, Sample, make_samples, run_parity
from rmsnorm_deploy.parity.__main__ import main
from rmsnorm_deploy.parity.backends import BACKENDS, open_on
from rmsnorm_deploy.parity.extract import Graph
from rmsnorm_deploy.parity.judge import as_exact_as_unfused, budget_for, judge
from rmsnorm_deploy.parity.junit import write_junit
from rmsnorm_deploy.parity.scratch import Scratch, open_backend
from rmsnorm_deploy.parity.ulp import UlpError
from rmsnorm_deploy.report.view import verdict
from rmsnorm_deploy.runtime.tensors import to_numpy

HERE = ["pytorch", "onnxruntime", "onnxruntime-unoptimized"]
DIMS = {"batch": (0,), "seq": (1,)}


def random_scales(model: torch.nn.Module) -> torch.nn.Module:
    for part in model.modules():
        if isinstance(part, torch.nn.RMSNorm):
            torch.nn.init.uniform_(part.weight, 0.5, 1.5)
    return model


def build(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> FakeBundle:
    torch.manual_seed(0)
    model: torch.nn.Module = Block() if kind == "block" else TokenModel()
    args = (torch.randn(2, 5, 32).to(dtype),) if kind == "block" else (torch.randint(0, 50, (2, 7)),)
    return make_bundle(folder, random_scales(model).to(dtype), args, dims=DIMS, high=50)


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> FakeBundle:
    return build(tmp_path_factory.mktemp("block"), "block")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> FakeBundle:
    return build(tmp_path_factory.mktemp("tokens"), "tokens")


@pytest.fixture
def spoilt(block: FakeBundle, tmp_path: Path) -> FakeBundle:
    """A copy whose model may be edited; its program stays the truth."""
    (tmp_path / "model.onnx").write_bytes(block.model_path.read_bytes())
    return FakeBundle(tmp_path, block.manifest, block.torch_program, eager=block.eager)


def test_a_clean_model_passes_everywhere_on_every_seed(block: FakeBundle, tokens: FakeBundle) -> None:
    for bundle in (block, tokens):
        for seed in range(4):
            report = run_parity(bundle, backends=HERE, seed=seed)
            assert report.ok
            assert {backend.verdict for backend in report.backends} == {"pass"}
            assert not any(sample.skipped for sample in report.samples)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_judged_in_its_own_units(tmp_path: Path, dtype: torch.dtype) -> None:
    bundle = make_bundle(
        tmp_path, torch.nn.RMSNorm(64, eps=1e-6).to(dtype), (torch.randn(4, 64).to(dtype),), dims={"n": (0,)}
    )
    report = run_parity(bundle, backends=HERE)
    assert report.ok
    worst = report.backend("onnxruntime").error
    assert worst is not None
    assert 0.4 < worst.max <= 0.51
    assert next(iter(report.budgets.values())).max < 6


def weights(model: ir.Model) -> list[ir.Value]:
    """The norms' scales in the graph's order."""
    return [value for name, value in model.graph.initializers.items() if "norm" in name and name.endswith("weight")]


def put(value: ir.Value, array: np.ndarray[Any, Any]) -> None:
    assert value.const_value is not None
    value.const_value = ir.tensor(array, dtype=value.const_value.dtype)


def ten_times_epsilon(model: ir.Model) -> None:
    changed = 0
    for node in model.graph:
        tensor = node.attributes["value"].as_tensor() if "value" in node.attributes else None
        if tensor is not None and tensor.size == 1 and 0 < float(tensor.numpy().item()) < 2e-6:
            wider = (np.asarray(tensor.numpy()) * 10).astype(tensor.numpy().dtype)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(wider, dtype=tensor.dtype))
            changed += 1
    assert changed


def one_gamma_off_by_a_percent(model: ir.Model) -> None:
    scale = weights(model)[-1]
    array = np.array(scale.const_value.numpy())  # type: ignore[union-attr]
    array[3] *= 1.01
    put(scale, array)


def exchanged_gammas(model: ir.Model) -> None:
    first, second = weights(model)[:2]
    one, other = np.array(first.const_value.numpy()), np.array(second.const_value.numpy())  # type: ignore[union-attr]
    put(first, other)
    put(second, one)


def root_without_epsilon_sum(model: ir.Model) -> None:
    """eps outside the root instead of inside."""
    for node in list(model.graph):
        add = node.inputs[0].producer() if node.op_type == "Sqrt" and node.inputs[0] else None
        if add is not None and add.op_type == "Add":
            mean, eps = add.inputs
            root = ir.node("Sqrt", [mean])
            outside = ir.node("Add", [root.outputs[0], eps])
            model.graph.insert_before(node, [root, outside])
            ir.convenience.replace_all_uses_with(node.outputs[0], outside.outputs[0])


def statistics_in_half(model: ir.Model) -> None:
    for node in list(model.graph):
        if node.op_type == "ReduceMean":
            down = ir.node("Cast", [node.inputs[0]], attributes={"to": 10})
            up = ir.node("Cast", [down.outputs[0]], attributes={"to": 1})
            model.graph.insert_before(node, [down, up])
            node.replace_input_with(0, up.outputs[0])


FAULTS = [
    ten_times_epsilon,
    one_gamma_off_by_a_percent,
    exchanged_gammas,
    root_without_epsilon_sum,
    statistics_in_half,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(spoilt: FakeBundle, fault: Callable[[ir.Model], None]) -> None:
    edit_model(spoilt, fault)
    report = run_parity(spoilt, backends=HERE)
    assert not report.ok
    assert report.backend("onnxruntime").verdict == "fail"
    assert report.backend("pytorch").verdict == "pass"
    assert report.headline().startswith("Parity failed on ONNX Runtime")


def test_nan_where_the_truth_is_finite_fails(spoilt: FakeBundle) -> None:
    def poison(model: ir.Model) -> None:
        scale = weights(model)[-1]
        put(scale, np.full(32, np.nan, np.float32))

    edit_model(spoilt, poison)
    backend = run_parity(spoilt, backends=HERE).backend("onnxruntime")
    assert backend.verdict == "fail"
    assert backend.error is not None
    assert backend.error.mismatched
    assert math.isinf(backend.error.max)


def test_an_onnx_source_is_its_own_baseline(block: FakeBundle) -> None:
    report = run_parity(onnx_only(block))
    assert report.ok
    assert report.baseline == "model.onnx in ONNX Runtime"
    assert report.backend("pytorch").verdict == "not-run"
    assert report.backend("onnxruntime").versus_eager == pytest.approx(1.0, rel=0.3)
    assert "reference evaluator" in report.oracle or "ONNX Runtime" in report.oracle


def test_every_absent_backend_says_why(block: FakeBundle) -> None:
    report = run_parity(block)
    for backend in report.backends:
        assert (backend.verdict == "not-run") == (backend.error is None)
        if backend.verdict == "not-run":
            assert backend.reason
    assert report.ok


def test_a_backend_asked_for_by_name_must_be_there(block: FakeBundle) -> None:
    with pytest.raises(BackendUnavailable):
        run_parity(block, backends=["onnxruntime", "tensorrt"])
    with pytest.raises(InputError, match="no backend 'ort' to judge: choose from pytorch"):
        run_parity(block, backends=["ort"])


def test_what_is_not_there_is_refused_before_the_model_is_read(
    cli: Any, block: FakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was read")

    for reader in ("HeldBundle", "open_oracle"):
        monkeypatch.setattr(f"rmsnorm_deploy.parity.run.{reader}", refuse)
    monkeypatch.setattr("rmsnorm_deploy.native.find_library", lambda kind: None)
    for absent in ("tensorrt", "onnxruntime-cuda", "onnxruntime-kernels"):
        with pytest.raises(BackendUnavailable):
            run_parity(block, backends=["onnxruntime", absent])
    capsys.readouterr()
    for path, reason in ((tmp_path / "no" / "out.xml", "there is no folder"), (tmp_path, "it is a folder")):
        assert cli(block)("--junit", str(path)) == 2
        assert f"cannot write {path}: {reason}" in capsys.readouterr().err


def test_junit_names_what_the_errors_stand_beside(block: FakeBundle, tmp_path: Path) -> None:
    for bundle, beside in ((block, "; PyTorch eager: max"), (onnx_only(block), "; model.onnx in ONNX Runtime: max")):
        report = run_parity(bundle, backends=["onnxruntime"], samples=make_samples(bundle.manifest)[:1])
        failing = [replace(item, verdict="fail") for item in report.measurements]
        write_junit(replace(report, measurements=failing), tmp_path / "out.xml")
        assert beside in (tmp_path / "out.xml").read_text()


def test_a_kernel_that_the_backend_lacks_is_no_fault_of_the_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    bundle = make_bundle(tmp_path, model, (torch.randn(2, 8).to(torch.bfloat16),))
    backend = run_parity(bundle).backend("onnxruntime")
    if backend.error is None:  # ONNX Runtime 1.32 has no bfloat16 product on the CPU
        assert backend.verdict == "not-run"
        assert "NOT_IMPLEMENTED" in (backend.reason or "")
        with pytest.raises(BackendUnavailable, match="cannot run this model"):
            run_parity(bundle, backends=["onnxruntime"])


def test_a_file_that_does_not_load_fails(spoilt: FakeBundle) -> None:
    spoilt.model_path.write_bytes(spoilt.model_path.read_bytes()[:-200])
    with pytest.raises(InputError, match="not a readable ONNX file"):
        run_parity(spoilt, backends=HERE)


def test_a_shape_the_model_itself_refuses_judges_nobody(tmp_path: Path) -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(4, 8)

    bundle = make_bundle(tmp_path, Fixed(), (torch.randn(4, 8),))
    bundle.manifest["signature"]["inputs"][0]["shape"] = ["batch", 8]
    bundle.manifest["dims"] = {"batch": {"example": 4, "min": 4, "max": None}}
    report = run_parity(bundle, backends=HERE)
    skipped = {sample.name: sample.skipped for sample in report.samples if sample.skipped}
    assert set(skipped) == {"random, prime sizes"}
    assert all("the model refuses it" in reason for reason in skipped.values())
    assert report.ok


def test_nothing_judged_is_not_proved(block: FakeBundle) -> None:
    bad = Sample("bad", "user", {"hidden": np.zeros((1, 1, 7), np.float32)})
    report = run_parity(block, backends=HERE, samples=[bad])
    assert not report.ok
    assert report.headline().startswith("Not proved: no input could be judged")


def test_nothing_but_nan_is_not_proved(tmp_path: Path) -> None:
    model = Block()
    torch.nn.init.constant_(next(model.parameters()), math.nan)
    report = run_parity(make_bundle(tmp_path, model, (torch.randn(2, 5, 32),), dims=DIMS), backends=HERE)
    assert not report.ok
    assert report.headline() == "Not proved: the model gives nothing but NaN and infinity, on every input"
    assert verdict(report, 2).state == "unknown"


def test_integers_must_be_equal(tmp_path: Path) -> None:
    class Argmax(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.argmax(-1), x > 0

    bundle = make_bundle(tmp_path, Argmax(), (torch.randn(4, 8),), dims={"batch": (0,)})
    report = run_parity(bundle, backends=HERE)
    assert report.ok
    assert report.budgets == {}
    assert {m.dtype for m in report.measurements} == {"int64", "bool"}


def test_a_report_survives_json(spoilt: FakeBundle) -> None:
    edit_model(spoilt, lambda model: put(weights(model)[-1], np.full(32, np.nan, np.float32)))
    report = run_parity(spoilt)
    text = json.dumps(report.to_json(), allow_nan=False)
    assert json.dumps(ParityReport.from_json(json.loads(text)).to_json()) == text
    with pytest.raises(InputError, match="format 99"):
        ParityReport.from_json({**json.loads(text), "format": 99})
    with pytest.raises(InputError, match="not one of this package's"):
        ParityReport.from_json({"format": 1})


def test_progress_names_every_step(block: FakeBundle) -> None:
    said: list[str] = []
    run_parity(block, backends=HERE, progress=said.append)
    assert said[0] == "lifting the model to float64"
    assert any(line.startswith("float64 truth 3 of 11") for line in said)
    assert said[-1] == "parity of ONNX Runtime (optimizer off)"


# --- the judge


def error(top: float, mean: float, mismatched: int = 0) -> UlpError:
    return UlpError(top, top, mean, 100, mismatched)


BUDGET = budget_for("float16", "float16", norms=1, matmuls=0, width=64)


@pytest.mark.parametrize(
    ("own", "eager", "verdict"),
    [
        (error(1, 0.2), None, "pass"),
        (error(1, 0.2), error(0.1, 0.01), "pass"),
        (error(900, 0.2), error(500, 0.2), "pass-better-than-eager"),
        (error(900, 0.2), error(200, 0.2), "fail"),
        (error(1, 20), error(1, 11), "pass-better-than-eager"),
        (error(1, 20), error(1, 9), "fail"),
        (error(900, 0.2), None, "fail"),
        (error(math.inf, 0.2, 3), error(0.5, 0.2), "fail"),
        (error(math.inf, 0.2, 3), error(math.inf, 0.2, 3), "pass-better-than-eager"),
        (error(math.inf, 0.2, 4), error(math.inf, 0.2, 3), "fail"),
        (error(math.inf, 50, 3), error(math.inf, 0.2, 3), "fail"),
        (error(0.5, 0.2), error(math.inf, 0.2, 3), "pass"),
    ],
)
def test_the_judge_forgives_no_more_than_eager_allows(own: UlpError, eager: UlpError | None, verdict: str) -> None:
    assert judge(own, eager, BUDGET) == verdict


def test_a_wider_output_of_a_half_model_has_a_budget_in_half() -> None:
    half = budget_for("float16", "float16", 5, 8, 64)
    through = budget_for("float32", "float16", 5, 8, 64)
    assert through.max == half.max * 2**13


def test_the_budget_grows_with_depth_and_in_single_with_width() -> None:
    shallow, deep = (budget_for("float16", "float16", norms, 8, 64).max for norms in (2, 60))
    assert 1.5 < deep / shallow < 4
    narrow, wide = (budget_for("float32", "float32", 5, 8, width).max for width in (64, 4096))
    assert 5 < wide / narrow < 8
    assert budget_for("float16", "float16", 5, 8, 64) != budget_for("float16", "float16", 5, 8, 4096)
    assert budget_for("float16", "float16", 5, 8, 64).max == budget_for("float16", "float16", 5, 8, 4096).max


# --- the command


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeBundle], Callable[..., int]]:
    """The command on a fake bundle."""

    def prepare(bundle: FakeBundle) -> Callable[..., int]:
        fake = types.ModuleType("rmsnorm_deploy.bundle")
        fake.open_bundle = lambda path: bundle  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rmsnorm_deploy.bundle", fake)
        return lambda *arguments: main([str(bundle.path), *arguments])

    return prepare


def test_the_command_prints_a_line_a_backend(cli: Any, block: FakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(block)() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "same model as before export, on 11 inputs against float64" in lines[0]
    assert any(line.startswith("ONNX Runtime: pass (max ") for line in lines)
    assert any(line.startswith("TensorRT: not-run (") for line in lines)


def test_the_command_fails_with_1_and_writes_junit(
    cli: Any, spoilt: FakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_model(spoilt, exchanged_gammas)
    assert cli(spoilt)("--junit", str(tmp_path / "out.xml"), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    suites = {suite.get("name"): suite for suite in ElementTree.parse(tmp_path / "out.xml").getroot()}
    assert int(suites["onnxruntime"].get("failures", 0)) >= 4
    assert "expected" in suites["onnxruntime"].find("testcase/failure").get("message")  # type: ignore[union-attr]
    assert suites["pytorch"].get("failures") == "0"
    assert suites["tensorrt"].find("testcase/skipped") is not None


def test_the_command_takes_user_inputs_and_names_a_bad_file(
    cli: Any, block: FakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "mine.npz", hidden=np.ones((1, 3, 32), np.float32))
    assert cli(block)("--inputs", str(tmp_path / "mine.npz"), "--backend", "onnxruntime") == 0
    assert "on 1 inputs" in capsys.readouterr().out
    assert cli(block)("--inputs", str(tmp_path / "none.npz")) == 2
    assert capsys.readouterr().err == f"error: no such file: {tmp_path / 'none.npz'}\n"


def test_the_command_fails_with_3_for_an_absent_backend_and_2_for_an_unknown_one(
    cli: Any, block: FakeBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(block)("--backend", "tensorrt") == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert cli(block)("--backend", "mystery") == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- beside the model before fusing


class Coarse:
    """A runtime that rounds what it computes to a few bits."""

    def __init__(self, session: Any, bits: int) -> None:
        self.session, self.bits = session, bits

    def run(self, feeds: Any) -> dict[str, Any]:
        found = self.session.run(feeds)
        return {name: np.ldexp(np.round(np.ldexp(array, self.bits)), -self.bits) for name, array in found.items()}


@pytest.fixture
def beside(spoilt: FakeBundle) -> FakeBundle:
    """A bundle with the model before fusing, which is the model itself."""
    spoilt.reference_path = spoilt.path / "reference.onnx"
    spoilt.reference_path.write_bytes(spoilt.model_path.read_bytes())
    return spoilt


def on_a_coarse_runtime(monkeypatch: pytest.MonkeyPatch, bits: Callable[[Path], int]) -> None:
    """Let ONNX Runtime round to so many bits after the point, by the file that it's given."""

    def coarse(bundle: Any, backend: Any, **options: Any) -> Any:
        session = open_on(bundle, backend, **options)
        return Coarse(session, bits(bundle.model_path)) if backend.name == "onnxruntime" else session

    monkeypatch.setattr("rmsnorm_deploy.parity.run.open_on", coarse)
    monkeypatch.setattr("rmsnorm_deploy.parity.unfused.open_on", coarse)


def test_what_the_runtime_loses_on_either_file_is_told_and_forgiven(
    beside: FakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_coarse_runtime(monkeypatch, lambda path: 12)
    report = run_parity(beside, backends=["onnxruntime"])
    backend = report.backend("onnxruntime")
    assert backend.verdict == "pass-as-exact-as-unfused"
    assert backend.error is not None
    assert backend.unfused is not None
    assert backend.unfused.max == pytest.approx(backend.error.max)
    assert f"before fusing {backend.unfused.max:.3g} and {backend.unfused.mean:.3g}" in report.summary()[1]
    assert ParityReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_what_fusing_loses_is_not_forgiven(beside: FakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_coarse_runtime(monkeypatch, lambda path: 14 if path.name == "reference.onnx" else 12)
    backend = run_parity(beside, backends=["onnxruntime"]).backend("onnxruntime")
    assert backend.verdict == "fail"
    assert backend.unfused is not None
    assert backend.error is not None
    assert backend.unfused.max < backend.error.max / 2


def test_a_file_that_was_wrong_before_fusing_is_not_forgiven(beside: FakeBundle) -> None:
    """Both files are equally far off, and the runtime is not to blame: the graph is not the traced program's."""
    edit_model(beside, one_gamma_off_by_a_percent)
    assert beside.reference_path is not None
    beside.reference_path.write_bytes(beside.model_path.read_bytes())
    backend = run_parity(beside, backends=["onnxruntime"]).backend("onnxruntime")
    assert backend.verdict == "fail"
    assert backend.unfused is not None
    assert backend.error is not None
    assert backend.unfused.max == backend.error.max


def test_a_right_model_never_runs_the_file_before_fusing(beside: FakeBundle) -> None:
    assert beside.reference_path is not None
    beside.reference_path.unlink()
    report = run_parity(beside, backends=["onnxruntime"], samples=[])
    assert "no input could be judged" in report.headline()
    beside.manifest = {**beside.manifest, "norms": []}
    report = run_parity(beside, backends=["onnxruntime"])
    assert report.ok
    assert report.backend("onnxruntime").unfused is None


@pytest.mark.parametrize(
    ("own", "unfused", "forgiven"),
    [
        (error(400, 14), error(384, 13.6), True),
        (error(400, 18), error(384, 13.6), False),
        (error(800, 14), error(384, 13.6), False),
        (error(math.inf, 14, 3), error(math.inf, 13.6, 3), True),
        (error(math.inf, 14, 4), error(math.inf, 13.6, 3), False),
    ],
)
def test_as_exact_as_before_fusing_has_little_room(own: UlpError, unfused: UlpError, forgiven: bool) -> None:
    assert as_exact_as_unfused(own, unfused) == forgiven


def test_a_file_that_the_runtime_loads_only_before_fusing_fails(beside: FakeBundle) -> None:
    """And one that it does not load in either form is not run."""

    def unknown_operator(model: ir.Model) -> None:
        model.graph[-1].op_type = "NoSuchOperator"

    edit_model(beside, unknown_operator)
    assert run_parity(beside, backends=["onnxruntime"]).backend("onnxruntime").verdict == "fail"
    assert beside.reference_path is not None
    beside.reference_path.write_bytes(beside.model_path.read_bytes())
    assert run_parity(beside).backend("onnxruntime").verdict == "not-run"
    with pytest.raises(BackendUnavailable, match="cannot run this model"):
        run_parity(beside, backends=["onnxruntime"])


# --- the onnx package's evaluator, and our kernels in PyTorch


def test_bfloat16_is_judged_on_any_cpu_by_the_evaluator(tmp_path: Path) -> None:
    bundle = build(tmp_path, "block", torch.bfloat16)
    report = run_parity(bundle, backends=["onnx-reference"])
    assert report.ok
    worst = report.backend("onnx-reference").error
    assert worst is not None
    assert 0.4 < worst.max < next(iter(report.budgets.values())).max
    edit_model(bundle, exchanged_gammas)
    assert run_parity(bundle, backends=["onnx-reference"]).backend("onnx-reference").verdict == "fail"


def test_a_model_that_nothing_here_runs_is_not_proved_and_says_what_proves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmsnorm_deploy.parity.evaluator.MAX_BYTES", 1000)
    narrow = {name: backend for name, backend in BACKENDS.items() if not backend.widens}
    monkeypatch.setattr("rmsnorm_deploy.parity.backends.BACKENDS", narrow)
    report = run_parity(build(tmp_path, "block", torch.bfloat16))
    if report.backend("onnxruntime").verdict != "not-run":
        assert report.unproved is None  # a later ONNX Runtime has the kernels
        return
    assert report.ok
    assert report.headline() == (
        "Not proved: no backend here runs the exported model; to prove it: python -m rmsnorm_deploy.parity BUNDLE "
        "--backend onnx-reference (slow), or an export with --precision fp32, or a machine with an NVIDIA GPU"
    )
    assert verdict(report, norms=2).state == "unknown"
    assert "--backend onnx-reference" in verdict(report, norms=2).detail


def test_a_bfloat16_model_is_judged_with_its_ops_widened_and_others_are_not_judged_twice(tmp_path: Path) -> None:
    report = run_parity(build(tmp_path / "narrow", "block", torch.bfloat16))
    widened = report.backend("onnxruntime-widened")
    assert widened.verdict.startswith("pass")
    assert widened.title == "ONNX Runtime, bf16 widened"
    plain = report.backend("onnxruntime")
    assert plain.verdict != "not-run" or "widen_bfloat16=True" in (plain.reason or "")
    wide = run_parity(build(tmp_path / "wide", "block", torch.float32))
    assert not [backend.name for backend in wide.backends if "widened" in backend.name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_evaluator_judges_no_layer_norm_that_it_gets_wrong(tmp_path: Path, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.RMSNorm(64)).to(dtype)
    torch.nn.init.uniform_(model[0].weight, 0.5, 1.5)
    bundle = make_bundle(tmp_path, model, (torch.randn(4, 64).to(dtype),))
    name = bundle.manifest["signature"]["inputs"][0]["name"]
    x = numpy_of(900 * torch.randn(4, 64), dtype)
    result = run_parity(bundle, samples=[Sample("huge", "user", {name: x})]).backend("onnx-reference")
    if dtype != torch.float16:
        assert result.verdict == "pass"
        return
    assert result.verdict == "not-run"
    assert "LayerNormalization wrongly in float16" in (result.reason or "")
    (got,) = ReferenceEvaluator(onnx.load(bundle.model_path)).run(None, {name: x})
    with torch.no_grad():
        want = model.double()(torch.from_numpy(x).double()).numpy()
    assert np.abs(got - want).max() > 0.1  # else the reason is out of date


def test_the_evaluator_shows_values_inside_a_model_whose_weights_lie_elsewhere(tmp_path: Path) -> None:
    bundle = build(tmp_path / "b", "block", torch.bfloat16)
    sample = make_samples(bundle.manifest)[0]
    want = open_on(bundle, BACKENDS["onnx-reference"]).run(sample.feeds)
    model = onnx.load(bundle.model_path)
    onnx.save_model(model, bundle.model_path, save_as_external_data=True, location="w.data", size_threshold=16)
    inner = next(node.output[0] for node in model.graph.node if node.op_type == "ReduceMean")
    with Scratch() as scratch:
        file = scratch.tapped(
            Graph(onnx.load(bundle.model_path, load_external_data=False), bundle.path),
            bundle.manifest,
            {inner: "float32"},
        )
        assert file.weights
        got = open_backend(file, BACKENDS["onnx-reference"]).run(sample.feeds)
    assert got[inner].shape[-1] == 1
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


def numpy_of(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    return to_numpy(tensor.to(dtype))


def test_a_large_model_is_left_to_who_asks_for_the_evaluator(
    block: FakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmsnorm_deploy.parity.evaluator.MAX_BYTES", 1000)
    result = run_parity(block).backend("onnx-reference")
    assert result.verdict == "not-run"
    assert "parity BUNDLE --backend onnx-reference" in (result.reason or "")
    assert run_parity(block, backends=["onnx-reference"]).backend("onnx-reference").verdict == "pass"


def test_our_kernels_in_pytorch_are_judged_beside_pytorchs_own_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rmsnorm_deploy import RMSNorm, ckernel, torch_ops

    torch.manual_seed(0)
    model = torch.nn.Sequential(RMSNorm(48), torch.nn.Linear(48, 16), RMSNorm(16))
    bundle = make_bundle(tmp_path, model, (torch.randn(4, 48),), dims={"n": (0,)})
    if ckernel.cpu_library() is None:
        assert "not built" in (run_parity(bundle).backend("pytorch-kernels").reason or "")
        pytest.skip("the CPU kernels are not built")
    ran: list[str] = []
    own = torch_ops._run_kernel
    monkeypatch.setattr(torch_ops, "_run_kernel", lambda *args: ran.append("kernel") or own(*args))
    rounding = ("pass", "pass-better-than-eager")
    report = run_parity(bundle, backends=["pytorch"])
    assert report.backend("pytorch").verdict in rounding  # on tiny rows it is over the budget itself
    assert not ran
    report = run_parity(bundle, backends=["pytorch-kernels"])
    assert report.backend("pytorch-kernels").verdict in rounding
    assert ran


def test_kernels_that_pytorch_would_not_run_are_not_judged(block: FakeBundle) -> None:
    with pytest.raises(BackendUnavailable, match=r"no norm of the module is rmsnorm_deploy\.RMSNorm"):
        run_parity(block, backends=["pytorch-kernels"])
    with pytest.raises(BackendUnavailable, match="only its traced program"):
        run_parity(FakeBundle(block.path, block.manifest, block.torch_program), backends=["pytorch-kernels"])
    with pytest.raises(BackendUnavailable, match="was not made from a PyTorch module"):
        run_parity(onnx_only(block), backends=["pytorch-kernels"])


def test_a_sample_that_onnx_runtime_refuses_before_fusing_too_fails_nobody(tmp_path: Path) -> None:
    """The older exporter writes a Reshape that ONNX Runtime's optimizer breaks for zero rows."""

    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(16, eps=1e-5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            return self.norm(x).reshape(batch, length, 4, 4).transpose(1, 2).reshape(batch, -1, 16)

    scripted = torch.jit.trace(Heads(), torch.randn(2, 5, 16))
    bundle = export_model(scripted, (torch.randn(2, 5, 16),), out_dir=tmp_path / "b")
    report = run_parity(bundle, backends=["onnxruntime"])
    assert report.ok, report.summary()
