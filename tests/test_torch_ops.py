"""torch.ops.rmsnorm_deploy: values, strides, derivatives, tracing, and the same without the compiled kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_truth import DTYPE_PAIRS, Case, rows, truth
from torch import Tensor

from rmsnorm_deploy import ckernel, torch_ops
from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.native_build import build

OPS = torch.ops.rmsnorm_deploy
VARIANTS: list[dict[str, Any]] = [
    {},
    {"epsilon_mode": "outside", "epsilon": 1e-3},
    {"epsilon_mode": "clamp", "epsilon": 0.5},
    {"scale_order": "before_cast", "epsilon": 1e-5},
]


@pytest.fixture(params=["kernel", "formula"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both ways of computing the op."""
    if request.param == "formula":
        monkeypatch.setattr(ckernel, "cpu_library", lambda: None)
    else:
        try:
            build(("cpu",), quiet=True)
        except BackendUnavailable as error:
            pytest.skip(f"the CPU kernels cannot be built here: {error}")
    return request.param


def to_torch(array: Any, dtype: str) -> Tensor:
    return torch.from_numpy(array.astype(np.float64)).to(getattr(torch, dtype))


@pytest.mark.parametrize(("x", "param"), DTYPE_PAIRS)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("skip", [False, True])
def test_values_match_float64(path: str, x: str, param: str, options: dict[str, Any], skip: bool) -> None:
    rng = np.random.default_rng(0)
    case = Case(
        x,
        param,
        options.get("epsilon_mode", "inside"),
        options.get("scale_order", "after_cast"),
        bias=True,
        skip=skip,
        double=x == "float64",
        eps=options.get("epsilon", 1e-6),
    )
    a, b = rows(rng, 5, 67, x), rows(rng, 5, 67, x)
    scale, bias = (to_torch(rng.standard_normal(67), param) for _ in range(2))
    numpy_scale, numpy_bias = scale.double().numpy(), bias.double().numpy()
    exact, _, bound, total = truth(case, a, b if skip else None, numpy_scale, numpy_bias)
    rest = {"double_stash": case.double, **options}
    if skip:
        y, got_total = torch_ops.skip_rms_norm(to_torch(a, x), to_torch(b, x), scale, bias, **rest)
        np.testing.assert_array_equal(got_total.double().numpy(), total)
    else:
        y = torch_ops.rms_norm(to_torch(a, x), scale, bias, **rest)
    assert str(y.dtype) == f"torch.{case.y}"
    assert (np.abs(y.double().numpy() - exact) <= bound).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 3:40],
        lambda x: x.t(),
        lambda x: x[:1].expand(9, -1),
        lambda x: x[::2],
        lambda x: x.as_strided((9, 20), (1, 1)),
        lambda x: x.view(3, 3, 50).transpose(0, 1),
        lambda x: x[0],
        lambda x: x[:0],
        lambda x: x[:, :1],
    ],
)
def test_any_strides_give_the_contiguous_result(path: str, view: Any) -> None:
    x = view(torch.randn(9, 50))
    y, total = torch_ops.skip_rms_norm(x, x)
    close = {"rtol": 0, "atol": 0} if path == "kernel" else {}  # PyTorch adds up strided rows in another order
    torch.testing.assert_close(torch_ops.rms_norm(x), torch_ops.rms_norm(x.contiguous()), **close)
    torch.testing.assert_close(y, torch_ops.rms_norm((x + x).contiguous()), **close)
    torch.testing.assert_close(total, (x + x).contiguous(), rtol=0, atol=0)


def test_rows_of_several_axes_with_a_scale_that_is_not_contiguous(path: str) -> None:
    x, scale = torch.randn(3, 4, 5), torch.randn(5, 4).t()
    want = x / (x.square().mean((1, 2), keepdim=True) + 1e-6).sqrt() * scale
    torch.testing.assert_close(torch_ops.rms_norm(x, scale, axis=-2), want)
    torch.testing.assert_close(torch_ops.rms_norm(x, scale[None], axis=-2), want)


@pytest.mark.parametrize("parameters", ["none", "one", "two axes"])
def test_opcheck(path: str, parameters: str) -> None:
    *tensors, rest = differentiable(parameters, {})
    torch.library.opcheck(OPS.skip_rms_norm.default, tuple(tensors), rest)
    torch.library.opcheck(OPS.rms_norm.default, (tensors[0], *tensors[2:]), rest)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("parameters", ["none", "scale", "bias", "one", "two axes"])
