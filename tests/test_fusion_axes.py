"""Norms over any axes, of any rank, with scales of any shape; what is not the last axis is moved there and back."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import onnx
import pytest
from fusion_graphs import check, feeds_of, fused, graph, op_types, run

ROOT = "me = Add(ms, eps) rt = Sqrt(me) "
NORM = "sq = Mul(x, x) ms = ReduceMean(sq, last) " + ROOT + "n = Div(x, rt) y = Mul(n, w)"


def _norm(axes: str, weight: str = "w", keepdims: str = "") -> str:
    return f"sq = Mul(x, x) ms = ReduceMean{keepdims}(sq, {axes}) {ROOT} n = Div(x, rt) y = Mul(n, {weight})"


def _io(shape: str) -> dict[str, str]:
    return {"inputs": f"float[{shape}] x", "outputs": f"float[{shape}] y"}


@pytest.mark.parametrize("shape", ["12", "N, 12", "N, S, 12", "2, 3, 4, 12", "1, 1, 12", "64, 512, 12"])
def test_a_rank_is_not_supported(shape: str) -> None:
    check(graph(NORM, **_io(shape)), 1)


def test_channels_first_images() -> None:
    result = check(graph(_norm("ch", "cw"), more="int64[1] ch = {1}, float[5, 1, 1] cw", **_io("N, 5, H, W")), 1)
    assert (result.norms[0].axis, result.norms[0].scale) == (-1, "cw_scale")


def test_channels_first_of_fixed_size() -> None:
    model = graph(_norm("ch", "cw"), more="int64[1] ch = {1}, float[1, 5, 1, 1] cw", **_io("2, 5, 4, 3"))
    proto, _ = fused(model)
    assert op_types(proto) == ["Transpose", "RMSNorm", "Transpose"]
    check(model, 1)


def test_two_axes_and_a_scale_over_both() -> None:
    result = check(graph(_norm("both", "ww"), more="float[4, 12] ww", **_io("N, 4, 12")), 1)
    assert result.norms[0].axis == -2


def test_two_axes_and_a_scale_over_one() -> None:
    check(graph(_norm("both"), **_io("N, 4, 12")), 1)


def test_two_axes_that_are_not_neighbours() -> None:
    check(graph(_norm("outer", "ow"), more="int64[2] outer = {1, 3}, float[3, 1, 5] ow", **_io("N, 3, H, 5")), 1)


def test_all_axes() -> None:
    body = "sq = Mul(x, x) ms = ReduceMean(sq) " + ROOT + "y = Div(x, rt)"
    check(graph(body, **_io("3, 12")), 1)


def test_global_average_pooling() -> None:
    body = "sq = Mul(x, x) ms = GlobalAveragePool(sq) " + ROOT + "n = Div(x, rt) y = Mul(n, three)"
    check(graph(body, **_io("N, C, 4, 3")), 1)


def test_a_transposed_norm() -> None:
    body = (
        "t = Transpose<perm = [0, 2, 1]>(x) sq = Mul(t, t) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = "
        "Sqrt(me) n = Div(t, rt) y = Mul(n, w)"
    )
    check(graph(body, inputs="float[N, 12, S] x", outputs="float[N, S, 12] y"), 1)


def test_a_statistic_on_the_transpose() -> None:
    body = (
        "t = Transpose<perm = [0, 2, 1]>(x) sq = Mul(t, t) m = ReduceMean(sq, middle) ms = Transpose<perm = "
        "[0, 2, 1]>(m) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)"
    )
    check(graph(body), 1)


def test_groups_through_a_view() -> None:
    body = (
        "v = Reshape(x, shape) sq = Mul(v, v) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = "
        "Div(v, rt) u = Reshape(n, back) y = Mul(u, w)"
    )
    more = "int64[4] shape = {0, 0, 3, 4}, int64[3] back = {0, 0, 12}"
    result = check(graph(body, more=more), 1)
    assert result.norms[0].shape[-1] == 4


def test_a_view_that_every_user_takes_anew() -> None:
    body = (
        "v = Reshape(x, shape) u = Reshape(x, shape) sq = Mul(v, v) ms = ReduceMean(sq, last) me = Add(ms, "
        "eps) rt = Sqrt(me) y = Div(u, rt)"
    )
    check(graph(body, more="int64[4] shape = {0, 0, 3, 4}", outputs="float[N, S, 3, 4] y"), 1)


def test_a_weight_that_is_stored_the_other_way_round() -> None:
    body = (
        "t = Transpose<perm = [1, 0]>(wt) sq = Mul(x, x) ms = ReduceMean(sq, both) me = Add(ms, eps) rt = "
        "Sqrt(me) n = Div(x, rt) y = Mul(n, t)"
    )
    check(graph(body, more="float[12, 4] wt", **_io("N, 4, 12")), 1)


def test_a_width_that_is_not_known() -> None:
    """The root mean square over time: no width to write into a scale."""
    body = "sq = Mul(x, x) ms = ReduceMean(sq, middle) me = Add(ms, eps) rt = Sqrt(me) y = Div(x, rt)"
    check(graph(body), 1)


@pytest.mark.parametrize("shape", ["N, N, 12", "?, ?, 12", "N, ?, 12", "12, 12, 12"])
def test_dimensions_that_are_alike_or_unknown(shape: str) -> None:
    check(graph(NORM, **_io(shape)), 1, sizes={"0": 2, "1": 3} if "?" in shape else None)


def test_an_unknown_dimension_that_is_broadcast() -> None:
    """x may have one row where the result has many: the op would yield too few."""
    body = (
        "s = Shape(z) e = Expand(x, s) sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = "
        "Sqrt(me) n = Div(e, rt) y = Mul(n, w)"
    )
    model = graph(body, inputs="float[A, 12] x, float[B, 12] z", outputs="float[B, 12] y")
    proto, _ = fused(model)
    feeds = feeds_of(model, sizes={"A": 1, "B": 5})
    assert run(proto, feeds)[0].shape == (5, 12)


def test_large_fixed_sizes_are_proved_in_full() -> None:
    check(graph(NORM, **_io("8, 2048, 12")), 1)


@pytest.mark.parametrize("scale", ["float[12] s", "float[1, 1, 12] s", "float[1] s", "float s"])
def test_a_scale_that_is_an_activation(scale: str) -> None:
    body = "sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, s)"
    result = check(graph(body, inputs=f"float[N, S, 12] x, {scale}"), 1)
    assert result.norms[0].scale == "s"


def test_a_scale_an_example() -> None:
    """adaLN and FiLM: the scale varies over the batch, so it stays behind the norm."""
    body = (
        "sq = Mul(x, x) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) v = Add(s, "
        "one) y = Mul(n, v)"
    )
    result = check(graph(body, inputs="float[N, S, 12] x, float[N, 1, 12] s"), 1)
    assert result.norms[0].scale == "ones_12"


def test_a_learned_scale_and_a_modulation() -> None:
    body = NORM.replace("y =", "z =") + " v = Add(s, one) m = Mul(z, v) y = Add(m, s)"
    result = check(graph(body, inputs="float[N, S, 12] x, float[N, 1, 12] s"), 1)
    assert result.norms[0].scale == "w"


PARTLY_KNOWN = {
    "the last of two": ("S, 12", "both", "w", (2, 12)),
    "the channels of an image": ("C2, H, W", "chw", "column", (3, 2, 5)),
    "all": ("A, B, 12", "all", "w", (2, 3, 12)),
    "the first of two": ("4, W", "both", "column", (4, 7)),
}


@pytest.mark.parametrize("name", PARTLY_KNOWN)
@pytest.mark.parametrize("order", ["n = Mul(x, r) y = Mul(n, w)", "n = Mul(x, r) m = Mul(n, three) y = Mul(w, m)"])
def test_a_weight_on_one_axis_of_a_row_whose_size_is_not_known(name: str, order: str) -> None:
    """The op's scale has one element or the whole row: the norm is taken, and the product stays behind it."""
    shape, axes, weight, sizes = PARTLY_KNOWN[name]
    batch = "" if name == "all" else "N, "
    channels = "3, 1, 1" if name.startswith("the channels") else "4, 1"
    shape = shape.replace("C2", "3")
    more = f"int64[3] chw = {{-3, -2, -1}}, int64[3] all = {{0, 1, 2}}, float[{channels}] column"
    body = f"sq = Mul(x, x) ms = ReduceMean(sq, {axes}) me = Add(ms, eps) rt = Sqrt(me) r = Reciprocal(rt) {order}"
    body = body.replace("Mul(n, w)", f"Mul(n, {weight})").replace("Mul(w, m)", f"Mul({weight}, m)")
    model = graph(body, more=more, **_io(batch + shape))
    proto, result = fused(model)
    assert len(result.norms) == 1, result.left
    assert not result.left
    x = np.random.default_rng(5).standard_normal(sizes if name == "all" else (3, *sizes)).astype(np.float32)
    wide, over = x.astype(np.float64), tuple(range(0 if name == "all" else 1, x.ndim))
    truth = wide / np.sqrt((wide * wide).mean(over, keepdims=True) + 1e-5) * _initializer(model, weight)
    if "three" in order:
        truth = truth * 3
    for optimized in (False, True):
        np.testing.assert_allclose(run(proto, {"x": x}, optimized=optimized)[0], truth, rtol=1e-5, atol=1e-6)


