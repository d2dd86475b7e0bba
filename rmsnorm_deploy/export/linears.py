"""Linear layers as PyTorch's exporter writes them, and one in place of several that read the same value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from rmsnorm_deploy.export.nodes import is_op, only_user, producer, typed_like
from rmsnorm_deploy.fusion.values import Shapes


@dataclass(frozen=True)
class Linear:
    """``result = source @ weight.T + bias``."""

    product: ir.Node  # MatMul(source, Transpose(weight))
    weight: ir.Value  # [features out, features in]
    bias: ir.Value | None  # [features out]
    result: ir.Value

    @property
    def source(self) -> ir.Value | None:
        """What is multiplied."""
        return self.product.inputs[0]


def linear_of(product: ir.Node, shapes: Shapes) -> Linear | None:
    """The layer that a MatMul belongs to, where its matrix is a transposed weight."""
    transposed = producer(product.inputs[1], "Transpose") if is_op(product, "MatMul") else None
    weight = transposed.inputs[0] if transposed is not None else None
    if weight is None or not weight.is_initializer() or len(shapes.get(weight, ())) != 2:
        return None
    return Linear(product, weight, *_bias(product, shapes))


def _bias(product: ir.Node, shapes: Shapes) -> tuple[ir.Value | None, ir.Value]:
    """What a Linear adds to its product, and the value afterwards."""
    add = only_user(product.outputs[0], "Add")
    for value in add.inputs if add is not None else ():
        if value is not None and value.is_initializer() and shapes.get(value) == shapes[product.outputs[0]][-1:]:
            assert add is not None
            return value, add.outputs[0]
    return None, product.outputs[0]


def as_one(parts: Sequence[Linear]) -> list[ir.Node]:
    """One Linear whose columns are those of ``parts``, in order; its last node makes the result.

    All of ``parts`` read one value, and either all of them have a bias or none.
    """
    source = parts[0].source
    assert source is not None
    weight = ir.node("Concat", [part.weight for part in parts], {"axis": 0})
    transposed = ir.node("Transpose", [weight.outputs[0]], {"perm": [1, 0]})
    nodes = [weight, transposed, ir.node("MatMul", [source, transposed.outputs[0]])]
    if parts[0].bias is not None:
        bias = ir.node("Concat", [part.bias for part in parts], {"axis": 0})
        nodes += [bias, ir.node("Add", [nodes[-1].outputs[0], bias.outputs[0]])]
    for node in nodes:
        node.metadata_props.update(parts[0].product.metadata_props)
        typed_like(source, node)
    return nodes
