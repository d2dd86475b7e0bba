"""Straightening: detours of data go away, and not one bit of a value changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from rmsnorm_deploy import export_model, open_bundle
from rmsnorm_deploy.export.straighten import straighten
from rmsnorm_deploy.fusion.imports import infer_shapes


def graph(nodes: list[Any], x: list[Any], y: list[Any], constants: dict[str, list[int]]) -> ir.Model:
    """A float graph x -> y whose nodes read int64 ``constants``."""
    proto = helper.make_model(
        helper.make_graph(
            nodes,
            "layout",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
            [helper.make_tensor(name, TensorProto.INT64, [len(v)], v) for name, v in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    return ir.from_proto(proto)


def run(model: ir.Model, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def straightened(model: ir.Model, *shapes: tuple[int, ...]) -> Counter[str]:
    """Which ops are left; the values at ``shapes`` must be what they were."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    before = [run(model, x) for x in inputs]
    straighten(model)
    for x, expected in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(run(model, x), expected, strict=True)
    return Counter(node.op_type for node in model.graph)


def take(shape: str, axis: str, result: str) -> Any:
    return helper.make_node("Gather", [shape, axis], [result], axis=0)


def heads(*last: str) -> list[Any]:
    """x [batch, heads, seq, dim] with the last two axes swapped in rank 3, then reshaped to the axes ``last``."""
    return [
        helper.make_node("Shape", ["x"], ["shape"]),
        *(take("shape", axis, axis + "_size") for axis in ("batch", "heads", "seq", "dim")),
        helper.make_node("Concat", ["minus_one", "seq_size", "dim_size"], ["merged_shape"], axis=0),
        helper.make_node("Reshape", ["x", "merged_shape"], ["merged"]),
        helper.make_node("Transpose", ["merged"], ["swapped"], perm=[0, 2, 1]),
        helper.make_node("Concat", [f"{axis}_size" for axis in last], ["apart_shape"], axis=0),
        helper.make_node("Reshape", ["swapped", "apart_shape"], ["apart"]),
        helper.make_node("Neg", ["apart"], ["y"]),
    ]


AXES = {"batch": [0], "heads": [1], "seq": [2], "dim": [3], "minus_one": [-1]}


@pytest.mark.parametrize("x", [["batch", 3, "seq", 4], [2, 3, 5, 4], ["batch", "heads", "seq", "dim"]])
def test_a_transpose_between_two_reshapes_becomes_one_transpose(x: list[Any]) -> None:
    left = straightened(
        graph(heads("batch", "heads", "dim", "seq"), x, [None] * 4, AXES),
        *([(2, 3, 5, 4)] if x[0] == 2 else [(2, 3, 5, 4), (1, 3, 1, 4), (7, 3, 4, 4)]),
    )
    assert left["Reshape"] == 0
    assert left["Transpose"] == 1


@pytest.mark.parametrize("last", [("heads", "batch", "dim", "seq"), ("batch", "heads", "seq", "dim")])
def test_a_last_reshape_that_means_other_axes_is_left(last: tuple[str, ...]) -> None:
    model = graph(heads(*last), ["batch", "heads", "seq", "dim"], [None] * 4, AXES)
    assert straightened(model, (2, 3, 5, 4), (3, 3, 4, 4))["Reshape"] == 2


def test_a_reshape_to_the_same_shape_goes_away() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Reshape", ["x", "shape"], ["same"]),
        helper.make_node("Neg", ["same"], ["y"]),
    ]
    assert straightened(graph(nodes, ["a", "b", 3], [None] * 3, {}), (2, 4, 3), (0, 1, 3)) == {"Neg": 1}


@pytest.mark.parametrize(("x", "shape"), [(["a", "b"], ["b", "a"]), (["a", 4], [4, "a"]), (["a", "b"], ["a", "b", 1])])
def test_a_reshape_that_changes_the_shape_is_left(x: list[Any], shape: list[Any]) -> None:
    where = {"a": 0, "b": 1}
    parts = [f"{name}_part" for name in map(str, shape)]
    nodes = [helper.make_node("Shape", ["x"], ["shape"])]
    nodes += [take("shape", f"axis_{d}", f"{d}_part") for d in shape if isinstance(d, str)]
    nodes += [
        helper.make_node("Concat", parts, ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["other"]),
        helper.make_node("Neg", ["other"], ["y"]),
    ]
    constants = {f"axis_{d}": [where[d]] for d in shape if isinstance(d, str)}
    constants |= {f"{d}_part": [d] for d in shape if isinstance(d, int)}
    model = graph(nodes, x, [None] * len(shape), constants)
    assert straightened(model, (4, 4), (2, 4))["Reshape"] == 1


