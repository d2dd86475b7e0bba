"""Lets grouped heads share their keys and values in place of a copy for each: their rows become rows of one product.

    q [batch, heads, seq, size] times keys [batch, groups, size, all], each repeated for heads / groups heads
 => q [batch, groups, heads / groups * seq, size] times keys

Queries of a group lie one behind the other already, so q is only seen in another shape, and so is what comes of them:
scores, mask, softmax and product with the values stay of rank 4, which is what TensorRT fuses. A mask that has a row
for each query is repeated for the heads of a group, once for all layers that have one mask.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from rmsnorm_deploy.export.attention import GroupedAttention, Operand, grouped_attention
from rmsnorm_deploy.export.nodes import identity, is_op, put_behind, typed_like
from rmsnorm_deploy.export.sizes import Size, Sizes, times
from rmsnorm_deploy.fusion.values import Shapes


def share_heads(graph: ir.Graph, shapes: Shapes) -> None:
    """Take out what repeats keys and values for their queries, where the products can do without, in place."""
    sizes = Sizes(graph)
    masks: dict[Any, ir.Value] = {}
    for node in list(graph):
        attention = grouped_attention(node, shapes) if is_op(node, "MatMul") else None
        if attention is not None:
            _share(graph, attention, shapes, sizes, masks)


def _share(
    graph: ir.Graph, attention: GroupedAttention, shapes: Shapes, sizes: Sizes, masks: dict[Any, ir.Value]
) -> None:
    batch, heads, seq, size = shapes[attention.queries.source]
    width = shapes[attention.context.outputs[0]][3]
    known = [dim for dim in (batch, heads, seq, size, width) if dim is not None and sizes.has(dim)]
    if len(known) < 5:
        return
    batch, heads, seq, size, width = known
    stacked = _seen_as(attention.queries.source, [batch, attention.groups, times(attention.each, seq), size], sizes)
    graph.insert_before(attention.queries.path[0][0], stacked)
    _reroute(attention.queries, stacked.outputs[0])
    for operand in (attention.keys, attention.values):
        node, index = operand.path[0]
        repeated = node.inputs[index]
        _reroute(operand, operand.source)
        if repeated is not None:
            _ask_inputs(repeated, shapes, sizes)
    for node, index in attention.masks:
        node.replace_input_with(index, _for_each_head(graph, node.inputs[index], attention.each, shapes, masks))
    result = attention.context.outputs[0]
    apart = _seen_as(result, [batch, heads, seq, width], sizes)
    put_behind(graph, attention.context, apart)
    for node in (attention.scores, *attention.between, attention.context):
        node.outputs[0].shape = None  # what it was is true no more


def _reroute(operand: Operand, source: ir.Value) -> None:
    """Let the path to a product begin at ``source``."""
    first, index = operand.path[0]
    first.replace_input_with(index, source)
    for node, _ in operand.path[:-1]:
        node.outputs[0].shape = None


def _ask_inputs(value: ir.Value, shapes: Shapes, sizes: Sizes) -> None:
    """Let what reads no more of ``value`` than its shape, as a causal mask does, read the sizes of inputs."""
    for node in list(value.consumers()):
        if is_op(node, "Shape") and not node.outputs[0].is_graph_output():
            dims = shapes[value][node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
            known = [dim for dim in dims if dim is not None and sizes.has(dim)]
            if len(known) == len(dims):
                ir.convenience.replace_all_uses_with(node.outputs[0], sizes.of(known))


def _seen_as(value: ir.Value, shape: list[Size], sizes: Sizes) -> ir.Node:
    reshape = ir.node("Reshape", [value, sizes.of(shape)], {"allowzero": 1})
    typed_like(value, reshape)
    return reshape


def _for_each_head(
    graph: ir.Graph, mask: ir.Value | None, each: int, shapes: Shapes, masks: dict[Any, ir.Value]
) -> ir.Value:
    """The mask with its rows repeated for the heads of a group, one behind the other."""
    assert mask is not None
    key = identity(mask), each
    if key not in masks:
        repeat = ir.node("Concat", [mask] * each, {"axis": len(shapes[mask]) - 2})
        typed_like(mask, repeat)
        made = mask.producer()
        if made is not None:
            graph.insert_after(made, repeat)
        else:
            graph.insert_before(graph[0], repeat)
        masks[key] = repeat.outputs[0]
    return masks[key]
