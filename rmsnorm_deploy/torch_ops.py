"""``torch.ops.rmsnorm_deploy.rms_norm`` and ``skip_rms_norm``: the op of docs/op-spec.md for PyTorch, on our kernels.

Importing this module defines both; nothing else does. They run the compiled kernels where those are built
(`rmsnorm_deploy.native`) and take the tensors, and PyTorch operations otherwise; both have fake implementations (for
``torch.compile`` and ``torch.export``) and first derivatives, and export_model takes them apart into these operations.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.eager_kernels import needs_gradient, tracing
from rmsnorm_deploy.errors import InputError

_OPTIONS = (
    "Tensor? scale=None, Tensor? bias=None, int axis=-1, float epsilon=1e-6, str epsilon_mode='inside', "
    "str scale_order='after_cast', bool? double_stash=None"
)
torch.library.define("rmsnorm_deploy::rms_norm", f"(Tensor x, {_OPTIONS}) -> Tensor")
torch.library.define("rmsnorm_deploy::skip_rms_norm", f"(Tensor x, Tensor skip, {_OPTIONS}) -> (Tensor, Tensor)")


def rms_norm(
    x: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-6,
    epsilon_mode: str = "inside",
    scale_order: str = "after_cast",
    double_stash: bool | None = None,
) -> Tensor:
    """RMSNorm over the last ``-axis`` axes of ``x``, as docs/op-spec.md has it.

    Args:
        x: float32, float16, bfloat16 or float64, of rank 1 or more.
        scale: as many elements as a row, or one; of x's dtype, or float32 for a half x.
        bias: the same; of scale's dtype.
        double_stash: float64 statistics, which only a float64 ``x`` can have and has by default (None); False makes
            them float32, as in the op whose ``stash_type`` is 1.

    Returns Y of x's shape; in x's dtype, or with "after_cast" in scale's.

    Raises:
        InputError: shapes, dtypes or options that the op does not have.
    """
    options = (scale, bias, axis, epsilon, epsilon_mode, scale_order, double_stash)
    if not (tracing() or needs_gradient(x, scale, bias)):
        return _run(_Call(x, None, *options))[0]  # without the dispatcher: a third of a small call
    return cast(Tensor, torch.ops.rmsnorm_deploy.rms_norm(x, *options))


def skip_rms_norm(
    x: Tensor,
    skip: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-6,
    epsilon_mode: str = "inside",
    scale_order: str = "after_cast",
    double_stash: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(sum, ...), sum)`` with ``sum = x + skip`` in x's dtype, in one pass; the rest is as `rms_norm`."""
    options = (scale, bias, axis, epsilon, epsilon_mode, scale_order, double_stash)
    if not (tracing() or needs_gradient(x, skip, scale, bias)):
        return _run(_Call(x, skip, *options))
    return cast("tuple[Tensor, Tensor]", torch.ops.rmsnorm_deploy.skip_rms_norm(x, skip, *options))


# ---- the operators


@torch.library.impl("rmsnorm_deploy::rms_norm", ("cpu", "cuda"))
def _rms_norm(x: Tensor, *options: Any, **more: Any) -> Tensor:
    return _run(_Call(x, None, *options, **more))[0]


