"""What one ONNX node computes, in numpy: for constant expressions and for the proof of a rewrite.

Two ways to compute: *typed* rounds every result to the node's own dtype, as a runtime would; *lifted* does all
floating-point work in float64 and ignores casts between floating-point types, so that it gives the mathematical value.
In lifted integer arrays NaN never occurs; an unknown dimension is given as ``UNKNOWN``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]
Inputs = Sequence[Array | None]
UNKNOWN = np.iinfo(np.int64).min

_FLOAT_DTYPES: Mapping[ir.DataType, Any] = {
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
    ir.DataType.FLOAT: np.float32,
    ir.DataType.DOUBLE: np.float64,
}
_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class CannotEvaluateError(Exception):
    """The node's op, attribute or dtype is not known here; carries the op's name."""


def can_evaluate(node: ir.Node) -> bool:
    """Whether a node's op is known here; none that is known is random or has a subgraph."""
    return node.domain == "" and node.op_type in _TABLE


def is_float(array: Array) -> bool:
    """Whether an array is floating point, bfloat16 included."""
    return array.dtype in _HALVES or bool(np.issubdtype(array.dtype, np.floating))


def numpy_dtype(dtype: ir.DataType) -> Any:
    """The numpy (or ml_dtypes) dtype of an ONNX one."""
    return _FLOAT_DTYPES.get(dtype) or dtype.numpy()


def evaluate(node: ir.Node, inputs: Inputs, *, lifted: bool) -> Array:
    """First output of ``node`` for the given inputs.

    Raises:
        CannotEvaluateError: the op is not in the table.
    """
    if not can_evaluate(node):
        raise CannotEvaluateError(f"{node.domain or 'onnx'}.{node.op_type}")
    if node.op_type in _CASTS:
        return _cast(node, inputs, lifted)
    present = [array for array in inputs if array is not None]
    if lifted and node.op_type not in _MOVES and any(_has_unknown(array) for array in present):
        raise CannotEvaluateError(f"{node.op_type} of an unknown dimension")
    rounded_to = next((a.dtype for a in present if is_float(a)), None)
    if node.op_type in _TYPED_BY_SCALE:
        rounded_to = present[1].dtype
    if lifted:
        rounded_to = None
        inputs = [_lift(array) for array in inputs]
    else:
        inputs = [a.astype(np.float32) if a is not None and a.dtype in _HALVES else a for a in inputs]
    with np.errstate(all="ignore"):
        result = np.asarray(_TABLE[node.op_type](node, inputs))
    if lifted and is_float(result):
        return result.astype(np.float64)
    if rounded_to is not None and is_float(result):
        with np.errstate(over="ignore"):
            return result.astype(rounded_to)
    return result


def _has_unknown(array: Array) -> bool:
    return array.dtype == np.int64 and bool(np.any(array == UNKNOWN))


def _lift(array: Array | None) -> Array | None:
    return array.astype(np.float64) if array is not None and is_float(array) else array


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """An attribute's value, or ``default``."""
    attr = node.attributes.get(name)
    return default if attr is None else attr.value


def constant_value(node: ir.Node) -> Array:
    """The array of a Constant node."""
    for name, attr in node.attributes.items():
        if name == "value":
            return np.asarray(attr.value.numpy())
        if name in ("value_float", "value_floats"):
            return np.asarray(attr.value, np.float32)
        if name in ("value_int", "value_ints"):
            return np.asarray(attr.value, np.int64)
    raise CannotEvaluateError("Constant")


def _cast(node: ir.Node, inputs: Inputs, lifted: bool) -> Array:
    x = _need(inputs, 0)
    if node.op_type == "CastLike":
        target: Any = _need(inputs, 1).dtype
    else:
        target = numpy_dtype(ir.DataType(attribute(node, "to")))
    floating = np.dtype(target) in _HALVES or np.issubdtype(target, np.floating)
    if lifted and floating:
        target = np.float64
    if lifted and np.dtype(target) != x.dtype and _has_unknown(x):
        raise CannotEvaluateError("another type of an unknown dimension")
    with np.errstate(all="ignore"):
        return x.astype(target)


def _need(inputs: Inputs, index: int) -> Array:
    array = inputs[index] if index < len(inputs) else None
    if array is None:
        raise CannotEvaluateError(f"input {index} is absent")
    return array


def _optional(inputs: Inputs, index: int) -> Array | None:
    return inputs[index] if index < len(inputs) else None


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[ir.Node, Inputs], Array]:
    return lambda node, inputs: function(_need(inputs, 0), _need(inputs, 1))


def _unary(function: Callable[[Array], Array]) -> Callable[[ir.Node, Inputs], Array]:
    return lambda node, inputs: function(_need(inputs, 0))


def _divide(a: Array, b: Array) -> Array:
    if is_float(a):
        return np.asarray(a / b)
    return np.asarray(np.trunc(a / b).astype(a.dtype))


