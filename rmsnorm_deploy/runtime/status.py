"""What can run here: every backend and execution provider, there or why not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.cuda import no_gpu_cure, no_gpu_reason
from rmsnorm_deploy.runtime.optional import load_module
from rmsnorm_deploy.runtime.ort_plugins import PLUGINS, install, plugin_devices
from rmsnorm_deploy.runtime.tensorrt_session import MODULES

PROVIDER_INSTALL = {
    "CUDAExecutionProvider": "pip install onnxruntime-gpu",
    "TensorrtExecutionProvider": "pip install onnxruntime-gpu tensorrt",
    "NvTensorRTRTXExecutionProvider": "pip install onnxruntime-ep-nv-tensorrt-rtx",
    "OpenVINOExecutionProvider": "pip install onnxruntime-openvino",
    "DmlExecutionProvider": "pip install onnxruntime-directml (Windows)",
    "QNNExecutionProvider": "pip install onnxruntime-qnn",
    "CoreMLExecutionProvider": "pip install onnxruntime (macOS)",
}

RTX_BUILDS_FOR = (75, 80, 86, 89, 120, 121)

NATIVE_PURPOSE = {
    "cpu": "kernels for the CPU",
    "ort": "custom ops for onnxruntime",
    "cuda": "kernels for CUDA",
    "tensorrt": "plugin for tensorrt",
    "tensorrt-ort": "plugin for onnxruntime's TensorRT provider",
}

PACKAGES = (
    "torch", "numpy", "ml_dtypes", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "tensorrt",
    "tensorrt-rtx-cu13", "transformers", "safetensors", "gguf", "accelerate",
)  # fmt: skip


@dataclass(frozen=True)
class BackendStatus:
    """One backend, execution provider or compiled library.

    ``available`` says that models run on it here and now; ``detail`` is what it is, or why it is not there; ``install``
    is how to get it; ``builds`` says that engines can be built here, whether or not they can run here.
    """

    name: str
    available: bool
    version: str | None
    detail: str
    install: str | None = None
    builds: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def available() -> list[BackendStatus]:
    """The status of PyTorch, ONNX Runtime and each of its providers, both TensorRTs, and our compiled libraries."""
    return [*_pytorch(), *_onnxruntime(), _tensorrt("tensorrt"), _tensorrt("tensorrt-rtx"), *_native()]


def versions() -> dict[str, str | None]:
    """Versions of Python and of each package that matters; None for those not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pytorch() -> Iterator[BackendStatus]:
    yield BackendStatus("pytorch (cpu)", True, torch.__version__, f"{torch.get_num_threads()} threads")
    reason = no_gpu_reason()
    if reason:
        yield BackendStatus("pytorch (cuda)", False, None, reason, no_gpu_cure())
        return
    major, minor = torch.cuda.get_device_capability()
    detail = f"{torch.cuda.get_device_name()}, SM {major}{minor}, CUDA {torch.version.cuda}"
    yield BackendStatus("pytorch (cuda)", True, torch.__version__, detail)


def _onnxruntime() -> Iterator[BackendStatus]:
    install = "pip install onnxruntime (or onnxruntime-gpu)"
    try:
        ort = load_module("onnxruntime", install)
    except BackendUnavailable as error:
        yield BackendStatus("onnxruntime", False, None, str(error).removesuffix(f": {install}"), install)
        return
    present = ort.get_available_providers()
    yield BackendStatus("onnxruntime", True, ort.__version__, f"{len(present)} execution providers in this build")
    known = {*ort.get_all_providers(), *present, *PLUGINS}
    for name in sorted(known, key=lambda name: (name not in present, name)):
        if name in PLUGINS and name not in present:
            yield _plugin_provider(ort, name)
        else:
            yield _provider(name, name in present, ort.__version__)


def _plugin_provider(ort: types.ModuleType, name: str) -> BackendStatus:
    """A provider of a package of its own; only registering it tells whether it works."""
    label, get = f"onnxruntime {name}", install(name)
    if importlib.util.find_spec(PLUGINS[name]) is None:
        return BackendStatus(label, False, None, f"{PLUGINS[name]} is not installed", get)
    try:
        devices = plugin_devices(ort, name)
    except BackendUnavailable as error:
        return BackendStatus(label, False, None, str(error), "an NVIDIA GPU and driver that it supports")
    version = getattr(importlib.import_module(PLUGINS[name]), "__version__", None)
    return BackendStatus(label, True, version, f"a package of its own, registered; devices: {len(devices)}")


def _provider(name: str, present: bool, version: str) -> BackendStatus:
    label = f"onnxruntime {name}"
    if not present:
        install = PROVIDER_INSTALL.get(name, f"an onnxruntime built with {name}")
        return BackendStatus(label, False, None, "not in this build of onnxruntime", install)
    reason = no_gpu_reason() if name.startswith(("CUDA", "Tensorrt", "NvTensorRT")) else None
    if reason:
        return BackendStatus(label, False, version, f"in this build, but {reason}", no_gpu_cure())
    return BackendStatus(label, True, version, "in this build")


def _tensorrt(backend: str) -> BackendStatus:
    name, install = MODULES[backend]
    try:
        module = load_module(name, install)
    except BackendUnavailable as error:
        return BackendStatus(backend, False, None, str(error).removesuffix(f": {install}"), install)
    version, reason = str(module.__version__), no_gpu_reason()
    if reason is None:
        return BackendStatus(backend, True, version, "builds and runs engines here", builds=True)
    if backend == "tensorrt-rtx":
        targets = ", ".join(str(sm) for sm in RTX_BUILDS_FOR)
        detail = f"builds engines for SM {targets} without a GPU, and runs them with one; {reason}"
        return BackendStatus(backend, False, version, detail, no_gpu_cure(), builds=True)
    return BackendStatus(backend, False, version, f"builds and runs engines with a GPU only; {reason}", no_gpu_cure())


def _native() -> Iterator[BackendStatus]:
    from rmsnorm_deploy import native

    for library in native.status():
        label = f"native {library.kind}: {NATIVE_PURPOSE.get(library.kind, library.kind)}"
        if library.path is not None:
            yield BackendStatus(label, True, None, f"{library.detail}, {library.path}")
        else:
            detail, _, install = library.detail.partition(": run ")
            yield BackendStatus(label, False, None, detail, install or "a checkout of the sources")