def test_a_reshape_that_is_an_output_keeps_its_name() -> None:
    nodes = [helper.make_node("Shape", ["x"], ["shape"]), helper.make_node("Reshape", ["x", "shape"], ["y"])]
    model = graph(nodes, ["a", 3], [None, 3], {})
    assert straightened(model, (2, 3))["Reshape"] == 1
    assert model.graph.outputs[0].name == "y"


class Attention(nn.Module):
    """Grouped heads behind a norm, as in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(24)
        self.q, self.kv = nn.Linear(24, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q = self.q(x).unflatten(-1, (6, 4)).transpose(1, 2)
        k, v = (t.repeat_interleave(3, 1) for t in self.kv(x).unflatten(-1, (4, 4)).transpose(1, 2).chunk(2, 1))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_attention_is_exported_without_reshapes_of_its_keys(tmp_path: Path) -> None:
    model = Attention().eval()
    export_model(model, (torch.randn(2, 5, 24),), out_dir=tmp_path / "attention.bundle", check=False, benchmark=False)
    bundle = open_bundle(tmp_path / "attention.bundle")
    nodes = list(ir.load(bundle.model_path).graph)
    assert not [node for node in nodes if node.op_type == "Transpose" and len(node.attributes["perm"].as_ints()) == 3]
    session = bundle.session("onnxruntime")
    for shape in ((2, 5, 24), (1, 1, 24), (3, 7, 24)):
        x = torch.randn(shape)
        expected = model.double()(x.double())
        model.float()
        torch.testing.assert_close(session(x)[0].double(), expected, atol=2e-6, rtol=2e-5)


class Repeated(nn.Module):
    """A norm of keys that are repeated for their queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x.repeat_interleave(3, 1))
        return result


@pytest.mark.parametrize("model", [Repeated(), nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 8))])
def test_what_the_file_says_of_inner_shapes_is_true(model: nn.Module, tmp_path: Path) -> None:
    example = (torch.randn(2, 2, 5, 16),)
    export_model(model, example, out_dir=tmp_path / "b.bundle", check=False, benchmark=False)
    for name in ("model.onnx", "reference.onnx"):
        onnx.checker.check_model(str(tmp_path / "b.bundle" / name), full_check=True)


def test_two_norms_of_one_value_stay_two(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm(x), self.norm(x)

    example = (torch.randn(2, 16),)
    export_model(Twice(), example, out_dir=tmp_path / "b.bundle", check=False, benchmark=False)
    assert len(open_bundle(tmp_path / "b.bundle").manifest["norms"]) == 2


def rotary(
    table: str = "sin", axis: int = -1, tables: int = 1, spare: bool = False, own_views: bool = False
) -> ir.Model:
    """Two layers' halves of x [2, seq, 4], swapped, one negated, times a table made of x's head."""
    nodes = [
        helper.make_node("Slice", ["x", "zero", "one"], ["head"]),
        helper.make_node("Sin", ["head"], ["sin0"]),
        helper.make_node("Cos", ["head"], ["sin1"]),
        helper.make_node("ReduceSum", ["head", "last"], ["narrow0"]),
        helper.make_node("ReduceSum", ["head", "last"], ["narrow1"]),
    ]
    for layer, source in enumerate(("x", "turned0")):
        names = [f"{name}{layer}" for name in ("a", "b", "minus", "swapped", "turned")]
        a, b, minus, swapped, turned = names
        factor = f"{table}{layer % tables}"
        if own_views:
            nodes.append(helper.make_node("Unsqueeze", [factor, "zero"], [f"view{layer}"]))
            factor = f"view{layer}"
        nodes += [
            helper.make_node("Split", [source], [a, b], axis=axis, num_outputs=2),
            helper.make_node("Neg", [b], [minus]),
            helper.make_node("Concat", [minus, a], [swapped], axis=axis),
            helper.make_node("Mul", [factor, swapped], [turned]),
        ]
    nodes.append(helper.make_node("Sub", ["turned1", "swapped0" if spare else "x"], ["y"]))
    model = graph(nodes, [2, "seq", 4], [None] * 3, {"zero": [0], "one": [1], "last": [-1]})
    infer_shapes(model)
    return model


@pytest.mark.parametrize("own_views", [False, True])
def test_a_table_that_layers_share_carries_their_minus_signs(own_views: bool) -> None:
    left = straightened(rotary(own_views=own_views), (2, 3, 4), (2, 0, 4))
    assert left["Neg"] == 0
    assert left["Mul"] == 3


@pytest.mark.parametrize(
    "model",
    [
        rotary(tables=2),  # each layer has a table of its own: nothing to gain
        rotary(table="narrow"),  # one number a row can't carry a sign an element
        rotary(axis=0),  # along another axis the table is broadcast
        rotary(spare=True),  # another user reads the negated half
    ],
    ids=["own tables", "narrow table", "other axis", "another user"],
)
def test_minus_signs_stay_where_a_table_cannot_carry_them(model: ir.Model) -> None:
    assert straightened(model, (2, 3, 4), (2, 0, 4))["Neg"] == 2
