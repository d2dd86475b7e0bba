"""Bundles built straight from torch's exporter, without the pipeline, for parity, benchmark and report."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from rmsnorm_deploy.runtime import Session, open_session
from rmsnorm_deploy.runtime.binding import flatten

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.bool: "bool",
}


@dataclass
class FakeBundle:
    """The part of a bundle that parity, the benchmark and the report read."""

    path: Path
    manifest: dict[str, Any]
    torch_program: torch.export.ExportedProgram | None = None
    reference_path: Path | None = None
    eager: torch.nn.Module | None = None
    norms: list[dict[str, Any]] = field(default_factory=list)
    left: list[dict[str, Any]] = field(default_factory=list)

    @property
    def model_path(self) -> Path:
        return self.path / "model.onnx"

    def program(self) -> torch.export.ExportedProgram | None:
        return self.torch_program

    def session(self, backend: str = "onnxruntime", **options: Any) -> Session:
        return open_session(self, backend, **options)


def make_bundle(
    folder: Path,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dims: dict[str, tuple[int, ...]] | None = None,
    high: int | None = None,
) -> FakeBundle:
    """Export ``model`` as it is, unfused. ``dims`` names dynamic axes: {"batch": (0,), ...} by axis of every input."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.eval()
    names = {axis: name for name, axes in (dims or {}).items() for axis in axes}
    dynamic = pytree.tree_map(lambda leaf: _dynamic(leaf, names), (args, kwargs or {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, kwargs, dynamic_shapes=_by_name(model, dynamic), strict=False)
        onnx_program = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=18, verbose=False)
    assert onnx_program is not None
    onnx_program.save(folder / "model.onnx")
    manifest = _manifest(folder / "model.onnx", model, args, kwargs or {}, names, high)
    bundle = FakeBundle(folder, manifest, program, eager=model, norms=manifest["norms"], left=manifest["left"])
    write_manifest(bundle)
    return bundle


def write_manifest(bundle: FakeBundle) -> None:
    files = [path for path in sorted(bundle.path.iterdir()) if path.name != "manifest.json"]
    bundle.manifest["files"] = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in files
    }
    (bundle.path / "manifest.json").write_text(json.dumps(bundle.manifest))


def onnx_only(bundle: FakeBundle) -> FakeBundle:
    """The same bundle as if it came from an ONNX file: its model is its own unfused reference."""
    manifest = {**bundle.manifest, "signature": {**bundle.manifest["signature"], "parameters": []}}
    return FakeBundle(bundle.path, manifest, None, bundle.model_path, None, bundle.norms, bundle.left)


def edit_model(bundle: FakeBundle, change: Any) -> None:
    """Rewrite model.onnx after ``change(ir.Model)``: how a fault is planted."""
    model = ir.load(bundle.model_path)
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(np.array(value.const_value.numpy()), dtype=value.const_value.dtype)
    change(model)
    ir.save(model, bundle.model_path)


def _dynamic(leaf: Any, names: dict[int, str]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None
    return {axis: torch.export.Dim.DYNAMIC for axis in names if axis < leaf.ndim}


def _by_name(model: torch.nn.Module, dynamic: tuple[Any, Any]) -> dict[str, Any]:
    import inspect

    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, dynamic[0], strict=False)), **dynamic[1]}


def _manifest(
    path: Path,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: dict[int, str],
    high: int | None,
) -> dict[str, Any]:
    import inspect

    parameters = list(inspect.signature(model.forward).parameters)
    bound = {**dict(zip(parameters, args, strict=False)), **kwargs}
    leaves = {path: leaf for name, value in bound.items() for path, leaf in flatten(name, value).items()}
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    graph = ir.load(path).graph
    with torch.no_grad():
        outputs = [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    norms = [
        {
            "name": name, "module": name, "node": f"node_{name}", "op": "RMSNorm", "op_type": "RMSNorm_before_cast",
            "dtype": DTYPES[module.weight.dtype], "shape": ["batch", *module.normalized_shape],
            "axis": -len(module.normalized_shape), "epsilon": module.eps or 1e-6, "epsilon_mode": "inside",
            "scale_order": "before_cast", "stash_type": "float32", "scale": f"{name}.weight",
            "scale_dtype": DTYPES[module.weight.dtype], "bias": None, "residual": False, "location": None,
            "proof": {"float64": 1e-16, "own": 0.5},
        }
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.RMSNorm)
    ]  # fmt: skip
    return {
        "format": 1,
        "tool": {"name": "rmsnorm_deploy", "version": "0.1.0"},
        "created": "2025-01-01T00:00:00Z",
        "source": {"kind": "module", "path": None, "recipe": None},
        "opset": 18,
        "ir_version": 10,
        "precision": "keep",
        "signature": {
            "parameters": parameters,
            "inputs": [
                {
                    "name": value.name,
                    "path": path,
                    "dtype": DTYPES[leaf.dtype],
                    "shape": [names.get(axis, size) for axis, size in enumerate(leaf.shape)],
                    "high": high if leaf.dtype == torch.int64 else None,
                }
                for value, (path, leaf) in zip(graph.inputs, tensors.items(), strict=True)
            ],
            "constants": [
                {"path": path, "value": leaf} for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)
            ],
            "outputs": [
                {"name": value.name, "dtype": DTYPES[leaf.dtype], "shape": list(leaf.shape)}
                for value, leaf in zip(graph.outputs, outputs, strict=True)
            ],
        },
        "dims": {
            name: {
                "example": next(leaf.shape[axis] for leaf in tensors.values() if axis < leaf.ndim),
                "min": 0,
                "max": None,
            }
            for axis, name in names.items()
        },
        "norms": norms,
        "left": [],
        "versions": {"torch": torch.__version__},
    }


class Block(torch.nn.Module):
    """Pre-norm attention and feed-forward with RMSNorm: small, and all that the tests need of a transformer."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.RMSNorm(width, eps=1e-6), torch.nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(torch.nn.functional.silu(self.up(self.norm2(hidden))))


class TokenModel(torch.nn.Module):
    """Ids in, logits out: an embedding, some blocks, a norm and a head."""

    def __init__(self, vocabulary: int = 50, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width, eps=1e-6)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(self.norm(hidden))
        return result
