"""Half types, mixed types, casts anywhere, and epsilons of any size: one op, the right variant, no rounding added."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fusion_graphs import check, feeds_of, fused, graph, run

from rmsnorm_deploy import export_model

F16 = "float16[N, S, 12] x"
WIDE = "f = Cast<to = 1>(x) sq = Mul(f, f) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(f, rt) "
HALF_WEIGHT = "wh = Cast<to = 10>(w) "


def _half(body: str, out: str = "float16", **options):  # type: ignore[no-untyped-def]
    model = graph(body, inputs=F16, outputs=f"{out}[N, S, 12] y", **options)
    for tensor in model.graph.initializer:  # a weight that is stored in float16
        if tensor.name in ("w", "b") and f"wh = Cast<to = 10>({tensor.name})" in body:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


def _as_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float16 model with bfloat16 in its place."""
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT16:
                attribute.i = onnx.TensorProto.BFLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT16:
            array = onnx.numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return model


CASES = {
    "llama": (WIDE + HALF_WEIGHT + "c = Cast<to = 10>(n) y = Mul(wh, c)", "float16", "after_cast", "half"),
    "gemma": (WIDE + HALF_WEIGHT + "v = Cast<to = 1>(wh) u = Add(v, one) m = Mul(n, u) y = Cast<to = 10>(m)", "float16",
        "before_cast", "float32"),
    "olmo": (WIDE + HALF_WEIGHT + "v = Cast<to = 1>(wh) m = Mul(v, n) y = Cast<to = 10>(m)", "float16", "before_cast",
        "half"),
    "float32 scale": (WIDE + "c = Cast<to = 10>(n) k = Cast<to = 1>(c) y = Mul(w, k)", "float", "after_cast",
        "float32"),
    "float32 scale, half out": (WIDE + "m = Mul(w, n) y = Cast<to = 10>(m)", "float16", "before_cast", "float32"),
    "float32 out": (WIDE + "y = Mul(w, n)", "float", "after_cast", "float32"),
    "no scale": (WIDE + "y = Cast<to = 10>(n)", "float16", "before_cast", "half"),
    "bias": (WIDE + "m = Mul(w, n) k = Add(m, b) y = Cast<to = 10>(k)", "float16", "before_cast", "float32"),
    "half statistics": ("sq = Mul(x, x) ms = ReduceMean(sq, last) e = CastLike(eps, x) me = Add(ms, e) rt = Sqrt(me) "
        "n = Div(x, rt) wh = Cast<to = 10>(w) y = Mul(n, wh)", "float16", "after_cast", "half"),
}  # fmt: skip


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_way_to_round_is_lost(name: str, half: str) -> None:
    body, out, order, scale = CASES[name]
    model = _half(body, out)
    if half == "bfloat16":
        model = _as_bfloat16(model)
    proto, result = fused(model)
    assert len(result.norms) == 1, result.left
    record = result.norms[0]
    assert record.scale_order == order
    assert record.scale_dtype == (half if scale == "half" else scale)
    assert record.stash_type == "float32"
    assert record.proof["same_bits"] > 0.9 or name == "half statistics" or out == "float"
    if half == "float16":
        feeds = feeds_of(model)
        truth = run(model, feeds, optimized=False)[0].astype(np.float64)
        for optimized in (False, True):
            actual = run(proto, feeds, optimized=optimized)[0]
            np.testing.assert_allclose(
                actual.astype(np.float64), truth, rtol=5e-3 if name == "half statistics" else 1e-3
            )


@pytest.mark.parametrize("epsilon", [1e-5, 1e-8, 1e-12, 1e-30, 0.0])
@pytest.mark.parametrize("dtype", ["float", "double"])
def test_an_epsilon_is_lost(epsilon: float, dtype: str) -> None:
    body = "sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, e) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)"
    model = graph(body, more=f"float e = {{{epsilon:.1e}}}", dtype=dtype)
    proto, result = fused(model)
    assert result.norms[0].epsilon == pytest.approx(epsilon, rel=1e-7 if dtype == "float" else 1e-14)
    feeds = feeds_of(model)
    feeds["x"][0] = 0
    feeds["x"][1] *= 1e-10
    truth = run(model, feeds, optimized=False)[0]
    np.testing.assert_allclose(run(proto, feeds)[0], truth, rtol=1e-6 if dtype == "float" else 1e-13)


def test_an_epsilon_is_read_after_the_cast_that_erases_it() -> None:
    """1e-8 is zero in float16, where PyTorch adds it in float32."""
    body = """e = Cast<to = 10>(tiny) sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, e) rt = Sqrt(me)
    n = Div(x, rt) wh = Cast<to = 10>(w) y = Mul(n, wh)"""
    _, result = fused(_half(body, more="float tiny = {1e-8}"))
    assert result.norms[0].epsilon == 1e-8


def test_a_narrowed_input_is_taken_for_its_source() -> None:
    """The norm is of the rounded value, though its source is there and wider."""
    body = """h = Cast<to = 10>(x) f = Cast<to = 1>(h) sq = Mul(f, f) ms = ReduceMean(sq, last) me = Add(ms, eps)
    rt = Sqrt(me) n = Div(f, rt) y = Mul(n, w)"""
    model = graph(body)
    proto, result = fused(model)
    assert result.norms[0].dtype in ("float16", "float32")
    feeds = feeds_of(model)
    np.testing.assert_allclose(run(proto, feeds)[0], run(model, feeds, optimized=False)[0], rtol=1e-6)


