"""Follows one element of a computed index or mask back to where it comes from, through what moves, copies and counts.

An element has a *place* on each axis: a name that stands for any number within the axis, or None for the first and only
one. Two elements of one origin at the same places are the same number, whatever numbers the names stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from rmsnorm_deploy.export.nodes import is_op
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.values import Shapes

Places = tuple[int | None, ...]
_SMALL = 1 << 31  # what a Range of such numbers counts does not overflow, nor when some are added


@dataclass(frozen=True)
class Element:
    """``origin[places]``; where the origin is a number, the step of a Range, ``origin * place + plus``."""

    origin: ir.Value | int
    places: Places
    plus: int = 0


class Elements:
    """Finds elements' origins in a graph of known shapes."""

    def __init__(self, shapes: Shapes, constants: Constants) -> None:
        self._shapes = shapes
        self._constants = constants

    def of(self, value: ir.Value, places: Places) -> Element:
        """What the element of ``value`` at ``places`` is; at worst, just that."""
        node, moved = value.producer(), self.moved(value, places)
        if moved is not None:
            return self.of(*moved)
        if node is not None and value.dtype == ir.DataType.INT64 and is_op(node, "Range"):
            start, step = self._number(node.inputs[0]), self._number(node.inputs[2])
            return Element(step, places, start) if start is not None and step is not None else Element(value, places)
        if node is not None and is_op(node, "Add", "Sub"):
            number, operand = self._number(node.inputs[1]), self.operand(node.inputs[0], value, places)
            counted = self.of(*operand) if number is not None and operand is not None else None
            # only what a Range counts: other numbers may overflow, and then x < x + 1 is false
            if number is not None and counted is not None and isinstance(counted.origin, int):
                return replace(counted, plus=counted.plus + (number if node.op_type == "Add" else -number))
        return Element(value, places)

    def moved(self, value: ir.Value, places: Places) -> tuple[ir.Value, Places] | None:
        """The value that ``value`` is a view or copy of, and the element's places there."""
        node = value.producer()
        source = node.inputs[0] if node is not None and node.inputs else None
        if node is None or source is None:
            return None
        if is_op(node, "Expand"):
            return self.operand(source, value, places)
        if is_op(node, "Unsqueeze") and (axes := self._constants.integers(node.inputs[1])) is not None:
            added = {axis % len(places) for axis in axes}
            return source, tuple(place for axis, place in enumerate(places) if axis not in added)
        if is_op(node, "Transpose") and (perm := node.attributes.get_ints("perm")) is not None:
            return source, tuple(places[perm.index(axis)] for axis in range(len(perm)))
        return None

    def operand(self, source: ir.Value | None, result: ir.Value, places: Places) -> tuple[ir.Value, Places] | None:
        """``source`` and the place there of the element that becomes that of ``result``, where it is broadcast so."""
        shape, full = self._shapes.get(source) if source is not None else None, self._shapes.get(result)
        if source is None or shape is None or full is None or not len(shape) <= len(full) == len(places):
            return None
        axes = list(zip(shape, full[len(full) - len(shape) :], places[len(full) - len(shape) :], strict=True))
        if any(dim is None or dim not in (1, whole) for dim, whole, _ in axes):  # a name that might be 1, or more
            return None
        return source, tuple(place if dim == whole else None for dim, whole, place in axes)

    def _number(self, value: ir.Value | None) -> int | None:
        numbers = self._constants.integers(value)
        return numbers[0] if numbers is not None and len(numbers) == 1 and abs(numbers[0]) < _SMALL else None
