"""Proves of a boolean mask that no query is blind, from how it is computed: each sees the key at its own position.

A query sees a key where the mask [..., queries, keys] is true. Where there are as many queries as keys, query ``i`` has
a key ``i``, and one key that is seen is enough. So both axes get one place, ``i``, and the mask's element there is
followed back to where it must be true, whatever ``i`` and the places on other axes are:

* a constant that is true throughout;
* ``a <= a + 1`` and the like for numbers that a Range counts, or of one element of an int64 value with itself;
* ``a & b`` of two such, ``a | b`` of one.

Broadcasting repeats the mask's rows and columns, and makes no query blind. A mask that can't be followed to its end, as
one of padding, which is an input, is not proved.
"""

from __future__ import annotations

import operator

import onnx_ir as ir

from rmsnorm_deploy.export.elements import Elements, Places
from rmsnorm_deploy.export.nodes import is_op
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.values import Shapes

_COMPARE = {
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
}


def each_sees_itself(mask: ir.Value, shapes: Shapes, constants: Constants) -> bool:
    """Whether a mask bool[..., n, n], true for what is seen, is proved to be true on its diagonal."""
    shape = shapes.get(mask, ())
    if len(shape) < 2 or shape[-1] is None or shape[-1] != shape[-2]:
        return False
    query = len(shape) - 2
    return _is_true(mask, (*range(query), query, query), Elements(shapes, constants), constants)


def _is_true(value: ir.Value, places: Places, elements: Elements, constants: Constants) -> bool:
    if constants.is_constant(value) and constants.lifted(value) is not None and constants.typed(value).all():
        return True
    moved = elements.moved(value, places)
    if moved is not None:
        return _is_true(*moved, elements, constants)
    node = value.producer()
    if node is None or not is_op(node, "And", "Or", *_COMPARE):
        return False
    operands = [elements.operand(each, value, places) for each in node.inputs]
    if is_op(node, "And", "Or"):
        proved = [each is not None and _is_true(*each, elements, constants) for each in operands]
        return all(proved) if node.op_type == "And" else any(proved)
    # a NaN does not even equal itself
    left, right = (elements.of(*each) if each is not None and _is_int64(each[0]) else None for each in operands)
    if left is None or right is None or (left.origin, left.places) != (right.origin, right.places):
        return False
    return bool(_COMPARE[node.op_type](left.plus, right.plus))


def _is_int64(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.INT64
