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

from rmsnorm_deploy.export.linears import Linear, as_one, linear_of
from rmsnorm_deploy.export.nodes import only_user, put_in_place, split, typed_like
from rmsnorm_deploy.export.sizes import Sizes
from rmsnorm_deploy.fusion.values import Shapes

_HEADS_FIRST = [0, 2, 1, 3]
_HEADS = 1  # the axis, then


@dataclass(frozen=True)
class _Projection:
    """One value's way into heads: [batch, seq, width] to [batch, heads, seq, size]."""

    linear: Linear
    heads: int
    size: int
    result: ir.Value  # [batch, heads, seq, size]


def join_projections(graph: ir.Graph, shapes: Shapes) -> None:
    """Make one product of those that project one value into heads of one size, in place."""
    found: dict[tuple[ir.Value, int, bool], list[_Projection]] = defaultdict(list)
    for node in graph:
        linear = linear_of(node, shapes)
        projection = _projection(linear, shapes) if linear is not None else None
        if linear is not None and projection is not None and linear.source is not None:
            found[linear.source, projection.size, linear.bias is not None].append(projection)
    sizes = Sizes(graph)
    for (source, _, _), parts in found.items():
        batch, seq = shapes[source][:2]
        if len(parts) > 1 and batch is not None and seq is not None and sizes.has(batch, seq):
            _join(graph, parts, sizes.of([batch, seq, sum(part.heads for part in parts), parts[0].size]))


def _projection(linear: Linear, shapes: Shapes) -> _Projection | None:
    reshape = only_user(linear.result, "Reshape")
    transpose = only_user(reshape.outputs[0], "Transpose") if reshape is not None else None
    if reshape is None or transpose is None or list(transpose.attributes["perm"].as_ints()) != _HEADS_FIRST:
        return None
    flat, apart = shapes.get(linear.result, ()), shapes.get(reshape.outputs[0], ())
    heads, size = apart[-2:] if len(apart) == 4 else (None, None)
    if len(flat) != 3 or flat[:2] != apart[:2] or not isinstance(heads, int) or not isinstance(size, int):
        return None
    return _Projection(linear, heads, size, transpose.outputs[0])


def _join(graph: ir.Graph, parts: list[_Projection], shape: ir.Value) -> None:
    nodes = as_one([part.linear for part in parts])
    flat, first = nodes[-1].outputs[0], parts[0].linear.product
    apart = ir.node("Reshape", [flat, shape], {"allowzero": 1})
    heads_first = ir.node("Transpose", [apart.outputs[0]], {"perm": _HEADS_FIRST})
    for node in (apart, heads_first):
        node.metadata_props.update(first.metadata_props)
        typed_like(flat, node)
    parted = split(heads_first.outputs[0], [part.heads for part in parts], _HEADS, first)
    graph.insert_before(first, [*nodes, apart, heads_first, *parted])
    for part, output in zip(parts, parted[1].outputs, strict=True):
        put_in_place(part.result, output)