def test_gradients_match_finite_differences(path: str, options: dict[str, Any], parameters: str) -> None:
    x, skip, scale, bias, rest = differentiable(parameters, options)
    assert torch.autograd.gradcheck(lambda *given: torch_ops.rms_norm(*given, **rest), (x, scale, bias))
    assert torch.autograd.gradcheck(lambda *given: torch_ops.skip_rms_norm(*given, **rest), (x, skip, scale, bias))


def differentiable(parameters: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """x, skip, scale, bias and the options of a float64 call."""
    torch.manual_seed(0)
    shape = (3, 2, 4) if parameters == "two axes" else (3, 2, 8)
    row = shape[1:] if parameters == "two axes" else shape[2:]
    x, skip = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    size = (1,) if parameters == "one" else row
    has_scale, has_bias = parameters not in ("none", "bias"), parameters not in ("none", "scale")
    scale = torch.randn(size, dtype=torch.float64, requires_grad=True) if has_scale else None
    bias = torch.randn(size, dtype=torch.float64, requires_grad=True) if has_bias else None
    return x, skip, scale, bias, {"axis": -len(row), "double_stash": True, **options}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_half_types_are_computed_in_float32(path: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 512, dtype=dtype, requires_grad=True)
    scale = torch.randn(512, dtype=torch.float32, requires_grad=True)
    weights = torch.randn(6, 512)
    (torch_ops.rms_norm(x, scale) * weights).sum().backward()
    x64, scale64 = x.detach().double().requires_grad_(), scale.detach().double().requires_grad_()
    (torch_ops.rms_norm(x64, scale64, double_stash=True) * weights).sum().backward()
    assert x.grad is not None
    assert x64.grad is not None
    torch.testing.assert_close(x.grad, x64.grad.to(dtype))
    torch.testing.assert_close(scale.grad, scale64.grad.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["outside", "clamp"])
def test_gradients_at_a_row_of_zeros_are_finite(path: str, mode: str) -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    torch_ops.rms_norm(x, epsilon=0.5, epsilon_mode=mode).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 2.0))


def test_it_is_one_node_of_a_trace_with_dynamic_rows(path: str) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            y, total = torch_ops.skip_rms_norm(x, x, scale)
            return torch_ops.rms_norm(y + total, scale, scale_order="before_cast")

    x, scale = torch.randn(3, 16), torch.randn(16)
    program = torch.export.export(Block(), (x, scale), dynamic_shapes=({0: torch.export.Dim("n", min=1)}, None))
    calls = [node for node in program.graph.nodes if "rmsnorm_deploy" in str(node.target)]
    assert len(calls) == 2
    torch.testing.assert_close(program.module()(torch.randn(0, 16), scale), torch.empty(0, 16))
    wide = torch.randn(7, 16)
    torch.testing.assert_close(program.module()(wide, scale), Block()(wide, scale))


GOOD = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch_ops.rms_norm(GOOD.int()), "no kernel for torch.int32"),
        (lambda: torch_ops.rms_norm(GOOD, axis=0), "axis 0"),
        (lambda: torch_ops.rms_norm(GOOD, axis=-3), "axis -3"),
        (lambda: torch_ops.rms_norm(GOOD, GOOD[0, :3]), "scale has 3 elements"),
        (lambda: torch_ops.rms_norm(GOOD, GOOD[0].half()), r"scale is torch.float16"),
        (lambda: torch_ops.rms_norm(GOOD.half(), GOOD[0], GOOD[0].half()), "both must be alike"),
        (lambda: torch_ops.rms_norm(GOOD, epsilon=-1.0), "negative"),
        (lambda: torch_ops.rms_norm(GOOD, epsilon_mode="beside"), "no epsilon_mode 'beside'"),
        (lambda: torch_ops.rms_norm(GOOD, scale_order="never"), "scale_order 'never'"),
        (lambda: torch_ops.rms_norm(GOOD, double_stash=True), "double_stash"),
        (lambda: torch_ops.skip_rms_norm(GOOD, GOOD[:1]), "both must be alike"),
        (lambda: torch_ops.skip_rms_norm(GOOD, GOOD.double()), "both must be alike"),
    ],
)
def test_what_the_op_does_not_have_is_refused(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize("size", [0, 4096])
def test_a_cuda_call_brings_the_workspace_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    seen: list[tuple[Any, int, int]] = []

    def run(args: ckernel.Args, stream: int) -> bool:
        seen.append((args.workspace, args.workspace_bytes, stream))
        return True

    monkeypatch.setattr(ckernel, "cuda_workspace_bytes", lambda args: size)
    monkeypatch.setattr(ckernel, "run_cuda", run)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    assert torch_ops._run_cuda(ckernel.Args(rows=1, width=20_000), torch.device("cpu"))
    (workspace, count, stream) = seen[0]
    assert (count, stream) == (size, 77)
    assert (workspace is not None) == (size > 0)