def test_a_statistic_of_the_narrowed_divides_the_source() -> None:
    body = """h = Cast<to = 10>(x) f = Cast<to = 1>(h) sq = Mul(f, f) ms = ReduceMean(sq, last) me = Add(ms, eps)
    rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)"""
    check(graph(body), 0, left=("other than the one that was squared",))


@pytest.mark.parametrize("half", [10, 16])
@pytest.mark.parametrize("square", ["Pow(f, two)", "Mul(f, f)", "Mul(x, x)"])
def test_a_square_that_is_narrowed_before_its_mean_is_no_square(square: str, half: int) -> None:
    body = f"""f = Cast<to = 1>(x) sq = {square} c = Cast<to = {half}>(sq) g = Cast<to = 1>(c) ms = ReduceMean(g, last)
    me = Add(ms, eps) rt = Sqrt(me) n = Div(f, rt) y = Mul(n, w)"""
    model = graph(body)
    proto, result = fused(model)
    assert len(result.norms) == 1, result.left
    feeds = feeds_of(model)
    feeds["x"][0, 0] = 300 * np.sign(feeds["x"][0, 0])  # its square is infinite in float16
    x, w = feeds["x"].astype(np.float64), onnx.numpy_helper.to_array(model.graph.initializer[-1]).astype(np.float64)
    truth = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(run(proto, feeds)[0], truth, rtol=1e-5)


def test_a_narrowed_square_beside_another_tensor_has_no_reason() -> None:
    body = """h = Mul(x, x) c = Cast<to = 10>(h) g = Cast<to = 1>(c) ms = ReduceMean(g, last) me = Add(ms, eps)
    rt = Sqrt(me) z = Relu(x) n = Div(z, rt) y = Mul(n, w)"""
    check(graph(body), 0, left=("other than the one that was squared",))


def test_the_mean_of_a_narrowed_square_is_normalized_as_the_square_is() -> None:
    """What is divided is the narrowed square itself, by its own root mean square."""
    body = """h = Mul(x, x) c = Cast<to = 10>(h) g = Cast<to = 1>(c) sq = Mul(g, g) ms = ReduceMean(sq, last)
    me = Add(ms, eps) rt = Sqrt(me) n = Div(g, rt) y = Mul(n, w)"""
    model = graph(body)
    proto, result = fused(model)
    assert len(result.norms) == 1, result.left
    feeds = feeds_of(model)
    x = (feeds["x"] * feeds["x"]).astype(np.float16).astype(np.float64)
    w = onnx.numpy_helper.to_array(model.graph.initializer[-1]).astype(np.float64)
    truth = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(run(proto, feeds)[0], truth, rtol=1e-5)


def test_casts_in_odd_places() -> None:
    body = """f = Cast<to = 1>(x) g = Cast<to = 1>(x) sq = Pow(f, two) ms = ReduceMean(sq, last) dd = Cast<to = 11>(ms)
    ed = Cast<to = 11>(eps) me = Add(dd, ed) rt = Sqrt(me) r = Cast<to = 1>(rt) n = Div(g, r) m = Mul(n, w)
    y = Cast<to = 10>(m)"""
    _, result = fused(_half(body))
    assert [record.op_type for record in result.norms] == ["RMSNorm_before_cast"]


def test_a_cast_that_loses_nothing_is_taken_for_a_rounding() -> None:
    """PyTorch's decompositions compute an absolute value of half precision in float32."""
    body = """f = Cast<to = 1>(x) a = Abs(f) h = Cast<to = 10>(a) g = Cast<to = 1>(h) sq = Pow(g, two)
    ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(f, rt) m = Mul(n, w) y = Cast<to = 10>(m)"""
    assert len(fused(_half(body))[1].norms) == 1


def test_integers_are_taken_for_rows() -> None:
    body = "sq = Mul(x, x) ms = ReduceMean(sq, last) q = Div(x, ms) y = Cast<to = 1>(q)"
    check(graph(body, inputs="int64[N, S, 12] x"), 0)


def test_a_norm_in_double_keeps_seventeen_digits() -> None:
    body = "sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, e) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)"
    model = graph(body, dtype="double", more="float e = {0.12345678901234567}")
    check(model, 1, exact=1e-14)


def test_the_scale_of_a_half_model_is_read_as_float32() -> None:
    model = _half(CASES["llama"][0])
    proto = ir.from_proto(fused(model)[0])
    norm = next(node for node in proto.graph if node.op_type.startswith("RMSNorm"))
    assert norm.inputs[1] is not None
    assert norm.inputs[1].dtype == ir.DataType.FLOAT16


def test_a_bfloat16_norm_without_a_scale_runs_in_stock_onnxruntime(tmp_path: Path) -> None:
    class Unscaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x.bfloat16(), (16,), eps=1e-5).float()

    x = torch.randn(3, 16)
    bundle = export_model(Unscaled(), (x,), out_dir=tmp_path / "b")
    session = onnxruntime.InferenceSession(str(bundle.model_path))
    row = x.bfloat16().double().numpy()
    expected = row / np.sqrt((row * row).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], expected, rtol=2**-8)
