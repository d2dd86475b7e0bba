"""Who takes part in the comparison of the CUDA kernels: each makes a call for each set of a case's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.benchmark.kernels_cuda_cases import COPY, EMPTY, EPSILON, NOT_PEERS, OURS, Buffers, Case
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.optional import load_module

WRITE_TO_OURS = (*NOT_PEERS, "flashinfer")  # the others allocate a y of their own


def ours_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """`rmsnorm_cuda` on the current stream, with a workspace where one helps."""
    if ckernel.cuda_library() is None:
        raise BackendUnavailable("the CUDA kernels are not built: run python -m rmsnorm_deploy.native build --cuda")
    made = [_args(case, item, scale) for item in sets]
    workspace = torch.empty(max(ckernel.cuda_workspace_bytes(made[0]), 1), dtype=torch.uint8, device=scale.device)
    for args in made:
        args.workspace, args.workspace_bytes = workspace.data_ptr(), ckernel.cuda_workspace_bytes(args)
    return [_ours_call(args, workspace) for args in made]


def _args(case: Case, item: Buffers, scale: torch.Tensor) -> ckernel.Args:
    dtype, width = ckernel.DTYPES[case.dtype], case.width
    pointers = {"x": item.x.data_ptr(), "y": item.y.data_ptr(), "scale": scale.data_ptr()}
    sizes = {"rows": case.rows, "width": width, "scale_count": width, "x_stride": width, "y_stride": width}
    return ckernel.Args(x_dtype=dtype, param_dtype=dtype, y_dtype=dtype, eps=EPSILON, **pointers, **sizes)


def _ours_call(args: ckernel.Args, _workspace: torch.Tensor) -> Call:
    return lambda: ckernel.run_cuda(args, torch.cuda.current_stream().cuda_stream)


def torch_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """PyTorch's own operator."""
    return [_call(F.rms_norm, item.x, (case.width,), scale, EPSILON) for item in sets]


def compiled_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """torch.compile's kernel for this very shape."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: F.rms_norm(x, (case.width,), w, EPSILON), dynamic=False)
    return [_call(compiled, item.x, scale) for item in sets]


def liger_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """Liger-Kernel's Triton kernel, forward alone."""
    ops = _module("liger_kernel.ops.rms_norm", "pip install liger-kernel")
    return [_call(ops.LigerRMSNormFunction.apply, item.x, scale, EPSILON) for item in sets]


def flashinfer_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """FlashInfer's kernel; it has none for float32."""
    if case.dtype == "float32":
        raise BackendUnavailable("flashinfer has no float32 kernel")
    norm = _module("flashinfer.norm", "pip install flashinfer-python")
    return [_call(norm.rmsnorm, item.x, scale, EPSILON, item.y) for item in sets]


def quack_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """quack's CuTe kernel."""
    quack = _module("quack.rmsnorm", "pip install quack-kernels")
    return [_call(lambda x: quack.rmsnorm_fwd(x, scale, eps=EPSILON), item.x) for item in sets]


def copy_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """A device copy of the same bytes."""
    return [_call(item.y.copy_, item.x) for item in sets]


def empty_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """A kernel that sleeps for no time."""
    return [_call(torch.cuda._sleep, 0)]


def _module(name: str, install: str) -> Any:
    load_module(name.split(".")[0], install)
    return load_module(name, install)


def _call(function: Callable[..., Any], *args: Any) -> Call:
    return lambda: function(*args)


Maker = Callable[[Case, Sequence[Buffers], torch.Tensor], list[Call]]
CONTESTANTS: dict[str, Maker] = {
    OURS: ours_calls,
    "torch": torch_calls,
    "torch.compile": compiled_calls,
    "liger": liger_calls,
    "flashinfer": flashinfer_calls,
    "quack": quack_calls,
    COPY: copy_calls,
    EMPTY: empty_calls,
}
