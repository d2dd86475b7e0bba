"""OpenVINO's CPU plugin as a contestant."""

from __future__ import annotations

from typing import Any

import onnx
import torch
from onnx import helper

from rmsnorm_deploy.benchmark.kernels_cases import DTYPES, Buffers, Case
from rmsnorm_deploy.benchmark.kernels_ort import NORM, initializer
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.optional import load_module


def openvino_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """OpenVINO's CPU plugin, which fuses RMSNormalization; float32 is not narrowed there to what the CPU has."""
    ov: Any = load_module("openvino", "pip install openvino")
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": case.threads, "PERFORMANCE_HINT": "LATENCY"}
    if case.dtype == "float32":
        options["INFERENCE_PRECISION_HINT"] = "f32"
    core = ov.Core()
    try:
        model = core.compile_model(core.read_model(_openvino_model(case, scale)), "CPU", options)
    except RuntimeError as error:
        raise BackendUnavailable(f"openvino {ov.__version__}: {' '.join(str(error).split())[:200]}") from error
    kind = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}[case.dtype]
    return [_openvino_call(ov, model, kind, item, case.skip) for item in sets]


def _openvino_model(case: Case, scale: torch.Tensor) -> bytes:
    element, shape = DTYPES[case.dtype][1], [case.rows, case.width]
    norm = helper.make_node("RMSNormalization", ["total" if case.skip else "x", "scale"], ["y"], **NORM)
    add = [helper.make_node("Add", ["x", "skip"], ["total"])] if case.skip else []

    def values(*names: str) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, element, shape) for name in names]

    inputs, outputs = (("x", "skip"), ("y", "total")) if case.skip else (("x",), ("y",))
    graph = helper.make_graph(
        [*add, norm], "norm", values(*inputs), values(*outputs), [initializer("scale", scale, element)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return bytes(model.SerializeToString())


def _openvino_call(ov: Any, model: Any, kind: Any, item: Buffers, skip: bool) -> Call:
    request = model.create_infer_request()

    def shared(tensor: torch.Tensor) -> Any:
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return ov.Tensor(bits.numpy(), ov.Shape(list(tensor.shape)), kind)

    for at, tensor in enumerate((item.x, item.skip) if skip else (item.x,)):
        request.set_input_tensor(at, shared(tensor))
    for at, tensor in enumerate((item.y, item.total) if skip else (item.y,)):
        request.set_output_tensor(at, shared(tensor))
    return lambda: request.infer()
