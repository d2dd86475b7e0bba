"""Look-alikes stay what they are, each with its reason, and ONNX Runtime's optimizer leaves their value alone too."""

from __future__ import annotations

import pytest
from fusion_graphs import check, graph

MEAN = "sq = Mul(x, x) ms = ReduceMean(sq, last) "
ROOT = MEAN + "me = Add(ms, eps) rt = Sqrt(me) "
CENTRE = "mu = ReduceMean(x, last) c = Sub(x, mu) "
OTHER = "multiplies a tensor other than the one that was squared"
WITHIN = "as something else than one over a root mean square"
NOTHING = "nothing divides"
AXES = "lines up with other axes"

DECOYS = {
    "layer norm by hand": (CENTRE + "sq = Pow(c, two) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) "
        "n = Div(c, rt) m = Mul(n, w) y = Add(m, b)", "LayerNorm"),
    "layer norm without bias": (CENTRE + "sq = Mul(c, c) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) "
        "r = Reciprocal(rt) n = Mul(c, r) y = Mul(n, w)", "LayerNorm"),
    "layer norm, deviations computed twice": (CENTRE + "sq = Mul(c, c) ms = ReduceMean(sq, last) me = Add(ms, eps) "
        "rt = Sqrt(me) c2 = Sub(x, mu) n = Div(c2, rt) y = Mul(n, w)", "LayerNorm"),
    "variance of the row": (CENTRE + "sq = Mul(c, c) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) "
        "n = Div(x, rt) y = Mul(n, w)", OTHER),
    "statistic of part of the row": ("s, t = Split<axis = -1, num_outputs = 2>(x) sq = Mul(s, s) "
        "ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)", OTHER),
    "two roots": (MEAN + "r = Sqrt(ms) me = Add(r, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)", WITHIN),
    "no root": (MEAN + "me = Add(ms, eps) n = Div(x, me) y = Mul(n, w)", WITHIN),
    "cube": ("sq = Pow(x, three) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) "
        "y = Mul(n, w)", None),
    "maximum": ("sq = Mul(x, x) ms = ReduceMax(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) "
        "y = Mul(n, w)", None),
    "sum, not mean, with epsilon": ("sq = Mul(x, x) ms = ReduceSum(sq, last) me = Add(ms, eps) rt = Sqrt(me) "
        "y = Div(x, rt)", "L2 normalization"),
    "l2 normalization": ("t = ReduceL2(x, last) y = Div(x, t)", "L2 normalization"),
    "swapped division": (ROOT + "n = Div(rt, x) y = Mul(n, w)", NOTHING),
    "multiplied by the root": (ROOT + "n = Mul(x, rt) y = Mul(n, w)", NOTHING),
    "wrong operand": (ROOT + "z = Relu(x) n = Div(z, rt) y = Mul(n, w)", OTHER),
    "negative epsilon": (MEAN + "ne = Neg(eps) me = Add(ms, ne) ab = Abs(me) rt = Sqrt(ab) n = Div(x, rt) "
        "y = Mul(n, w)", NOTHING),
    "epsilon a row": (MEAN + "me = Add(ms, veps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)", NOTHING),
    "guard that hides NaN": (MEAN + "q = Greater(ms, eps) f = Where(q, ms, eps) rt = Sqrt(f) n = Div(x, rt) "
        "y = Mul(n, w)", "in float64 it differs"),
    "guard that changes small rows": (MEAN + "rt = Sqrt(ms) q = Less(rt, three) f = Where(q, one, rt) n = Div(x, f) "
        "y = Mul(n, w)", "in float64 it differs"),
    "variance and squared mean, NaN where a row has infinity": (CENTRE + "sq = Mul(c, c) va = ReduceMean(sq, last) "
        "m2 = Mul(mu, mu) ms = Add(va, m2) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)", NOTHING),
    "statistic of a view of other rows": ("v = Reshape(x, rows) sq = Mul(v, v) ms = ReduceMean<keepdims = 0>(sq, last) "
        "me = Add(ms, eps) rt = Sqrt(me) s = Shape<end = 2>(x) r = Reshape(rt, s) u = Unsqueeze(r, last) z = Relu(x) "
        "n = Div(z, u) y = Mul(n, w)", OTHER),
    "exponential of another power": (MEAN + "me = Add(ms, eps) l = Log(me) h = Mul(l, half) e = Exp(h) f = Mul(e, e) "
        "n = Div(x, f) y = Mul(n, w)", WITHIN),
    "softmax": ("e = Exp(x) t = ReduceSum(e, last) y = Div(e, t)", None),
}  # fmt: skip


@pytest.mark.parametrize("name", DECOYS)
@pytest.mark.parametrize("dtype", ["float", "double"])
def test_a_decoy_becomes_a_norm_or_has_no_reason(name: str, dtype: str) -> None:
    body, reason = DECOYS[name]
    more = "float[3, 1] veps = {1e-5, 1e-2, 0.1}, int64[2] rows = {-1, 12}"
    exact = 1e-6 if dtype == "float" else 1e-13
    model = graph(body, more=more, dtype=dtype)
    check(model, 0, left=() if reason is None else (reason,), exact=exact)


