"""RMSNorm for PyTorch: the functional and the module, with every variant of the op, differentiable.

``RMSNorm(d)`` replaces ``torch.nn.RMSNorm(d)``; keyword arguments choose the other variants of ``docs/op-spec.md``.
State dicts are those of ``torch.nn.RMSNorm`` and of Hugging Face's classes: ``weight`` and, if asked for, ``bias``.

Eager calls run on the compiled kernels where those are built and have the variant (`rmsnorm_deploy.eager_kernels` turns
that off), which are at least as exact. Anything else, all that is compiled or exported included, is PyTorch operations,
and ``torch.nn.RMSNorm`` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsnorm_deploy.eager_kernels import kernels_take
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.reference import check_variant, without_leading_ones

_N = TypeVar("_N", bound="_Norm")


class _Variant(NamedTuple):
    """What distinguishes one RMSNorm from another, resolved for one input dtype."""

    eps: float
    epsilon_mode: str
    weight_offset: float
    scale_order: str
    stash: torch.dtype


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    epsilon_mode: str = "inside",
    weight_offset: float = 0.0,
    scale_order: str = "before_cast",
    stash_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x / rms(x) * (weight_offset + weight) + bias`` over the last ``len(normalized_shape)`` axes of ``x``.

    With its defaults this is ``torch.nn.functional.rms_norm``; without compiled kernels it calls that.

    Args:
        x: float16, bfloat16, float32 or float64, of shape ``(*, *normalized_shape)``.
        normalized_shape: the sizes of the normalized axes.
        weight: scale of shape ``normalized_shape`` (leading ones allowed) or one element; 1 if absent.
        eps: ``None`` means torch's: ``finfo(float64).eps`` for a float64 ``x``, else ``finfo(float32).eps``.
        bias: shaped like ``weight``; 0 if absent.
        epsilon_mode: ``"inside"`` (``sqrt(mean(x^2) + eps)``), ``"outside"`` (``sqrt(mean(x^2)) + eps``) or ``"clamp"``
            (``max(sqrt(mean(x^2)), eps)``).
        weight_offset: 1.0 for Gemma, which stores the scale less one. It is added in the stash type for
            ``"before_cast"`` and in the weight's own type for ``"after_cast"``.
        scale_order: ``"before_cast"`` scales in the stash type and rounds once, to the dtype of ``x``; ``"after_cast"``
            rounds to the dtype of ``x`` first, and scales in the promoted type of ``x``, ``weight`` and ``bias``, which
            is then the output's.
        stash_dtype: float32 or float64, the type of the statistics; by default float64 for a float64 ``x``, else
            float32.

    Raises ``InputError`` for a shape, dtype or name that the op does not have.
    """
    axes, variant = _resolve(x, normalized_shape, weight, eps, epsilon_mode, weight_offset, scale_order, stash_dtype)
    weight, bias = _fit(weight, axes, "weight"), _fit(bias, axes, "bias")
    if kernels_take(x, weight, bias):
        call = _kernel_call(x, axes, weight, bias, variant)
        if call is not None:
            from rmsnorm_deploy import torch_ops

            return torch_ops.rms_norm(x, *call)
    return _plain(x, axes, weight, bias, variant)


