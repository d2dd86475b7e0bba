"""Export PyTorch models with RMSNorm to ONNX and TensorRT, every norm as one fused op, proved against float64.

Importing this package imports nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmsnorm_deploy.bundle import Bundle, open_bundle
    from rmsnorm_deploy.export.pipeline import export_model
    from rmsnorm_deploy.native import library_path, register
    from rmsnorm_deploy.norm import RMSNorm, SkipRMSNorm, rms_norm

__version__ = "0.1.0"

__all__ = [
    "Bundle",
    "RMSNorm",
    "SkipRMSNorm",
    "__version__",
    "export_model",
    "library_path",
    "open_bundle",
    "register",
    "rms_norm",
]

_HOMES = {
    "Bundle": "rmsnorm_deploy.bundle",
    "RMSNorm": "rmsnorm_deploy.norm",
    "SkipRMSNorm": "rmsnorm_deploy.norm",
    "export_model": "rmsnorm_deploy.export.pipeline",
    "library_path": "rmsnorm_deploy.native",
    "open_bundle": "rmsnorm_deploy.bundle",
    "register": "rmsnorm_deploy.native",
    "rms_norm": "rmsnorm_deploy.norm",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