def test_a_mean_over_part_of_the_row_is_taken_for_the_rows() -> None:
    body = (
        "sq = Mul(x, x) p = AveragePool<kernel_shape = [11]>(sq) ms = ReduceMean(p, last) me = Add(ms, eps) "
        "rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)"
    )
    check(graph(body), 0)


SQUARE = {"inputs": "float[12, 12] x", "outputs": "float[12, 12] y"}


@pytest.mark.parametrize("scale", ["Mul(n, w)", "Mul(w, n)"])
@pytest.mark.parametrize("square", ["Pow(x, two)", "Mul(x, x)"])
def test_a_mean_that_lines_up_with_columns_is_taken_for_rows(scale: str, square: str) -> None:
    body = (
        f"sq = {square} ms = ReduceMean<keepdims = 0>(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, "
        f"rt) y = {scale}"
    )
    check(graph(body, **SQUARE), 0, left=(AXES,), exact=1e-6)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (0, 0)])
def test_onnxruntime_takes_a_layer_norm_over_columns_for_one_over_rows(first: int, second: int) -> None:
    body = f"""mu = ReduceMean<keepdims = {first}>(x, last) c = Sub(x, mu) sq = Pow(c, two)
    ms = ReduceMean<keepdims = {second}>(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(c, rt)
    m = Mul(n, w) y = Add(m, b)"""
    check(graph(body, **SQUARE), 0, left=("",), exact=1e-6)


def test_a_statistic_over_columns_divides_rows() -> None:
    body = (
        "t = Transpose<perm = [1, 0]>(x) sq = Mul(t, t) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = "
        "Sqrt(me) n = Div(x, rt) y = Mul(n, w)"
    )
    check(graph(body, **SQUARE), 0, left=(OTHER,), exact=1e-6)


def test_a_mean_over_other_axes_makes_no_layer_norm() -> None:
    body = (
        "mu = ReduceMean(x, first) c = Sub(x, mu) sq = Mul(c, c) ms = ReduceMean(sq, last) me = Add(ms, eps) "
        "rt = Sqrt(me) n = Div(c, rt) y = Mul(n, w)"
    )
    check(graph(body), 1)


def test_lp_normalization_which_leaves_a_row_of_zeros_zero_is_left() -> None:
    import numpy as np
    from fusion_graphs import feeds_of, fused, run

    model = graph("n = LpNormalization<axis = -1, p = 2>(x) m = Mul(n, sd) y = Mul(m, w)")
    check(model, 0, left=("in float64 it differs",))
    (x,) = feeds_of(model).values()
    assert not run(fused(model)[0], {"x": np.zeros_like(x)})[0].any()


def test_a_left_layer_norm_loses_the_fusion_that_onnxruntime_has_for_it() -> None:
    from fusion_graphs import feeds_of, fused, op_types, run

    model = graph(DECOYS["layer norm by hand"][0])
    proto, _ = fused(model)
    assert "Pow" in op_types(proto)
    run(proto, feeds_of(model))


def test_a_layer_norm_op_is_not_mentioned() -> None:
    body = "y = LayerNormalization<axis = -1, epsilon = 1e-5>(x, w, b)"
    check(graph(body), 0, left=("LayerNormalization subtracts the mean",))


def test_a_cancelled_zero_is_fused_away() -> None:
    """x * x / x is x, but NaN where x is zero: the proof's zero rows tell."""
    body = (
        "p = Mul(x, x) h = Div(p, x) sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = "
        "Sqrt(me) n = Div(h, rt) y = Mul(n, w)"
    )
    check(graph(body), 0, left=("in float64 it differs",))


def test_a_root_that_is_computed_later_is_used_before_it_is_there() -> None:
    body = """s = Mul(x, x) t = Mul(z, z) sq = Mul(s, t) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me)
    i = Div(x, rt) n = Mul(i, z) y = Mul(n, w) h = Mul(x, z)"""
    inputs = "float[N, S, 12] x, float[N, S, 12] z"
    check(graph(body, inputs=inputs, outputs="float[N, S, 12] y, float[N, S, 12] h"), 0, left=(OTHER,))


def test_double_statistics_of_large_rows_overflow() -> None:
    """A float32 row of 1e25 has no mean square in float32; the graph takes it in float64, and so must the op."""
    body = """f = Cast<to = 11>(x) sq = Mul(f, f) m = ReduceMean(sq, last) ms = Cast<to = 11>(m)
    deps = Cast<to = 11>(eps) me = Add(ms, deps) rt = Sqrt(me) n = Div(f, rt) c = Cast<to = 1>(n) y = Mul(c, w)"""
    result = check(graph(body), 1)
    assert result.norms[0].stash_type == "float64"


def test_a_scale_that_spreads_rows_of_one_element_fails_in_onnx_runtime() -> None:
    body = (
        "mu = ReduceMean(x, last) c = Sub(x, mu) sq = Pow(c, two) ms = ReduceMean(sq, last) me = Add(ms, eps) "
        "rt = Sqrt(me) n = Div(c, rt) y = Mul(n, w)"
    )
    check(graph(body, inputs="float[N, 1] x", outputs="float[N, 12] y"), 0, left=("LayerNorm",))
