"""Moves the minus signs of rotary embeddings into their tables: concat(-b, a) * s is concat(b, a) * (signs * s).

``signs`` is -1 under ``b`` and 1 under ``a``. Every layer negates half of its queries and keys, while the tables of
sines belong to the model: one product of a table replaces all those Negs. No other bit of a product depends on a sign.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.export.nodes import identity, place_of
from rmsnorm_deploy.fusion.meaning import Shape
from rmsnorm_deploy.fusion.values import Shapes

Signs = tuple[int, ...]


def move_signs(graph: ir.Graph, shapes: Shapes) -> None:
    """Let tables that several products share carry the signs of what they are multiplied with, in place."""
    found: dict[tuple[Any, Signs], list[tuple[ir.Value, ir.Node]]] = defaultdict(list)
    for node in graph:
        signs = _signs(node, shapes) if (node.domain, node.op_type) == ("", "Concat") else None
        table = _table(node, shapes) if signs is not None else None
        if signs is not None and table is not None:
            found[identity(table), signs].append((table, node))
    places: dict[ir.Node | None, int] = {None: -1, **{node: number for number, node in enumerate(graph)}}
    for (_, signs), shared in found.items():
        if len(shared) > 1:
            tables = [table for table, _ in shared]
            first = min(tables, key=lambda table: places[table.producer()])
            _sign_table(graph, first, signs, shared)


def _signs(concat: ir.Node, shapes: Shapes) -> Signs | None:
    """-1 and 1 for each element of a Concat along the last axis, where it has negated inputs."""
    widths = [_last(value, shapes) for value in concat.inputs]
    shape = shapes.get(concat.outputs[0])
    if shape is None or concat.attributes["axis"].as_int() not in (-1, len(shape) - 1) or None in widths:
        return None
    negated = [_negation(value) is not None for value in concat.inputs]
    signs = [-1 if minus else 1 for minus, width in zip(negated, widths, strict=True) for _ in range(width or 0)]
    return tuple(signs) if any(negated) else None


def _table(concat: ir.Node, shapes: Shapes) -> ir.Value | None:
    """What the Concat's one user multiplies it with, where that has the Concat's width."""
    value = concat.outputs[0]
    if len(value.uses()) != 1 or value.is_graph_output():
        return None
    ((product, index),) = value.uses()
    if (product.domain, product.op_type) != ("", "Mul") or product.graph is not concat.graph:
        return None
    table = product.inputs[1 - index]
    if table is None or table.dtype is None or _last(table, shapes) != _last(value, shapes):
        return None
    return table


def _sign_table(graph: ir.Graph, table: ir.Value, signs: Signs, shared: list[tuple[ir.Value, ir.Node]]) -> None:
    """Let the products of ``shared`` take ``table`` with ``signs`` in place of their tables, which equal it."""
    assert table.dtype is not None
    constant = ir.node("Constant", [], {"value": ir.tensor(np.array(signs, table.dtype.numpy()))})
    signed = ir.node("Mul", [table, constant.outputs[0]])
    for node in (constant, signed):
        node.outputs[0].dtype = table.dtype
    producer = table.producer()
    if producer is not None:
        graph.insert_after(producer, [constant, signed])
    else:
        graph.insert_before(graph[0], [constant, signed])
    for own, concat in shared:
        (product,) = concat.outputs[0].consumers()
        product.replace_input_with(place_of(own, product), signed.outputs[0])
        for index, value in enumerate(concat.inputs):
            source = _negation(value)
            if source is not None:
                concat.replace_input_with(index, source)


def _negation(value: ir.Value | None) -> ir.Value | None:
    """What ``value`` is minus of."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and (node.domain, node.op_type) == ("", "Neg") else None


def _last(value: ir.Value | None, shapes: Shapes) -> int | None:
    shape: Shape | None = shapes.get(value) if value is not None else None
    return shape[-1] if shape and isinstance(shape[-1], int) else None
