"""Values of a graph that do not depend on its inputs, worked out on demand.

Only small values are looked at (a weight is never loaded to find an epsilon), except by :meth:`Constants.typed`, which
folds a norm's scale.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.fusion.evaluate import UNKNOWN, Array, CannotEvaluateError, can_evaluate, evaluate, is_float

SMALL = 64
LONGEST_COLUMN = 1 << 16


class Constants:
    """Lazily evaluated constants of one model."""

    def __init__(self) -> None:
        self._lifted: dict[ir.Value, Array | None] = {}
        self._is_constant: dict[ir.Value, bool] = {}
        self._picked: set[ir.Value] = set()  # numbers that come out of a weight: a proof puts others in their place

    def lifted(self, value: ir.Value | None) -> Array | None:
        """A small constant with floats as float64, unrounded by casts on its way; None if it is no small constant.

        A dynamic dimension in a shape is ``UNKNOWN``.
        """
        if value is None:
            return None
        if value not in self._lifted:
            self._lifted[value] = self._lift(value)
        return self._lifted[value]

    def scalar(self, value: ir.Value | None) -> float | None:
        """The one element of a lifted floating-point or integer constant of size one; no element of a weight."""
        array = self.lifted(value)
        if array is None or array.size != 1 or value in self._picked:
            return None
        number = array.reshape(-1)[0]
        return None if not is_float(array) and number == UNKNOWN else float(number)

    def integers(self, value: ir.Value | None) -> list[int] | None:
        """A fully known integer vector."""
        array = self.lifted(value)
        if array is None or is_float(array) or np.any(array == UNKNOWN):
            return None
        return [int(item) for item in array.reshape(-1)]

    def uniform_column(self, value: ir.Value) -> float | None:
        """The element of a constant matrix of one column, positive and all alike: a matrix product with it is a sum."""
        shape = value.shape.dims if value.shape is not None and self.is_constant(value) else ()
        if len(shape) != 2 or shape[1] != 1 or not isinstance(shape[0], int) or not 1 < shape[0] <= LONGEST_COLUMN:
            return None
        try:
            column = self.typed(value).astype(np.float64)
        except CannotEvaluateError:
            return None
        return float(column[0, 0]) if column[0, 0] > 0 and np.all(column == column[0, 0]) else None

    def _lift(self, value: ir.Value) -> Array | None:
        node = value.producer()
        if node is None:
            tensor = value.const_value if is_fixed(value) else None
            small = tensor is not None and tensor.size <= SMALL and _is_number(tensor.dtype)
            return _as_lifted(tensor.numpy()) if tensor is not None and small else None
        if not can_evaluate(node):
            return None
        if node.op_type == "Shape":
            return self._shape(node)
        if node.op_type == "Constant":
            tensor = node.attributes["value"].as_tensor() if "value" in node.attributes else None
            if tensor is not None and (tensor.size > SMALL or not _is_number(tensor.dtype)):
                return None
        if node.op_type == "CastLike":  # what it is cast like is no part of the value
            return self.lifted(node.inputs[0])
        inputs = [self.lifted(i) for i in node.inputs]
        if any(array is None and i is not None for array, i in zip(inputs, node.inputs, strict=True)):
            return None
        if value is not node.outputs[0]:
            return None
        if any(i in self._picked or _is_row(array) for i, array in zip(node.inputs, inputs, strict=True)):
            self._picked.add(value)
        try:
            result = evaluate(node, inputs, lifted=True)
        except (CannotEvaluateError, ValueError, IndexError, TypeError):
            return None  # not a constant that is understood: the value stays opaque
        return _as_lifted(result) if result.size <= SMALL else None

    def _shape(self, node: ir.Node) -> Array | None:
        source = node.inputs[0]
        if source is None or source.shape is None:
            return None
        dims = [d if isinstance(d, int) else UNKNOWN for d in source.shape]
        start, end = node.attributes.get("start"), node.attributes.get("end")
        return np.asarray(dims, np.int64)[start.as_int() if start else 0 : end.as_int() if end else None]

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value follows from initializers and Constant nodes alone, whatever its size."""
        known = self._is_constant.get(value)
        if known is None:
            node = value.producer()
            if node is None:
                known = is_fixed(value)
            else:
                known = can_evaluate(node) and all(i is None or self.is_constant(i) for i in node.inputs)
            self._is_constant[value] = known
        return known

    def typed(self, value: ir.Value) -> Array:
        """The array of a constant value, each step rounded to its own dtype, as a runtime computes it.

        Raises:
            CannotEvaluateError: an op on its way is not known.
        """
        node = value.producer()
        if node is None:
            assert value.const_value is not None
            return np.asarray(value.const_value.numpy())
        return evaluate(node, [None if i is None else self.typed(i) for i in node.inputs], lifted=False)


def is_fixed(value: ir.Value) -> bool:
    """Whether a value is an initializer that no caller can replace: one that is an input too has but a default."""
    return value.is_initializer() and value.const_value is not None and not value.is_graph_input()


def _is_row(array: Array | None) -> bool:
    return array is not None and is_float(array) and array.size > 1


def _is_number(dtype: ir.DataType) -> bool:
    return dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)


def _as_lifted(array: Array) -> Array:
    return array.astype(np.float64) if is_float(array) else array.astype(np.int64) if array.dtype != bool else array
