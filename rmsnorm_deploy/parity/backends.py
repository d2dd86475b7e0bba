"""The backends that parity judges, and how each is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.ort_options import sparing_options
from rmsnorm_deploy.parity.ulp import Array

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.runtime.session import Session


@dataclass(frozen=True)
class Backend:
    """``runtime`` is the backend's name for `open_session`, with ``options`` (or one of parity's own: see `open_on`);
    ``name`` is parity's own, stable.

    ``limited_shapes``: a refused shape is the engine's profile, not an error.
    """

    name: str
    title: str
    runtime: str
    options: dict[str, Any] = field(default_factory=dict)
    limited_shapes: bool = False

    @property
    def shows_norms(self) -> bool:
        """Whether values inside the model can be had from it, by their names in the file."""
        return self.runtime in ("onnxruntime", REFERENCE)

    @property
    def widens(self) -> bool:
        """Whether it runs ops without a bfloat16 kernel in float32: for other models it is what it is without that."""
        return bool(self.options.get("widen_bfloat16"))

    @property
    def unfused(self) -> Backend | None:
        """What runs the model before fusing on the same runtime with the same options; None where nothing does."""
        if self.runtime == "onnxruntime":
            return replace(self, options={**self.options, "custom_ops": False})
        return self if self.runtime == REFERENCE else None


REFERENCE = "onnx-reference"
KERNELS = "pytorch-kernels"
_CUDA = {"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"], "custom_ops": "auto"}
_WIDENED = {"widen_bfloat16": True}

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("pytorch", "PyTorch eager", "pytorch"),
        Backend(KERNELS, "PyTorch with our kernels", KERNELS),
        Backend(REFERENCE, "ONNX reference evaluator", REFERENCE),
        Backend("onnxruntime", "ONNX Runtime", "onnxruntime", {"custom_ops": False}),
        Backend(
            "onnxruntime-unoptimized",
            "ONNX Runtime (optimizer off)",
            "onnxruntime",
            {"custom_ops": False, "optimization": "disabled"},
        ),
        Backend("onnxruntime-kernels", "ONNX Runtime with our kernels", "onnxruntime", {"custom_ops": True}),
        Backend("onnxruntime-widened", "ONNX Runtime, bf16 widened", "onnxruntime", {"custom_ops": False, **_WIDENED}),
        Backend(
            "onnxruntime-kernels-widened",
            "ONNX Runtime, our kernels, bf16 widened",
            "onnxruntime",
            {"custom_ops": True, **_WIDENED},
        ),
        Backend("onnxruntime-cuda", "ONNX Runtime on CUDA", "onnxruntime", _CUDA),
        Backend("tensorrt", "TensorRT", "tensorrt", limited_shapes=True),
        Backend("tensorrt-rtx", "TensorRT-RTX", "tensorrt-rtx", limited_shapes=True),
    )
}


def chosen(names: Sequence[str] | None, manifest: Mapping[str, Any]) -> list[Backend]:
    """The backends by name, for None all of them that are for such a model.

    Raises:
        InputError: a name that is none.
    """
    for name in names or ():
        if name not in BACKENDS:
            raise InputError(f"no backend {name!r} to judge: choose from {', '.join(BACKENDS)}")
    if names is not None:
        return [BACKENDS[name] for name in names]
    return [backend for backend in BACKENDS.values() if not backend.widens or _has_bfloat16(manifest)]


def _has_bfloat16(manifest: Mapping[str, Any]) -> bool:
    tensors = [*manifest["norms"], *manifest["signature"]["inputs"], *manifest["signature"]["outputs"]]
    return any(item["dtype"] == "bfloat16" for item in tensors)


class Runner(Protocol):
    """The part of a session that parity needs."""

    def run(self, feeds: Mapping[str, Array]) -> Mapping[str, Any]: ...


class EagerRunner:
    """PyTorch with the norms of this package on the compiled kernels (``kernels``), or on PyTorch's operations."""

    def __init__(self, bundle: BundleLike, kernels: bool) -> None:
        self._session = bundle.session("pytorch")
        self._kernels = kernels

    def run(self, feeds: Mapping[str, Array]) -> Mapping[str, Any]:
        with _eager_kernels(self._kernels):
            return self._session.run(feeds)


