"""Which execution providers an ONNX Runtime session gets, with which options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.optional import native_library
from rmsnorm_deploy.runtime.ort_plugins import CPU, PLUGINS, TENSORRT_RTX

Provider = tuple[str, Mapping[str, Any]]

TENSORRT = "TensorrtExecutionProvider"


def provider_names(providers: Sequence[str | Provider]) -> list[str]:
    return [item if isinstance(item, str) else item[0] for item in providers]


def resolve_providers(
    present: Sequence[str],
    asked: Sequence[str | Provider] | None,
    manifest: Mapping[str, Any],
    engine_cache: Path | None = None,
) -> list[tuple[str, dict[str, Any]]]:
    """(name, options) for each provider asked for, the CPU's alone when ``asked`` is None.

    TensorRT gets our plugin library and an engine cache, TensorRT-RTX a cache, unless the caller's options say
    otherwise. A provider that is not in this onnxruntime may be one of a package of its own.

    Raises:
        BackendUnavailable: a provider that this onnxruntime does not have; names those it has.
    """
    resolved = []
    for item in asked if asked is not None else [CPU]:
        name, options = (item, {}) if isinstance(item, str) else (item[0], dict(item[1]))
        if name not in present and name not in PLUGINS:
            raise BackendUnavailable(
                f"this onnxruntime has no {name}; it has {', '.join(present)}: onnxruntime-gpu has CUDA and TensorRT"
            )
        resolved.append((name, {**_defaults(name, manifest, engine_cache), **options}))
    return resolved


def _defaults(name: str, manifest: Mapping[str, Any], engine_cache: Path | None) -> dict[str, Any]:
    if name == TENSORRT:
        return tensorrt_options(engine_cache or default_engine_cache(manifest))
    if name == TENSORRT_RTX:
        return tensorrt_rtx_options(engine_cache or default_engine_cache(manifest))
    return {}


def tensorrt_options(engine_cache: Path) -> dict[str, Any]:
    """Options of the TensorRT provider: engines and timings are kept, our plugin is loaded where it is built."""
    engine_cache.mkdir(parents=True, exist_ok=True)
    options = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(engine_cache),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(engine_cache),
    }
    plugin = native_library("tensorrt-ort")
    return {**options, "trt_extra_plugin_lib_paths": str(plugin)} if plugin else options


def tensorrt_rtx_options(engine_cache: Path) -> dict[str, Any]:
    """Options of the TensorRT-RTX provider: what it compiles is kept. It has no option for a plugin library."""
    engine_cache.mkdir(parents=True, exist_ok=True)
    return {"nv_runtime_cache_path": str(engine_cache)}


def default_engine_cache(manifest: Mapping[str, Any]) -> Path:
    """A folder of the user's own for each model, since a bundle may be read-only and its files are hashed."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = str(manifest.get("files", {}).get("model.onnx", {}).get("sha256", "unknown"))
    return root / "rmsnorm_deploy" / "onnxruntime-tensorrt" / digest[:16]
