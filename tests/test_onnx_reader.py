"""ONNX files of any origin are read for what they compute, whatever they claim about it or how they store it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers import float16

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.onnx_reader import read_onnx
from rmsnorm_deploy.parity import run_parity

D = 8
X = np.random.default_rng(1).normal(size=(2, 3, D)).astype(np.float32)
W = np.where(np.arange(D) % 3 == 0, 0, np.linspace(0.5, 1.5, D)).astype(np.float32)


def _model(**graph_parts: Any) -> onnx.ModelProto:
    """``Relu`` and a norm of it; the weight ``w`` is left to the caller."""
    nodes = [
        helper.make_node("Relu", ["x0"], ["x"]),
        helper.make_node("Mul", ["x", "x"], ["sq"]),
        helper.make_node("ReduceMean", ["sq", "last"], ["ms"]),
        helper.make_node("Add", ["ms", "eps"], ["me"]),
        helper.make_node("Sqrt", ["me"], ["rt"]),
        helper.make_node("Div", ["x", "rt"], ["nx"]),
        helper.make_node("Mul", ["nx", "w"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", "S", D]) for name in ("x0", "y")]
    constants = [
        numpy_helper.from_array(np.full((), 1e-5, np.float32), "eps"),
        numpy_helper.from_array(np.array([-1]), "last"),
        *graph_parts.pop("weights", ()),
    ]
    graph = helper.make_graph(
        [*graph_parts.pop("before", ()), *nodes], "g", ends[:1], ends[1:], constants, **graph_parts
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _truth(weight: np.ndarray[Any, Any] = W) -> np.ndarray[Any, Any]:
    x = np.maximum(X.astype(np.float64), 0)
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight)


def _check(
    source: onnx.ModelProto | Path, out: Path, expected: np.ndarray[Any, Any], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    bundle = export_model(source, out_dir=out)
    assert len(bundle.norms) == 1
    for name in ("model.onnx", "reference.onnx"):
        session = onnxruntime.InferenceSession(str(out / name), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, {"x0": X})[0], expected, rtol=rtol, atol=atol)


def _info(name: str, shape: list[Any] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


LIES = {
    "another batch": _info("x", [7, 3, D]),
    "another width": _info("x", [2, 3, 4]),
    "another rank": _info("x", [2, 3]),
    "a statistic without its axis": _info("ms", [2, 3]),
    "a statistic as wide as the row": _info("ms", [2, 3, D]),
    "a scalar": _info("ms", []),
    "one name for two sizes": _info("x", ["N", "N", D]),
    "no shape": _info("x", None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_claim_about_an_inner_value_is_believed(lie: str, tmp_path: Path) -> None:
    weight = numpy_helper.from_array(W, "w")
    _check(_model(weights=[weight], value_info=[LIES[lie]]), tmp_path / "b", _truth())


def test_a_claim_is_lost_where_nothing_can_be_inferred() -> None:
    model = _model(
        weights=[numpy_helper.from_array(W, "w")], value_info=[_info("g", [2, 3, D])], before=[
            helper.make_node("Gelu", ["x0"], ["g"], domain="com.microsoft"),
            helper.make_node("Tanh", ["g"], ["t"]),
        ],
    )  # fmt: skip
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    values = {value.name: value for node in read_onnx(model).graph for value in node.outputs}
    assert list(values["g"].shape or ()) == [2, 3, D]
    assert list(values["t"].shape or ()) == [2, 3, D]


def test_a_claimed_dimension_gives_way_to_an_invented_name() -> None:
    model = _model(
        weights=[numpy_helper.from_array(W, "w")], value_info=[_info("v", ["N", "S", 2, 4])], before=[
            helper.make_node("Neg", ["shape_"], ["minus"]),
            helper.make_node("Abs", ["minus"], ["shape"]),
            helper.make_node("Reshape", ["x0", "shape"], ["v"]),
        ],
    )  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 3, 2, 4]), "shape_"))
    values = {value.name: value for node in read_onnx(model).graph for value in node.outputs}
    assert [str(dim) for dim in values["v"].shape or ()] == ["N", "S", "2", "4"]


@pytest.mark.parametrize("place", ["initializer", "constant", "coordinates"])
def test_a_sparse_weight_is_lost(place: str, tmp_path: Path) -> None:
    indices = np.nonzero(W)[0]
    if place == "coordinates":
        indices = indices[:, None]
    values = numpy_helper.from_array(W[W != 0], "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices, "w_indices"), [D])
    if place == "constant":
        model = _model(before=[helper.make_node("Constant", [], ["w"], sparse_value=sparse)])
    else:
        model = _model(sparse_initializer=[sparse])
    before = model.SerializeToString()
    _check(model, tmp_path / "b", _truth())
    assert model.SerializeToString() == before


def test_the_long_name_of_the_standard_domain_is_taken_for_another(tmp_path: Path) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    model.opset_import[0].domain = "ai.onnx"
    for node in model.graph.node:
        node.domain = "ai.onnx"
    _check(model, tmp_path / "b", _truth())


def test_a_constant_node_with_its_tensor_in_another_file(tmp_path: Path) -> None:
    wide = np.random.default_rng(2).normal(size=(512, D)).astype(np.float32)
    model = _model(weights=[numpy_helper.from_array(W, "w")], before=[
        helper.make_node("Constant", [], ["big"], value=numpy_helper.from_array(wide)),
    ])  # fmt: skip
    model.graph.node.append(helper.make_node("Gemm", ["flat", "big"], ["z"], transB=1))
    model.graph.node.insert(8, helper.make_node("Reshape", ["y", "rows"], ["flat"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, D]), "rows"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["R", 512]))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, convert_attribute=True)
    _check(path, tmp_path / "b", (_truth() @ wide.T.astype(np.float64)).reshape(-1, 512))


def test_a_default_among_the_inputs_must_be_fed(tmp_path: Path) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    model.graph.input.append(_info("w", [D]))
    bundle = export_model(model, out_dir=tmp_path / "b")
    np.testing.assert_allclose(bundle.session("onnxruntime").run({"x0": X})["y"], _truth(), rtol=1e-5, atol=1e-6)
    assert run_parity(bundle, backends=["onnxruntime"]).ok
    session = onnxruntime.InferenceSession(str(tmp_path / "b" / "model.onnx"), providers=["CPUExecutionProvider"])
    given = session.run(None, {"x0": X, "w": W + 1})[0]
    np.testing.assert_allclose(given, _truth(W.astype(np.float64) + 1), rtol=1e-5, atol=1e-6)


def test_a_norm_of_onnx_runtime_whose_second_output_is_used(tmp_path: Path) -> None:
    node = helper.make_node("SimplifiedLayerNormalization", ["x0", "w"], ["y", "i"], axis=-1, epsilon=1e-5)
    ends = [_info("x0", ["N", "S", D]), _info("y", ["N", "S", D]), _info("i", ["N", "S", 1])]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [numpy_helper.from_array(W, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    export_model(model, out_dir=tmp_path / "b")
    session = onnxruntime.InferenceSession(str(tmp_path / "b" / "model.onnx"), providers=["CPUExecutionProvider"])
    y, inverse = session.run(None, {"x0": X})
    expected = 1 / np.sqrt((X.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(inverse, expected, rtol=1e-5)
    np.testing.assert_allclose(y, X * expected * W, rtol=1e-5, atol=1e-6)


def test_a_quantized_weight_beside_an_input_that_is_normed_has_no_float64_truth(tmp_path: Path) -> None:
    levels = np.arange(1, D + 1, dtype=np.int8)
    model = _model(before=[helper.make_node("DequantizeLinear", ["levels", "step", "zero"], ["w"])])
    model.graph.initializer.extend([
        numpy_helper.from_array(levels, "levels"),
        numpy_helper.from_array(np.full((), 0.125, np.float32), "step"),
        numpy_helper.from_array(np.zeros((), np.int8), "zero"),
    ])  # fmt: skip
    model.graph.node.remove(next(node for node in model.graph.node if node.op_type == "Relu"))
    for node in model.graph.node:
        node.input[:] = ["x0" if name == "x" else name for name in node.input]
    bundle = export_model(model, out_dir=tmp_path / "b")
    assert len(bundle.norms) == 1
    assert run_parity(bundle, backends=["onnxruntime"]).ok


def test_a_sequence_is_taken_for_a_tensor(tmp_path: Path) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    model.graph.node[-1].output[0] = "n"
    model.graph.node.extend([
        helper.make_node("SequenceConstruct", ["n", "x"], ["s"]),
        helper.make_node("Identity", ["s"], ["s2"]),
        helper.make_node("SequenceAt", ["s2", "zero"], ["y"]),
    ])  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    _check(model, tmp_path / "b", _truth())


def test_an_input_without_a_rank_is_not_named(tmp_path: Path) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(InputError, match="input 'x0' says nothing of its shape"):
        export_model(model, out_dir=tmp_path / "b")


def test_a_source_that_onnx_finds_invalid_and_runtimes_take_is_refused(tmp_path: Path) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    model.graph.node.append(helper.make_node("SimplifiedLayerNormalization", ["y", "w"], ["z", "i"], axis=-1))
    for name in ("z", "i"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    del model.graph.output[1]
    bundle = export_model(model, out_dir=tmp_path / "b")
    assert any("no valid ONNX" in note for note in bundle.manifest["notes"])


@pytest.mark.parametrize("blocked", [[], ["Pow"], ["ReduceMean", "Add", "Sqrt", "Pow"]], ids=lambda ops: "+".join(ops))
@pytest.mark.parametrize("square", ["Mul", "Pow"])
def test_a_file_that_a_converter_made_half_has_casts_at_its_end(
    square: str, blocked: list[str], tmp_path: Path
) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w"), numpy_helper.from_array(np.float32(2), "two")])
    if square == "Pow":
        model.graph.node[1].CopyFrom(helper.make_node("Pow", ["x", "two"], ["sq"]))
    half = float16.convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked)
    _check(half, tmp_path / "b", _truth(), rtol=4e-3, atol=1e-3)


@pytest.mark.parametrize("place", ["graph", "branch"])
def test_nodes_come_before_those_that_they_need(place: str, tmp_path: Path) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    if place == "branch":
        branches = {
            "then_branch": helper.make_graph(nodes, "t", [], [_info("y", ["N", "S", D])]),
            "else_branch": helper.make_graph(
                [helper.make_node("Neg", ["x0"], ["z"])], "e", [], [_info("z", ["N", "S", D])]
            ),
        }
        nodes = [
            helper.make_node("Identity", ["picked"], ["chosen"]),
            helper.make_node("If", ["yes"], ["picked"], **branches),
            helper.make_node("Not", ["no"], ["yes"]),
        ]
        model.graph.output[0].name = "chosen"
        model.graph.initializer.append(numpy_helper.from_array(np.array(False), "no"))
    model.graph.node.extend(nodes)
    _check(model, tmp_path / "b", _truth())


def test_nodes_of_a_function_come_before_those_that_they_need(tmp_path: Path) -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    opsets = [helper.make_opsetid("", 18)]
    nodes = list(model.graph.node)[::-1]
    inputs = ["x0", "last", "eps", "w"]
    model.functions.append(helper.make_function("local", "norm", inputs, ["y"], nodes, opsets))
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("norm", inputs, ["y"], domain="local"))
    model.opset_import.append(helper.make_opsetid("local", 1))
    _check(model, tmp_path / "b", _truth())


def test_a_graph_that_no_order_runs_ends_in_a_traceback() -> None:
    model = _model(weights=[numpy_helper.from_array(W, "w")])
    model.graph.node[0].input[0] = "nx"
    with pytest.raises(InputError, match="need each other's outputs") as caught:
        read_onnx(model)
    assert "\n" not in str(caught.value)
