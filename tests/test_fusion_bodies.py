"""A file may define any function under a name of this package's: what counts is the body, not the name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.onnx_reader import read_onnx
from rmsnorm_deploy.fusion import FusionResult, fuse
from rmsnorm_deploy.fusion.bodies import strangers
from rmsnorm_deploy.opset import DOMAIN, Signature, Variant, function_body, node_attributes, variants

D = 12
OPSET = 18
X = np.random.default_rng(4).standard_normal((2, 3, D)).astype(np.float32) * 3
W = np.linspace(0.5, 2, D).astype(np.float32)
F16, BF16, F32, F64 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE


def _own(variant: Variant, pairs: list[tuple[ir.DataType, ir.DataType]], opset: int, axis: int = -1) -> ir.Model:
    """A node for each pair of types of X and the scale, with this package's body."""
    inputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    for x_type, scale_type in pairs:
        types = [x_type, *([x_type] if variant.skip else []), scale_type, *([scale_type] if variant.bias else [])]
        rows = 1 + variant.skip
        taken = [
            ir.Value(
                name=f"i{len(inputs)}_{k}",
                shape=ir.Shape((2, D) if k < rows else (2, D)[axis:]),
                type=ir.TensorType(dtype),
            )
            for k, dtype in enumerate(types)
        ]
        node = ir.Node(DOMAIN, variant.name, taken, node_attributes(axis=axis), num_outputs=1 + variant.skip)
        for k, output in enumerate(node.outputs):
            output.name, output.dtype, output.shape = f"o{len(nodes)}_{k}", x_type, ir.Shape((2, D))
        inputs += taken
        nodes.append(node)
    outputs = [output for node in nodes for output in node.outputs]
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": opset, DOMAIN: 1}, name="g")
    given = frozenset(Signature(x, scale, axis) for x, scale in pairs)
    return ir.Model(graph, ir_version=10, functions=[function_body(variant, given, opset)])


def _renamed(model: ir.Model) -> ir.Model:
    for function in model.functions.values():
        values = (*function.inputs, *(output for node in function for output in node.outputs))
        for number, value in enumerate(values):
            value.name = f"v{number}"
    return ir.from_proto(ir.to_proto(model))


TYPES = [[(F32, F32)], [(F16, F16)], [(BF16, F32)], [(F16, F32), (BF16, BF16), (F32, F32)]]


@pytest.mark.parametrize("opset", [13, 23])
def test_an_own_body_is_taken_for_a_strangers(opset: int) -> None:
    for number, variant in enumerate(variants()):
        types = TYPES if opset >= 15 else TYPES[:-1]
        pairs = [(F64, F64)] if variant.double else types[number // 2 % len(types)]
        model = _own(variant, pairs, opset, axis=-1 - number % 3 % 2)
        assert not strangers(_renamed(model)), (variant, pairs)
    changed = _own(Variant(), [(F32, F32)], opset)
    body = next(iter(changed.functions.values()))
    root = next(node for node in body if node.op_type == "Sqrt")
    root.op_type = "Abs"
    assert len(strangers(changed)) == 1


def _function(
    text: str, name: str = "RMSNorm", opset: int = OPSET, attributes: str = "axis: int = -1"
) -> onnx.FunctionProto:
    """A function of our domain: inputs X and S, output Y."""
    opsets = f'["" : {opset}, "{DOMAIN}" : 1]'
    header = f'<domain: "{DOMAIN}", opset_import: {opsets}> {name} <{attributes}> (X, S) => (Y)'
    return onnx.parser.parse_function(f"{header} {{ {text} }}")


def _model(*functions: onnx.FunctionProto, name: str = "RMSNorm") -> onnx.ModelProto:
    call = helper.make_node(name, ["x", "w"], ["y"], "call", domain=DOMAIN, epsilon=1e-5)
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["N", "S", D]) for end in "xy"]
    graph = helper.make_graph([call], "g", ends[:1], ends[1:], [numpy_helper.from_array(W, "w")])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def _fused(model: onnx.ModelProto) -> tuple[Any, FusionResult]:
    """The output after reading and fusing, by stock ONNX Runtime."""
    read = read_onnx(model)
    result = fuse(read)
    proto = ir.to_proto(read)
    onnx.checker.check_model(proto)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0], result


