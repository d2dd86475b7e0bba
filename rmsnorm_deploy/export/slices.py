"""Makes one Split of Slices that share out an axis, as rotary embeddings write them for the halves of each head.

ONNX Runtime does so itself, but not behind a node of several outputs.
"""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir

from rmsnorm_deploy.export.nodes import is_op, put_in_place, split
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.values import Shapes

Part = tuple[int, int, ir.Node]  # from, to, and the Slice that takes it


def split_slices(graph: ir.Graph, shapes: Shapes) -> None:
    """Put a Split in the place of Slices that take all of an axis, each element once, in place."""
    constants = Constants()
    found: dict[tuple[ir.Value, int], list[Part]] = defaultdict(list)
    for node in graph:
        taken = _taken(node, shapes, constants) if is_op(node, "Slice") else None
        if taken is not None and node.inputs[0] is not None:
            axis, start, end = taken
            found[node.inputs[0], axis].append((start, end, node))
    for (source, axis), parts in found.items():
        first = parts[0][2]
        parts = sorted(parts, key=lambda part: part[:2])
        edges = [start for start, _, _ in parts] + [shapes[source][axis]]
        if len(parts) > 1 and edges[0] == 0 and edges[1:] == [end for _, end, _ in parts] and all(_sizes(parts)):
            _split(graph, axis, parts, first)


def _taken(node: ir.Node, shapes: Shapes, constants: Constants) -> tuple[int, int, int] | None:
    """The one axis that a Slice shortens, where its beginning and its end are known, and these."""
    numbers = [constants.integers(value) for value in node.inputs[1:]]
    source = node.inputs[0]
    shape = shapes.get(source) if source is not None else None
    if shape is None or len(numbers) not in (3, 4) or numbers[3:] not in ([], [[1]]):
        return None
    known = [number[0] for number in numbers[:3] if number is not None and len(number) == 1]
    if len(known) < 3:
        return None
    start, end, axis = known
    axis %= len(shape)
    length = shape[axis]
    if not isinstance(length, int):
        return None
    start, end = (min(max(at + length if at < 0 else at, 0), length) for at in (start, end))
    return axis, start, end


def _sizes(parts: list[Part]) -> list[int]:
    return [end - start for start, end, _ in parts]


def _split(graph: ir.Graph, axis: int, parts: list[Part], before: ir.Node) -> None:
    source = before.inputs[0]  # now: it may have been a Slice of another that has become a Split
    assert source is not None
    parted = split(source, _sizes(parts), axis, before)
    graph.insert_before(before, parted)
    for (_, _, node), output in zip(parts, parted[1].outputs, strict=True):
        put_in_place(node.outputs[0], output)
