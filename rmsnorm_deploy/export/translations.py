"""Operators that PyTorch's exporter has no ONNX function for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18


def table() -> dict[Any, Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=...)``."""
    return {torch.ops.aten.sort.stable: _stable_sort}


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """TopK of all: of equal elements the first comes first, in both directions."""
    size = opset18.Shape(self, start=dim, end=None if dim == -1 else dim + 1)
    return opset18.TopK(self, size, axis=dim, largest=int(descending), sorted=1)