@torch.library.impl("rmsnorm_deploy::skip_rms_norm", ("cpu", "cuda"))
def _skip_rms_norm(x: Tensor, skip: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return _run(_Call(x, skip, *options, **more))


def _fake_rms_norm(x: Tensor, *options: Any, **more: Any) -> Tensor:
    return _Call(x, None, *options, **more).empty_y()


def _fake_skip_rms_norm(x: Tensor, skip: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    call = _Call(x, skip, *options, **more)
    return call.empty_y(), call.empty_sum()


torch.library.register_fake("rmsnorm_deploy::rms_norm", _fake_rms_norm)
torch.library.register_fake("rmsnorm_deploy::skip_rms_norm", _fake_skip_rms_norm)


class _Call:
    """The arguments of one call, checked; positions and names are those of the operators' schema."""

    def __init__(
        self,
        x: Tensor,
        skip: Tensor | None,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        axis: int = -1,
        epsilon: float = 1e-6,
        epsilon_mode: str = "inside",
        scale_order: str = "after_cast",
        double_stash: bool | None = None,
    ) -> None:
        self.x, self.skip, self.scale, self.bias = x, skip, scale, bias
        self.axis, self.epsilon, self.epsilon_mode, self.scale_order = axis, epsilon, epsilon_mode, scale_order
        self.double_stash = x.dtype == torch.float64 if double_stash is None else double_stash
        _check(self)

    @property
    def row(self) -> tuple[int, ...]:
        return tuple(self.x.shape[self.axis :])

    @property
    def stash(self) -> torch.dtype:
        return torch.float64 if self.double_stash else torch.float32

    @property
    def y_dtype(self) -> torch.dtype:
        param = self.scale if self.scale is not None else self.bias
        return param.dtype if param is not None and self.scale_order == "after_cast" else self.x.dtype

    def empty_y(self) -> Tensor:
        return torch.empty(self.x.shape, dtype=self.y_dtype, device=self.x.device)

    def empty_sum(self) -> Tensor:
        return torch.empty(self.x.shape, dtype=self.x.dtype, device=self.x.device)


def _check(call: _Call) -> None:
    x, skip = call.x, call.skip
    if str(x.dtype).removeprefix("torch.") not in ckernel.DTYPES:
        raise InputError(f"rms_norm has no kernel for {x.dtype}: cast x to a floating-point type of 16, 32 or 64 bits")
    if not -x.dim() <= call.axis < 0:
        raise InputError(f"axis {call.axis} is not between -{x.dim()} and -1, and x has {x.dim()} axes")
    if skip is not None and (skip.shape != x.shape or skip.dtype != x.dtype):
        raise InputError(f"skip is {skip.dtype} {list(skip.shape)} and x {x.dtype} {list(x.shape)}: both must be alike")
    if call.epsilon_mode not in ckernel.EPSILON_MODES or call.scale_order not in ckernel.SCALE_ORDERS:
        raise InputError(f"there is no epsilon_mode {call.epsilon_mode!r} with scale_order {call.scale_order!r}")
    if call.double_stash and x.dtype != torch.float64:
        raise InputError(f"double_stash needs a float64 x, and x is {x.dtype}")
    if call.epsilon < 0:
        raise InputError(f"epsilon {call.epsilon} is negative")
    for name, param in (("scale", call.scale), ("bias", call.bias)):
        if param is not None:
            _check_param(call, name, param)


def _check_param(call: _Call, name: str, param: Tensor) -> None:
    x, scale = call.x, call.scale
    half = x.dtype in (torch.float16, torch.bfloat16)
    if param.dtype != x.dtype and not (half and param.dtype == torch.float32):
        raise InputError(f"{name} is {param.dtype} and x {x.dtype}: it must be x's, or float32 for a half x")
    if scale is not None and param.dtype != scale.dtype:
        raise InputError(f"bias is {param.dtype} and scale {scale.dtype}: both must be alike")
    count = math.prod(call.row)
    if param.numel() not in (1, count):
        raise InputError(f"{name} has {param.numel()} elements: rows of {list(call.row)} need {count}, or 1 for all")


# ---- running one


def _run(call: _Call) -> tuple[Tensor, Tensor]:
    y = call.empty_y()
    total = call.empty_sum() if call.skip is not None else y
    if y.numel() == 0 or _run_kernel(call, y, total):
        return y, total
    return _formula(call)


def _run_kernel(call: _Call, y: Tensor, total: Tensor) -> bool:
    """Fill y and total with the compiled kernel; False where there is none for this call."""
    device = call.x.device
    if (ckernel.cpu_library() if device.type == "cpu" else ckernel.cuda_library()) is None:
        return False
    width = math.prod(call.row)
    x, skip = _rows(call.x, width), None if call.skip is None else _rows(call.skip, width)
    scale, bias = _flat(call.scale), _flat(call.bias)
    args = ckernel.Args(
        x_dtype=_number(x),
        param_dtype=_number(scale if scale is not None else bias if bias is not None else x),
        y_dtype=_number(y),
        eps_mode=ckernel.EPSILON_MODES[call.epsilon_mode],
        scale_order=ckernel.SCALE_ORDERS[call.scale_order],
        stash=int(call.double_stash),
        eps=call.epsilon,
        rows=x.shape[0],
        width=width,
        scale_count=0 if scale is None else scale.numel(),
        bias_count=0 if bias is None else bias.numel(),
        x_stride=x.stride(0),
        skip_stride=0 if skip is None else skip.stride(0),
        y_stride=width,
        sum_stride=width,
        x=x.data_ptr(),
        skip=None if skip is None else skip.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        sum=None if skip is None else total.data_ptr(),
    )
    if device.type == "cpu":
        return ckernel.run_cpu(args, torch.get_num_threads())
    with torch.cuda.device(device):
        return _run_cuda(args, device)


def _run_cuda(args: ckernel.Args, device: torch.device) -> bool:
    # PyTorch hands memory of a stream to later work on that stream alone, so the workspace need not outlive the call.
    size = ckernel.cuda_workspace_bytes(args)
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    if workspace is not None:
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size
    return ckernel.run_cuda(args, torch.cuda.current_stream(device).cuda_stream)


def _number(tensor: Tensor) -> int:
    return ckernel.DTYPES[str(tensor.dtype).removeprefix("torch.")]


def _rows(x: Tensor, width: int) -> Tensor:
    """x as rows a whole stride apart, their elements side by side; a copy only where its strides do not allow that."""
    rows = x.detach().reshape(-1, width)
    if rows.shape[0] <= 1:
        return rows.contiguous()
    apart = rows.stride(0) >= width or rows.stride(0) == 0
    return rows if apart and (width == 1 or rows.stride(1) == 1) else rows.contiguous()


def _flat(param: Tensor | None) -> Tensor | None:
    return None if param is None else param.detach().reshape(-1).contiguous()


# ---- the same in PyTorch's operations, and the derivatives


def plain_rms_norm(x: Tensor, *options: Any, **more: Any) -> Tensor:
    """`rms_norm` in PyTorch's operations alone: what the exporter takes the operator apart into."""
    return _formula(_Call(x, None, *options, **more))[0]


def plain_skip_rms_norm(x: Tensor, skip: Tensor, *options: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """`skip_rms_norm` in PyTorch's operations alone."""
    return _formula(_Call(x, skip, *options, **more))


def _fit(param: Tensor, call: _Call) -> Tensor:
    return param.reshape(()) if param.numel() == 1 else param.reshape(call.row)


def _root(call: _Call, v: Tensor) -> tuple[Tensor, Tensor]:
    """r of the specification for rows v in the stash type, and the square root of the mean square alone."""
    mean = v.square().mean(tuple(range(call.axis, 0)), keepdim=True)
    root = mean.sqrt()
    if call.epsilon_mode == "inside":
        return (mean + call.epsilon).sqrt(), root
    return (root + call.epsilon if call.epsilon_mode == "outside" else root.clamp(min=call.epsilon)), root


def _formula(call: _Call) -> tuple[Tensor, Tensor]:
    total = call.x if call.skip is None else call.x + call.skip
    v = total.to(call.stash)
    y = v / _root(call, v)[0]
    if call.scale_order == "after_cast":
        y = y.to(call.x.dtype).to(call.y_dtype)
    if call.scale is not None:
        y = y * _fit(call.scale, call).to(y.dtype)
    if call.bias is not None:
        y = y + _fit(call.bias, call).to(y.dtype)
    return y.to(call.y_dtype), total


def _sum_to(gradient: Tensor, param: Tensor, call: _Call) -> Tensor:
    """The gradient of a parameter from that of its broadcast."""
    if param.numel() == 1:
        return gradient.sum().reshape(param.shape).to(param.dtype)
    leading = tuple(range(gradient.dim() + call.axis))
    return (gradient.sum(leading) if leading else gradient).reshape(param.shape).to(param.dtype)


def _gradients(call: _Call, total: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """For the normalized tensor, scale and bias. The roundings between have the derivative of the identity."""
    v, g = total.to(call.stash), grad_y.to(call.stash)
    r, root = _root(call, v)
    n = v / r
    grad_scale = None if call.scale is None else _sum_to(g * n, call.scale, call)
    grad_bias = None if call.bias is None else _sum_to(g, call.bias, call)
    if call.scale is not None:
        g = g * _fit(call.scale, call).to(call.stash)
    dims = tuple(range(call.axis, 0))
    # dr/dv is v / (d * slope). Where r does not depend on v ("clamp" below eps) it is 0, and at a row of zeros, where
    # the square root has no derivative ("outside"), 0 is the choice that stays finite.
    slope = r if call.epsilon_mode == "inside" else root
    along = (g * n).mean(dims, keepdim=True) / slope
    along = along if call.epsilon_mode == "inside" else along.where(slope > 0, torch.zeros_like(along))
    if call.epsilon_mode == "clamp":
        along = along.where(root >= r, torch.zeros_like(along))
    grad_x = (g - v * along) / r
    return grad_x.to(call.x.dtype), grad_scale, grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    skipping = isinstance(output, tuple)
    x, (scale, bias, *options) = (output[1], inputs[2:]) if skipping else (inputs[0], inputs[1:])
    ctx.save_for_backward(x, scale, bias)
    ctx.options = options
    if skipping:
        ctx.set_materialize_grads(True)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    total, scale, bias = ctx.saved_tensors
    gradients = _gradients(_Call(total, None, scale, bias, *ctx.options), total, grad_y)
    return (*gradients, *(None for _ in ctx.options))


def _skip_backward(ctx: Any, grad_y: Tensor, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
    total, scale, bias = ctx.saved_tensors
    grad_x, *rest = _gradients(_Call(total, None, scale, bias, *ctx.options), total, grad_y)
    grad_x = grad_x + grad_sum
    return (grad_x, grad_x, *rest, *(None for _ in ctx.options))


torch.library.register_autograd("rmsnorm_deploy::rms_norm", _backward, setup_context=_save)
torch.library.register_autograd("rmsnorm_deploy::skip_rms_norm", _skip_backward, setup_context=_save)
