"""Sources that PyTorch's newer exporter can't read: ONNX files and TorchScript."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.naming import vocabularies
from rmsnorm_deploy.export.onnx_reader import read_onnx
from rmsnorm_deploy.export.quiet import reason, silence
from rmsnorm_deploy.export.torchscript_ops import register_rms_norm
from rmsnorm_deploy.export.traced import Traced
from rmsnorm_deploy.export.weights import merge_tied
from rmsnorm_deploy.load import Source, refused_call
from rmsnorm_deploy.load.quantized import CURE


def from_onnx(path: Path | ir.Model, source: Source) -> Traced:
    """An ONNX file, or a model in memory; weights of a file stay on disk.

    Raises:
        InputError: it can't be read, or an input has no rank.
    """
    model = path if isinstance(path, ir.Model) else read_onnx(path)
    if model.ir_version < 4:
        # before IR 4 every initializer had to be listed as an input too
        kept = [v for v in model.graph.inputs if not v.is_initializer()]
        model.graph.inputs.clear()
        model.graph.inputs.extend(kept)
    ranked = {value.name: value.shape is not None for value in model.graph.inputs}
    if not all(ranked.values()):
        name = next(name for name, known in ranked.items() if not known)
        raise InputError(f"input '{name}' says nothing of its shape, not even its rank: write it into the file")
    merge_tied(model)
    traced = Traced(model, None, [], high=vocabularies(model))
    for value in model.graph.inputs:
        for dim in value.shape or ():
            name = None if isinstance(dim, int) or dim.value is None else str(dim.value)
            if name is not None and name.isidentifier():
                low, high = source.ranges.get(name, (0, None))
                traced.dims.setdefault(name, {"example": None, "min": low, "max": high})
    return traced


def from_torchscript(source: Source, opset: int) -> Traced:
    """TorchScript, through PyTorch's older exporter.

    Raises:
        InputError: the exporter can't write it; the message carries its reason.
    """
    leaves = [(path, value) for path, value in script_leaves(source) if isinstance(value, torch.Tensor)]
    axes = {
        path: {axis: (source.dims.get(path, {}).get(axis) or f"{path}_dim{axis}") for axis in source.dims.get(path, {})}
        for path, _ in leaves
    }
    buffer = io.BytesIO()
    register_rms_norm(opset)
    try:
        with torch.no_grad(), silence():
            torch.onnx.export(
                source.model,
                (*source.args, *source.kwargs.values()),
                buffer,  # type: ignore[arg-type]
                dynamo=False,
                opset_version=opset,
                input_names=[path for path, _ in leaves],
                dynamic_axes={path: found for path, found in axes.items() if found},
                do_constant_folding=False,
            )
    except Exception as error:  # the exporter raises failures of any kind
        cure = f": it is quantized, {CURE}" if "quantized::" in str(error) else ""
        raise InputError(
            refused_call(source) or f"PyTorch can't write the TorchScript model as ONNX: {reason(error)}{cure}"
        ) from error
    proto = onnx.shape_inference.infer_shapes(onnx.load_from_string(buffer.getvalue()))
    traced = from_onnx(ir.from_proto(proto), source)
    traced.parameters = [path for path, _ in script_leaves(source)]
    for path, value in script_leaves(source):
        for axis, name in axes.get(path, {}).items():
            traced.dims.setdefault(name, {"example": None, "min": 0, "max": None})["example"] = value.shape[axis]
    return traced


def script_leaves(source: Source) -> list[tuple[str, Any]]:
    """The arguments of a TorchScript module's example call, by name, in order."""
    names = [argument.name for argument in source.model.forward.schema.arguments[1:]]
    return [*zip(names, source.args, strict=False), *source.kwargs.items()]
