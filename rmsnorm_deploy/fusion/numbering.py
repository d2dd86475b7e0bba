"""One number for values that are the same computation: exporters that merge no common subexpressions repeat them.

Nothing is merged in the graph: two calls of a norm on one input stay two.
"""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir

from rmsnorm_deploy.fusion.constants import SMALL, is_fixed
from rmsnorm_deploy.fusion.evaluate import can_evaluate


class Numbering:
    """Value numbers of one model, given in the order of its nodes."""

    def __init__(self) -> None:
        self._numbers: dict[ir.Value, int] = {}
        self._known: dict[Hashable, int] = {}

    def visit(self, node: ir.Node) -> None:
        """Number the outputs of a node whose inputs have been visited."""
        if len(node.outputs) != 1 or not can_evaluate(node):
            return
        attributes = tuple((name, attribute_key(attr)) for name, attr in sorted(node.attributes.items()))
        inputs = tuple(None if value is None else self.of(value) for value in node.inputs)
        self._assign(node.outputs[0], (node.op_type, attributes, inputs))

    def of(self, value: ir.Value) -> int:
        """The number of a value."""
        known = self._numbers.get(value)
        return self._assign(value, self._leaf_key(value)) if known is None else known

    def _assign(self, value: ir.Value, key: Hashable) -> int:
        return self._numbers.setdefault(value, self._known.setdefault(key, len(self._known)))

    def _leaf_key(self, value: ir.Value) -> Hashable:
        tensor = value.const_value if is_fixed(value) else None
        if tensor is not None and tensor.size <= SMALL and not tensor.dtype.is_floating_point():
            return tensor_key(tensor)
        return id(value)


def attribute_key(attr: ir.Attr) -> Hashable:
    """Equal for attributes of equal value."""
    if attr.type == ir.AttributeType.TENSOR:
        return tensor_key(attr.as_tensor())
    return str(attr.value)


def tensor_key(tensor: ir.TensorProtocol) -> Hashable:
    """Equal for small tensors of equal content; large ones are equal only to themselves."""
    if tensor.size > SMALL or tensor.dtype == ir.DataType.STRING:
        return id(tensor)
    return int(tensor.dtype), tuple(tensor.shape.numpy()), tensor.tobytes()
