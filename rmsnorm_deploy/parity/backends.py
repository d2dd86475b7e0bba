"""The backends that parity judges, and how the runtime opens each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.oracle import BundleLike

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.runtime.session import Session


@dataclass(frozen=True)
class Backend:
    """``runtime`` is the backend's name for `open_session`, with ``options``; ``name`` is parity's own, stable.

    ``limited_shapes``: a refused shape is the engine's profile, not an error.
    """

    name: str
    title: str
    runtime: str
    options: dict[str, Any] = field(default_factory=dict)
    limited_shapes: bool = False


_CUDA = {"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"], "custom_ops": "auto"}

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("pytorch", "PyTorch eager", "pytorch"),
        Backend("onnxruntime", "ONNX Runtime", "onnxruntime", {"custom_ops": False}),
        Backend(
            "onnxruntime-unoptimized",
            "ONNX Runtime (optimizer off)",
            "onnxruntime",
            {"custom_ops": False, "optimization": "disabled"},
        ),
        Backend("onnxruntime-kernels", "ONNX Runtime with our kernels", "onnxruntime", {"custom_ops": True}),
        Backend("onnxruntime-cuda", "ONNX Runtime on CUDA", "onnxruntime", _CUDA),
        Backend("tensorrt", "TensorRT", "tensorrt", limited_shapes=True),
        Backend("tensorrt-rtx", "TensorRT-RTX", "tensorrt-rtx", limited_shapes=True),
    )
}


def chosen(names: Sequence[str] | None) -> list[Backend]:
    """The backends by name, all of them for None. Raises InputError for a name that is none."""
    for name in names or ():
        if name not in BACKENDS:
            raise InputError(f"no backend {name!r} to judge: choose from {', '.join(BACKENDS)}")
    return [BACKENDS[name] for name in names] if names is not None else list(BACKENDS.values())


class HeldBundle:
    """A bundle that reads its program once, however many sessions are opened on it; or one with another model file."""

    def __init__(self, bundle: BundleLike, model_path: Path | None = None) -> None:
        self.path, self.manifest = bundle.path, bundle.manifest
        self.model_path = model_path or bundle.model_path
        self.reference_path, self.eager = bundle.reference_path, bundle.eager
        self._program = bundle.program()

    def program(self) -> torch.export.ExportedProgram | None:
        return self._program

    def session(self, backend: str = "onnxruntime", **options: Any) -> Session:
        from rmsnorm_deploy.runtime import open_session

        return open_session(self, backend, **options)


def open_baseline(bundle: BundleLike) -> tuple[str, Session] | None:
    """The model before export, with its name: PyTorch eager, else the unfused ONNX file with the optimizer off.

    None when the bundle holds neither. Raises DeployError when it is there and cannot be opened.
    """
    if bundle.eager is not None or bundle.program() is not None:
        return "PyTorch eager", bundle.session("pytorch")
    if bundle.reference_path is None:
        return None
    source = HeldBundle(bundle, bundle.reference_path)
    session = source.session("onnxruntime", custom_ops=False, optimization="disabled")
    return f"{source.model_path.name} in ONNX Runtime", session
