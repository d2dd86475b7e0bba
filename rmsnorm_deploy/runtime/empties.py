"""Keeps empty inputs from the ops by which ONNX Runtime ends the whole process: no caller could catch that."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

# Of the ops in ONNX's own tests, each run with every axis empty, those that divide by zero, abort or read out of bounds
# on the CPU in ONNX Runtime 1.32.
_END_THE_PROCESS = {"ConvTranspose", "Einsum", "GRU", "LSTM", "Unique"}


def is_empty(shapes: Iterable[Iterable[int]]) -> bool:
    """Whether a shape has no elements."""
    return any(0 in shape for shape in shapes)


def dies_of_empty(model: ir.Model) -> str | None:
    """An op of a model that ends the process on an empty input; None if it has none."""
    functions = [node for function in model.functions.values() for node in function.all_nodes()]
    for node in (*model.graph.all_nodes(), *functions):
        if node.domain in ("", "ai.onnx") and node.op_type in _END_THE_PROCESS:
            return node.op_type
    return None


def refusal(op_type: str) -> str:
    """Why an empty input is not run, in words."""
    return f"an input is empty, and ONNX Runtime's {op_type} would end the whole process"
