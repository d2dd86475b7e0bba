"""What the trace stage hands to the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch


@dataclass
class Traced:
    """An unfused ONNX model, with names and dims as the user knows them.

    Attributes:
        model: the graph; inputs, outputs and dims have the names that the manifest will give.
        program: the traced PyTorch program; None for ONNX and TorchScript.
        parameters: forward's parameter names; "*rest" and "**rest" for variadic ones; none for ONNX.
        constants: arguments that are no tensors, as ``{"path": ..., "value": ...}``: fixed from here on.
        dims: example, least and greatest size of each named dim.
        high: exclusive upper bound of an integer input's values, by input name.
        notes: choices made on the way, to be printed.
        draws: the ops that draw random numbers, in words.
    """

    model: ir.Model
    program: torch.export.ExportedProgram | None
    parameters: list[str]
    constants: list[dict[str, Any]] = field(default_factory=list)
    dims: dict[str, dict[str, int | None]] = field(default_factory=dict)
    high: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    draws: str | None = None
