"""Files of any origin: subgraphs, functions, old opsets, defaults, no shapes, ONNX Runtime's ops, fused files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from fusion_graphs import check, feeds_of, fused, graph, interpret, op_types, run

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.fusion import fuse

ROOT = "sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) "
NORM = ROOT + "n = Div(x, rt) y = Mul(n, w) "
SECOND = "s2 = Mul(x, x) m2 = ReduceMean(s2, last) e2 = Add(m2, eps) r2 = Sqrt(e2) n2 = Div(x, r2) z = Mul(n2, w)"


# -- subgraphs


def _branch(name: str, body: str, out: str) -> str:
    return f"{name} = {name} () => (float[N, S, 12] {out}) {{ {body} }}"


def test_norms_in_both_branches_of_an_if() -> None:
    then = _branch("then_branch", NORM.replace("y =", "y1 =").replace("sq", "sqa"), "y1")
    other = _branch("else_branch", NORM.replace("y =", "y2 =").replace("w)", "w2)"), "y2")
    model = graph(f"y = If(c) <{then}, {other}>", inputs="float[N, S, 12] x, bool c")
    check(model, 2)


def test_a_statistic_outside_and_the_norm_within() -> None:
    then = _branch("then_branch", "n = Div(x, rt) y1 = Mul(n, w)", "y1")
    other = _branch("else_branch", "y2 = Neg(x)", "y2")
    model = graph(f"{ROOT} y = If(c) <{then}, {other}>", inputs="float[N, S, 12] x, bool c")
    check(model, 1)


def test_a_branch_uses_a_value_of_the_other_branch() -> None:
    """The same computation in both branches is one value number, and two values."""
    body = "h = Sigmoid(x) sq = Mul(h, h) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(h, rt) "
    then = _branch("then_branch", body + "y1 = Mul(n, w)", "y1")
    other = _branch("else_branch", body + "y2 = Mul(n, w)", "y2")
    check(graph(f"y = If(c) <{then}, {other}>", inputs="float[N, S, 12] x, bool c"), 2)


def test_a_norm_in_a_loop() -> None:
    body = NORM.replace("x", "h").replace("y =", "g =").replace("h_last", "last").replace("eps", "eps")
    loop = (
        f"body = b (int64 i, bool go, float[N, S, 12] h) => (bool on, float[N, S, 12] g) {{ on = Identity(go) {body} }}"
    )
    model = graph(f"y = Loop(count, yes, x) <{loop}>", more="int64 count = {3}, bool yes = {1}")
    check(model, 1)


def test_the_input_of_a_loop_has_names_of_its_own_for_its_dimensions() -> None:
    """As PyTorch's exporter writes a ``while_loop``: what is computed from the input has the names outside."""
    body = ROOT.replace("x", "h") + "n = Div(h, rt) m = Mul(n, w) g = Add(m, h)"
    state = "(int64 i, bool go, float[T0, T1, 12] h) => (bool on, float[N, S, 12] g)"
    loop = f"body = step {state} {{ on = Identity(go) {body} }}"
    model = graph(f"y = Loop(count, yes, x) <{loop}>", more="int64 count = {3}, bool yes = {1}")
    branch = model.graph.node[0].attribute[0].g
    for name in ("sq", "rt", "n", "m"):
        last = 1 if name == "rt" else 12
        branch.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", "S", last]))
    check(model, 1)
    feeds = feeds_of(model)
    truth, w = feeds["x"].astype(np.float64), onnx.numpy_helper.to_array(model.graph.initializer[-1]).astype(np.float64)
    for _ in range(3):
        truth = truth + truth / np.sqrt((truth * truth).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(run(fused(model)[0], feeds)[0], truth, rtol=1e-5, atol=1e-5)


def test_a_loop_whose_body_says_nothing_of_its_input_has_a_false_reason() -> None:
    body = NORM.replace("x", "h").replace("y =", "g =")
    loop = f"body = b (int64 i, bool go, float[] h) => (bool on, float[N, S, 12] g) {{ on = Identity(go) {body} }}"
    model = graph(f"y = Loop(count, yes, x) <{loop}>", more="int64 count = {3}, bool yes = {1}")
    model.graph.node[0].attribute[0].g.input[2].type.tensor_type.ClearField("shape")
    check(model, 0, left=("says nothing of the shape",))


def test_a_norm_in_a_scan() -> None:
    body = "sq = Mul(h, h) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(h, rt) g = Mul(n, w)"
    scan = f"body = b (float[S, 12] h) => (float[S, 12] g) {{ {body} }}"
    check(graph(f"y = Scan<num_scan_inputs = 1, {scan}>(x)"), 1)


# -- functions

FUNCTIONS = """
<domain: "local", opset_import: ["" : 18]> square (a) => (b) { b = Mul(a, a) }
<domain: "local", opset_import: ["" : 18, "local" : 1]> rms <eps: float = 0.001> (a) => (r) {
  s = local.square(a) axis = Constant<value_ints = [-1]>() m = ReduceMean(s, axis)
  e = Constant<value_float: float = @eps>() t = Add(m, e) r = Sqrt(t) }
"""


def test_norms_through_nested_functions() -> None:
    body = "rt = local.rms<eps = 0.25>(x) n = Div(x, rt) y = Mul(n, w)"
    result = check(graph(body, functions=FUNCTIONS), 1)
    assert result.norms[0].epsilon == 0.25


def test_a_function_in_a_branch() -> None:
    then = _branch("then_branch", "rt = local.rms<eps = 0.25>(x) n = Div(x, rt) y1 = Mul(n, w)", "y1")
    other = _branch("else_branch", "y2 = Neg(x)", "y2")
    check(graph(f"y = If(c) <{then}, {other}>", inputs="float[N, S, 12] x, bool c", functions=FUNCTIONS), 1)


# -- opsets and IR versions


@pytest.mark.parametrize("opset", [13, 14, 15, 16, 17])
def test_axes_as_an_attribute(opset: int) -> None:
    check(graph(NORM.replace("ReduceMean(sq, last)", "ReduceMean<axes = [-1]>(sq)"), opset=opset), 1)


@pytest.mark.parametrize("opset", range(18, min(onnx.defs.onnx_opset_version(), 26) + 1))
def test_an_opset_is_not_supported(opset: int) -> None:
    model = graph(NORM, opset=opset)
    proto, result = fused(model)
    assert len(result.norms) == 1
    if opset <= 23:  # as far as the ONNX Runtime of the time goes
        np.testing.assert_allclose(run(proto, feeds_of(model))[0], interpret(model, feeds_of(model))[0], rtol=1e-5)


def test_an_old_opset_has_one_body_for_norms_over_other_axes() -> None:
    first = NORM.replace("ReduceMean(sq, last)", "ReduceMean<axes = [-1]>(sq)")
    second = SECOND.replace("ReduceMean(s2, last)", "ReduceMean<axes = [-2, -1]>(s2)")
    model = graph(first + second, opset=17, outputs="float[N, 3, 12] y, float[N, 3, 12] z", inputs="float[N, 3, 12] x")
    check(model, 1, left=("opset 17 can't hold it",))


def test_an_old_opset_is_half_converted() -> None:
    model = ir.from_proto(graph(NORM.replace("ReduceMean(sq, last)", "ReduceMean<axes = [-1]>(sq)"), opset=12))
    with pytest.raises(InputError, match="opset is 12"):
        fuse(model)


def _listed(name: str, ir_version: int) -> onnx.ModelProto:
    model = graph(NORM)
    model.ir_version = ir_version
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    return model


def test_a_default_that_a_caller_may_replace_becomes_a_constant() -> None:
    _, result = fused(_listed("eps", 8))
    assert result.norms == []
    model = _listed("w", 8)
    proto, result = fused(model)
    assert result.norms[0].scale == "w"
    feeds = feeds_of(model) | {"w": np.arange(12, dtype=np.float32)}
    np.testing.assert_allclose(run(proto, feeds)[0], run(model, feeds, optimized=False)[0], rtol=1e-5)


def test_old_files_list_their_constants_among_the_inputs() -> None:
    proto, result = fused(_listed("eps", 3))
    assert len(result.norms) == 1
    assert [value.name for value in proto.graph.input] == ["x"]


# -- shapes


def test_shapes_that_the_file_does_not_say() -> None:
    body = (
        "a = Sigmoid(x) sq = Mul(a, a) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(a, "
        "rt) y = Mul(n, w)"
    )
    check(graph(body), 1)


def test_shapes_hidden_behind_an_onnxruntime_norm() -> None:
    body = f"a = SimplifiedLayerNormalization<axis = -1, epsilon = 1e-5>(z, w) x = Sigmoid(a) {NORM}"
    proto, result = fused(graph(body, inputs="float[N, S, 12] z"))
    assert len(result.norms) == 2
    assert len(run(proto, {"z": np.ones((2, 3, 12), np.float32)})) == 1


def test_a_scalar_of_unknown_shape_is_squeezed() -> None:
    """PyTorch's old exporter takes the width from the shape, and says of no inner value what shape it has."""
    body = """s = Shape(x) i = Gather(s, last) u = Squeeze(i, first) f = Cast<to = 1>(u) sq = Mul(x, x)
    t = ReduceSum(sq, last) ms = Div(t, f) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)"""
    check(graph(body), 1)


def test_what_is_squeezed_from_a_value_of_unknown_shape_has_its_own() -> None:
    """PyTorch's exporter says no shape of the values inside its own functions, and unbind is one."""
    body = """p = Gather(z, first) q = Squeeze(p, first) sq = Mul(q, q) ms = ReduceMean(sq, last) me = Add(ms, eps)
    rt = Sqrt(me) n = Div(q, rt) y = Mul(n, w)"""
    proto = graph(body, inputs="float[3, N, S, 12] z")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("q", onnx.TensorProto.FLOAT, ["N", "S", 12]))
    check(proto, 1)