def _power(a: Array, b: Array) -> Array:
    return np.asarray(np.power(a, b.astype(a.dtype) if is_float(b) == is_float(a) else b).astype(a.dtype))


def reduced_axes(node: ir.Node, inputs: Inputs, rank: int) -> tuple[int, ...] | None:
    """The axes that a Reduce node reduces, sorted, non-negative; None if it is a no-op (``noop_with_empty_axes``)."""
    axes = attribute(node, "axes")
    given = _optional(inputs, 1)
    if given is not None:
        axes = given.reshape(-1).tolist()
    if not axes:
        return None if attribute(node, "noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(int(axis) % rank for axis in axes))


def _reduce(function: Callable[..., Any]) -> Callable[[ir.Node, Inputs], Array]:
    def run(node: ir.Node, inputs: Inputs) -> Array:
        x = _need(inputs, 0)
        axes = reduced_axes(node, inputs, x.ndim)
        if axes is None:
            return x
        return np.asarray(function(x, axis=axes, keepdims=bool(attribute(node, "keepdims", 1))), dtype=x.dtype)

    return run


def _sum_square(x: Array, **options: Any) -> Array:
    return np.asarray(np.sum(x * x, **options))


def _l2(x: Array, **options: Any) -> Array:
    return np.asarray(np.sqrt(np.sum(x * x, **options)))


def _axes(node: ir.Node, inputs: Inputs) -> list[int] | None:
    given = _optional(inputs, 1)
    axes = attribute(node, "axes") if given is None else given.reshape(-1).tolist()
    return None if axes is None else [int(axis) for axis in axes]


def _unsqueeze(node: ir.Node, inputs: Inputs) -> Array:
    return np.expand_dims(_need(inputs, 0), tuple(_axes(node, inputs) or ()))


def _squeeze(node: ir.Node, inputs: Inputs) -> Array:
    axes = _axes(node, inputs)
    return np.squeeze(_need(inputs, 0), None if axes is None else tuple(axes))


def _reshape(node: ir.Node, inputs: Inputs) -> Array:
    x, target = _need(inputs, 0), [int(size) for size in _need(inputs, 1).reshape(-1)]
    if not attribute(node, "allowzero", 0):
        target = [x.shape[i] if size == 0 else size for i, size in enumerate(target)]
    return x.reshape(target)


def _transpose(node: ir.Node, inputs: Inputs) -> Array:
    return np.transpose(_need(inputs, 0), attribute(node, "perm"))


def _expand(node: ir.Node, inputs: Inputs) -> Array:
    x, target = _need(inputs, 0), tuple(int(size) for size in _need(inputs, 1).reshape(-1))
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, target))


def _concat(node: ir.Node, inputs: Inputs) -> Array:
    return np.concatenate([_need(inputs, i) for i in range(len(inputs))], axis=attribute(node, "axis"))


def _gather(node: ir.Node, inputs: Inputs) -> Array:
    return np.take(_need(inputs, 0), _need(inputs, 1), axis=attribute(node, "axis", 0))


def _slice(node: ir.Node, inputs: Inputs) -> Array:
    x = _need(inputs, 0)
    starts, ends = _need(inputs, 1).reshape(-1), _need(inputs, 2).reshape(-1)
    given_axes, given_steps = _optional(inputs, 3), _optional(inputs, 4)
    axes = range(len(starts)) if given_axes is None else given_axes.reshape(-1)
    steps = [1] * len(starts) if given_steps is None else given_steps.reshape(-1)
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end < -x.shape[int(axis)] else int(end)
        index[int(axis)] = slice(int(start), stop, int(step))
    return x[tuple(index)]


def _shape(node: ir.Node, inputs: Inputs) -> Array:
    shape = np.asarray(_need(inputs, 0).shape, np.int64)
    return shape[attribute(node, "start", 0) : attribute(node, "end")]


def _range(node: ir.Node, inputs: Inputs) -> Array:
    start, limit, delta = (_need(inputs, i).item() for i in range(3))
    return np.arange(start, limit, delta, dtype=_need(inputs, 0).dtype)


def _clip(node: ir.Node, inputs: Inputs) -> Array:
    low, high = _optional(inputs, 1), _optional(inputs, 2)
    low = attribute(node, "min") if low is None else low
    high = attribute(node, "max") if high is None else high
    x = _need(inputs, 0)
    return x if low is None and high is None else np.clip(x, low, high)


def _einsum(node: ir.Node, inputs: Inputs) -> Array:
    operands = [_need(inputs, i) for i in range(len(inputs))]
    return np.asarray(np.einsum(attribute(node, "equation"), *operands))


