"""Small steps through a graph: who made a value, who alone reads it, which values are one, one in another's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

_MOVES = ("Cast", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Where")
_FEW = 16  # elements of a constant that is compared, as axes and shapes are


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of ONNX's own ``op_types``."""
    return node is not None and node.domain == "" and node.op_type in op_types


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that made ``value``, where it is an ONNX ``op_type``."""
    node = value.producer() if value is not None else None
    return node if is_op(node, op_type) else None


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The one reader of ``value``, where it is an ONNX ``op_type`` in the same graph and nothing else needs it."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    made = value.producer()
    return node if is_op(node, op_type) and (made is None or made.graph is node.graph) else None


def put_in_place(old: ir.Value, new: ir.Value) -> None:
    """Let all who read ``old`` read ``new``, under the name of ``old``, which the graph may return."""
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.name, old.name = old.name, None
    new.type, new.shape = old.type, old.shape


def put_behind(graph: ir.Graph, node: ir.Node, follower: ir.Node) -> None:
    """Let all others that read what ``node`` makes read what ``follower``, a new node, makes of it, under its name."""
    value, output = node.outputs[0], follower.outputs[0]
    follower.metadata_props.update(node.metadata_props)
    graph.insert_after(node, follower)
    ir.convenience.replace_all_uses_with(value, output, replace_graph_outputs=True)
    follower.replace_input_with(0, value)
    output.name, value.name = value.name, output.name
    output.type, output.shape = value.type, value.shape


def on_last_axis(softmax: ir.Node, rank: int) -> bool:
    """Whether a Softmax of ``rank`` axes works on the last one."""
    axis = softmax.attributes.get("axis")
    return axis is None or axis.as_int() in (-1, rank - 1)


def place_of(value: ir.Value, node: ir.Node) -> int:
    """Which input of ``node`` a value is."""
    return next(index for index, read in enumerate(node.inputs) if read is value)


def split(value: ir.Value, sizes: Sequence[int], axis: int, like: ir.Node) -> list[ir.Node]:
    """A Split of ``value`` into ``sizes`` along an axis, behind the Constant that it reads, described as ``like``."""
    counts = ir.node("Constant", [], {"value": ir.tensor(list(sizes), ir.DataType.INT64)})
    counts.outputs[0].dtype = ir.DataType.INT64
    node = ir.node("Split", [value, counts.outputs[0]], {"axis": axis}, num_outputs=len(sizes))
    node.metadata_props.update(like.metadata_props)
    typed_like(value, node)
    return [counts, node]


def typed_like(value: ir.Value, node: ir.Node) -> None:
    """Say of a new node's outputs that they have the type of ``value``."""
    for output in node.outputs:
        output.type = value.type


def identity(value: ir.Value) -> Any:
    """Equal for values that are the same because they are moved in the same way from one value.

    A layer has its own Unsqueeze of a table.
    """
    constant = ir.convenience.get_const_tensor(value)
    if constant is not None and constant.size <= _FEW:
        return constant.dtype, tuple(constant.shape), constant.tobytes()
    node = value.producer()
    if node is None or node.domain != "" or node.op_type not in _MOVES:
        return id(value)  # as PyTorch's exporter leaves values, they can't be compared
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    return node.op_type, attributes, tuple(identity(each) if each is not None else None for each in node.inputs)
