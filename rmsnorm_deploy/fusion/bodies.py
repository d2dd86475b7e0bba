"""Tells the functions of this package from others under its names: a file may define any body in any domain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import onnx
import onnx_ir as ir

from rmsnorm_deploy.fusion.evaluate import attribute
from rmsnorm_deploy.fusion.numbering import attribute_key
from rmsnorm_deploy.fusion.values import dtype_of
from rmsnorm_deploy.opset import (
    DOMAIN,
    MIN_OPSET,
    VARIANT_BY_NAME,
    Signature,
    can_share_body,
    function_body,
    is_fused_op,
)


def signatures(model: ir.Model) -> dict[str, set[Signature]]:
    """The types of all nodes of each of the domain's ops; UNDEFINED where the model does not tell."""
    found: dict[str, set[Signature]] = defaultdict(set)
    for node in model.graph.all_nodes():
        if is_fused_op(node):
            types = [dtype_of(value) for value in node.inputs] + [ir.DataType.UNDEFINED] * 3
            scale = types[2 if VARIANT_BY_NAME[node.op_type].skip else 1]
            found[node.op_type].add(Signature(types[0], scale, attribute(node, "axis", -1)))
    return found


def strangers(model: ir.Model) -> set[ir.Function]:
    """Functions of the domain with another body than this package gives them in a model of these types."""
    functions = [function for function in model.functions.values() if function.domain == DOMAIN]
    given = signatures(model) if functions else {}
    return {function for function in functions if not _is_own(function, given.get(function.name, set()))}


def _is_own(function: ir.Function, given: set[Signature]) -> bool:
    variant, opset = VARIANT_BY_NAME.get(function.name), function.opset_imports.get("", 0)
    if variant is None or function.overload or not given:
        return False
    if not MIN_OPSET <= opset <= onnx.defs.onnx_opset_version():
        return False
    first = next(iter(given))
    if not all(ir.DataType.UNDEFINED not in (s.x, s.scale) and can_share_body(first, s, opset) for s in given):
        return False
    return _form(function_body(variant, frozenset(given), opset)) == _form(function)


def _form(function: ir.Function) -> Hashable:
    """Equal for functions that differ in the names of their values alone."""
    numbers: dict[ir.Value | None, int] = {None: -1}
    for value in (*function.inputs, *(output for node in function for output in node.outputs)):
        numbers.setdefault(value, len(numbers))
    nodes = tuple(
        (
            node.domain,
            node.op_type,
            tuple(
                sorted(
                    (name, attr.ref_attr_name or "", str(attribute_key(attr))) for name, attr in node.attributes.items()
                )
            ),
            tuple(numbers.get(value) for value in node.inputs),
            len(node.outputs),
        )
        for node in function
    )
    defaults = tuple(sorted((name, str(attr.value)) for name, attr in function.attributes.items()))
    return len(function.inputs), defaults, nodes, tuple(numbers.get(value) for value in function.outputs)
