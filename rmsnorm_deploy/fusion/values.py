"""Small questions about one value of a graph: its shape, its dtype, and what it is a wider copy of."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from rmsnorm_deploy.fusion.meaning import Shape
from rmsnorm_deploy.opset import FLOAT_TYPES

Shapes = Mapping[ir.Value, Shape]


def shape_of(value: ir.Value) -> Shape | None:
    """A value's dimensions: numbers, names, or None where nothing is known."""
    if value.shape is None:
        return None
    return tuple(
        dim if isinstance(dim, int) else (None if dim.value is None else str(dim.value)) for dim in value.shape
    )


def dtype_of(value: ir.Value | None) -> ir.DataType:
    """A value's dtype, UNDEFINED where it is not known."""
    return ir.DataType.UNDEFINED if value is None or value.dtype is None else value.dtype


def is_float_value(*candidates: ir.Value | None) -> bool:
    """Whether the first value with a known dtype is floating point (no known dtype: taken for yes)."""
    known = [value.dtype for value in candidates if value is not None and value.dtype is not None]
    return not known or known[0] in FLOAT_TYPES


def is_wider(a: ir.DataType, b: ir.DataType) -> bool:
    """Whether every number of type ``b`` is one of type ``a``."""
    return b in FLOAT_TYPES and a in FLOAT_TYPES and a.bitwidth > b.bitwidth


def widest_source(value: ir.Value) -> ir.Value:
    """The value before any casts that lose nothing: the narrowest that holds the same numbers."""
    node = value.producer()
    while node is not None and node.op_type in ("Cast", "CastLike", "Identity") and node.domain == "":
        source = node.inputs[0]
        if source is None or source.dtype not in FLOAT_TYPES:
            break
        if node.op_type != "Identity" and source.dtype != value.dtype and not is_wider(dtype_of(value), source.dtype):
            break
        value, node = source, source.producer()
    return value


_EXACT = ("Abs", "Cast", "CastLike", "Expand", "Identity", "Neg", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def holds_only(value: ir.Value, dtype: ir.DataType) -> bool:
    """Whether every number of ``value`` is one of ``dtype``: it has a narrower type, or is made from what has one."""
    source: ir.Value | None = value
    while source is not None and source.dtype in FLOAT_TYPES:
        if source.dtype == dtype or is_wider(dtype, source.dtype):
            return True
        node = source.producer()
        source = node.inputs[0] if node is not None and node.domain == "" and node.op_type in _EXACT else None
    return False
