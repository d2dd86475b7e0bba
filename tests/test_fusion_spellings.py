"""Every spelling of the same computation becomes the one op, in float32 and in float64."""

from __future__ import annotations

import pytest
from fusion_graphs import check, graph

MEAN = "sq = Mul(x, x) ms = ReduceMean(sq, last) "
ROOT = MEAN + "me = Add(ms, eps) rt = Sqrt(me) "
SPELLINGS = {
    "div": ROOT + "n = Div(x, rt) y = Mul(n, w)",
    "weight first": ROOT + "n = Div(x, rt) y = Mul(w, n)",
    "pow two": "sq = Pow(x, two) ms = ReduceMean(sq, last) me = Add(eps, ms) rt = Sqrt(me) n = Div(x, rt) "
    "y = Mul(n, w)",
    "integer exponent": "e = Constant<value_int=2>() sq = Pow(x, e) ms = ReduceMean(sq, last) me = Add(ms, eps) "
    "rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "reciprocal": ROOT + "r = Reciprocal(rt) n = Mul(x, r) y = Mul(n, w)",
    "one over": ROOT + "r = Div(one, rt) n = Mul(r, x) y = Mul(n, w)",
    "pow minus half": MEAN + "me = Add(ms, eps) r = Pow(me, mhalf) n = Mul(x, r) y = Mul(n, w)",
    "pow half": MEAN + "me = Add(ms, eps) rt = Pow(me, half) n = Div(x, rt) y = Mul(n, w)",
    "root of reciprocal": MEAN + "me = Add(ms, eps) i = Reciprocal(me) r = Sqrt(i) n = Mul(x, r) y = Mul(n, w)",
    "scale before division": ROOT + "v = Mul(x, w) y = Div(v, rt)",
    "scale on the root": ROOT + "r = Reciprocal(rt) s = Mul(r, w) y = Mul(x, s)",
    "divided by the inverse scale": ROOT + "i = Reciprocal(w) n = Div(x, rt) y = Div(n, i)",
    "two scales": ROOT + "v = Mul(x, w) n = Div(v, rt) y = Mul(n, w2)",
    "sum over d": "sq = Mul(x, x) t = ReduceSum(sq, last) ms = Div(t, d) me = Add(ms, eps) rt = Sqrt(me) "
    "n = Div(x, rt) y = Mul(n, w)",
    "sum times 1/d": "sq = Mul(x, x) t = ReduceSum(sq, last) ms = Mul(t, rd) me = Add(ms, eps) rt = Sqrt(me) "
    "n = Div(x, rt) y = Mul(n, w)",
    "d from the shape": "sq = Mul(x, x) t = ReduceSum(sq, last) s = Shape(x) i = Gather(s, last) f = CastLike(i, eps) "
    "ms = Div(t, f) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "sum and epsilon": "sq = Mul(x, x) t = ReduceSum(sq, last) me = Add(t, eps) rt = Sqrt(me) n = Div(x, rt) "
    "y = Mul(n, w)",
    "sum of squares": "t = ReduceSumSquare(x, last) ms = Div(t, d) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) "
    "y = Mul(n, w)",
    "l2 squared": "t = ReduceL2(x, last) r = Div(t, sd) ms = Mul(r, r) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) "
    "y = Mul(n, w)",
    "einsum": 'sq = Einsum<equation = "...d,...d->...">(x, x) t = Unsqueeze(sq, last) ms = Div(t, d) me = Add(ms, eps) '
    "rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "einsum in letters": 'sq = Einsum<equation = "bij,bij->bi">(x, x) t = Unsqueeze(sq, last) ms = Div(t, d) '
    "me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "row times column": "r = Unsqueeze(x, mid) c = Unsqueeze(x, last) t = MatMul(r, c) u = Squeeze(t, last) "
    "ms = Div(u, d) me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "times a column of ones": "sq = Mul(x, x) t = MatMul(sq, ones) ms = Div(t, d) me = Add(ms, eps) rt = Sqrt(me) "
    "n = Div(x, rt) y = Mul(n, w)",
    "keepdims by unsqueeze": "sq = Mul(x, x) m = ReduceMean<keepdims = 0>(sq, last) ms = Unsqueeze(m, last) "
    "me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "late unsqueeze": "sq = Mul(x, x) m = ReduceMean<keepdims = 0>(sq, last) me = Add(m, eps) r = Sqrt(me) "
    "rt = Unsqueeze(r, last) n = Div(x, rt) y = Mul(n, w)",
    "absolute value": "a = Abs(x) sq = Pow(a, two) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) "
    "n = Div(x, rt) y = Mul(n, w)",
    "expanded root": ROOT + "s = Shape(x) full = Expand(rt, s) n = Div(x, full) y = Mul(n, w)",
    "expanded weight": ROOT + "s = Shape(x) full = Expand(w, s) n = Div(x, rt) y = Mul(n, full)",
    "guarded against negatives": "sq = Mul(x, x) m = ReduceMean(sq, last) zero = Sub(eps, eps) ms = Max(m, zero) "
    "me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "sum op": MEAN + "me = Sum(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "minus a negative": MEAN + "ne = Neg(eps) me = Sub(ms, ne) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "negated twice": ROOT + "m = Neg(x) n = Div(m, rt) k = Neg(w) y = Mul(n, k)",
    "identities": ROOT + "i = Identity(x) n = Div(i, rt) j = Identity(n) y = Mul(j, w)",
    "offset weight": ROOT + "n = Div(x, rt) v = Add(w, one) y = Mul(n, v)",
    "scalar scale": ROOT + "n = Div(x, rt) y = Mul(n, three)",
    "no scale": ROOT + "y = Div(x, rt)",
    "bias": ROOT + "n = Div(x, rt) m = Mul(n, w) y = Add(b, m)",
    "bias without scale": ROOT + "n = Div(x, rt) y = Add(n, b)",
    "no epsilon": MEAN + "rt = Sqrt(ms) n = Div(x, rt) y = Mul(n, w)",
    "epsilon outside": MEAN + "rt = Sqrt(ms) re = Add(rt, eps) n = Div(x, re) y = Mul(n, w)",
    "l2 norm and epsilon outside": "t = ReduceL2(x, last) r = Mul(t, rsd) re = Add(r, eps) n = Div(x, re) "
    "y = Mul(n, w)",
    "clamped mean": MEAN + "me = Max(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "clamped root": MEAN + "rt = Sqrt(ms) re = Clip(rt, eps) n = Div(x, re) y = Mul(n, w)",
    "normalize times root d": "t = ReduceL2(x, last) c = Clip(t, eps) s = Shape(x) full = Expand(c, s) "
    "n = Div(x, full) m = Mul(n, sd) y = Mul(m, w)",
    "legacy norm": "a = Abs(x) sq = Pow(a, two) t = ReduceSum(sq, last) r = Pow(t, half) s = Mul(r, rsd) "
    "c = Clip(s, eps) n = Div(x, c) y = Mul(n, w)",
    "computed twice": "sq = Mul(x, x) p = Sigmoid(x) q = Sigmoid(x) v = Mul(p, p) ms = ReduceMean(v, last) "
    "me = Add(ms, eps) rt = Sqrt(me) n = Div(q, rt) y = Mul(n, w)",
    "product over letters": 'sq = Einsum<equation = "bij,bij->bi">(x, x) ms = Div(sq, d) me = Add(ms, eps) '
    'rt = Sqrt(me) r = Reciprocal(rt) y = Einsum<equation = "bij,bi,j->bij">(x, r, w)',
    "product under an ellipsis": ROOT + 'n = Div(x, rt) y = Einsum<equation = "...d,d->...d">(n, w)',
    "exponential of a logarithm": MEAN + "me = Add(ms, eps) l = Log(me) h = Mul(l, mhalf) r = Exp(h) n = Mul(x, r) "
    "y = Mul(n, w)",
    "divided by an exponential": MEAN + "me = Add(ms, eps) l = Log(me) h = Mul(half, l) rt = Exp(h) n = Div(x, rt) "
    "y = Mul(n, w)",
    "statistic of a view": "v = Reshape(x, rows) sq = Mul(v, v) ms = ReduceMean<keepdims = 0>(sq, last) "
    "me = Add(ms, eps) rt = Sqrt(me) s = Shape<end = 2>(x) one1 = Constant<value_ints = [1]>() "
    "t = Concat<axis = 0>(s, one1) back = Reshape(rt, t) n = Div(x, back) y = Mul(n, w)",
    "statistic of a view, axis kept": "v = Reshape(x, rows) sq = Mul(v, v) ms = ReduceMean(sq, last) me = Add(ms, eps) "
    "s = Shape<end = 2>(x) k = Reshape(me, s) rt = Sqrt(k) u = Unsqueeze(rt, last) n = Div(x, u) y = Mul(n, w)",
    "pool over the row": "sq = Mul(x, x) ms = AveragePool<kernel_shape = [12]>(sq) me = Add(ms, eps) rt = Sqrt(me) "
    "n = Div(x, rt) y = Mul(n, w)",
    "an axis of one element": "sq = Mul(x, x) u = Unsqueeze(sq, mid) m = ReduceMean(u, both) ms = Squeeze(m, mid) "
    "me = Add(ms, eps) rt = Sqrt(me) n = Div(x, rt) y = Mul(n, w)",
    "capped inverse": MEAN + "rt = Sqrt(ms) r = Reciprocal(rt) big = Reciprocal(eps) c = Min(r, big) n = Mul(x, c) "
    "y = Mul(n, w)",
    "clipped inverse": MEAN + "rt = Sqrt(ms) r = Reciprocal(rt) big = Reciprocal(eps) none = Neg(big) "
    "c = Clip(r, none, big) n = Mul(x, c) y = Mul(n, w)",
    "epsilon spread over the rows": MEAN + "s = Shape(ms) e = Expand(eps, s) me = Add(e, ms) rt = Sqrt(me) "
    "n = Div(x, rt) y = Mul(n, w)",
    "guard that only zero rows meet": ROOT + "z = Sub(eps, eps) q = Equal(ms, z) g = Where(q, one, rt) n = Div(x, g) "
    "y = Mul(n, w)",
    "floor by comparison": MEAN + "q = Less(ms, eps) f = Where(q, eps, ms) rt = Sqrt(f) n = Div(x, rt) y = Mul(n, w)",
    "guard below the epsilon": MEAN + "me = Add(ms, eps) q = Less(me, eps) f = Where(q, eps, me) rt = Sqrt(f) "
    "n = Div(x, rt) y = Mul(n, w)",
    "gated": "g = Sigmoid(x) h = Mul(g, x) sq = Mul(h, h) ms = ReduceMean(sq, last) me = Add(ms, eps) rt = Sqrt(me) "
    "n = Div(h, rt) y = Mul(n, w)",
}
MORE = "float[12, 1] ones = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, int64[1] mid = {-2}, int64[2] rows = {-1, 12}"
ROUNDED = {"sum times 1/d": 1e-7}  # the constant is a float32, whatever the graph's dtype
NO_DOUBLE_KERNEL = {
    "l2 squared",
    "l2 norm and epsilon outside",
    "normalize times root d",
    "pool over the row",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_missed_or_changes_value(name: str) -> None:
    result = check(graph(SPELLINGS[name], more=MORE), 1)
    record = result.norms[0]
    assert record.axis == -1
    assert record.epsilon_mode in (name.split()[-1] if "outside" in name else "", "inside", "clamp")


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_in_double_is_missed_or_inexact(name: str) -> None:
    model = graph(SPELLINGS[name], more=MORE, dtype="double")
    result = check(model, 1, exact=ROUNDED.get(name, 1e-13), reference=name in NO_DOUBLE_KERNEL)
    assert result.norms[0].op_type.endswith("_double")
