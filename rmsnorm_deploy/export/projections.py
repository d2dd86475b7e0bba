"""Joins the projections of one value into heads: queries, keys and values are columns of one product.

    x -> MatMul(Wq) -> Reshape -> Transpose -> q              x -> MatMul(Concat(Wq, Wk, Wv)) -> Reshape -> Transpose
    x -> MatMul(Wk) -> Reshape -> Transpose -> k       =>       -> Split along the heads -> q, k, v
    x -> MatMul(Wv) -> Reshape -> Transpose -> v

A product of few rows is read from memory at its weights' pace, and each costs threads a meeting: at one token nine
nodes of a layer become five. The weights stay in the file as they are and under their names. A runtime joins them when
it loads the model, as any constants.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import onnx_ir as ir

from rmsnorm_deploy.export.nodes import is_op, only_user, producer, put_in_place, split, typed_like
from rmsnorm_deploy.export.sizes import Sizes
from rmsnorm_deploy.fusion.values import Shapes

_HEADS_FIRST = [0, 2, 1, 3]
_HEADS = 1  # the axis, then


@dataclass(frozen=True)
class _Projection:
    """One value's way into heads: [batch, seq, width] to [batch, heads, seq, size]."""

    product: ir.Node
    weight: ir.Value  # [heads * size, width]
    bias: ir.Value | None  # [heads * size]
    heads: int
    size: int
    result: ir.Value  # [batch, heads, seq, size]


def join_projections(graph: ir.Graph, shapes: Shapes) -> None:
    """Make one product of those that project one value into heads of one size, in place."""
    found: dict[tuple[ir.Value, int, bool], list[_Projection]] = defaultdict(list)
    for node in graph:
        projection = _projection(node, shapes)
        if projection is not None and node.inputs[0] is not None:
            found[node.inputs[0], projection.size, projection.bias is not None].append(projection)
    sizes = Sizes(graph)
    for (source, _, _), parts in found.items():
        batch, seq = shapes[source][:2]
        if len(parts) > 1 and batch is not None and seq is not None and sizes.has(batch, seq):
            _join(graph, source, parts, sizes.of([batch, seq, sum(part.heads for part in parts), parts[0].size]))


def _projection(product: ir.Node, shapes: Shapes) -> _Projection | None:
    transposed = producer(product.inputs[1], "Transpose") if is_op(product, "MatMul") else None
    weight = transposed.inputs[0] if transposed is not None else None
    if weight is None or not weight.is_initializer() or len(shapes.get(weight, ())) != 2:
        return None
    bias, last = _bias(product, shapes)
    reshape = only_user(last, "Reshape")
    transpose = only_user(reshape.outputs[0], "Transpose") if reshape is not None else None
    if reshape is None or transpose is None or list(transpose.attributes["perm"].as_ints()) != _HEADS_FIRST:
        return None
    flat, apart = shapes.get(last, ()), shapes.get(reshape.outputs[0], ())
    heads, size = apart[-2:] if len(apart) == 4 else (None, None)
    if len(flat) != 3 or flat[:2] != apart[:2] or not isinstance(heads, int) or not isinstance(size, int):
        return None
    return _Projection(product, weight, bias, heads, size, transpose.outputs[0])


def _bias(product: ir.Node, shapes: Shapes) -> tuple[ir.Value | None, ir.Value]:
    """What a Linear adds to its product, and the value afterwards."""
    add = only_user(product.outputs[0], "Add")
    for value in add.inputs if add is not None else ():
        if value is not None and value.is_initializer() and shapes.get(value) == shapes[product.outputs[0]][-1:]:
            assert add is not None
            return value, add.outputs[0]
    return None, product.outputs[0]


def _join(graph: ir.Graph, source: ir.Value, parts: list[_Projection], shape: ir.Value) -> None:
    weight = ir.node("Concat", [part.weight for part in parts], {"axis": 0})
    transposed = ir.node("Transpose", [weight.outputs[0]], {"perm": [1, 0]})
    product = ir.node("MatMul", [source, transposed.outputs[0]])
    nodes = [weight, transposed, product]
    if parts[0].bias is not None:
        bias = ir.node("Concat", [part.bias for part in parts], {"axis": 0})
        nodes += [bias, ir.node("Add", [nodes[-1].outputs[0], bias.outputs[0]])]
    apart = ir.node("Reshape", [nodes[-1].outputs[0], shape], {"allowzero": 1})
    heads_first = ir.node("Transpose", [apart.outputs[0]], {"perm": _HEADS_FIRST})
    parted = split(heads_first.outputs[0], [part.heads for part in parts], _HEADS, parts[0].product)
    for node in (*nodes, apart, heads_first):
        node.metadata_props.update(parts[0].product.metadata_props)
    for node in (*nodes, apart, heads_first, parted[1]):
        typed_like(source, node)
    graph.insert_before(parts[0].product, [*nodes, apart, heads_first, *parted])
    for part, output in zip(parts, parted[1].outputs, strict=True):
        put_in_place(part.result, output)
