"""``aten::rms_norm`` for PyTorch's TorchScript exporter, which does not know it."""

from __future__ import annotations

from typing import Any

import torch
from torch.onnx import register_custom_op_symbolic, symbolic_helper  # type: ignore[attr-defined]

_CODES = {"Half": 10, "BFloat16": 16}  # ONNX's numbers for the half types
_FLOAT = 1


def register_rms_norm(opset: int) -> None:
    """Let ``torch.onnx.export(..., dynamo=False, opset_version=opset)`` write ``torch.rms_norm``.

    It is written as torch computes it: halves are widened to float32, the weight too, and rounded once at the end.
    ReduceMean takes its axes as an input, so ``opset`` must be 18 or more.
    """
    register_custom_op_symbolic("aten::rms_norm", _rms_norm, opset)


def _rms_norm(g: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    kind = x.type().scalarType()
    stash = torch.float64 if kind == "Double" else torch.float32
    axes = torch.arange(-len(symbolic_helper._maybe_get_const(shape, "is")), 0)
    value = symbolic_helper._maybe_get_const(eps, "f")
    if not isinstance(value, float):  # None: the eps of the dtype that torch computes in
        value = torch.finfo(stash).eps

    def constant(number: float) -> Any:
        return g.op("Constant", value_t=torch.tensor(number, dtype=stash))

    def wide(tensor: Any) -> Any:
        return g.op("Cast", tensor, to_i=_FLOAT) if kind in _CODES else tensor

    row = wide(x)
    mean = g.op("ReduceMean", g.op("Pow", row, constant(2.0)), g.op("Constant", value_t=axes), keepdims_i=1)
    y = g.op("Div", row, g.op("Sqrt", g.op("Add", mean, constant(value))))
    if not symbolic_helper._is_none(weight):
        y = g.op("Mul", y, wide(weight))
    return g.op("Cast", y, to_i=_CODES[kind]) if kind in _CODES else y
