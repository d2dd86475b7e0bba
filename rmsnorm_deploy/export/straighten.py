"""Takes the detours out of attention: a Reshape or Expand to what is there, a Transpose between two Reshapes, copies.

PyTorch's exporter writes all of these. They compute nothing, and at one token they cost a model more than its norms do:
ONNX Runtime merges a Transpose into the MatMul behind it, but not through a Reshape. Values stay what they are, up to
the order in which a product of another shape adds up.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from rmsnorm_deploy.export.gated import join_gates
from rmsnorm_deploy.export.gathers import skip_gathers
from rmsnorm_deploy.export.grouped import share_heads
from rmsnorm_deploy.export.guards import ask_masks
from rmsnorm_deploy.export.infinite import ask_infinite_masks
from rmsnorm_deploy.export.nodes import is_op, producer, put_in_place, typed_like
from rmsnorm_deploy.export.projections import join_projections
from rmsnorm_deploy.export.signs import move_signs
from rmsnorm_deploy.export.slices import split_slices
from rmsnorm_deploy.export.twins import join_twins
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.imports import infer_shapes
from rmsnorm_deploy.fusion.meaning import Shape
from rmsnorm_deploy.fusion.values import Shapes, shape_of


def straighten(model: ir.Model) -> None:
    """Remove detours from the main graph, in place.

    Only for graphs whose dimension names can be relied on: two dimensions of one name have one size. That holds for
    this package's own traces; what a file from elsewhere claims about its inner values may be wrong.
    """
    for steps in (
        (_skip_detours, skip_gathers),
        (move_signs, split_slices, ask_infinite_masks, ask_masks),
        (share_heads, join_projections),
        (join_twins, join_gates),
    ):
        shapes = _inferred(model)  # of what the steps before wrote, too
        for step in steps:
            step(model.graph, shapes)
        RemoveUnusedNodesPass()(model)
    model.graph.sort()  # what is done to queries and keys at once needs both, and stands where one of them was made


def _skip_detours(graph: ir.Graph, shapes: Shapes) -> None:
    constants = Constants()
    for node in list(graph):
        if node.outputs and node.outputs[0].is_graph_output():
            continue
        if is_op(node, "Identity") and node.inputs[0] is not None:
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        elif is_op(node, "CastLike"):
            _name_type(node)
        elif is_op(node, "Slice"):
            _skip_slice(node, shapes, constants)
        elif is_op(node, "Expand"):
            _skip(node, shapes)
        elif is_op(node, "Reshape") and not _skip(node, shapes):
            _swap_last_axes(node, shapes)


def _name_type(node: ir.Node) -> None:
    """A Cast in place of a CastLike, which reads a whole value for its type; nothing, where that is the type it has."""
    source, like = node.inputs
    if source is None or like is None or like.dtype is None:
        return
    if source.dtype == like.dtype:
        ir.convenience.replace_all_uses_with(node.outputs[0], source)
        return
    cast = ir.node("Cast", [source], attributes={"to": like.dtype}, name=node.name)
    cast.metadata_props.update(node.metadata_props)
    assert node.graph is not None
    node.graph.insert_before(node, cast)
    node.name = None
    typed_like(like, cast)
    put_in_place(node.outputs[0], cast.outputs[0])
    cast.outputs[0].dtype = like.dtype


def _skip(node: ir.Node, shapes: Shapes) -> bool:
    """Let users of a node whose input has the shape of its output take the input."""
    source = node.inputs[0]
    shape = _known(source, shapes)
    if source is None or shape is None or shape != _known(node.outputs[0], shapes):
        return False
    ir.convenience.replace_all_uses_with(node.outputs[0], source)
    return True


def _skip_slice(node: ir.Node, shapes: Shapes, constants: Constants) -> None:
    """Skip a Slice that takes all there is, forwards."""
    steps = constants.integers(node.inputs[4]) if len(node.inputs) > 4 else [1]
    if steps is not None and set(steps) == {1}:
        _skip(node, shapes)


def _swap_last_axes(last: ir.Node, shapes: Shapes) -> bool:
    """One Transpose in place of Reshape (leading axes into one), Transpose, Reshape (leading axes apart again)."""
    transpose = producer(last.inputs[0], "Transpose")
    first = producer(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or first is None or list(transpose.attributes["perm"].as_ints()) != [0, 2, 1]:
        return False
    source, merged = first.inputs[0], first.outputs[0]
    before, between, after = (_known(value, shapes) for value in (source, merged, last.outputs[0]))
    if source is None or before is None or between is None or after is None or len(before) < 3:
        return False
    if between[1:] != before[-2:] or after != (*before[:-2], before[-1], before[-2]):
        return False
    axes = list(range(len(before)))
    swap = ir.node("Transpose", [source], attributes={"perm": [*axes[:-2], axes[-1], axes[-2]]}, name=transpose.name)
    swap.metadata_props.update(transpose.metadata_props)
    assert last.graph is not None
    last.graph.insert_before(last, swap)
    transpose.name = None
    put_in_place(last.outputs[0], swap.outputs[0])
    return True


def _known(value: ir.Value | None, shapes: Shapes) -> Shape | None:
    """A value's shape, where every dimension of it is a number or has a name."""
    shape = shapes.get(value) if value is not None else None
    return shape if shape is not None and None not in shape else None


def _inferred(model: ir.Model) -> dict[ir.Value, Shape]:
    """Shapes of the main graph's values by ONNX's own inference, which also follows shapes that are computed.

    Of a copy: the names that inference invents are no business of the model's.
    """
    copy = model.clone()
    infer_shapes(copy)
    pairs = [*zip(model.graph.inputs, copy.graph.inputs, strict=True)]
    pairs += [(value, value) for value in model.graph.initializers.values()]
    for node, copied in zip(model.graph, copy.graph, strict=True):
        pairs += zip(node.outputs, copied.outputs, strict=True)
    return {value: shape for value, copied in pairs if (shape := shape_of(copied)) is not None}
