"""An empty input never ends the process: ONNX Runtime has ops that divide by zero or abort on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import run_parity

WIDTH = 8


class Recurrent(nn.Module):
    """A norm in front of a recurrent layer."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(WIDTH, 1e-6), layer(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.norm(x))[0]
        return result


def norm(source: str, target: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Mul", [source, source], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["mean"], axes=[-1]),
        helper.make_node("Add", ["mean", "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["root"]),
        helper.make_node("Div", [source, "root"], [target]),
    ]


def model(nodes: list[onnx.NodeProto], inputs: dict[str, list[str | int]], **weights: np.ndarray) -> onnx.ModelProto:
    weights["eps"] = np.float32(1e-6)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def recurrent(op: str) -> onnx.ModelProto:
    gates = {"GRU": 3, "LSTM": 4}[op]
    random = np.random.default_rng(0)
    w, r = (random.standard_normal((1, gates * WIDTH, WIDTH)) / 3 for _ in "wr")
    node = helper.make_node(op, ["n", "w", "r"], ["y"], hidden_size=WIDTH)
    return model([*norm("x", "n"), node], {"x": ["seq", "batch", WIDTH]}, w=w, r=r)


def attention() -> onnx.ModelProto:
    node = helper.make_node("Einsum", ["n", "n"], ["y"], equation="bhid,bhjd->bhij")
    return model([*norm("x", "n"), node], {"x": ["batch", 2, "seq", WIDTH]})


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
def test_a_recurrent_module_is_judged_and_refuses_what_would_end_the_process(
    layer: type[nn.RNNBase], tmp_path: Path
) -> None:
    module = Recurrent(layer).eval()
    bundle = export_model(module, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b")
    report = run_parity(bundle)
    assert report.ok
    judged = {m.sample: m for m in report.measurements if m.backend == "onnxruntime"}
    assert judged["random, no rows"].verdict == "not-run"
    assert judged["random, prime sizes"].error is not None
    session = bundle.session("onnxruntime")
    for batch in (1, 3):
        x = torch.randn(batch, 5, WIDTH)
        torch.testing.assert_close(session(x)[0], module(x).detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=f"an input is empty, and ONNX Runtime's {layer.__name__} would end"):
        session(torch.randn(0, 5, WIDTH))


@pytest.mark.parametrize("op", ["GRU", "LSTM", "Einsum"])
def test_an_onnx_file_is_judged_without_empty_inputs(op: str, tmp_path: Path) -> None:
    bundle = export_model(attention() if op == "Einsum" else recurrent(op), out_dir=tmp_path / "b")
    report = run_parity(bundle)
    assert report.ok
    assert {r.verdict for r in report.backends if r.name == "onnxruntime"} <= {"pass", "pass-better-than-eager"}
    assert [record.name for record in report.samples if record.skipped] == ["random, no rows"]


def test_other_models_take_empty_inputs(tmp_path: Path) -> None:
    bundle = export_model(
        nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2)), (torch.randn(2, WIDTH),), out_dir=tmp_path / "b"
    )
    assert bundle.session("onnxruntime")(torch.randn(0, WIDTH))[0].shape == (0, 2)
