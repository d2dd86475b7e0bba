"""Which opsets and dtypes can be had of a kind of file: found out before it is loaded."""

from __future__ import annotations

import contextlib

import onnx
import torch

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.pipeline import DEFAULT_OPSET
from rmsnorm_deploy.export.quiet import silence
from rmsnorm_deploy.export.trace import MIN_TORCH_OPSET
from rmsnorm_deploy.load.sniff import FileKind
from rmsnorm_deploy.opset import MIN_OPSET

SURE_OPSET = 23  # what every supported PyTorch writes; newer ones are asked of it
_BUILT_IN: dict[FileKind, str] = {"onnx": "an ONNX file", "torchscript": "TorchScript", "program": "a .pt2 program"}


def check_opset(kind: FileKind, opset: int | None) -> int:
    """The opset to write for a file of ``kind`` when ``opset`` is asked for, None being none in particular.

    Raises:
        InputError: the exporter of that kind can't write it.
    """
    if opset is None:
        return DEFAULT_OPSET
    if kind == "onnx":
        raise InputError(f"--opset {opset}: an ONNX file keeps its own opset: drop --opset")
    newest = onnx.defs.onnx_opset_version()
    if kind == "torchscript":
        if not MIN_OPSET <= opset <= newest:
            raise InputError(f"--opset {opset}: TorchScript can be written as {MIN_OPSET} and newer: try --opset 18")
    elif not MIN_TORCH_OPSET <= opset <= newest or (opset > SURE_OPSET and not _writes(opset)):
        raise InputError(
            f"--opset {opset}: PyTorch {torch.__version__} does not write it: give {MIN_TORCH_OPSET} to {SURE_OPSET} "
            f"(18 to 22 run everywhere)"
        )
    return opset


def check_precision(kind: FileKind, precision: str) -> None:
    """Raise InputError when a file of ``kind`` has its dtypes built in and another ``precision`` is asked for."""
    if precision != "keep" and kind in _BUILT_IN:
        raise InputError(
            f"--precision {precision}: {_BUILT_IN[kind]} has its dtypes built in; export the PyTorch module instead"
        )


def _writes(opset: int) -> bool:
    """Whether PyTorch's exporter writes ``opset``: where it can't, it writes another without a word."""
    with contextlib.suppress(Exception), silence():  # asked for what it doesn't know, it may fail in any way
        exported = torch.onnx.export(
            torch.nn.Identity(), (torch.zeros(1),), dynamo=True, opset_version=opset, optimize=False, verbose=False
        )
        return exported is not None and exported.model.opset_imports.get("") == opset
    return False
