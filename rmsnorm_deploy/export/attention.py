"""Finds attention whose heads share keys and values in groups: where these are repeated, and all that is between.

keys [batch, groups, all, size] -> Unsqueeze -> Expand -> Reshape [batch, heads, all, size] -> Transpose, scaling
MatMul(queries, keys) -> scaling, mask, Softmax, ... -> MatMul(that, values, repeated alike)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from rmsnorm_deploy.export.nodes import is_op, on_last_axis, producer
from rmsnorm_deploy.fusion.meaning import Shape
from rmsnorm_deploy.fusion.values import Shapes

Read = tuple[ir.Node, int]  # a node, and which of its inputs

_SCALINGS = ("Mul", "Div")
_ELEMENTWISE = (*_SCALINGS, "Add", "Cast", "IsNaN", "Max", "Min", "Neg", "Sub", "Tanh", "Where")


@dataclass(frozen=True)
class Operand:
    """What a product reads."""

    source: ir.Value  # queries for each head; keys and values for each group
    path: tuple[Read, ...]  # from what reads the source, or its repetition, to the product; nobody else reads from it


@dataclass(frozen=True)
class GroupedAttention:
    """A product of queries and keys, one with the values, and what is between."""

    scores: ir.Node
    context: ir.Node
    queries: Operand
    keys: Operand
    values: Operand
    between: tuple[ir.Node, ...]
    masks: tuple[Read, ...]  # where nodes between read what has a row for each query, and that for all heads
    groups: int
    each: int  # heads of a group


def grouped_attention(scores: ir.Node, shapes: Shapes) -> GroupedAttention | None:
    """The attention that begins with the MatMul ``scores``; None where its heads can't share."""
    keys, *numbers = _repeated(scores, shapes)
    queries = _operand(scores, 0, _SCALINGS, shapes)
    between, context = _until_product(scores)
    if keys is None or queries is None or context is None:
        return None
    values, *others = _repeated(context, shapes)
    groups, each = numbers
    shape, result = shapes.get(queries.source, ()), shapes.get(context.outputs[0], ())
    if values is None or others != numbers or len(shape) != 4 or shape[1] != groups * each or None in shape:
        return None
    masks = [*_masks(between, scores, shape, shapes)]
    if len(result) != 4 or result[:3] != shape[:3] or None in masks:
        return None
    found = tuple(mask for mask in masks if mask is not None)
    return GroupedAttention(scores, context, queries, keys, values, between, found, groups, each)


def _repeated(product: ir.Node, shapes: Shapes) -> tuple[Operand | None, int, int]:
    """What a product's right operand repeats along its heads, with the numbers of groups and of heads in each."""
    operand = _operand(product, 1, (*_SCALINGS, "Transpose"), shapes)
    reshape = producer(operand.source, "Reshape") if operand is not None else None
    expand = producer(reshape.inputs[0], "Expand") if reshape is not None else None
    single = expand.inputs[0].producer() if expand is not None and expand.inputs[0] is not None else None
    if operand is None or reshape is None or expand is None or single is None or single.inputs[0] is None:
        return None, 0, 0
    one, many, flat = (shapes.get(step, ()) for step in (single.outputs[0], expand.outputs[0], reshape.outputs[0]))
    if not is_op(single, "Unsqueeze", "Reshape") or len(many) != 5 or len(flat) != 4:
        return None, 0, 0
    (batch, groups, _, *rest), heads = many, flat[1]
    if not isinstance(groups, int) or not isinstance(heads, int) or groups < 1 or None in (batch, *rest):
        return None, 0, 0
    each = heads // groups  # enable_gqa computes it in the graph, where no shape inference follows
    expected = ((batch, groups, *rest), (batch, groups, 1, *rest), (batch, groups * each, *rest))
    if each < 2 or (shapes.get(single.inputs[0]), one, flat) != expected:
        return None, 0, 0
    return Operand(single.inputs[0], operand.path), groups, each


def _operand(product: ir.Node, index: int, op_types: tuple[str, ...], shapes: Shapes) -> Operand | None:
    """An operand of a product, behind scalings and transposes of its last axes that serve it alone."""
    path = [(product, index)]
    while True:
        value = path[0][0].inputs[path[0][1]]
        if value is None:
            return None
        node = value.producer()
        wide = _wide_input(node, shapes) if node is not None and is_op(node, *op_types) else None
        if node is None or wide is None or len(value.uses()) != 1 or value.is_graph_output():
            return Operand(value, tuple(path))
        path.insert(0, (node, wide))


def _wide_input(node: ir.Node, shapes: Shapes) -> int | None:
    """Which input a scaling scales, or a Transpose of the last two of four axes transposes."""
    if node.op_type == "Transpose":
        return 0 if list(node.attributes["perm"].as_ints()) == [0, 1, 3, 2] else None
    wide = [index for index, value in enumerate(node.inputs) if not _is_scalar(value, shapes)]
    return wide[0] if len(wide) == 1 and (node.op_type != "Div" or wide == [0]) else None


def _is_scalar(value: ir.Value | None, shapes: Shapes) -> bool:
    return value is not None and shapes.get(value) in ((), (1,))


def _until_product(scores: ir.Node) -> tuple[tuple[ir.Node, ...], ir.Node | None]:
    """The nodes behind ``scores``, and the one product that reads what comes of them; None where others do too."""
    between: dict[ir.Node, None] = {}
    context: ir.Node | None = None
    pending = [scores.outputs[0]]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return (), None
        for node, index in value.uses():
            if is_op(node, "MatMul") and index == 0 and context in (None, node):
                context = node
            elif _keeps_rows(node) and node.graph is scores.graph:
                if node not in between:
                    between[node] = None
                    pending.extend(node.outputs)
            else:
                return (), None
    return tuple(between), context


def _keeps_rows(node: ir.Node) -> bool:
    """Whether each row of four axes' last one stays on its own."""
    return is_op(node, *_ELEMENTWISE) or (is_op(node, "Softmax") and on_last_axis(node, 4))


def _masks(nodes: tuple[ir.Node, ...], scores: ir.Node, queries: Shape, shapes: Shapes) -> Iterator[Read | None]:
    """Which inputs of ``nodes`` have a row for each query; None for one that has values for each head."""
    inside = {scores.outputs[0], *(output for node in nodes for output in node.outputs)}
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is None or value in inside or _is_scalar(value, shapes):
                continue
            shape = shapes.get(value)
            if shape is None or len(shape) > 4 or (len(shape) > 2 and shape[-3] != 1):
                yield None
            elif len(shape) > 1 and shape[-2] != 1:
                yield (node, index) if shape[-2] == queries[2] else None