@contextmanager
def _eager_kernels(wanted: bool) -> Iterator[None]:
    from rmsnorm_deploy.eager_kernels import use_kernels

    before = use_kernels(wanted)
    try:
        yield
    finally:
        use_kernels(before)


def require(backend: Backend, manifest: Mapping[str, Any]) -> None:
    """Raise BackendUnavailable where ``backend`` is not on this machine, as far as that shows without a model."""
    from rmsnorm_deploy.runtime.optional import load_module, native_library

    if backend.runtime in ("tensorrt", "tensorrt-rtx"):
        from rmsnorm_deploy.runtime.cuda import CudaDevice
        from rmsnorm_deploy.runtime.tensorrt_session import MODULES

        load_module(*MODULES[backend.runtime])
        CudaDevice(None)
    elif backend.runtime == "onnxruntime":
        from rmsnorm_deploy.runtime.onnxruntime_session import INSTALL
        from rmsnorm_deploy.runtime.ort_providers import resolve_providers

        ort = load_module("onnxruntime", INSTALL)
        resolve_providers(ort.get_available_providers(), backend.options.get("providers"), manifest, None)
        if backend.options.get("custom_ops") is True and native_library("ort") is None:
            raise BackendUnavailable("the custom ops are not built: run python -m rmsnorm_deploy.native build")


def open_on(bundle: BundleLike, backend: Backend, *, insist: bool = False) -> Runner:
    """What runs ``bundle`` as ``backend`` does. With ``insist`` a backend that is only slow runs too.

    Raises:
        BackendUnavailable: the backend is not here, or does not serve this model.
        InputError: the model cannot be loaded.
    """
    if backend.runtime == REFERENCE:
        from rmsnorm_deploy.parity.evaluator import MAX_BYTES, EvaluatorSession

        return EvaluatorSession(bundle, None if insist else MAX_BYTES)
    if backend.runtime == KERNELS:
        _require_kernels(bundle)
    if backend.runtime in ("pytorch", KERNELS):
        return EagerRunner(bundle, backend.runtime == KERNELS)
    return bundle.session(backend.runtime, **_with_sparing_options(backend))


def _with_sparing_options(backend: Backend) -> dict[str, Any]:
    """The options of a backend; "auto" finds out by itself whether the custom ops serve, and takes none besides."""
    if backend.runtime != "onnxruntime" or backend.options.get("custom_ops") == "auto":
        return backend.options
    return {**backend.options, "session_options": sparing_options()}


def _require_kernels(bundle: BundleLike) -> None:
    """Raises BackendUnavailable where eager PyTorch would run none of the compiled kernels."""
    from rmsnorm_deploy.ckernel import cpu_library
    from rmsnorm_deploy.norm import RMSNorm, SkipRMSNorm

    if bundle.eager is None:
        if bundle.program() is None:
            raise BackendUnavailable(
                "this bundle was not made from a PyTorch module, whose norms would have the kernels"
            )
        raise BackendUnavailable(
            "the module itself is not at hand, only its traced program, which has no kernel of ours"
        )
    if not any(isinstance(module, RMSNorm | SkipRMSNorm) for module in bundle.eager.modules()):
        raise BackendUnavailable(
            "no norm of the module is rmsnorm_deploy.RMSNorm or SkipRMSNorm, which have the kernels"
        )
    if cpu_library() is None:
        raise BackendUnavailable("the kernels are not built: run python -m rmsnorm_deploy.native build")


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


def open_baseline(bundle: BundleLike) -> tuple[str, Runner] | None:
    """The model before export, with its name: PyTorch eager, else the unfused ONNX file with the optimizer off.

    None when the bundle holds neither. Raises DeployError when it is there and cannot be opened.
    """
    if bundle.eager is not None or bundle.program() is not None:
        return BACKENDS["pytorch"].title, open_on(bundle, BACKENDS["pytorch"])
    if bundle.reference_path is None:
        return None
    source = HeldBundle(bundle, bundle.reference_path)
    session = open_on(source, BACKENDS["onnxruntime-unoptimized"])
    return f"{source.model_path.name} in ONNX Runtime", session
