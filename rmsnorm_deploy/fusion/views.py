"""Statistics of a view: taken on ``x.view(-1, d)``, and used beside ``x`` itself.

A reshape that leaves the last axes alone only counts the rows in another way. A statistic over those last axes, brought
back to the rows as ``x`` has them, is therefore that statistic of ``x``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from rmsnorm_deploy.fusion.meaning import BROADCAST, Meaning, Shape

if TYPE_CHECKING:
    from rmsnorm_deploy.fusion.interpret import Interpreter


def view(interpreter: Interpreter, node: ir.Node, source: Meaning, shape: Shape) -> Meaning | None:
    """What a Reshape of ``source`` to ``shape`` means: a statistic of what was viewed, or a view; None for neither."""
    if source.statistics:
        return _back(interpreter, source, shape)
    if source.shape is None or not _common_tail(source.shape, shape):
        return None
    return interpreter.view_of(node.outputs[0], source, shape)


def _back(interpreter: Interpreter, source: Meaning, shape: Shape) -> Meaning | None:
    """The statistic of a view in the shape of the tensor that was viewed, its reduced axes kept as ones or dropped."""
    atom, layout, power = source.only_statistic() or (None, (), 0.0)
    statistic = atom.statistic if atom is not None else None
    root = statistic.inner if statistic is not None else None
    viewed = _viewed(root) if root is not None else None
    if atom is None or statistic is None or root is None or viewed is None:
        return None
    assert root.shape is not None
    assert viewed.shape is not None
    shift = len(viewed.shape) - len(root.shape)
    axes = tuple(axis + shift for axis in statistic.axes)
    rows = [axis for axis, dim in enumerate(root.shape) if axis not in statistic.axes and dim != 1]
    if min(statistic.axes) < len(root.shape) - _common_tail(root.shape, viewed.shape):
        return None
    if [entry for entry in layout if entry != BROADCAST] != rows:
        return None
    kept = tuple(1 if axis in axes else dim for axis, dim in enumerate(viewed.shape))
    dropped = tuple(dim for axis, dim in enumerate(viewed.shape) if axis not in axes)
    square = viewed.raised(2)
    if shape not in (kept, dropped) or square is None:
        return None
    assert statistic.node is not None
    found = interpreter.mean_square(statistic.node, square, axes, None)
    if found is None:
        return None
    mean = found[1] if shape == kept else found[1].without(axes)
    ((_, seen),) = mean.factors
    return Meaning({(interpreter.rebuilt(atom, found[0]), seen): power}, source.constants, source.sign, shape)


def _viewed(root: Meaning) -> Meaning | None:
    """What a meaning is nothing but a view of."""
    if len(root.factors) != 1 or root.constants or root.sign < 0:
        return None
    ((atom, _), power) = next(iter(root.factors.items()))
    return atom.inner if atom.kind == "opaque" and power == 1 else None


def _common_tail(a: Shape, b: Shape) -> int:
    """How many of the last dimensions are the same numbers."""
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if not isinstance(x, int) or x != y:
            break
        count += 1
    return count
