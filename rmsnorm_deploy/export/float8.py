"""Weights of one byte in opsets that have no such type.

ONNX has the float8 types from opset 19 on. Below that their constants become float16, which holds every number of
theirs, and so does what only moves them about. What computes in float8, as a cast to it does, can't be written there.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.errors import InputError

_SINCE = 19
_FLOAT8 = (
    ir.DataType.FLOAT8E4M3FN,
    ir.DataType.FLOAT8E4M3FNUZ,
    ir.DataType.FLOAT8E5M2,
    ir.DataType.FLOAT8E5M2FNUZ,
)


def widen_float8(model: ir.Model) -> None:
    """Widen the constants in place; nothing from opset 19 on.

    Raises InputError where an input or a cast is float8.
    """
    opset = model.opset_imports[""]
    if opset >= _SINCE:
        return
    made = [value for value in model.graph.inputs if value.dtype in _FLOAT8]
    made += [node.outputs[0] for node in model.graph.all_nodes() if node.op_type == "Cast" and _target(node) in _FLOAT8]
    if made:
        raise InputError(
            f"opset {opset}: {made[0].name} is float8, which ONNX has from opset {_SINCE} on: give --opset {_SINCE}"
        )
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            if value.dtype in _FLOAT8 and value.const_value is not None:
                _widen(graph, value, value.const_value)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.dtype in _FLOAT8:
                value.dtype = ir.DataType.FLOAT16


def _target(node: ir.Node) -> int:
    return node.attributes["to"].as_int()


def _widen(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """The same numbers under another name: the source's tensor of the old one has other bytes."""
    del graph.initializers[value.name or ""]
    value.name, value.dtype = f"{value.name}.float16", ir.DataType.FLOAT16
    numbers, shape = functools.partial(_numbers, tensor), ir.Shape(tensor.shape.numpy())
    value.const_value = ir.LazyTensor(numbers, ir.DataType.FLOAT16, shape, name=value.name)
    graph.initializers[value.name] = value


def _numbers(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(np.asarray(tensor.numpy()).astype(np.float16))
