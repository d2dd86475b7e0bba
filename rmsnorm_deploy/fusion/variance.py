"""Means that are subtracted: what tells a LayerNorm, and ``variance + mean ** 2``, which is a mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from rmsnorm_deploy.fusion.meaning import Atom, Meaning, resolve

if TYPE_CHECKING:
    from rmsnorm_deploy.fusion.interpret import Interpreter

_CASTS = ("Cast", "CastLike", "Identity")
_SPREADS = (*_CASTS, "Expand", "Unsqueeze", "Reshape")


def through(value: ir.Value, op_types: tuple[str, ...]) -> ir.Node | None:
    """The node behind a value, looking through unary nodes of the given types."""
    node = value.producer()
    while node is not None and node.op_type in op_types:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def centred(value: ir.Value, interpreter: Interpreter) -> ir.Value | None:
    """The x of which a value is ``x - mean(x)``; None if it isn't."""
    node = through(value, _CASTS)
    if node is None or node.op_type != "Sub" or node.inputs[0] is None or node.inputs[1] is None:
        return None
    mean = _mean_node(node.inputs[1])
    if mean is None or mean.inputs[0] is None:
        return None
    return node.inputs[0] if interpreter.of(mean.inputs[0]).key == interpreter.of(node.inputs[0]).key else None


def mean_square_of_sum(interpreter: Interpreter, node: ir.Node) -> Meaning | None:
    """The meaning of an Add whose terms are a row's variance and its mean squared."""
    a, b = node.inputs
    if a is None or b is None:
        return None
    for variance, square in ((a, b), (b, a)):
        found = _joined(interpreter, node, interpreter.of(variance), interpreter.of(square))
        if found is not None:
            return found
    return None


def _joined(interpreter: Interpreter, node: ir.Node, variance: Meaning, square: Meaning) -> Meaning | None:
    atom, layout, power = variance.only_statistic() or (None, (), 0.0)
    if atom is None or atom.kind != "mean" or power != 1 or variance.constants or atom.value is None:
        return None
    x = centred(atom.value, interpreter)
    meaning = interpreter.of(x) if x is not None else None
    if meaning is None or not _is_squared_mean(interpreter, square, meaning, atom) or square.shape != variance.shape:
        return None
    raised = meaning.raised(2)
    found = raised and interpreter.mean_square(node, raised, atom.axes, x)
    return Meaning({(found[0], layout): 1.0}, shape=variance.shape) if found else None


def _is_squared_mean(interpreter: Interpreter, square: Meaning, x: Meaning, variance: Atom) -> bool:
    """Whether ``square`` is the square of the mean of ``x``, over the axes of the variance."""
    if len(square.factors) != 1 or square.sign < 0:
        return False
    ((atom, _), power) = next(iter(square.factors.items()))
    mean = through(atom.value, _SPREADS) if atom.value is not None and power == 2 else None
    divided = {"ReduceMean": (1.0, 0.0), "ReduceSum": (1.0, -4.0)}  # by the square of the width, which is d^(-4/2)
    if mean is None or mean.inputs[0] is None or mean.domain != "":
        return False
    if divided.get(mean.op_type) != resolve(square.constants, variance.width):
        return False
    source = interpreter.of(mean.inputs[0])
    return source.key == x.key and interpreter.reduced_axes(mean, source.shape) == variance.axes


def _mean_node(value: ir.Value) -> ir.Node | None:
    node = through(value, _SPREADS)
    return node if node is not None and (node.domain, node.op_type) == ("", "ReduceMean") else None
