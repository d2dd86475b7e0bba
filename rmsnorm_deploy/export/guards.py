"""Asks the mask which queries see nothing, once for all layers, and not each probability of each layer.

A query whose keys are all masked attends to nothing, and its result is zero. PyTorch's exporter hides keys by the least
number of the dtype and looks for NaN, in two passes over all probabilities, which finds no such query: it gets the mean
of all values.

    mask = Where(seen, 0, least);  scores + mask -> Softmax -> p -> Where(IsNaN(p), 0, p) -> MatMul(values)
 => scores + Where(blind, 0, mask) -> Softmax -> MatMul(values) -> Mul(Where(blind, 0, 1))

with ``blind`` for rows of the mask that are ``least`` throughout, which may be -inf. A NaN that comes from the scores
stays one, as in PyTorch. Where no query can be blind (see sighted.py), nothing is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.export.nodes import (
    identity,
    is_op,
    on_last_axis,
    only_user,
    place_of,
    producer,
    put_behind,
    typed_like,
)
from rmsnorm_deploy.export.sighted import each_sees_itself
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.values import Shapes
from rmsnorm_deploy.opset import FLOAT_TYPES

_ATTENTION = re.compile(r"target=torch\.ops\.aten\._?scaled_dot_product")  # of the call that a node was written for


@dataclass(frozen=True)
class _Guard:
    mask: ir.Value
    add: ir.Node  # of scores and mask
    softmax: ir.Node
    context: ir.Node  # the product with the values


@dataclass(frozen=True)
class Sighted:
    """A mask whose blind rows see all, and what their results are multiplied with: 0 for them, 1 for the others."""

    mask: ir.Value
    factor: ir.Value


def ask_masks(graph: ir.Graph, shapes: Shapes) -> None:
    """Take the search for NaN out of attention, in place."""
    constants = Constants()
    made: dict[Any, Sighted] = {}
    for node in list(graph):
        guard = _guard(node, shapes, constants) if is_op(node, "Where") else None
        if guard is None:
            continue
        guard.context.replace_input_with(0, guard.softmax.outputs[0])
        if _none_is_blind(guard.mask, shapes, constants):
            continue
        key = identity(guard.mask)
        if key not in made:
            made[key] = sighted(graph, guard.mask)
        guard.add.replace_input_with(place_of(guard.mask, guard.add), made[key].mask)
        put_behind(graph, guard.context, ir.node("Mul", [guard.context.outputs[0], made[key].factor]))


def _guard(where: ir.Node, shapes: Shapes, constants: Constants) -> _Guard | None:
    """The attention that ``where`` guards, if that is all that it does."""
    if not is_pytorchs(where):
        return None
    isnan, softmax = producer(where.inputs[0], "IsNaN"), producer(where.inputs[2], "Softmax")
    context = only_user(where.outputs[0], "MatMul")
    add = producer(softmax.inputs[0], "Add") if softmax is not None else None
    if isnan is None or softmax is None or add is None or context is None:
        return None
    value, rank = softmax.outputs[0], len(shapes.get(context.outputs[0], ()))
    if isnan.inputs[0] is not value or len(value.uses()) != 2 or len(isnan.outputs[0].uses()) != 1:
        return None
    if context.inputs[0] is not where.outputs[0] or rank < 2 or not on_last_axis(softmax, rank):
        return None
    masks = [mask for mask in add.inputs if mask is not None and _hides(mask, constants)]
    if len(masks) != 1 or constants.scalar(where.inputs[1]) != 0 or len(add.outputs[0].uses()) != 1:
        return None
    return _Guard(masks[0], add, softmax, context) if 0 < len(shapes.get(masks[0], ())) <= rank else None


def is_pytorchs(node: ir.Node) -> bool:
    """Whether the exporter wrote a node for PyTorch's own attention.

    A model's own guard means what it says: a row that the least number of the dtype hides has the mean of all values.
    """
    return _ATTENTION.search(str(node.meta.get("pkg.torch.onnx.fx_node"))) is not None


def _hides(mask: ir.Value, constants: Constants) -> bool:
    """Whether a value is throughout 0 or less than anything."""
    where = producer(mask, "Where")
    if where is None or mask.dtype not in FLOAT_TYPES:
        return False
    seen, hidden = (constants.scalar(value) for value in where.inputs[1:])
    return seen == 0 and hidden is not None and hidden <= float(mask.dtype.min)


def _none_is_blind(mask: ir.Value, shapes: Shapes, constants: Constants) -> bool:
    made = mask.producer()
    seen = made.inputs[0] if made is not None else None
    return seen is not None and each_sees_itself(seen, shapes, constants)


def sighted(graph: ir.Graph, mask: ir.Value, hidden: ir.Value | None = None) -> Sighted:
    """``mask`` with rows that are ``hidden`` throughout made to see all; by default what a Where hides keys with."""
    made = mask.producer()
    if hidden is None:
        assert made is not None
        hidden = made.inputs[2]
    zero, one = (_constant(value, mask) for value in (0, 1))
    axis = ir.node("Constant", [], {"value": ir.tensor([-1], ir.DataType.INT64)})
    best = ir.node("ReduceMax", [mask, axis.outputs[0]], {"keepdims": 1})
    blind = ir.node("Equal", [best.outputs[0], hidden])
    blind.outputs[0].dtype = ir.DataType.BOOL
    seeing = ir.node("Where", [blind.outputs[0], zero.outputs[0], mask])
    factor = ir.node("Where", [blind.outputs[0], zero.outputs[0], one.outputs[0]])
    for node in (best, seeing, factor):
        typed_like(mask, node)
    asked = [axis, zero, one, best, blind, seeing, factor]
    if made is not None:
        graph.insert_after(made, asked)
    else:
        graph.insert_before(graph[0], asked)
    seeing.outputs[0].shape = mask.shape
    return Sighted(seeing.outputs[0], factor.outputs[0])


def _constant(value: float, like: ir.Value) -> ir.Node:
    assert like.dtype is not None
    node = ir.node("Constant", [], {"value": ir.tensor(np.array(value, like.dtype.numpy()))})
    typed_like(like, node)
    return node
