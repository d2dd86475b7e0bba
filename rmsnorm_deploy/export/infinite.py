"""Gives a query from which a mask of floats hides every key the result that PyTorch gives it: zero.

A row of the mask that is -inf throughout makes NaN of a Softmax, and PyTorch's exporter writes no more than that.

    scores + mask -> Softmax -> MatMul(values)
 => scores + Where(blind, 0, mask) -> Softmax -> MatMul(values) -> Mul(Where(blind, 0, 1))

The mask is asked once for all layers, and not at all where it is put together of finite numbers, or each query sees
itself (see sighted.py). A row of the least finite number is not blind: in PyTorch too its result is the mean of all
values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.export.guards import Sighted, is_pytorchs, sighted
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

_CHOICES = {"Where": slice(1, 3), "Concat": slice(None)}  # which inputs the numbers come from
_MOVES = ("Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def ask_infinite_masks(graph: ir.Graph, shapes: Shapes) -> None:
    """Let masks that may hide all keys be asked which queries see nothing, in place. Before guards are taken out."""
    constants = Constants()
    made: dict[Any, Sighted] = {}
    for softmax in list(graph):
        if not is_op(softmax, "Softmax") or not is_pytorchs(softmax):
            continue
        add, context = producer(softmax.inputs[0], "Add"), only_user(softmax.outputs[0], "MatMul")
        rank = len(shapes.get(context.outputs[0], ())) if context is not None else 0
        if add is None or context is None or context.inputs[0] is not softmax.outputs[0] or rank < 2:
            continue
        mask = add.inputs[1]  # behind the scores
        if mask is None or not 0 < len(shapes.get(mask, ())) <= rank or not on_last_axis(softmax, rank):
            continue
        if only_user(add.outputs[0], "Softmax") is None or not _may_blind(mask, shapes, constants):
            continue
        key = identity(mask)
        if key not in made:
            least = _minus_infinity(mask)
            made[key] = sighted(graph, mask, least.outputs[0])
            graph.insert_before(graph[0], least)
        add.replace_input_with(place_of(mask, add), made[key].mask)
        put_behind(graph, context, ir.node("Mul", [context.outputs[0], made[key].factor]))


def _may_blind(mask: ir.Value, shapes: Shapes, constants: Constants) -> bool:
    """Whether a mask may hide all keys from a query."""
    where = producer(mask, "Where")
    seen, shown = where.inputs[:2] if where is not None else (None, None)
    if seen is None or shown is None or _may_hide(shown, constants):
        return _may_hide(mask, constants)
    return _may_hide(mask, constants) and not each_sees_itself(seen, shapes, constants)


def _may_hide(mask: ir.Value, constants: Constants) -> bool:
    """Whether a mask may have -inf in it. Of a causal one PyTorch knows, and we with it, that no query is blind."""
    node = mask.producer()
    if node is not None and is_pytorchs(node):
        return False
    if constants.is_constant(mask):
        known = constants.lifted(mask)
        return known is None or bool(np.isneginf(known).any())
    if node is None or node.domain != "":
        return True
    if node.op_type == "Cast":
        source = node.inputs[0]
        return source is None or (source.dtype in FLOAT_TYPES and _may_hide(source, constants))
    chosen = node.inputs[_CHOICES[node.op_type]] if node.op_type in _CHOICES else node.inputs[:1]
    if node.op_type not in (*_CHOICES, *_MOVES):
        return True
    return any(value is None or _may_hide(value, constants) for value in chosen)


def _minus_infinity(like: ir.Value) -> ir.Node:
    assert like.dtype is not None
    node = ir.node("Constant", [], {"value": ir.tensor(np.array(-np.inf, like.dtype.numpy()))})
    typed_like(like, node)
    return node