def test_a_weight_that_can_not_stay_behind_is_spread_over_rows_of_unknown_size() -> None:
    body = "sq = Mul(x, x) ms = ReduceMean(sq, both) me = Add(ms, eps) rt = Sqrt(me) m = Mul(x, w) y = Div(m, rt)"
    check(graph(body), 0, left=("can't be spread over rows whose size is not known",))


@pytest.mark.parametrize(("scale", "taken"), [("4, 12", True), ("12", False), ("4, 1", False), ("1, 1", True)])
def test_a_scale_that_is_an_activation_over_part_of_the_row(scale: str, taken: bool) -> None:
    """The op takes one element or the whole row; anything between stays behind the norm."""
    inputs = f"float[N, 4, 12] x, float[{scale}] s"
    model = graph(_norm("both", "s"), inputs=inputs, outputs="float[N, 4, 12] y")
    assert (check(model, 1).norms[0].scale == "s") == taken


LENGTH = "l = ReduceL2(x, last) g = Max(l, eps) "
HEADS = {"inputs": "float[N, 4, S, 12] x", "outputs": "float[N, 4, S, 12] y"}


def _initializer(model: onnx.ModelProto, name: str) -> np.ndarray[Any, Any]:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    return onnx.numpy_helper.to_array(tensor).astype(np.float64)


