"""SkipRMSNorm takes the add in front of a norm where that is right, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from fusion_graphs import check, feeds_of, fused, graph, op_types, run

ADD = "h = Add(x, r) "
NORM = "sq = Mul(h, h) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) n = Div(h, rt) y = Mul(n, w) "
TWO = "float[N, S, 12] x, float[N, S, 12] r"
OUT = "float[N, S, 12] y"


def _skips(model, **options):  # type: ignore[no-untyped-def]
    result = check(model, options.pop("norms", 1), **options)
    return [record.residual for record in result.norms]


def test_the_add_in_front_is_left() -> None:
    proto, _ = fused(graph(ADD + NORM, inputs=TWO))
    assert op_types(proto) == ["SkipRMSNorm"]
    assert _skips(graph(ADD + NORM, inputs=TWO)) == [True]


def test_residual_false_takes_adds() -> None:
    assert _skips(graph(ADD + NORM, inputs=TWO), residual=False) == [False]


def test_the_sum_as_an_output_and_as_an_input_is_lost() -> None:
    body = ADD + NORM + "z = Add(h, y)"
    assert _skips(graph(body, inputs=TWO, outputs=OUT + ", float[N, S, 12] h, float[N, S, 12] z")) == [True]


def test_layers_of_a_transformer() -> None:
    body = "h0 = Add(x, r) "
    for i in range(4):
        body += f"sq{i} = Mul(h{i}, h{i}) ms{i} = ReduceMean(sq{i}, last) me{i} = Add(ms{i}, eps) rt{i} = Sqrt(me{i}) "
        body += f"n{i} = Div(h{i}, rt{i}) y{i} = Mul(n{i}, w) a{i} = Sigmoid(y{i}) h{i + 1} = Add(h{i}, a{i}) "
    body += NORM.replace("h", "h4")
    assert _skips(graph(body, inputs=TWO), norms=5) == [True] * 5


@pytest.mark.parametrize("other", ["float[1, S, 12] r", "float[12] r", "float[N, 1, 12] r", "float[M, S, 12] r"])
def test_a_broadcast_is_taken_for_a_residual(other: str) -> None:
    model = graph(ADD + NORM, inputs=f"float[N, S, 12] x, {other}")
    assert _skips(model, sizes={"M": 2, "N": 2}) == [False]


def test_a_constant_is_taken_for_a_residual() -> None:
    assert _skips(graph("h = Add(x, c) " + NORM, more="float[2, 3, 12] c", inputs="float[2, 3, 12] x")) == [False]


def test_an_add_serves_two_norms() -> None:
    second = (
        "sq2 = Mul(h, h) ms2 = ReduceMean(sq2, last) me2 = Add(ms2, one) rt2 = Sqrt(me2) n2 = Div(h, rt2) z "
        "= Mul(n2, w2)"
    )
    model = graph(ADD + NORM + second, inputs=TWO, outputs=OUT + ", float[N, S, 12] z")
    assert sorted(_skips(model, norms=2)) == [False, True]


def test_a_scale_made_from_the_sum_closes_a_cycle() -> None:
    body = ADD + "s = ReduceMax<keepdims = 0>(h, lead) " + NORM.replace("w)", "s)")
    assert _skips(graph(body, more="int64[2] lead = {0, 1}", inputs=TWO)) == [False]


def test_a_scale_made_before_the_sum() -> None:
    body = "s = ReduceMax<keepdims = 0>(x, lead) " + ADD + NORM.replace("w)", "s)")
    assert _skips(graph(body, more="int64[2] lead = {0, 1}", inputs=TWO)) == [True]


def test_a_scale_made_after_the_sum_from_something_else() -> None:
    body = ADD + "s = ReduceMax<keepdims = 0>(x, lead) " + NORM.replace("w)", "s)") + "z = Sigmoid(h)"
    model = graph(body, more="int64[2] lead = {0, 1}", inputs=TWO, outputs=OUT + ", float[N, S, 12] z")
    assert _skips(model) == [True]


def test_a_sum_that_others_wait_for_moves_down_to_its_norm() -> None:
    body = ADD + "z = Sigmoid(h) s = ReduceMax<keepdims = 0>(z, lead) " + NORM.replace("w)", "s)")
    assert _skips(graph(body, more="int64[2] lead = {0, 1}", inputs=TWO)) == [False]


def test_a_sum_of_one_value_with_itself() -> None:
    assert _skips(graph("h = Add(x, x) " + NORM)) == [True]


def test_a_sum_in_half_precision_is_rounded_elsewhere() -> None:
    """The norm must see the sum rounded to float16, as the two ops do."""
    body = """h = Add(x, r) f = Cast<to = 1>(h) sq = Mul(f, f) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me)
    n = Div(f, rt) m = Mul(n, w) y = Cast<to = 10>(m)"""
    half = "float16[N, S, 12] x, float16[N, S, 12] r"
    model = graph(body, inputs=half, outputs="float16[N, S, 12] y, float16[N, S, 12] h")
    proto, result = fused(model)
    assert [(n.op, n.scale_order) for n in result.norms] == [("SkipRMSNorm", "before_cast")]
    feeds = feeds_of(model)
    for actual, expected in zip(run(proto, feeds), run(model, feeds, optimized=False), strict=True):
        np.testing.assert_allclose(actual.astype(float), expected.astype(float), rtol=1.1e-3)


def test_a_norm_in_a_branch_takes_the_add_outside_it() -> None:
    branch = f"then_branch = t () => (float[N, S, 12] y1) {{ {NORM.replace('y =', 'y1 =')} }}"
    other = "else_branch = e () => (float[N, S, 12] y2) { y2 = Identity(h) }"
    model = graph(f"{ADD} y = If(c) <{branch}, {other}>", inputs=TWO + ", bool c")
    assert _skips(model) == [False]
