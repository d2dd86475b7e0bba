"""Does to queries and keys at once what is done to both alike: the rotation of their embeddings.

    Split along the heads -> q, k, v               Split -> qk, v
    q -> Mul(cos), ..., Add -> rotated q     =>    qk -> Mul(cos), ..., Add -> Split -> rotated q, rotated k
    k -> Mul(cos), ..., Add -> rotated k

Only where q and k come out of one Split, as `projections` leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import onnx_ir as ir

from rmsnorm_deploy.export.nodes import identity, is_op, put_behind, put_in_place, split
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.values import Shapes

_HEADS = 1  # the axis
_ELEMENTWISE = ("Add", "Cast", "Div", "Mul", "Neg", "Sub")
_WITHIN_ROWS = ("Concat", "Split")


@dataclass
class _Twins:
    """Two values and what is done to both alike."""

    first: ir.Value
    second: ir.Value
    pairs: dict[ir.Value, ir.Value] = field(default_factory=dict)
    nodes: dict[ir.Node, ir.Node] = field(default_factory=dict)

    def end(self) -> ir.Value | None:
        """The one of the first's values that goes on to what is not done to both."""
        ends = [
            value
            for value, twin in self.pairs.items()
            if not all(node in self.nodes for node in value.consumers())
            or not all(node in self.nodes.values() for node in twin.consumers())
        ]
        outputs = any(value.is_graph_output() for pair in self.pairs.items() for value in pair)
        if len(ends) != 1 or outputs or not is_op(ends[0].producer(), *_ELEMENTWISE, "Concat") or ends[0] is self.first:
            return None
        return ends[0]


def join_twins(graph: ir.Graph, shapes: Shapes) -> None:
    """Let pairs of heads that one Split parts go through what is done to both in one, in place."""
    constants = Constants()
    for node in list(graph):
        if not is_op(node, "Split") or node.attributes.get_int("axis", 0) != _HEADS or len(node.inputs) != 2:
            continue
        if len(shapes.get(node.outputs[0], ())) != 4:
            continue
        sizes = constants.integers(node.inputs[1])
        for index, (first, second) in enumerate(pairwise(node.outputs)):
            twins = _twins(first, second, shapes)
            end = twins.end()
            if sizes is not None and end is not None and len(twins.nodes) > 1:
                _join(graph, node, sizes, index, twins, end)
                break


def _twins(first: ir.Value, second: ir.Value, shapes: Shapes) -> _Twins:
    twins = _Twins(first, second, {first: second})
    pending = [(first, second)]
    while pending:
        one, other = pending.pop()
        for node in one.consumers():
            for twin in other.consumers():
                if node not in twins.nodes and twin not in twins.nodes.values() and _alike(node, twin, twins, shapes):
                    twins.nodes[node] = twin
                    made = list(zip(node.outputs, twin.outputs, strict=True))
                    twins.pairs.update(made)
                    pending += made
    return twins


def _alike(node: ir.Node, twin: ir.Node, twins: _Twins, shapes: Shapes) -> bool:
    """Whether two nodes do the same to twins, head by head."""
    same = (node.op_type, len(node.inputs), len(node.outputs)) == (twin.op_type, len(twin.inputs), len(twin.outputs))
    if not same or _attributes(node) != _attributes(twin) or node.graph is not twin.graph:
        return False
    if is_op(node, *_WITHIN_ROWS):
        if node.attributes.get_int("axis", 0) not in (-1, 3):
            return False
    elif not is_op(node, *_ELEMENTWISE):
        return False
    return all(
        twins.pairs.get(mine) is yours if mine in twins.pairs else _same_for_all_heads(mine, yours, shapes)
        for mine, yours in zip(node.inputs, twin.inputs, strict=True)
        if mine is not None
    )


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _same_for_all_heads(mine: ir.Value, yours: ir.Value | None, shapes: Shapes) -> bool:
    if yours is None or identity(mine) != identity(yours):
        return False
    shape = shapes.get(mine)
    return shape is not None and len(shape) <= 4 and (len(shape) < 3 or shape[-3] == 1)


def _join(graph: ir.Graph, parted: ir.Node, sizes: list[int], index: int, twins: _Twins, end: ir.Value) -> None:
    source, last, twin = parted.inputs[0], end.producer(), twins.pairs[end]
    assert source is not None
    assert last is not None
    both = sizes[index] + sizes[index + 1]
    first = split(source, [*sizes[:index], both, *sizes[index + 2 :]], _HEADS, parted)
    graph.insert_before(parted, first)
    joint = first[1].outputs
    others = [*parted.outputs[:index], *parted.outputs[index + 2 :]]
    for old, new in zip(others, [*joint[:index], *joint[index + 1 :]], strict=True):
        put_in_place(old, new)
    ir.convenience.replace_all_uses_with(twins.first, joint[index])
    apart = split(end, sizes[index : index + 2], _HEADS, last)
    put_behind(graph, last, apart[1])
    graph.insert_before(apart[1], apart[0])
    put_in_place(twin, apart[1].outputs[1])
    for node in twins.nodes:
        for output in node.outputs:
            output.shape = None
