"""Brings graphs of any origin into plain ONNX before norms are looked for.

Functions are inlined, casts are made explicit, and ONNX Runtime's own skip norm is taken apart into the add and the
norm that it is.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveInitializersFromInputsPass, ShapeInferencePass

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.fusion.bodies import strangers
from rmsnorm_deploy.opset import ATTRIBUTES, DOMAIN, VARIANT_BY_NAME, is_fused_op, node_attribute

_SIMPLIFIED = "SimplifiedLayerNormalization"
SKIP_NORM = f"Skip{_SIMPLIFIED}"
_ORT_DOMAIN = "com.microsoft"
_FIRST_WITH_DEFAULTS = 4  # the first IR version in which an initializer among the inputs is a default, no constant


def import_graph(model: ir.Model) -> None:
    """All of the above; no value of the model changes."""
    if model.ir_version < _FIRST_WITH_DEFAULTS:
        RemoveInitializersFromInputsPass()(model)
    inline_functions(model)
    inline_strangers(model)
    for node in list(model.graph.all_nodes()):
        if node.domain == DOMAIN:
            _restore_attributes(node)
            _restore_scale(model, node)
        elif node.domain == _ORT_DOMAIN:
            _split_contrib_norm(node)
        elif node.domain == "" and node.op_type in ("Cast", "CastLike"):
            _resolve_cast(node)
    if not any(node.domain == _ORT_DOMAIN for node in model.graph.all_nodes()):
        model.opset_imports.pop(_ORT_DOMAIN, None)


def inline_functions(model: ir.Model) -> None:
    """Write out all functions but those with a name of this package's own.

    Raises:
        InputError: a function can't be written out.
    """
    _inline(model, {f for f in model.functions.values() if f.domain != DOMAIN or f.name not in VARIANT_BY_NAME})


def inline_strangers(model: ir.Model) -> bool:
    """Write out functions that have a name of this package's and another body; whether there were any.

    Norms among them are found by what they compute, as any are. The dtypes of the model's values should be known: a
    function that is called with types unknown is taken for a stranger.

    Raises:
        InputError: a function can't be written out.
    """
    return _inline(model, strangers(model))


def _inline(model: ir.Model, functions: set[ir.Function]) -> bool:
    if not functions:
        return False
    try:
        InlinePass(lambda function: function in functions)(model)
    except (ValueError, ir.passes.InvariantError, ir.passes.PassError) as error:
        raise InputError(f"the model's functions can't be written out in its graph: {error}") from error
    return True


def split_skip_norms(model: ir.Model) -> None:
    """Take ONNX Runtime's own skip norms apart as `import_graph` does, with the same names for the same values."""
    for node in list(model.graph.all_nodes()):
        if node.domain == _ORT_DOMAIN:
            _split_contrib_norm(node)


def infer_shapes(model: ir.Model) -> bool:
    """Shapes and dtypes by ONNX's own inference; weights stay where they are. Whether anything was learned.

    ONNX knows no SimplifiedLayerNormalization, which hides all that follows one: meanwhile it is called PRelu, which
    has the same shape rule.
    """
    norms = [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == ("", _SIMPLIFIED)]
    log = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of models that ONNX can't infer: those that are left as they were
    for node in norms:
        node.op_type = "PRelu"
    others = {value: (value.type, value.shape) for value in _sequences(model)}
    try:
        return ShapeInferencePass(check_type=False, strict_mode=False)(model).modified
    finally:
        for value, (was, shape) in others.items():  # the pass takes all that it learns of for tensors
            value.type, value.shape = was, shape
        log.setLevel(level)
        for node in norms:
            node.op_type = _SIMPLIFIED


_SEQUENCE_OPS = frozenset(
    ("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap", "SplitToSequence")
) | {"Optional"}


def _sequences(model: ir.Model) -> set[ir.Value]:
    """Values that are no tensors."""
    found: set[ir.Value] = set()
    for node in model.graph.all_nodes():
        passed_on = node.op_type == "Identity" and node.inputs[0] in found
        makes = passed_on or node.op_type in (*_SEQUENCE_OPS, "Optional")
        typed = (
            value for value in node.outputs if value.type is not None and not isinstance(value.type, ir.TensorType)
        )
        found.update(node.outputs if makes else typed)
    return found


