"""Tidies a graph after fusing, in ways that touch no value: nothing is simplified by what a constant is close to."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from rmsnorm_deploy.fusion.constants import SMALL, Constants, is_fixed
from rmsnorm_deploy.fusion.evaluate import CannotEvaluateError, attribute
from rmsnorm_deploy.fusion.values import shape_of

_FOLDED = frozenset(
    ("Add", "Cast", "Concat", "Div", "Gather", "Mul", "Neg", "Reshape", "Shape", "Slice", "Sqrt", "Squeeze", "Sub")
) | {"Transpose", "Unsqueeze"}
_MERGED = 8  # elements: shapes, axes, epsilons. Larger equal initializers are weights, which keep their names


def clean_up(model: ir.Model) -> None:
    """Fold small constants, drop what nothing uses, and keep one copy of equal small initializers."""
    for graph in model.graphs():
        _drop_identities(graph)
    _fold_constants(model.graph)
    _shield_look_alikes(model)
    RemoveUnusedNodesPass()(model)
    _merge_initializers(model.graph)
    RemoveUnusedOpsetsPass()(model)


def _drop_identities(graph: ir.Graph) -> None:
    """Let users take an Identity's input; where its result is an output, the input's node yields that output itself."""
    for node in list(graph):
        source = node.inputs[0] if (node.domain, node.op_type) == ("", "Identity") else None
        output = node.outputs[0]
        if source is None:
            continue
        if output.is_graph_output():
            if source.producer() is None or source.graph is not graph or source.is_graph_output():
                continue
            source.name, output.name = output.name, None
        source.shape = source.shape if source.shape is not None else output.shape
        source.type = source.type if source.type is not None else output.type
        ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _fold_constants(graph: ir.Graph) -> None:
    """Replace nodes whose inputs are small constants by initializers, each result rounded to the node's own dtype."""
    constants = Constants()
    for node in list(graph):
        if node.op_type not in _FOLDED or node.domain != "" or node.outputs[0].is_graph_output():
            continue
        output = node.outputs[0]
        if not constants.is_constant(output) or any(_size(i) > SMALL for i in node.inputs):
            continue
        try:
            array = constants.typed(output)
        except (CannotEvaluateError, ValueError, IndexError):
            continue
        if array.size > SMALL:
            continue
        dtype = output.dtype or ir.DataType.from_numpy(array.dtype)
        output_name = output.name or f"{node.name}_folded"
        value = ir.Value(name=output_name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype))
        value.const_value = ir.tensor(array, dtype=dtype, name=output_name)
        output.name = None
        ir.convenience.replace_all_uses_with(output, value)
        graph.remove(node, safe=True)
        graph.register_initializer(value)


def _size(value: ir.Value | None) -> int:
    if value is None:
        return 0
    if value.const_value is not None:
        return int(value.const_value.size)
    return 0 if value.producer() is not None else SMALL + 1


def _merge_initializers(graph: ir.Graph) -> None:
    first: dict[tuple[object, ...], ir.Value] = {}
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.size > _MERGED or tensor.dtype == ir.DataType.STRING:
            continue
        if not is_fixed(value) or value.is_graph_output():
            continue
        key = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
        kept = first.setdefault(key, value)
        if kept is not value:
            ir.convenience.replace_all_uses_with(value, kept)
            assert value.name is not None
            del graph.initializers[value.name]


def _shield_look_alikes(model: ir.Model) -> None:
    """Spell squares whose mean loses its axis as ``x * x``: the same value, which ONNX Runtime doesn't take for a norm.

    ONNX Runtime makes a norm of Pow, ReduceMean, Add, Sqrt, Div, Mul without looking at keepdims. Where the mean lines
    up with other axes after all (a square matrix), that changes the result. Nor does it look whether the scale spreads
    rows of one element over more: such a norm fails when it runs. Other look-alikes it leaves or gets right.
    """
    constants = Constants()
    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) != ("", "Pow") or node.inputs[0] is None:
            continue
        users = [use.node for use in node.outputs[0].uses()]
        wrong = _is_flat_mean(*users, *_subtracted(node.inputs[0])) or (shape_of(node.inputs[0]) or ())[-1:] == (1,)
        if wrong and constants.scalar(node.inputs[1]) == 2:
            node.op_type = "Mul"
            node.replace_input_with(1, node.inputs[0])


def _is_flat_mean(*nodes: ir.Node) -> bool:
    return any(node.op_type == "ReduceMean" and attribute(node, "keepdims", 1) == 0 for node in nodes)


def _subtracted(value: ir.Value) -> list[ir.Node]:
    """The node whose result is subtracted in ``value``, as the mean is in a LayerNorm."""
    node = value.producer()
    if node is None or node.op_type != "Sub" or node.inputs[1] is None:
        return []
    mean = node.inputs[1].producer()
    return [] if mean is None else [mean]
