"""Tasks that talk to TensorRT-RTX, each run by `tensorrt_support.in_child`; prints one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import tensorrt_rtx as trt  # noqa: E402

from rmsnorm_deploy.runtime.rtx_library import ensure_rtx_library  # noqa: E402


class Log(trt.ILogger):
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.errors.append(message)


def creators(library: str) -> list[str]:
    """The names of the library's creators in the registry, "namespace::name::version"."""
    registry = trt.get_plugin_registry()
    registry.load_library(library)
    ours = [c for c in registry.all_creators if c.plugin_namespace == "rmsnorm_deploy"]
    return [f"{c.plugin_namespace}::{c.name}::{c.plugin_version}" for c in ours]


def build(library: str, *models: str) -> list[dict[str, Any]]:
    """Parse and build each model for SM 89, with the library loaded and embedded unless it is "-"."""
    log = Log()
    builder = trt.Builder(log)
    if library != "-":
        trt.get_plugin_registry().load_library(library)
    return [_build(builder, log, library, model) for model in models]


def _build(builder: Any, log: Log, library: str, model: str) -> dict[str, Any]:
    log.errors.clear()
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    out: dict[str, Any] = {"parsed": parser.parse_from_file(model), "built": False}
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    out["plugins"] = [layer.name for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    out["layers"] = len(layers)
    if out["parsed"]:
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        out["outputs"] = {o.name: [o.dtype.name, list(o.shape)] for o in outputs}
        out["built"] = _serialize(builder, network, library)
    out["errors"] = list(log.errors)
    return out


def _serialize(builder: Any, network: Any, library: str) -> bool:
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        ranges = [tuple(size if d < 0 else d for d in tensor.shape) for size in (0, 4, 16)]
        profile.set_shape(tensor.name, *ranges)
    config.add_optimization_profile(profile)
    if library != "-":
        config.plugins_to_serialize = [library]
    return builder.build_serialized_network(network, config) is not None


if __name__ == "__main__":
    ensure_rtx_library()
    print(json.dumps({"creators": creators, "build": build}[sys.argv[1]](*sys.argv[2:])))
