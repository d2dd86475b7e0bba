"""One `Session` interface over PyTorch, ONNX Runtime, TensorRT and TensorRT-RTX."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.runtime.session import BundleLike, Session
from rmsnorm_deploy.runtime.status import BackendStatus, available

__all__ = ["BACKENDS", "BackendStatus", "BundleLike", "Session", "available", "open_session"]

_OPENERS = {
    "onnxruntime": ("rmsnorm_deploy.runtime.onnxruntime_session", "OnnxRuntimeSession", {}),
    "pytorch": ("rmsnorm_deploy.runtime.pytorch_session", "PyTorchSession", {}),
    "tensorrt": ("rmsnorm_deploy.runtime.tensorrt_session", "open_tensorrt", {"backend": "tensorrt"}),
    "tensorrt-rtx": ("rmsnorm_deploy.runtime.tensorrt_session", "open_tensorrt", {"backend": "tensorrt-rtx"}),
}

BACKENDS = tuple(_OPENERS)


def open_session(bundle: BundleLike, backend: str = "onnxruntime", **options: Any) -> Session:
    """Open ``bundle`` with one of `BACKENDS`; the options are those of the backend's own session class.

    Raises:
        InputError: no such backend, an option it does not have, or a model it cannot load.
        BackendUnavailable: the backend, or a part of it that was asked for by name, is not on this machine.
    """
    if backend not in _OPENERS:
        raise InputError(f"no backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    module, name, fixed = _OPENERS[backend]
    opener = getattr(importlib.import_module(module), name)
    keywords = [p.name for p in inspect.signature(opener).parameters.values() if p.kind is p.KEYWORD_ONLY]
    allowed = [name for name in keywords if name not in fixed]
    unknown = [name for name in options if name not in allowed]
    if unknown:
        raise InputError(f"backend {backend} has no option {unknown[0]!r}: its options are {', '.join(allowed)}")
    session: Session = opener(bundle, **fixed, **options)
    return session
