"""What rounding alone may do: outputs that cancel or magnify don't fail for it, and no fault passes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from rmsnorm_deploy import export_model, open_bundle
from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.parity.judge import budget_for
from rmsnorm_deploy.parity.lift_onnx import OnnxProgram
from rmsnorm_deploy.parity.result import FAIL, PASS_LIKE_ROUNDING, Measurement, ParityReport
from rmsnorm_deploy.parity.rounding import beside_rounding, with_roundings
from rmsnorm_deploy.parity.run import run_parity
from rmsnorm_deploy.parity.samples import make_samples
from rmsnorm_deploy.parity.ulp import ulp_error

Head = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A norm, and what is made of it."""

    def __init__(self, width: int, head: Head) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), head
        with torch.no_grad():
            self.norm.weight.copy_(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def exported(folder: Path, width: int, head: Head) -> Bundle:
    path = folder / "model.bundle"
    export_model(Model(width, head).eval(), (torch.randn(2, 3, width),), out_dir=path, check=False, benchmark=False)
    return open_bundle(path)


def alternating(width: int) -> nn.Linear:
    """Sums with signs: of equal elements nothing is left."""
    layer = nn.Linear(width, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -1.0]).repeat(width // 2).expand(4, width))
    return layer


HEADS: dict[str, tuple[int, Head]] = {
    "mean of all, width 16": (16, lambda x: x.mean()),
    "mean of all, width 64": (64, lambda x: x.mean()),
    "mean of a row": (12, lambda x: x.mean(-1, keepdim=True)),
    "sum over rows": (8, lambda x: x.sum((1, 2))),
    "alternating signs": (8, alternating(8)),
    "exponential": (8, lambda x: (x * 10).exp()),
}


@pytest.mark.parametrize("name", HEADS)
def test_an_output_that_cancels_or_magnifies_is_right(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    report = run_parity(exported(tmp_path, *HEADS[name]))
    assert report.ok, report.summary()


def test_a_mean_over_no_rows_judges_nobody(tmp_path: Path) -> None:
    report = run_parity(exported(tmp_path, 16, lambda x: x.mean()), backends=["onnxruntime"])
    assert "random, no rows" in [record.name for record in report.samples]
    assert "random, no rows" not in [measured.sample for measured in report.measurements]


def test_a_wrong_epsilon_in_front_of_an_output_that_cancels_fails(tmp_path: Path) -> None:
    bundle = exported(tmp_path, 16, lambda x: x.mean())
    model = onnx.load(bundle.model_path)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f *= 10
    onnx.save(model, bundle.model_path)
    assert not run_parity(bundle, backends=["onnxruntime"]).ok


def judged_alone(bundle: Bundle, off: float) -> str:
    """The verdict on an output that is off by the factor 1 + ``off``, however it came about."""
    sample = next(s for s in make_samples(bundle.manifest, seed=0) if "prime" in s.name)
    assert bundle.reference_path is not None
    program = OnnxProgram(bundle.reference_path)
    (truth,) = program.run(sample.feeds)
    error = ulp_error(np.asarray(truth * (1 + off)), truth, "float32")
    output = program.outputs[0]
    measured = Measurement("onnxruntime", sample.name, output, "float32", FAIL, error, None)
    limits = {"float32": budget_for("float32", "float32", norms=1, matmuls=0, width=16)}
    return beside_rounding(bundle, [measured], {sample.name: sample}, limits)[0].verdict


@pytest.mark.parametrize(
    ("head", "off", "verdict"),
    [
        ("mean of all, width 16", 2e-7, PASS_LIKE_ROUNDING),
        ("mean of all, width 16", 1e-4, FAIL),
        ("mean of a row", 1e-5, FAIL),
    ],
)
def test_only_what_roundings_can_do_is_explained(head: str, off: float, verdict: str, tmp_path: Path) -> None:
    assert judged_alone(exported(tmp_path, *HEADS[head]), off) == verdict


def graph_file(path: Path, nodes: list[Any], weight: np.ndarray[Any, Any], dtype: int) -> Path:
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info("x", dtype, ["rows", 64])],
            [helper.make_tensor_value_info("y", dtype, None)],
            [numpy_helper.from_array(weight, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    onnx.save(model, path)
    return path


def draws(path: Path, x: np.ndarray[Any, Any], count: int = 32) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The output without roundings, and what ``count`` draws of them move it by."""
    program = OnnxProgram(path, with_roundings(path))
    exact = program.run({"x": x, "rounding_amount": np.array(0.0)})[0]
    moved = [program.run({"x": x, "rounding_amount": np.array(1.0)})[0] - exact for _ in range(count)]
    return exact, np.stack(moved)


@pytest.mark.parametrize(
    ("dtype", "onnx_type", "unit"),
    [
        (np.float32, TensorProto.FLOAT, 2.0**-24),
        (np.float16, TensorProto.FLOAT16, 2.0**-11),
    ],
)
def test_each_operation_is_rounded_to_its_own_dtype(dtype: Any, onnx_type: int, unit: float, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(dtype)
    w = np.ones(64, dtype)
    nodes = [helper.make_node("Mul", ["x", "w"], ["p"]), helper.make_node("Neg", ["p"], ["y"])]
    exact, moved = draws(graph_file(tmp_path / "m.onnx", nodes, w, onnx_type), x)
    np.testing.assert_array_equal(exact, -x.astype(np.float64))
    relative = np.abs(moved / exact)
    assert relative.max() < unit  # Neg is exact: one rounding
    assert relative.max() > 0.7 * unit
    assert len(np.unique(moved[:, 0, 0])) == 32


def test_sums_in_float32_are_rounded_at_every_term(tmp_path: Path) -> None:
    """The spread of a product of 64 terms is that of float32 sums taken one after the other."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((40, 64)).astype(np.float32), rng.standard_normal((64, 40)).astype(np.float32)
    path = graph_file(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], w, TensorProto.FLOAT)
    exact, moved = draws(path, x)
    total = np.zeros((40, 40), np.float32)
    for k in range(64):
        total = total + x[:, k : k + 1] * w[k : k + 1]
    assert np.std(moved) == pytest.approx(np.std(total - exact), rel=0.5)


def test_the_verdict_survives_json(tmp_path: Path) -> None:
    report = run_parity(exported(tmp_path, *HEADS["exponential"]), backends=["onnx-reference"])
    assert PASS_LIKE_ROUNDING in {measured.verdict for measured in report.measurements}
    assert ParityReport.from_json(report.to_json()) == report
