"""ONNX Runtime's ops as models of one node, with tensors bound, so that a call allocates and copies nothing."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from rmsnorm_deploy import native
from rmsnorm_deploy.benchmark.kernels_cases import DTYPES, EPSILON, OURS, Buffers, Case
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable


class OrtOp(NamedTuple):
    """An op of ONNX Runtime as a one-node model."""

    op_type: str
    domain: str
    opset: int
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    custom: bool = False
    bias: bool = False


NORM: dict[str, Any] = {"axis": -1, "epsilon": EPSILON}
_OURS = {**NORM, "scale_order": "after_cast", "epsilon_mode": "inside", "stash_type": 1}
NORM_OPS = {
    OURS: OrtOp("RMSNorm", "rmsnorm_deploy", 1, ("y",), _OURS, custom=True),
    "onnxruntime SimplifiedLayerNormalization": OrtOp("SimplifiedLayerNormalization", "", 18, ("y",), NORM),
    "onnxruntime RMSNormalization": OrtOp("RMSNormalization", "", 23, ("y",), NORM),
    "onnxruntime LayerNormalization": OrtOp("LayerNormalization", "", 18, ("y",), NORM, bias=True),
}
SKIP_OPS = {
    OURS: OrtOp("SkipRMSNorm", "rmsnorm_deploy", 1, ("y", "total"), _OURS, custom=True),
    "onnxruntime SkipSimplifiedLayerNormalization": OrtOp(
        "SkipSimplifiedLayerNormalization", "com.microsoft", 1, ("y", "", "", "total"), {"epsilon": EPSILON}
    ),
}


def ort_calls(op: OrtOp, case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """ONNX Runtime with its inputs and outputs bound, so that nothing is allocated or copied in a call."""
    session = _session(op, case, scale)
    element = DTYPES[case.dtype][1]
    return [_bound_call(session, _bind(session, element, item)) for item in sets]


def cores_of(threads: int) -> list[int]:
    """A core for each of several threads, the calling one's first; none where there are too few, or for one thread."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return cores[:threads] if 1 < threads <= len(cores) else []


def _bound_call(session: Any, binding: Any) -> Call:
    return lambda: session.run_with_iobinding(binding)


def _session(op: OrtOp, case: Case, scale: torch.Tensor) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = case.threads
    others = cores_of(case.threads)[1:]
    if others:
        cores = ";".join(str(core + 1) for core in others)  # counted from 1
        options.add_session_config_entry("session.intra_op_thread_affinities", cores)
    options.log_severity_level = 4
    if op.custom:
        native.register(options)
    try:
        return ort.InferenceSession(_model(op, case, scale), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the exceptions of ONNX Runtime have no common base
        raise BackendUnavailable(f"onnxruntime {ort.__version__}: {' '.join(str(error).split())[:200]}") from error


def _model(op: OrtOp, case: Case, scale: torch.Tensor) -> bytes:
    element = DTYPES[case.dtype][1]
    shape = [case.rows, case.width]
    tensors = ["x", "skip"] if case.skip else ["x"]
    parameters = ["scale", "bias"] if op.bias else ["scale"]
    node = helper.make_node(op.op_type, [*tensors, *parameters], list(op.outputs), domain=op.domain, **op.attributes)
    graph = helper.make_graph(
        [node],
        "norm",
        [helper.make_tensor_value_info(name, element, shape) for name in tensors],
        [helper.make_tensor_value_info(name, element, shape) for name in op.outputs if name],
        [initializer("scale", scale, element)]
        + ([initializer("bias", torch.zeros_like(scale), element)] if op.bias else []),
    )
    opsets = [helper.make_opsetid("", op.opset if op.domain == "" else 18)]
    opsets += [helper.make_opsetid(op.domain, op.opset)] if op.domain else []
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def initializer(name: str, value: torch.Tensor, element: int) -> onnx.TensorProto:
    """``value`` as ONNX has it, whatever numpy knows of its dtype. element: its number in ONNX."""
    raw = value.view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, element, list(value.shape), raw, raw=True)


def _bind(session: Any, element: int, item: Buffers) -> Any:
    binding = session.io_binding()
    shape = list(item.x.shape)
    tensors = {"x": item.x, "skip": item.skip, "y": item.y, "total": item.total}
    # Numpy's types are what every version takes; a number stands for the one that numpy does not have.
    kind: Any = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}.get(element, element)  # type: ignore[call-overload]
    for value in session.get_inputs():
        binding.bind_input(value.name, "cpu", 0, kind, shape, tensors[value.name].data_ptr())
    for value in session.get_outputs():
        binding.bind_output(value.name, "cpu", 0, kind, shape, tensors[value.name].data_ptr())
    return binding