def test_a_shape_that_the_file_says_of_a_later_value_only() -> None:
    body = """a = Sigmoid(x) h = Cast<to = 10>(a) f = Cast<to = 1>(h) sq = Mul(f, f) ms = ReduceMean(sq, last)
    me = Add(ms, eps) rt = Sqrt(me) n = Div(f, rt) y = Mul(n, w)"""
    check(graph(body, outputs="float[N, S, 12] y, float[N, S, 12] f"), 1)


# -- ONNX Runtime's ops


def test_simplified_layer_normalization() -> None:
    body = "y = SimplifiedLayerNormalization<axis = -1, epsilon = 1e-5, stash_type = 1>(x, w)"
    model = graph(body)
    proto = ir.from_proto(model)
    assert len(fuse(proto).norms) == 1
    feeds = feeds_of(model)
    np.testing.assert_allclose(run(ir.to_proto(proto), feeds)[0], run(model, feeds)[0], rtol=1e-5)


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("total", ["", ", , , h"])
def test_skip_simplified_layer_normalization(bias: str, total: str) -> None:
    body = f"y{total} = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 1e-5>(x, r, w{bias})"
    outputs = "float[N, S, 12] y" + (", float[N, S, 12] h" if total else "")
    check(graph(body, inputs="float[N, S, 12] x, float[N, S, 12] r", outputs=outputs), 1)


