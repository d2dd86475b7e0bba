"""What is said of each norm that was fused and of each look-alike that was left; goes into the manifest."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
_TRACE = "pkg.torch.onnx.stack_trace"


@dataclass(frozen=True)
class NormRecord:
    """One fused call site."""

    name: str
    module: str | None
    node: str
    op: str
    op_type: str
    dtype: str
    shape: list[int | str | None]
    axis: int
    epsilon: float
    epsilon_mode: str
    scale_order: str
    stash_type: str
    scale: str | None
    scale_dtype: str
    bias: str | None
    residual: bool
    location: str | None
    proof: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class LeftRecord:
    """A reduction that looks like a norm and was left, with the reason."""

    name: str
    node: str
    reason: str
    location: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)


def module_of(node: ir.Node) -> str | None:
    """The path of the PyTorch module that a node comes from, if the exporter wrote it."""
    scopes = node.metadata_props.get(_SCOPES)
    if not scopes:
        return None
    path = [scope for scope in ast.literal_eval(scopes)[:-1] if scope]
    return path[-1] if path else None


def location_of(node: ir.Node) -> str | None:
    """``file.py:line`` of the source, if the exporter wrote it."""
    return last_place(node.metadata_props.get(_TRACE) or str(node.meta.get(_TRACE, "")))


def last_place(trace: str) -> str | None:
    """``file.py:line`` of the innermost frame of a stack trace in Python's words."""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else None
