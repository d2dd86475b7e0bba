"""Brings graphs of any origin into plain ONNX before norms are looked for.

Functions are inlined, and ONNX Runtime's own skip norm is taken apart into the add and the norm that it is.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from rmsnorm_deploy.opset import DOMAIN, ATTRIBUTES

_SIMPLIFIED = "SimplifiedLayerNormalization"


def inline_functions(model: ir.Model) -> None:
    """Inline every model-local function that is not one of ours."""
    if any(key[0] != DOMAIN for key in model.functions):
        InlinePass(lambda function: function.domain != DOMAIN)(model)


def resolve_casts(model: ir.Model) -> None:
    """CastLike becomes Cast where the type is known, and a cast to the type that a value has goes away."""
    for node in list(model.graph.all_nodes()):
        if node.op_type == "CastLike" and node.domain == "" and node.inputs[1] is not None and node.inputs[1].dtype:
            target = node.inputs[1].dtype
            node.op_type = "Cast"
            node.resize_inputs(1)
            node.attributes["to"] = ir.AttrInt64("to", int(target))
        if node.op_type == "Cast" and node.domain == "" and node.inputs[0] is not None:
            source, output = node.inputs[0], node.outputs[0]
            if source.dtype == ir.DataType(node.attributes["to"].as_int()) and not output.is_graph_output():
                ir.convenience.replace_all_uses_with(output, source)


def split_contrib_norms(model: ir.Model) -> None:
    """``SkipSimplifiedLayerNormalization`` (sum as output 3) becomes Add and SimplifiedLayerNormalization."""
    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) == ("com.microsoft", _SIMPLIFIED):
            node.domain = ""
        if (node.domain, node.op_type) == ("com.microsoft", f"Skip{_SIMPLIFIED}") and _only_norm_and_sum(node):
            _split(node)
    if not any(node.domain == "com.microsoft" for node in model.graph.all_nodes()):
        model.opset_imports.pop("com.microsoft", None)


def _only_norm_and_sum(node: ir.Node) -> bool:
    return all(not output.uses() and not output.is_graph_output() for output in node.outputs[1:3])


def _split(node: ir.Node) -> None:
    graph = node.graph
    assert graph is not None
    x, skip, gamma, *rest = node.inputs
    new = []
    total = x
    for term in (skip, *rest):
        if term is not None:
            add = ir.Node("", "Add", [total, term], name=f"{node.name or node.outputs[0].name}_add{len(new)}")
            total = add.outputs[0]
            total.name, total.dtype = f"{add.name}_out", x.dtype if x is not None else None
            total.shape = x.shape if x is not None else None
            new.append(add)
    epsilon = node.attributes.get("epsilon")
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", epsilon.as_float() if epsilon else 1e-12)]
    norm = ir.Node("", _SIMPLIFIED, [total, gamma], attributes, name=node.name)
    y = norm.outputs[0]
    y.dtype, y.shape = node.outputs[0].dtype, node.outputs[0].shape
    new.append(norm)
    graph.insert_before(node, new)
    _replace(node.outputs[0], y)
    if len(node.outputs) > 3 and total is not None:
        _replace(node.outputs[3], total)
    graph.remove(node, safe=True)


def _replace(old: ir.Value, new: ir.Value) -> None:
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if old.name:
        old.name, new.name = None, old.name


def restore_attributes(model: ir.Model) -> None:
    """Nodes of ours from an older or foreign file get every attribute, so that all implementations read the same."""
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN:
            for name in ATTRIBUTES:
                if name not in node.attributes:
                    value = ATTRIBUTES[name]
                    node.attributes[name] = (
                        ir.AttrString(name, value) if isinstance(value, str)
                        else ir.AttrInt64(name, value) if isinstance(value, int)
                        else ir.AttrFloat32(name, value)
                    )
