"""Joins the two projections of a gated MLP: what is gated and what gates it are columns of one product.

    x -> MatMul(Wg) -> activation -> Mul           x -> MatMul(Concat(Wg, Wu)) -> Split -> activation -> Mul
    x -> MatMul(Wu) --------------->        =>                                          --------------->

For the same reason as `projections`: a product fewer for threads to meet at. The parts are copied afterwards, which at
many tokens costs about what the larger product gains.
"""

from __future__ import annotations

import onnx_ir as ir

from rmsnorm_deploy.export.linears import Linear, as_one, linear_of
from rmsnorm_deploy.export.nodes import is_op, put_in_place, split
from rmsnorm_deploy.fusion.values import Shapes

_LONGEST = 24  # nodes of an activation that is written out


def join_gates(graph: ir.Graph, shapes: Shapes) -> None:
    """Make one product of two whose results are multiplied, one of them through an activation, in place."""
    for node in list(graph):
        pair = _pair(node, shapes) if is_op(node, "Mul") else None
        if pair is not None:
            _join(graph, pair, shapes)


def _pair(product: ir.Node, shapes: Shapes) -> tuple[Linear, Linear] | None:
    """The Linear that is the source of one factor and that which is the other factor, where they can be joined."""
    first, second = product.inputs
    if first is None or second is None:
        return None
    for gate, up in ((first, second), (second, first)):
        one, other = _linear_behind(gate, shapes), _linear_at(up, shapes)
        if one is not None and other is not None and _alike(one, other, shapes):
            return one, other
    return None


def _alike(one: Linear, other: Linear, shapes: Shapes) -> bool:
    return (
        one.source is other.source
        and one.weight is not other.weight
        and (one.weight.dtype, shapes[one.weight]) == (other.weight.dtype, shapes[other.weight])
        and (one.bias is None) == (other.bias is None)
    )


def _linear_at(value: ir.Value, shapes: Shapes) -> Linear | None:
    """The Linear whose result a value is."""
    node = value.producer()
    products = [node] if is_op(node, "MatMul") else [each.producer() for each in node.inputs if each] if node else []
    for product in products:
        linear = linear_of(product, shapes) if product is not None else None
        if linear is not None and linear.result is value:
            return linear
    return None


def _linear_behind(value: ir.Value, shapes: Shapes) -> Linear | None:
    """The one Linear that a value is computed from, by nodes that keep its shape."""
    shape = shapes.get(value)
    found: dict[ir.Node, Linear] = {}
    waiting, seen = [value], {value}
    while waiting and len(seen) <= _LONGEST:
        each = waiting.pop()
        linear, node = _linear_at(each, shapes), each.producer()
        if linear is not None:
            found[linear.product] = linear
        elif node is not None and shapes.get(each) == shape is not None:
            fresh = [source for source in node.inputs if source is not None and source not in seen]
            seen.update(fresh)
            waiting += fresh
    return next(iter(found.values())) if len(found) == 1 and not waiting else None


def _join(graph: ir.Graph, pair: tuple[Linear, Linear], shapes: Shapes) -> None:
    nodes = as_one(pair)
    width = shapes[pair[0].weight][0]
    assert isinstance(width, int)
    parted = split(nodes[-1].outputs[0], [width, width], -1, pair[0].product)
    graph.insert_before(pair[0].product, [*nodes, *parted])
    for part, output in zip(pair, parted[1].outputs, strict=True):
        put_in_place(part.result, output)
