"""Einsum: products that are spread over axes, and a tensor times itself, which sums squares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from rmsnorm_deploy.fusion.evaluate import attribute
from rmsnorm_deploy.fusion.meaning import BROADCAST, Meaning, broadcast
from rmsnorm_deploy.fusion.values import widest_source

if TYPE_CHECKING:
    from rmsnorm_deploy.fusion.interpret import Interpreter

_ELLIPSIS = "..."


def einsum(interpreter: Interpreter, node: ir.Node) -> Meaning | None:
    """What an Einsum means; None where it contracts anything but a tensor with itself, or takes a diagonal."""
    terms, arrow, result = attribute(node, "equation").replace(" ", "").partition("->")
    operands = [interpreter.of(value) for value in node.inputs if value is not None]
    texts = terms.split(",")
    if not arrow or len(texts) != len(operands) or any(operand.shape is None for operand in operands):
        return None
    labels = [_labels(text, len(operand.shape or ())) for text, operand in zip(texts, operands, strict=True)]
    rank = max(sum(label.startswith(_ELLIPSIS) for label in found) for found in labels)
    out = _labels(result, len(result.replace(_ELLIPSIS, "")) + (rank if _ELLIPSIS in result else 0))
    if any(len(set(found)) != len(found) for found in (*labels, out)):
        return None
    if all(label in out for found in labels for label in found):
        return _product(operands, labels, out)
    return _sum_of_squares(interpreter, node, operands, labels, out)


def _labels(text: str, rank: int) -> list[str]:
    """One label an axis; those of an ellipsis are counted from its end, as broadcasting does."""
    before, ellipsis, after = text.partition(_ELLIPSIS)
    hidden = rank - len(before) - len(after) if ellipsis else 0
    return [*before, *(f"{_ELLIPSIS}{hidden - i}" for i in range(hidden)), *after]


def _product(operands: list[Meaning], labels: list[list[str]], out: list[str]) -> Meaning | None:
    product = Meaning(shape=(1,) * len(out))
    for operand, found in zip(operands, labels, strict=True):
        assert operand.shape is not None
        axes = [found.index(label) if label in found else BROADCAST for label in out]
        shape = tuple(1 if axis == BROADCAST else operand.shape[axis] for axis in axes)
        whole = broadcast(product.shape, shape)
        product = product.times(operand.laid_out(axes, shape))
        product = Meaning(product.factors, product.constants, product.sign, whole)
    return product


def _sum_of_squares(
    interpreter: Interpreter, node: ir.Node, operands: list[Meaning], labels: list[list[str]], out: list[str]
) -> Meaning | None:
    """``...d,...d->...`` in any letters: the sum of squares over the axes that the result lacks."""
    if len(operands) != 2 or operands[0].key != operands[1].key or labels[0] != labels[1] or node.inputs[0] is None:
        return None
    if out != [label for label in labels[0] if label in out]:
        return None
    axes = tuple(axis for axis, label in enumerate(labels[0]) if label not in out)
    square = operands[0].raised(2)
    found = square and interpreter.mean_square(node, square, axes, widest_source(node.inputs[0]))
    total = found and interpreter.sum_of(*found)
    return total and total.without(axes)
