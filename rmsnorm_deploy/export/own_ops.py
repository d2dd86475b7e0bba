"""Operators in a traced program that stand for others, taken apart into these.

The package's own: ONNX has no function for them, and parity's oracle must compute what they mean, where a float32
kernel is no float64 truth. And functions that torch.vmap was given, as masks of transformers are built: PyTorch traces
a call of them that it can't save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rmsnorm_deploy.export.quiet import silence

_NAMES = ("rmsnorm_deploy.rms_norm.default", "rmsnorm_deploy.skip_rms_norm.default", "flat_apply")


def spell_out(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` itself where it calls none of the operators, else the same program in PyTorch's own operations."""
    if not _calls_them(program):
        return program
    with torch.no_grad(), silence():
        plain: torch.export.ExportedProgram = program.run_decompositions(_table())
    return plain


def _calls_them(program: torch.export.ExportedProgram) -> bool:
    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    targets = (node.target for graph in graphs for node in graph.nodes)
    return any(str(target) in _NAMES for target in targets)


def _table() -> dict[Any, Callable[..., Any]]:
    from rmsnorm_deploy.torch_ops import plain_rms_norm, plain_skip_rms_norm

    ours = torch.ops.rmsnorm_deploy
    return {ours.rms_norm.default: plain_rms_norm, ours.skip_rms_norm.default: plain_skip_rms_norm}
