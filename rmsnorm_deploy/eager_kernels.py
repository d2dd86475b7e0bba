"""Whether a norm in eager PyTorch runs on the compiled kernels: where they are built, wanted, and nothing is tracing.

``RMSNORM_DEPLOY_KERNELS=0`` in the environment, or `use_kernels`, keeps ``rms_norm`` and the modules on PyTorch's own
operations.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

ENVIRONMENT = "RMSNORM_DEPLOY_KERNELS"
_wanted = os.environ.get(ENVIRONMENT, "1").lower() not in ("0", "false", "off", "no")


def use_kernels(wanted: bool) -> bool:
    """Switch the compiled kernels on or off for this process; returns what was set before."""
    global _wanted
    before, _wanted = _wanted, wanted
    return before


def tracing() -> bool:
    """Whether somebody records or transforms what is computed: they are to see plain operations."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def kernels_take(*tensors: Tensor | None) -> bool:
    """Whether the kernels may run on these, as far as dtypes and options have no say."""
    if not _wanted or tracing():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided for tensor in given)
    return plain and len({tensor.device for tensor in given}) == 1 and _built(given[0])


def _built(x: Tensor) -> bool:
    from rmsnorm_deploy import ckernel

    if x.device.type == "cpu":
        return ckernel.cpu_library() is not None
    return x.device.type == "cuda" and x.dtype != torch.float64 and ckernel.cuda_library() is not None
