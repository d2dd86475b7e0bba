"""What the load stage hands to the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["module", "exported_program", "torchscript", "onnx"]


@dataclass
class Source:
    """A model as it was found, with example inputs to call it with.

    Attributes:
        kind: what ``model`` is.
        model: an ``nn.Module`` in eval mode, a ``torch.export.ExportedProgram``, a ``torch.jit.ScriptModule``, or the
            path of an ONNX file.
        args, kwargs: example inputs, as the model is called; empty for ONNX.
        dynamic_shapes: for ``torch.export.export``, keyed by parameter name; None when nothing is asked for (a program
            and a TorchScript archive carry their own shapes).
        dims: names of the dynamic axes: path of a tensor in the bound call ("x", "pair.0", "extras.b") -> axis -> name.
        ranges: least and greatest size of a named dim, where the user gave them.
        high: exclusive upper bound of the values of an integer input, by path.
        engine_profile: smallest, usual and largest size of each named dim for a TensorRT engine, where a recipe says.
        inputs_from: what describes the example inputs (an option, a recipe); None for a call that the caller made.
        path, recipe: the files it came from.
        notes: every choice made for the user, in the order made, to be printed.
    """

    kind: Kind
    model: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: dict[str, Any] | None = None
    dims: dict[str, dict[int, str]] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    high: dict[str, int] = field(default_factory=dict)
    engine_profile: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    inputs_from: str | None = None
    path: Path | None = None
    recipe: Path | None = None
    notes: list[str] = field(default_factory=list)