def _variadic(function: Callable[[Array, Array], Array]) -> Callable[[ir.Node, Inputs], Array]:
    def run(node: ir.Node, inputs: Inputs) -> Array:
        result = _need(inputs, 0)
        for i in range(1, len(inputs)):
            result = function(result, _need(inputs, i))
        return result

    return run


def _dropout(node: ir.Node, inputs: Inputs) -> Array:
    training = _optional(inputs, 2)
    if training is not None and bool(training):
        raise CannotEvaluateError("Dropout in training mode")
    return _need(inputs, 0)


def _global_average_pool(node: ir.Node, inputs: Inputs) -> Array:
    x = _need(inputs, 0)
    return np.asarray(np.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True))


def is_whole_pool(node: ir.Node, shape: Sequence[object]) -> bool:
    """Whether an AveragePool over an input of ``shape`` is the mean over everything behind batch and channel."""
    plain = not any(attribute(node, "pads", ())) and attribute(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
    return plain and tuple(attribute(node, "kernel_shape", ())) == tuple(shape[2:])


def _average_pool(node: ir.Node, inputs: Inputs) -> Array:
    if not is_whole_pool(node, _need(inputs, 0).shape):
        raise CannotEvaluateError("AveragePool over a part")
    return _global_average_pool(node, inputs)


def _constant_of_shape(node: ir.Node, inputs: Inputs) -> Array:
    value = node.attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else value.value.numpy()
    return np.full(tuple(int(size) for size in _need(inputs, 0)), fill.reshape(-1)[0], fill.dtype)


def _lp_normalization(node: ir.Node, inputs: Inputs) -> Array:
    x, axis, p = _need(inputs, 0), attribute(node, "axis", -1), attribute(node, "p", 2)
    length = np.linalg.norm(x, ord=p, axis=axis, keepdims=True)
    return np.asarray(x / np.where(length == 0, 1, length))  # of a row of zeros, the standard gives zeros


def _rms_normalization(node: ir.Node, inputs: Inputs) -> Array:
    x, scale = _need(inputs, 0), _need(inputs, 1)
    axes = tuple(range(attribute(node, "axis", -1) % x.ndim, x.ndim))
    mean = np.mean(x * x, axis=axes, keepdims=True)
    return np.asarray(x / np.sqrt(mean + attribute(node, "epsilon", 1e-5)) * scale)


_CASTS = ("Cast", "CastLike")
_MOVES = frozenset(  # what these give of a dimension is the dimension, known or not
    ("Concat", "Expand", "Gather", "Identity", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Transpose", "Unsqueeze")
)
_TYPED_BY_SCALE = ("RMSNormalization", "SimplifiedLayerNormalization")
_TABLE: dict[str, Callable[[ir.Node, Inputs], Array]] = {
    "Cast": _unary(np.asarray),
    "CastLike": _unary(np.asarray),
    "Constant": lambda node, inputs: constant_value(node),
    "Identity": _unary(np.asarray),
    "Dropout": _dropout,
    "Add": _binary(np.add),
    "Sub": _binary(np.subtract),
    "Mul": _binary(np.multiply),
    "Div": _binary(_divide),
    "Pow": _binary(_power),
    "Neg": _unary(np.negative),
    "Abs": _unary(np.abs),
    "Sqrt": _unary(np.sqrt),
    "Reciprocal": _unary(np.reciprocal),
    "Exp": _unary(np.exp),
    "Log": _unary(np.log),
    "Tanh": _unary(np.tanh),
    "Sigmoid": _unary(lambda x: np.asarray(1 / (1 + np.exp(-x)))),
    "Relu": _unary(lambda x: np.maximum(x, 0)),
    "Max": _variadic(np.maximum),
    "Min": _variadic(np.minimum),
    "Sum": _variadic(np.add),
    "Clip": _clip,
    "Where": lambda node, inputs: np.where(_need(inputs, 0), _need(inputs, 1), _need(inputs, 2)),
    "Equal": _binary(np.equal),
    "Greater": _binary(np.greater),
    "GreaterOrEqual": _binary(np.greater_equal),
    "Less": _binary(np.less),
    "LessOrEqual": _binary(np.less_equal),
    "And": _binary(np.logical_and),
    "Or": _binary(np.logical_or),
    "Not": _unary(np.logical_not),
    "IsNaN": _unary(np.isnan),
    "ReduceMean": _reduce(np.mean),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSumSquare": _reduce(_sum_square),
    "ReduceL2": _reduce(_l2),
    "GlobalAveragePool": _global_average_pool,
    "AveragePool": _average_pool,
    "Einsum": _einsum,
    "MatMul": _binary(np.matmul),
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
    "Shape": _shape,
    "Size": lambda node, inputs: np.asarray(_need(inputs, 0).size, np.int64),
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "LpNormalization": _lp_normalization,
    "RMSNormalization": _rms_normalization,
    "SimplifiedLayerNormalization": _rms_normalization,
}
