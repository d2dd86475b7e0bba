"""Eager norms on the compiled kernels: used where they can be, unseen by whoever traces, and no less exact."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_truth import Array
from test_cpu_exact import once
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rmsnorm_deploy import RMSNorm, SkipRMSNorm, ckernel, reference
from rmsnorm_deploy.eager_kernels import use_kernels
from rmsnorm_deploy.norm import rms_norm

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32, torch.float64]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows with every call that reaches the compiled kernels."""
    if ckernel.cpu_library() is None:
        pytest.skip("the CPU kernels are not built: python -m rmsnorm_deploy.native build")
    seen: list[int] = []
    run = ckernel.run_cpu
    monkeypatch.setattr(ckernel, "run_cpu", lambda args, threads: (seen.append(args.rows), run(args, threads))[1])
    before = use_kernels(True)
    yield seen
    use_kernels(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def plainly(norm: Callable[[], Tensor]) -> Tensor:
    before = use_kernels(False)
    try:
        return norm()
    finally:
        use_kernels(before)


def double(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_that_the_kernels_have_runs_on_them(calls: list[int], dtype: torch.dtype) -> None:
    x = normal(5, 96, dtype=dtype)
    variants = itertools.product(
        ("inside", "outside", "clamp"), ("before_cast", "after_cast"), (0.0, 1.0), (False, True), (dtype, torch.float32)
    )
    for number, (mode, order, offset, has_bias, weight_dtype) in enumerate(variants, 1):
        bias = normal(96, seed=2, dtype=dtype) if has_bias else None
        options = {"epsilon_mode": mode, "scale_order": order, "weight_offset": offset}
        weight = normal(96, seed=1, dtype=weight_dtype)

        def norm(weight: Tensor = weight, bias: Tensor | None = bias, options: dict = options) -> Tensor:
            return rms_norm(x, 96, weight, 1e-3, bias=bias, **options)

        y, want = norm(), plainly(norm)
        assert len(calls) == number, options
        assert y.dtype == want.dtype
        coarse = torch.finfo(dtype).eps
        torch.testing.assert_close(y, want, rtol=coarse, atol=4 * coarse)


@pytest.mark.parametrize("order", ["before_cast", "after_cast"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_types_are_exact_arithmetic_rounded(calls: list[int], dtype: torch.dtype, order: str) -> None:
    name = str(dtype).removeprefix("torch.")
    x, weight = normal(300, 128, dtype=dtype), normal(128, seed=1, dtype=dtype)
    y = rms_norm(x, 128, weight, 1e-6, scale_order=order)
    n = reference.rms_norm(double(x), epsilon=1e-6)
    exact = n * double(weight) if order == "before_cast" else once(n, name) * double(weight)
    assert (double(y) == once(exact, name)).all()
    assert len(calls) == 1


def test_float32_is_nearer_to_the_truth_than_torch(calls: list[int]) -> None:
    x, weight = normal(300, 1000), normal(1000, seed=1)
    truth = reference.rms_norm(double(x), double(weight), epsilon=1e-6)

    def error(y: Tensor) -> float:
        return float((abs(double(y) - truth) / abs(truth)).max())

    ours, torchs = error(rms_norm(x, 1000, weight, 1e-6)), error(plainly(lambda: rms_norm(x, 1000, weight, 1e-6)))
    assert ours < 1.75 * 2.0**-23  # three roundings, and a little for the statistics
    assert ours <= torchs
    assert len(calls) == 1


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: rms_norm(x.float(), 8, torch.ones(8, dtype=torch.float64), 1e-6),
        lambda x: rms_norm(x, 8, stash_dtype=torch.float64),
        lambda x: rms_norm(x[:0], 8),
        lambda x: rms_norm(x.to("meta"), 8),
    ],
    ids=["float64 scale", "float64 statistics", "no rows", "no memory"],
)
def test_what_the_kernels_do_not_have_is_plain(calls: list[int], norm: Callable[[Tensor], Tensor]) -> None:
    assert norm(normal(4, 8)).shape[-1] == 8
    assert not calls


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.skip = RMSNorm(8), SkipRMSNorm.llama(8)

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.skip(self.norm(x), x)
        return y + total


TRACERS = {
    "export": lambda model, x: torch.export.export(model, (x,)).graph_module.code,
    "loose export": lambda model, x: torch.export.export(model, (x,), strict=False).graph_module.code,
    "make_fx": lambda model, x: make_fx(model)(x).code,
    "make_fx on fakes": lambda model, x: make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x).code,
    "TorchScript": lambda model, x: str(torch.jit.trace(model, x, check_trace=False).inlined_graph),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("tracer", TRACERS)
def test_traced_programs_are_plain_operations(calls: list[int], tracer: str) -> None:
    code = TRACERS[tracer](Both().eval(), normal(3, 8))
    assert "rmsnorm_deploy::" not in code
    assert "ops.rmsnorm_deploy" not in code
    assert "rsqrt" in code or "rms_norm" in code or "sqrt" in code
    assert not calls


def test_compiled_programs_have_no_graph_break(calls: list[int]) -> None:
    model, x = Both(), normal(3, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    assert len(calls) == 2  # the eager model's


def test_transforms_of_functions_work(calls: list[int]) -> None:
    x, model = normal(4, 3, 8), Both()
    mapped = torch.func.vmap(model)(x)
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert not calls
    torch.testing.assert_close(mapped, model(x))
    assert tangent.shape == x.shape
    jacobian = torch.autograd.functional.jvp(model, x, torch.ones_like(x))[1]
    torch.testing.assert_close(tangent, jacobian, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_plain_formula(calls: list[int], dtype: torch.dtype) -> None:
    model, x = Both().to(dtype), normal(6, 8, dtype=dtype)
    found = []
    for wanted in (True, False):
        use_kernels(wanted)
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        found.append([leaf.grad, *(parameter.grad for parameter in model.parameters())])
    assert calls
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=8 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


def test_strided_and_broadcast_inputs(calls: list[int]) -> None:
    x = normal(4, 6, 20)
    for view in (x[:, ::2, 3:11], x.transpose(0, 1)[..., :8], x[:1, :1, :8].expand(3, 2, 8), x[..., ::2][..., :8]):
        y = rms_norm(view, 8, eps=1e-6)
        torch.testing.assert_close(y, plainly(lambda view=view: rms_norm(view, 8, eps=1e-6)))
    assert len(calls) == 4


def test_the_environment_switches_them_off() -> None:
    program = (
        "import torch; from rmsnorm_deploy import ckernel, RMSNorm\n"
        "ckernel.run_cpu = lambda *args: print('kernel') or False\n"
        "with torch.no_grad(): RMSNorm(8)(torch.ones(2, 8))\n"
    )
    environment = {**os.environ, "RMSNORM_DEPLOY_KERNELS": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
