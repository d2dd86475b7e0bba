"""Tidies a graph after fusing, in ways that can't touch a value: nothing is simplified by what a constant is close to."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
    DeduplicateInitializersPass,
    IdentityEliminationPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from rmsnorm_deploy.fusion.constants import SMALL, Constants
from rmsnorm_deploy.fusion.evaluate import CannotEvaluateError

_FOLDED = frozenset(
    ("Add", "Cast", "Concat", "Div", "Gather", "Mul", "Neg", "Reshape", "Shape", "Slice", "Sqrt", "Squeeze", "Sub")
    + ("Transpose", "Unsqueeze")
)


def clean_up(model: ir.Model) -> None:
    """Fold small constants, drop what nothing uses, and keep one copy of equal initializers."""
    IdentityEliminationPass()(model)
    _fold_constants(model.graph)
    _shield_look_alikes(model)
    RemoveUnusedNodesPass()(model)
    DeduplicateInitializersPass(size_limit=SMALL)(model)
    RemoveUnusedOpsetsPass()(model)


def _fold_constants(graph: ir.Graph) -> None:
    """Replace nodes whose inputs are small constants by initializers, each result rounded to the node's own dtype."""
    constants = Constants()
    for node in list(graph):
        output = node.outputs[0] if node.outputs else None
        if output is None or node.op_type not in _FOLDED or node.domain != "" or output.is_graph_output():
            continue
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


def _shield_look_alikes(model: ir.Model) -> None:
    """Spell the squares that are left as ``x * x``: the same value, which ONNX Runtime's own fusion doesn't match.

    ONNX Runtime takes Pow, ReduceMean, Add, Sqrt, Div, Mul for an RMSNorm without looking at keepdims, and changes the
    result of those that are none.
    """
    constants = Constants()
    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) != ("", "Pow") or node.inputs[0] is None:
            continue
        feeds_mean = any(use.node.op_type == "ReduceMean" for use in node.outputs[0].uses())
        if feeds_mean and constants.scalar(node.inputs[1]) == 2:
            node.op_type = "Mul"
            node.replace_input_with(1, node.inputs[0])


def _size(value: ir.Value | None) -> int:
    if value is None:
        return 0
    if value.const_value is not None:
        return int(value.const_value.size)
    return 0 if value.producer() is not None else SMALL + 1
