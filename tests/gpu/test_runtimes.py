"""The CUDA kernels as PyTorch's ops and as ONNX Runtime's custom ops on the CUDA provider, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import cuda_emulator as emu
import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from rmsnorm_deploy import native, native_build, torch_ops

from . import cuda_kernel

SHAPES = [(1, 64), (3, 4096), (257, 1000), (1, 65_536), (2, 300_000), (2, 300_001)]
ONNX = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}


def tensors(case: emu.Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(case.width)
    made = {"x": torch.randn(case.rows, case.width, device="cuda").to(cuda_kernel.DTYPES[case.x])}
    if case.skip:
        made["skip"] = torch.randn(case.rows, case.width, device="cuda").to(cuda_kernel.DTYPES[case.x])
    made["scale"] = (1 + 0.5 * torch.randn(case.width, device="cuda")).to(cuda_kernel.DTYPES[case.params])
    return made


def check(case: emu.Case, given: dict[str, torch.Tensor], y: np.ndarray, total: np.ndarray | None) -> None:
    host = {name: value.double().cpu().numpy() for name, value in given.items()}
    expected = emu.truth(case, host["x"], host.get("skip"), host["scale"], None)
    assert (np.abs(y.astype(np.float64) - expected.y) <= np.broadcast_to(expected.slack, y.shape)).all(), case
    if total is not None:
        np.testing.assert_array_equal(total.astype(np.float64), expected.sum)


@pytest.mark.parametrize(("x", "params"), [("f32", "f32"), ("f16", "f16"), ("bf16", "f32")])
def test_torch_ops_on_cuda_tensors(x: str, params: str) -> None:
    cuda_kernel.library()
    for (rows, width), skip in itertools.product(SHAPES, (False, True)):
        case = emu.Case(width, rows, x, params, skip=skip)
        given = tensors(case)
        if skip:
            y, total = torch_ops.skip_rms_norm(given["x"], given["skip"], given["scale"], epsilon=case.eps)
            check(case, given, y.double().cpu().numpy(), total.double().cpu().numpy())
        else:
            y = torch_ops.rms_norm(given["x"], given["scale"], epsilon=case.eps)
            check(case, given, y.double().cpu().numpy(), None)


def test_torch_ops_on_two_streams_do_not_share_a_workspace() -> None:
    cuda_kernel.library()
    case = emu.Case(2**21, 1, "f32", "f32")
    given = tensors(case)
    other = {name: value.flip(-1).contiguous() for name, value in given.items()}
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[torch.Tensor] = []
    for turn in range(100):
        which = turn % 2
        with torch.cuda.stream(streams[which]):
            use = (given, other)[which]
            results.append(torch_ops.rms_norm(use["x"], use["scale"], epsilon=case.eps)[:, :64].clone())
    torch.cuda.synchronize()
    for which in (0, 1):
        assert all(torch.equal(result, results[which]) for result in results[which::2])


def test_torch_ops_have_gradients_on_cuda() -> None:
    x = torch.randn(5, 256, device="cuda", dtype=torch.float32, requires_grad=True)
    scale = torch.randn(256, device="cuda", requires_grad=True)
    weight = torch.randn(5, 256, device="cuda")
    ours = torch.autograd.grad((torch_ops.rms_norm(x, scale) * weight).sum(), (x, scale))
    theirs = torch.autograd.grad((torch.nn.functional.rms_norm(x, (256,), scale, 1e-6) * weight).sum(), (x, scale))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def ort_session(case: emu.Case) -> Any:
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider: pip install onnxruntime-gpu")
    cuda_kernel.library()
    native_build.build(("cpu",), quiet=True)  # and links the CUDA kernels beside it
    names, outputs = (["x", "skip"], ["y", "total"]) if case.skip else (["x"], ["y"])
    node = helper.make_node(
        "SkipRMSNorm" if case.skip else "RMSNorm", [*names, "scale"], outputs, domain="rmsnorm_deploy", epsilon=case.eps
    )
    kinds = {"y": ONNX[case.y]}
    values = [[helper.make_tensor_value_info(n, kinds.get(n, ONNX[case.x]), ["n", case.width]) for n in names]]
    values += [[helper.make_tensor_value_info(n, kinds.get(n, ONNX[case.x]), ["n", case.width]) for n in outputs]]
    scale = helper.make_tensor_value_info("scale", ONNX[case.params], [case.width])
    graph = helper.make_graph([node], "g", [*values[0], scale], values[1])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("rmsnorm_deploy", 1)]
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    native.register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("x", "params"), [("f32", "f32"), ("f16", "f16"), ("f16", "f32")])
def test_onnx_runtime_on_its_cuda_provider(x: str, params: str, skip: bool) -> None:
    for rows, width in SHAPES:
        case = emu.Case(width, rows, x, params, skip=skip)
        given = tensors(case)
        session = ort_session(case)
        for _ in range(3):
            out = session.run(None, {name: value.cpu().numpy() for name, value in given.items()})
            check(case, given, out[0], out[1] if skip else None)
