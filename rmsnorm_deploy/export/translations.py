"""Operators that PyTorch's exporter has no ONNX function for, or one that overflows or loses small numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as _opset18

opset18: Any = _opset18  # its types are of values as numpy has them


def table() -> dict[Any, Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=...)``."""
    aten = torch.ops.aten
    return {
        aten.sort.stable: _stable_sort,
        aten._cdist_forward.default: _distances,
        aten.log_sigmoid.default: _log_sigmoid,
        aten.logaddexp.default: _log_of_sum,
        aten.expm1.default: _exponential_less_one,
        aten.log1p.default: _log_of_one_more,
    }


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """TopK of all: of equal elements the first comes first, in both directions."""
    size = opset18.Shape(self, start=dim, end=None if dim == -1 else dim + 1)
    return opset18.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


def _distances(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """The p-norms of all differences of two rows: [..., n, width] and [..., m, width] give [..., n, m]."""
    one, other = opset18.Constant(value_ints=[-2]), opset18.Constant(value_ints=[-3])
    size = opset18.Abs(opset18.Sub(opset18.Unsqueeze(x1, one), opset18.Unsqueeze(x2, other)))
    last = opset18.Constant(value_ints=[-1])
    if p == math.inf:
        return opset18.ReduceMax(size, last, keepdims=0)
    if p == 1:
        return opset18.ReduceSum(size, last, keepdims=0)
    if p == 2:
        return opset18.Sqrt(opset18.ReduceSum(opset18.Mul(size, size), last, keepdims=0))
    exponent = opset18.CastLike(opset18.Constant(value_float=p), x1)
    total = opset18.ReduceSum(opset18.Pow(size, exponent), last, keepdims=0)
    return opset18.Pow(total, opset18.Reciprocal(exponent))


def _log_sigmoid(self: Any) -> Any:
    """Not the logarithm of a sigmoid, which is zero below -104 in float32."""
    return opset18.Neg(opset18.Softplus(opset18.Neg(self)))


def _log_of_sum(self: Any, other: Any) -> Any:
    """log(exp(self) + exp(other)) by way of the larger of the two, whose exponential is not taken."""
    larger, smaller = opset18.Max(self, other), opset18.Min(self, other)
    zero = opset18.CastLike(opset18.Constant(value_float=0.0), self)
    # of two equal infinities the difference would be NaN
    below = opset18.Where(opset18.Equal(larger, smaller), zero, opset18.Sub(smaller, larger))
    return opset18.Add(larger, opset18.Softplus(below))


def _exponential_less_one(self: Any) -> Any:
    """2 t / (1 - t) with t = tanh(x / 2) where x is small: e^x - 1 has none of its digits there."""
    one = opset18.CastLike(opset18.Constant(value_float=1.0), self)
    half = opset18.CastLike(opset18.Constant(value_float=0.5), self)
    tangent = opset18.Tanh(opset18.Mul(self, half))
    near = opset18.Div(opset18.Add(tangent, tangent), opset18.Sub(one, tangent))
    return opset18.Where(opset18.Less(opset18.Abs(self), one), near, opset18.Sub(opset18.Exp(self), one))


def _log_of_one_more(self: Any) -> Any:
    """log(u) x / (u - 1) with u = 1 + x as it is rounded, which mends what the rounding did; x where u is one.

    W. Kahan's, in D. Goldberg, What Every Computer Scientist Should Know About Floating-Point Arithmetic, theorem 4.
    """
    one = opset18.CastLike(opset18.Constant(value_float=1.0), self)
    more = opset18.Add(self, one)
    added = opset18.Sub(more, one)
    lost = opset18.Equal(added, opset18.CastLike(opset18.Constant(value_float=0.0), self))
    huge = opset18.Equal(added, self)  # as infinity is, of which there is no quotient
    quotient = opset18.Div(self, opset18.Where(lost, one, added))
    mended = opset18.Mul(opset18.Log(more), opset18.Where(huge, one, quotient))
    return opset18.Where(lost, self, mended)