@pytest.mark.parametrize(
    "factors",
    [*permutations(("gamma", "sd")), *permutations(("gamma", "w")), *permutations(("column", "w", "d")), ("gamma",)],
    ids="*".join,
)
def test_the_order_of_what_scales_a_row_of_length_one_decides(factors: tuple[str, ...]) -> None:
    """A scale for each head can't be the op's, be it before or behind sqrt(d)."""
    values = ["n", *(f"f{i}" for i in range(1, len(factors))), "y"]
    scaled = " ".join(f"{values[i + 1]} = Mul({values[i]}, {name})" for i, name in enumerate(factors))
    model = graph(f"{LENGTH} n = Div(x, g) {scaled}", more="float[4, 1, 12] gamma, float[4, 1, 1] column", **HEADS)
    check(model, 1)
    feeds = feeds_of(model)
    x = feeds["x"].astype(np.float64)
    truth = x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-5)
    for name in factors:
        truth = truth * _initializer(model, name)
    np.testing.assert_allclose(run(fused(model)[0], feeds)[0], truth, rtol=1e-5)


@pytest.mark.parametrize("scale", ["float[4, 1, 1] s", "float[N, 4, S, 12] s"])
def test_a_row_of_length_one_times_another_tensor_is_taken_for_a_norm(scale: str) -> None:
    """A temperature for each head, or the other half of a cosine."""
    more = f", {scale}" if "N" in scale else ""
    constant = "" if more else scale
    inputs = HEADS["inputs"] + more
    model = graph(f"{LENGTH} n = Div(x, g) y = Mul(n, s)", inputs=inputs, outputs=HEADS["outputs"], more=constant)
    check(model, 0, left=("varies over more than the normalized axes",))


BEFORE = "sq = Mul(x, x) ms = ReduceMean(sq, last) " + ROOT


@pytest.mark.parametrize(
    "body",
    [
        "a = Mul(x, s) y = Div(a, rt)",
        "r = Reciprocal(rt) a = Mul(x, s) y = Mul(a, r)",
        "r = Reciprocal(rt) a = Mul(s, r) y = Mul(x, a)",
        "a = Mul(x, s) n = Div(a, rt) y = Mul(n, w)",
        "a = Mul(x, s) c = Mul(a, w) y = Div(c, rt)",
        "a = Mul(x, s) n = Div(a, rt) y = Add(n, w)",
        "a = Mul(x, s) n = Div(a, rt) y = Mul(n, s)",
        "o = Add(one, s) a = Mul(x, o) y = Div(a, rt)",
    ],
)
@pytest.mark.parametrize("scale", ["float[4, 1, 12] s", "float[1, 4, 1, 1] s"])
def test_a_scale_for_each_head_in_front_of_the_statistic_keeps_the_norm_apart(body: str, scale: str) -> None:
    model = graph(BEFORE + body, more=f"{scale}, float one = {{1}}", **HEADS)
    check(model, 1)
    assert [op for op in op_types(fused(model)[0]) if op not in ("Mul", "Add")] == ["RMSNorm"]


def test_a_scale_for_each_row_that_is_an_activation_follows_the_norm() -> None:
    model = graph(
        f"{BEFORE} a = Mul(x, s) y = Div(a, rt)",
        inputs=HEADS["inputs"] + ", float[N, 1, S, 1] s",
        outputs=HEADS["outputs"],
    )
    check(model, 1)


def test_a_scale_for_each_head_of_a_half_type_follows_a_norm_that_rounds_once_more() -> None:
    body = (
        f"xf = Cast<to = 1>(x) sq = Mul(xf, xf) ms = ReduceMean(sq, last) {ROOT} a = Mul(xf, s) n = Div(a, rt) "
        "y = Cast<to = 10>(n)"
    )
    halves = {key: text.replace("float", "float16") for key, text in HEADS.items()}
    result = check(graph(body, more="float[4, 1, 12] s", **halves), 1, exact=1e-3)
    assert (result.norms[0].dtype, result.norms[0].proof["same_bits"] > 0.5) == ("float32", True)


@pytest.mark.parametrize(
    "body",
    [
        "a = Mul(x, s) c = Mul(a, t) y = Div(c, rt)",  # two
        "st = Transpose<perm = [1, 2, 0]>(v) a = Mul(x, st) y = Div(a, rt)",  # not as it lies
    ],
)
def test_scales_that_are_more_than_one_factor_follow_a_norm(body: str) -> None:
    model = graph(BEFORE + body, more="float[4, 1, 12] s, float[4, 1, 1] t, float[12, 4, 1] v", **HEADS)
    check(model, 0, left=("varies over more than the normalized axes",))