def test_the_statistic_output_of_an_onnxruntime_norm() -> None:
    body = "y, , v = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 1e-5>(x, r, w) z = Neg(v)"
    model = graph(body, inputs="float[N, S, 12] x, float[N, S, 12] r", outputs="float[N, S, 12] y, float[N, S, 1] z")
    result = fused(model)[1]
    assert result.norms == []
    assert ["its statistic is read" in record.reason for record in result.left] == [True]


def test_a_graph_that_onnxruntime_optimized(tmp_path: Path) -> None:
    add = "h = Add(x, r) "
    pow_form = (
        "sq = Pow(h, two) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(h, rt) y = Mul(n, w) "
    )
    last = (
        "k = Add(h, y) s2 = Pow(k, two) m2 = ReduceMean(s2, last) e2 = Add(m2, eps) r2 = Sqrt(e2) n2 = "
        "Div(k, r2) z = Mul(n2, w2)"
    )
    two = "float[N, S, 12] x, float[N, S, 12] r"
    model = graph(add + pow_form + last, inputs=two, outputs="float[N, S, 12] z")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert "Pow" not in op_types(optimized)
    copy = ir.from_proto(optimized)
    result = fuse(copy)
    assert [record.op for record in result.norms] == ["SkipRMSNorm", "SkipRMSNorm"]
    feeds = feeds_of(model)
    np.testing.assert_allclose(run(ir.to_proto(copy), feeds)[0], run(model, feeds, optimized=False)[0], rtol=1e-5)