def _rms(epsilon: float = 1e-5, power: float = 2) -> Any:
    x = X.astype(np.float64)
    return x / np.sqrt((np.abs(x) ** power).mean(-1, keepdims=True) + epsilon) * W.astype(np.float64)


LAST = "l = Constant<value_ints = [-1]>() "
MAXIMUM = LAST + "a = Abs(X) m = ReduceMax(a, l) n = Div(X, m) Y = Mul(n, S)"
OTHER_EPSILON = LAST + (
    "q = Mul(X, X) m = ReduceMean(q, l) e = Constant<value_float = 0.25>() t = Add(m, e) r = Sqrt(t) n = Div(X, r) "
    "Y = Mul(n, S)"
)


@pytest.mark.parametrize("name", ["RMSNorm", "Other", "SkipRMSNorm"])
def test_another_body_under_a_name_of_ours_is_run_as_ours(name: str) -> None:
    actual, result = _fused(_model(_function(MAXIMUM, name), name=name))
    x = X.astype(np.float64)
    np.testing.assert_allclose(actual, x / np.abs(x).max(-1, keepdims=True) * W.astype(np.float64), rtol=1e-5)
    assert not result.norms


def test_a_norm_under_a_name_of_ours_keeps_its_own_epsilon() -> None:
    actual, result = _fused(_model(_function(OTHER_EPSILON)))
    np.testing.assert_allclose(actual, _rms(0.25), rtol=1e-5)
    assert [record.epsilon for record in result.norms] == [0.25]


def test_another_default_under_a_name_of_ours_is_lost() -> None:
    text = OTHER_EPSILON.replace("value_float = 0.25", "value_float: float = @epsilon")
    model = _model(_function(text, attributes="axis: int = -1, epsilon: float = 0.25"))
    del model.graph.node[0].attribute[:]
    np.testing.assert_allclose(_fused(model)[0], _rms(0.25), rtol=1e-5)


@pytest.mark.parametrize("change", ["constant", "operands"])
def test_our_body_with_one_change_is_run_as_ours(change: str) -> None:
    body = ir.to_proto(function_body(Variant(), frozenset({Signature(F32, F32, -1)}), OPSET))
    model, expected = _model(body), _rms()
    if change == "constant":
        two = next(a for node in model.functions[0].node for a in node.attribute if a.name == "value")
        two.t.CopyFrom(numpy_helper.from_array(np.float32(4), "two"))
        expected = _rms(power=4)
    else:
        scaling = next(node for node in model.functions[0].node if node.op_type == "Mul")
        scaling.op_type = "Div"
        expected = _rms() / W.astype(np.float64) ** 2
    actual, _ = _fused(model)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_file_of_ours_is_read_as_it_is() -> None:
    model = _own(Variant(skip=True), [(F32, F32)], OPSET)
    read = read_onnx(ir.to_proto(model))
    assert [node.op_type for node in read.graph] == ["SkipRMSNorm"]
    assert len(fuse(read).norms) == 1


def test_a_function_of_another_opset_ends_in_a_traceback() -> None:
    with pytest.raises(InputError, match="can't be written out in its graph") as caught:
        read_onnx(_model(_function(MAXIMUM, opset=17)))
    assert "\n" not in str(caught.value)


def test_a_function_that_calls_itself_ends_in_a_traceback() -> None:
    model = _model(_function(f"Y = {DOMAIN}.RMSNorm(X, S)"))
    with pytest.raises(InputError, match="can't be written out in its graph"):
        read_onnx(model)


@pytest.mark.parametrize("inputs", [["x"], ["x", ""]])
def test_an_op_of_ours_without_a_scale_ends_in_a_traceback(inputs: list[str]) -> None:
    model = _model()
    del model.graph.node[0].input[:]
    model.graph.node[0].input.extend(inputs)
    actual, result = _fused(model)
    np.testing.assert_allclose(actual, _rms() / W.astype(np.float64), rtol=1e-5)
    assert len(result.norms) == 1
