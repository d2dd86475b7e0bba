"""Weights as products read them: transposed, and side by side where one product has several.

A runtime that finds Transpose(Concat(weights)) computes it when it loads the model, and has the weights in memory twice
meanwhile or for good. Stored as they are read, they are mapped from the file. Each keeps a part of it, seen through
strides, so that whoever knows a weight by its name finds it (`program.weights.json`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.export.nodes import producer
from rmsnorm_deploy.export.weights import Part, describe

_LEAST = 256  # elements: of smaller ones a runtime makes what it likes in no time


def stack_weights(graph: ir.Graph) -> None:
    """Put weights that only one product reads, by way of a Transpose, in the place of that, in place."""
    for node in list(graph):
        if (node.domain, node.op_type) == ("", "Transpose") and list(node.attributes["perm"].as_ints()) == [1, 0]:
            weights = _only_read_by(node)
            if weights and not node.outputs[0].is_graph_output():
                _stack(graph, node, weights)


def _only_read_by(transpose: ir.Node) -> list[ir.Value]:
    """The weights that nobody but ``transpose`` reads, through a Concat of their rows or directly."""
    concat = producer(transpose.inputs[0], "Concat")
    if concat is not None and (concat.attributes["axis"].as_int() != 0 or len(concat.outputs[0].uses()) != 1):
        return []
    reads = concat.inputs if concat is not None else transpose.inputs
    weights = [value for value in reads if value is not None and _is_weight(value)]
    kinds = {(weight.dtype, weight.const_value.shape[1]) for weight in weights if weight.const_value is not None}
    return weights if len(weights) == len(reads) == len(set(weights)) and len(kinds) == 1 else []


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    fixed = value.is_initializer() and not value.is_graph_input() and not value.is_graph_output()
    return fixed and tensor is not None and tensor.size >= _LEAST and len(tensor.shape) == 2 and len(value.uses()) == 1


def _stack(graph: ir.Graph, transpose: ir.Node, weights: list[ir.Value]) -> None:
    tensors: list[Any] = [weight.const_value for weight in weights]
    name = _joint_name([weight.name or "" for weight in weights])
    rows = [int(tensor.shape[0]) for tensor in tensors]
    shape = ir.Shape([int(tensors[0].shape[1]), sum(rows)])
    dtype = tensors[0].dtype

    def read() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([tensor.numpy().T for tensor in tensors], axis=1), dtype)

    columns = [sum(rows[:index]) for index in range(len(rows))]
    parts = [Part(w.name or "", c, r) for w, c, r in zip(weights, columns, rows, strict=True)]
    stacked = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype))
    stacked.const_value = ir.LazyTensor(read, dtype, shape, name=name, metadata_props=describe(parts))
    result = transpose.outputs[0]
    ir.convenience.replace_all_uses_with(result, stacked)
    concat = producer(transpose.inputs[0], "Concat")
    graph.remove([transpose, *([concat] if concat is not None else [])], safe=True)
    for weight in weights:
        del graph.initializers[weight.name or ""]
    graph.register_initializer(stacked)


def _joint_name(names: list[str]) -> str:
    """One name of several: layers.0.{q,k,v}.weight is layers.0.q+k+v.weight; ".T" says that it is transposed."""
    if len(names) == 1:
        return names[0] + ".T"
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) > 1:
        return "+".join(names) + ".T"
    levels = ["+".join(dict.fromkeys(level)) for level in zip(*split, strict=True)]
    return ".".join(levels) + ".T"