def test_the_standard_rms_normalization() -> None:
    body = "y = RMSNormalization<axis = -1, epsilon = 1e-5>(x, w)"
    check(graph(body, opset=23), 1)


# -- names, metadata, outputs, and what is used elsewhere


def test_names_and_metadata_are_lost() -> None:
    model = ir.from_proto(graph(NORM))
    model.metadata_props["author"] = "someone"
    model.graph.doc_string = "a graph"
    end = model.graph.node(-1)
    end.name = "/layers.0/norm/Mul"
    end.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'layers.0', 'layers.0.norm', 'mul']"
    end.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/modeling.py", line 23, in forward'
    record = fuse(model).norms[0]
    assert (record.name, record.module, record.location) == ("layers.0.norm", "layers.0.norm", "modeling.py:23")
    assert model.metadata_props["author"] == "someone"
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert model.graph.doc_string == "a graph"


def test_parts_of_a_norm_that_are_used_elsewhere() -> None:
    body = NORM + "z = Neg(rt) a = Abs(n)"
    outputs = "float[N, S, 12] y, float[N, S, 1] z, float[N, S, 12] a, float[N, S, 1] ms"
    result = check(graph(body, outputs=outputs), 1)
    assert result.norms[0].scale == "ones_12"


def test_a_norm_that_is_an_output_and_used() -> None:
    check(graph(NORM + "z = Neg(y)", outputs="float[N, S, 12] y, float[N, S, 12] z"), 1)


def test_inputs_that_are_outputs() -> None:
    check(graph(NORM, outputs="float[N, S, 12] x, float[N, S, 12] y"), 1)


def test_identities_at_the_edges() -> None:
    body = NORM.replace("y =", "m =") + "y = Identity(m) z = Identity(m) k = Identity(x)"
    check(graph(body, outputs="float[N, S, 12] y, float[N, S, 12] z, float[N, S, 12] k"), 1)


def test_one_weight_for_many_norms() -> None:
    model = graph(NORM + SECOND.replace("x", "y"), outputs="float[N, S, 12] z")
    proto, result = fused(model)
    assert [record.scale for record in result.norms] == ["w", "w"]
    assert sum(tensor.name.startswith("w") for tensor in proto.graph.initializer) == 1
    check(model, 2)


def test_a_norm_called_twice_on_one_input_counts_once() -> None:
    check(graph(NORM + SECOND, outputs="float[N, S, 12] y, float[N, S, 12] z"), 2)


def test_ops_of_another_domain_are_touched() -> None:
    body = NORM.replace("y =", "m =") + "y = com.microsoft.Gelu(m)"
    proto, _ = fused(graph(body))
    assert op_types(proto) == ["RMSNorm", "Gelu"]


@pytest.mark.parametrize(
    "body", [NORM, NORM.replace("Mul(x, x)", "Pow(x, three)"), "h = Add(x, x) " + NORM.replace("x", "h")]
)
def test_fusing_again_changes_something(body: str) -> None:
    body = body.replace("h = Add(h, h)", "h = Add(x, x)")
    first, found = fused(graph(body))
    second, again = fused(first)
    assert second.SerializeToString() == first.SerializeToString()
    assert [record.name for record in again.norms] == [record.name for record in found.norms]
    assert [record.op_type for record in again.norms] == [record.op_type for record in found.norms]