def _restore_attributes(node: ir.Node) -> None:
    """A node of ours from a foreign file gets every attribute, so that all implementations read the same.

    Raises:
        InputError: it has one that the op does not have, such as a misspelt one, which all of them would ignore.
    """
    unknown = [name for name in node.attributes if name not in ATTRIBUTES]
    if unknown and is_fused_op(node):
        raise InputError(
            f"node {(node.name or node.outputs[0].name)!r} is {node.op_type} with the attribute {unknown[0]!r}, and "
            f"the op has only {', '.join(ATTRIBUTES)}"
        )
    for name, default in ATTRIBUTES.items():
        if name not in node.attributes:
            node.attributes[name] = node_attribute(name, default)


def _restore_scale(model: ir.Model, node: ir.Node) -> None:
    """A node of ours without a scale gets a one: no function body can leave it out."""
    at = 2 if is_fused_op(node) and VARIANT_BY_NAME[node.op_type].skip else 1
    x = node.inputs[0] if node.inputs else None
    if not is_fused_op(node) or x is None or x.dtype is None or (len(node.inputs) > at and node.inputs[at] is not None):
        return
    one = ir.Value(name=f"{node.outputs[0].name}_scale_one", shape=ir.Shape([1]), type=ir.TensorType(x.dtype))
    one.const_value = ir.tensor(np.ones(1, x.dtype.numpy()), dtype=x.dtype, name=one.name)
    model.graph.register_initializer(one)
    node.resize_inputs(max(len(node.inputs), at + 1))
    node.replace_input_with(at, one)


def _resolve_cast(node: ir.Node) -> None:
    """CastLike becomes Cast where the type is known, and a cast to the type that a value has goes away."""
    source, output = node.inputs[0], node.outputs[0]
    if node.op_type == "CastLike":
        target = node.inputs[1].dtype if node.inputs[1] is not None else None
        if target is None:
            return
        node.op_type = "Cast"
        node.resize_inputs(1)
        node.attributes["to"] = ir.AttrInt64("to", int(target))
    to = ir.DataType(node.attributes["to"].as_int())
    if source is not None and source.dtype == to and not output.is_graph_output():
        ir.convenience.replace_all_uses_with(output, source)
        assert node.graph is not None
        node.graph.remove(node, safe=True)  # a dead reader would end a norm before its weight


def _split_contrib_norm(node: ir.Node) -> None:
    if node.op_type == _SIMPLIFIED:
        node.domain = ""
    elif node.op_type == SKIP_NORM and _only_norm_and_sum(node):
        _split(node)


def _only_norm_and_sum(node: ir.Node) -> bool:
    return all(not output.uses() and not output.is_graph_output() for output in node.outputs[1:3])


def _split(node: ir.Node) -> None:
    """``SkipSimplifiedLayerNormalization`` (sum as output 3) becomes Add and SimplifiedLayerNormalization."""
    graph = node.graph
    assert graph is not None
    total, gamma = node.inputs[0], node.inputs[2]
    assert total is not None
    new: list[ir.Node] = []
    for term in (node.inputs[1], *node.inputs[3:]):
        if term is not None:
            add = ir.Node("", "Add", [total, term], name=f"{node.name or node.outputs[0].name}_add{len(new)}")
            add.outputs[0].name = f"{add.name}_out"
            add.outputs[0].type, add.outputs[0].shape = total.type, total.shape
            total = add.outputs[0]
            new.append(add)
    epsilon = node.attributes.get("epsilon")
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", epsilon.as_float() if epsilon else 1e-12)]
    norm = ir.Node("", _SIMPLIFIED, [total, gamma], attributes, name=node.name)
    norm.outputs[0].type, norm.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    new.append(norm)
    graph.insert_before(node, new)
    _replace(node.outputs[0], norm.outputs[0])
    if len(node.outputs) > 3:
        _replace(node.outputs[3], total)
    graph.remove(node, safe=True)


def _replace(old: ir.Value, new: ir.Value) -> None:
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if old.name:
        old.name, new.name = None, old.name