def skip_rms_norm(
    x: Tensor,
    skip: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    epsilon_mode: str = "inside",
    weight_offset: float = 0.0,
    scale_order: str = "before_cast",
    stash_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The residual add and the norm: ``(rms_norm(sum, ...), sum)`` with ``sum = x + skip`` in the dtype of ``x``.

    ``skip`` has the shape and dtype of ``x``, else ``InputError``; the other arguments are those of ``rms_norm``.
    """
    if x.shape != skip.shape or x.dtype != skip.dtype:
        raise InputError(
            f"x is {x.dtype} {list(x.shape)} and skip is {skip.dtype} {list(skip.shape)}: SkipRMSNorm needs two alike"
        )
    axes, variant = _resolve(x, normalized_shape, weight, eps, epsilon_mode, weight_offset, scale_order, stash_dtype)
    weight, bias = _fit(weight, axes, "weight"), _fit(bias, axes, "bias")
    if kernels_take(x, skip, weight, bias):
        call = _kernel_call(x, axes, weight, bias, variant)
        if call is not None:
            from rmsnorm_deploy import torch_ops

            return torch_ops.skip_rms_norm(x, skip, *call)
    total = x + skip
    return _plain(total, axes, weight, bias, variant), total


class _Norm(nn.Module):
    """Parameters and options of both modules; a fresh one scales by 1 whatever its offset is."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        epsilon_mode: str = "inside",
        weight_offset: float = 0.0,
        scale_order: str = "before_cast",
        stash_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _axes(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.epsilon_mode = epsilon_mode
        self.weight_offset = weight_offset
        self.scale_order = scale_order
        self.stash_dtype = stash_dtype
        _check_options(
            _Variant(eps or 0.0, epsilon_mode, weight_offset, scale_order, stash_dtype or torch.float32),
            has_weight=elementwise_affine,
        )
        self.weight = self._parameter(elementwise_affine, device, dtype)
        self.bias = self._parameter(bias, device, dtype)
        self.reset_parameters()

    @classmethod
    def llama(cls: type[_N], normalized_shape: int | Sequence[int], eps: float = 1e-6, **options: Any) -> _N:
        """As Llama, Mistral, Qwen2 and Qwen3: round to the dtype of ``x``, then scale. ``options`` as ``RMSNorm``."""
        return cls(normalized_shape, eps, **{"scale_order": "after_cast", **options})

    @classmethod
    def gemma(cls: type[_N], normalized_shape: int | Sequence[int], eps: float = 1e-6, **options: Any) -> _N:
        """As Gemma: the scale is ``1 + weight``, applied before the one rounding. ``options`` as ``RMSNorm``."""
        return cls(normalized_shape, eps, **{"scale_order": "before_cast", "weight_offset": 1.0, **options})

    def reset_parameters(self) -> None:
        """Set the effective scale to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """``torch.nn.RMSNorm``'s, and whatever differs from its formula."""
        parts = [f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"]
        parts += ["bias=True"] if self.bias is not None else []
        parts += [f"epsilon_mode={self.epsilon_mode}"] if self.epsilon_mode != "inside" else []
        parts += [f"weight_offset={self.weight_offset}"] if self.weight_offset else []
        parts += [f"scale_order={self.scale_order}"] if self.scale_order != "before_cast" else []
        parts += [f"stash_dtype={self.stash_dtype}"] if self.stash_dtype is not None else []
        return ", ".join(parts)

    def _parameter(
        self, wanted: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Parameter | None:
        return nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if wanted else None

    def _options(self) -> dict[str, Any]:
        return {
            "bias": self.bias,
            "epsilon_mode": self.epsilon_mode,
            "weight_offset": self.weight_offset,
            "scale_order": self.scale_order,
            "stash_dtype": self.stash_dtype,
        }


class RMSNorm(_Norm):
    """``torch.nn.RMSNorm`` with the other variants as keyword arguments, see ``rms_norm``.

    The positional arguments are torch's. ``weight`` has the shape
    ``normalized_shape``, or is ``None`` without ``elementwise_affine``; ``bias`` is there if asked for. ``InputError``
    for options that the op does not have.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` of shape ``(*, *normalized_shape)``."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, **self._options())


class SkipRMSNorm(_Norm):
    """The residual add in front of an ``RMSNorm``, with the same arguments and state dict as ``RMSNorm``."""

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """``(y, sum)`` for ``x`` and ``skip``, both of shape ``(*, *normalized_shape)`` and of one dtype."""
        return skip_rms_norm(x, skip, self.normalized_shape, self.weight, self.eps, **self._options())


def _resolve(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    epsilon_mode: str,
    weight_offset: float,
    scale_order: str,
    stash_dtype: torch.dtype | None,
) -> tuple[tuple[int, ...], _Variant]:
    """The normalized axes and the variant, checked against each other and against x."""
    axes = _axes(normalized_shape)
    variant = _Variant(
        _default_eps(x.dtype) if eps is None else eps,
        epsilon_mode,
        weight_offset,
        scale_order,
        _default_stash(x.dtype) if stash_dtype is None else stash_dtype,
    )
    _check_input(x, axes)
    _check_options(variant, has_weight=weight is not None)
    return axes, variant


def _kernel_call(
    x: Tensor, axes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, variant: _Variant
) -> tuple[Tensor | None, Tensor | None, int, float, str, str, bool] | None:
    """The arguments behind x (and skip) of the same norm in `torch_ops`; None where that has no such variant."""
    # One type for both parameters, x's or float32 for a half x, to which any narrower one converts without loss.
    dtype = _promoted(x, weight, bias)
    fits = dtype == x.dtype or (dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16))
    if not fits or x.numel() == 0 or variant.stash != _default_stash(x.dtype):
        return None
    if weight is not None and variant.weight_offset:
        if variant.scale_order == "before_cast":
            dtype = variant.stash
            weight = weight.to(dtype)
        weight = _shifted(weight, variant.weight_offset)
    scale = None if weight is None else weight.to(dtype)
    shift = None if bias is None else bias.to(dtype)
    return scale, shift, -len(axes), variant.eps, variant.epsilon_mode, variant.scale_order, x.dtype == torch.float64


def _plain(x: Tensor, axes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, variant: _Variant) -> Tensor:
    """In PyTorch's operations."""
    if _torch_has(x, axes, weight, bias, variant):
        return F.rms_norm(x, list(axes), weight, variant.eps)
    return _compute(x, len(axes), weight, bias, variant)


def _compute(x: Tensor, rank: int, weight: Tensor | None, bias: Tensor | None, variant: _Variant) -> Tensor:
    """The op as the spec states it, for every variant, over the last ``rank`` axes; inputs have been checked."""
    stashed = x.to(variant.stash)
    mean_square = stashed.pow(2).mean(dim=tuple(range(-rank, 0)), keepdim=True)
    y = stashed / _rms(mean_square, variant)
    if variant.scale_order == "before_cast":
        scale = None if weight is None else _shifted(weight.to(variant.stash), variant.weight_offset)
        return _affine(y, scale, bias).to(x.dtype)
    scale = None if weight is None else _shifted(weight, variant.weight_offset)
    return _affine(y.to(x.dtype).to(_promoted(x, scale, bias)), scale, bias)


def _rms(mean_square: Tensor, variant: _Variant) -> Tensor:
    if variant.epsilon_mode == "inside":
        return torch.sqrt(mean_square + variant.eps)
    if variant.epsilon_mode == "outside":
        return _root(mean_square) + variant.eps
    return torch.clamp(_root(mean_square), min=variant.eps)


def _root(mean_square: Tensor) -> Tensor:
    """sqrt whose gradient at 0 is 0: autograd's is infinite, which makes the gradient of a zero row NaN (inf * 0).

    The norm itself has a finite derivative there. A program being exported computes no gradients and stays plain.
    """
    exporting = torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if exporting or not mean_square.requires_grad:
        return torch.sqrt(mean_square)
    zero = mean_square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, mean_square).sqrt())


def _affine(y: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    if scale is not None:
        y = y * scale.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y


def _shifted(weight: Tensor, offset: float) -> Tensor:
    return weight + offset if offset else weight


def _promoted(x: Tensor, *others: Tensor | None) -> torch.dtype:
    dtype = x.dtype
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return dtype


def _torch_has(x: Tensor, axes: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, variant: _Variant) -> bool:
    """Whether ``F.rms_norm`` computes this variant: it is one fused kernel on GPUs, forward and backward."""
    if bias is not None or variant.weight_offset or variant.epsilon_mode != "inside":
        return False
    if variant.stash != _default_stash(x.dtype) or (weight is not None and tuple(weight.shape) != axes):
        return False
    one_dtype = x.dtype == variant.stash and (weight is None or weight.dtype == x.dtype)
    return variant.scale_order == "before_cast" or one_dtype


def _default_stash(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _default_eps(dtype: torch.dtype) -> float:
    """torch 2.13's eps=None: the epsilon of the computation type. Passed on, so that older torch releases agree."""
    return torch.finfo(_default_stash(dtype)).eps


def _axes(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    axes = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    if not axes:
        raise InputError("normalized_shape is empty: name the size of at least one axis")
    return axes


def _check_input(x: Tensor, axes: tuple[int, ...]) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"x is {x.dtype}: RMSNorm takes float16, bfloat16, float32 or float64")
    if x.dim() < len(axes) or tuple(x.shape[-len(axes) :]) != axes:
        raise InputError(f"x has shape {list(x.shape)}: its last axes must be {list(axes)}, the normalized shape")


def _check_options(variant: _Variant, *, has_weight: bool) -> None:
    check_variant(variant.eps, variant.epsilon_mode, variant.scale_order)
    if variant.stash not in (torch.float32, torch.float64):
        raise InputError(f"stash_dtype is {variant.stash}: statistics are float32 or float64")
    if variant.weight_offset and not has_weight:
        raise InputError(f"weight_offset is {variant.weight_offset} and there is no weight to add it to: give a weight")


def _fit(value: Tensor | None, axes: tuple[int, ...], name: str) -> Tensor | None:
    """``value`` with the rank of the normalized axes; no operation at all in the usual case of equal shapes."""
    if value is None or tuple(value.shape) == axes:
        return value
    if value.numel() == 1:
        return value.reshape((1,) * len(axes))
    if without_leading_ones(tuple(value.shape)) != without_leading_ones(axes):
        raise InputError(f"{name} has shape {list(value.shape)}: it must be {list(axes)} or one element")
    return value.reshape(axes)