def test_random_numbers_are_taken_for_a_constant() -> None:
    body = NORM.replace("w)", "s)").replace("y =", "s = RandomUniform<shape = [12], seed = 1.0, low = 0.5>() y =")
    proto, result = fused(graph(body))
    assert len(result.norms) == 1
    assert "RandomUniform" in op_types(proto)
    assert len(run(proto, {"x": np.ones((2, 3, 12), np.float32)})) == 1


def test_a_name_of_a_subgraph_is_given_twice() -> None:
    then = _branch("then_branch", "ones_12 = Neg(x) y1 = Abs(ones_12)", "y1")
    other = _branch("else_branch", ROOT + "y2 = Div(x, rt)", "y2")
    check(graph(f"y = If(c) <{then}, {other}>", inputs="float[N, S, 12] x, bool c"), 1)


# -- weights that are computed


@pytest.mark.parametrize(
    "made",
    [
        "v = Concat<axis = 0>(half1, half2)",
        "v = Where(mask, w, one)",
        "k = Constant<value_ints = [12]>() v = ConstantOfShape<value = float[1] {1.5}>(k)",
        "k = Constant<value_ints = [12]>() i = Constant<value_ints = [3]>() e = Gather(w, i) v = Expand(e, k)",
        "i = Constant<value_int = 3>() v = Gather(w, i)",
    ],
)
def test_a_weight_without_a_declared_type_is_not_understood(made: str) -> None:
    body = NORM.replace("y = Mul(n, w)", f"{made} y = Mul(n, v)")
    more = "float[5] half1, float[7] half2, bool[12] mask = {1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1}"
    model = graph(body, more=more)
    result = check(model, 1)
    assert len(result.norms) == 1
    assert op_types(fused(model)[0])[-1] == "RMSNorm"


def test_a_cast_to_the_same_type_ends_a_norm_before_its_weight() -> None:
    proto, _ = fused(graph(NORM.replace("y = Mul(n, w)", "c = CastLike(n, x) y = Mul(c, w)")))
    assert op_types(proto) == ["RMSNorm"]


def test_a_shape_that_onnx_does_not_infer_before_opset_14() -> None:
    """The attention's reshapes as PyTorch's older exporter writes them, with a norm of heads and one behind them."""
    body = (
        "s = Shape(x) zero = Constant<value_int = 0>() b0 = Gather(s, zero) t = Gather(s, one1) "
        "b1 = Unsqueeze(b0, first) t1 = Unsqueeze(t, first) h = Concat<axis = 0>(b1, t1, heads) v = Reshape(x, h) "
        "sq = Mul(v, v) ms = ReduceMean<axes = [-1]>(sq) me = Add(ms, eps) rt = Sqrt(me) n = Div(v, rt) "
        "f = Concat<axis = 0>(b1, t1, full) r = Reshape(n, f) g = MatMul(r, mat) a = Add(x, g) s2 = Mul(a, a) "
        "m2 = ReduceMean<axes = [-1]>(s2) e2 = Add(m2, eps) r2 = Sqrt(e2) n2 = Div(a, r2) y = Mul(n2, w)"
    )
    more = "int64 one1 = {1}, int64[2] heads = {3, 4}, int64[1] full = {12}, float[12, 12] mat"
    check(graph(body, opset=13, more=more), 2)


def test_a_norm_without_a_scale_gets_ones_of_its_inputs_shape() -> None:
    """As PyTorch writes ``rms_norm`` at opset 23: the ones are as large as the tensor."""
    body = (
        "s = Shape(x) o = ConstantOfShape<value = float[1] {1.0}>(s) n = RMSNormalization<epsilon = 1e-5>(x, o) "
        "y = Mul(n, w)"
    )
    model = graph(body, opset=23)
    check(model, 1)
    assert op_types(fused(model)[0]) == ["RMSNorm"]
