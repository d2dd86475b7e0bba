"""The op's formulas in numpy: float64 truth, the roundings a kernel must make, and the closed-form Jacobian.

RMSNorm is from B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019 (arXiv:1910.07467),
equation 4: ``y_i = x_i / RMS(x) * g_i`` with ``RMS(x) = sqrt(mean(x^2))``. The paper has no epsilon: the three places
where models put one, and the order of scale and cast, are those of ``docs/op-spec.md``.

Nothing here uses torch, so that no bug can be common to the truth and to what it judges.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rmsnorm_deploy.errors import InputError

EPSILON_MODES = ("inside", "outside", "clamp")
SCALE_ORDERS = ("after_cast", "before_cast")

Array = NDArray[Any]
Float64Array = NDArray[np.float64]

_STORAGE = tuple(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    epsilon_mode: str = "inside",
) -> Float64Array:
    """RMSNorm in float64: ``x / r * scale + bias``, with the mean over the last ``-axis`` axes.

    ``r`` is ``sqrt(mean(x^2) + epsilon)`` for ``"inside"``, ``sqrt(mean(x^2)) + epsilon`` for ``"outside"`` and
    ``max(sqrt(mean(x^2)), epsilon)`` for ``"clamp"``. ``x`` has any float dtype and a rank of at least ``-axis``;
    ``scale`` and ``bias`` have the shape of the normalized axes or one element. The result has the shape of ``x``.
    NaN and infinity spread as the formula says, and a zero row with ``epsilon=0`` is NaN.

    Raises ``InputError`` for an unknown mode, an axis that is not negative or a shape that does not fit.
    """
    rows = np.asarray(x).astype(np.float64)
    check_variant(epsilon, epsilon_mode)
    row_shape = _row_shape(rows, axis)
    with np.errstate(all="ignore"):
        y = rows / _rms(_mean_square(rows, axis), epsilon, epsilon_mode)
        if scale is not None:
            y = y * _as_row(scale, row_shape, "scale").astype(np.float64)
        if bias is not None:
            y = y + _as_row(bias, row_shape, "bias").astype(np.float64)
    return np.asarray(y, dtype=np.float64)


def skip_rms_norm(
    x: ArrayLike,
    skip: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    epsilon_mode: str = "inside",
) -> tuple[Float64Array, Array]:
    """The residual add and the norm: ``(rms_norm(sum, ...), sum)``, ``sum = x + skip`` rounded to the dtype of ``x``.

    ``x`` and ``skip`` have the same shape and dtype; pass float64 arrays for a sum without rounding to speak of.
    """
    total = _rounded_sum(np.asarray(x), np.asarray(skip))
    return rms_norm(total, scale, bias, axis=axis, epsilon=epsilon, epsilon_mode=epsilon_mode), total


def rms_norm_rounded(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
    scale_dtype: DTypeLike | None = None,
    scale_order: str = "after_cast",
    stash_dtype: DTypeLike | None = None,
    axis: int = -1,
    epsilon: float = 1e-6,
    epsilon_mode: str = "inside",
) -> Array:
    """RMSNorm with every rounding of the op, as an array of the op's output dtype V.

    ``dtype`` is T, to which ``x`` is rounded first (default: the dtype of ``x``); ``scale_dtype`` is U, to which scale
    and bias are rounded (default: T). Names such as ``"bfloat16"`` are understood. ``stash_dtype`` is the type of the
    statistics: float64 for a float64 T, else float32, unless given.

    The mean is rounded once from a wider sum. An implementation adds its squares in an order of its own, so its mean
    may be off by some ULPs of the stash type, and a Y in a half type by one ULP of its own, rarely. Wherever the sum of
    squares is exact, as for small integers and a power-of-two width, every bit of Y is determined and returned here.

    Raises ``InputError`` for a dtype outside float16, bfloat16, float32 and float64, and as ``rms_norm`` does.
    """
    check_variant(epsilon, epsilon_mode, scale_order)
    stored = _storage_dtype(np.asarray(x).dtype if dtype is None else dtype)
    scale_type = stored if scale_dtype is None else _storage_dtype(scale_dtype)
    stash = _default_stash(stored) if stash_dtype is None else _storage_dtype(stash_dtype)
    with np.errstate(all="ignore"):
        rows = np.asarray(x).astype(stored)
        row_shape = _row_shape(rows, axis)
        gamma = None if scale is None else _as_row(scale, row_shape, "scale").astype(scale_type)
        beta = None if bias is None else _as_row(bias, row_shape, "bias").astype(scale_type)
        mean_square = _mean_square(rows.astype(_wider(stash)), axis).astype(stash)
        y = rows.astype(stash) / _rms(mean_square, epsilon, epsilon_mode)
        if scale_order == "before_cast":
            return _affine(y, gamma, beta).astype(stored)
        has_affine = gamma is not None or beta is not None
        return _affine(y.astype(stored).astype(promote(stored, scale_type) if has_affine else stored), gamma, beta)


def skip_rms_norm_rounded(
    x: ArrayLike,
    skip: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
    scale_dtype: DTypeLike | None = None,
    scale_order: str = "after_cast",
    stash_dtype: DTypeLike | None = None,
    axis: int = -1,
    epsilon: float = 1e-6,
    epsilon_mode: str = "inside",
) -> tuple[Array, Array]:
    """``(Y, sum)`` of SkipRMSNorm with every rounding of the op; the arguments are those of ``rms_norm_rounded``."""
    stored = _storage_dtype(np.asarray(x).dtype if dtype is None else dtype)
    total = _rounded_sum(np.asarray(x).astype(stored), np.asarray(skip).astype(stored))
    y = rms_norm_rounded(
        total,
        scale,
        bias,
        scale_dtype=scale_dtype,
        scale_order=scale_order,
        stash_dtype=stash_dtype,
        axis=axis,
        epsilon=epsilon,
        epsilon_mode=epsilon_mode,
    )
    return y, total


def jacobian(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    epsilon_mode: str = "inside",
) -> Float64Array:
    """The derivative of each row's output by its input, ``(*leading, d, d)`` in float64, rows flattened to ``d``.

    From ``y_i = g_i x_i / r`` follows ``dy_i/dx_j = g_i (delta_ij / r - x_i r_j / r^2)``. With ``s = sqrt(mean(x^2))``,
    ``r_j = dr/dx_j`` is ``x_j / (d r)`` inside, ``x_j / (d s)`` outside, and ``x_j / (d s)`` or 0 for clamp, as
    ``s >= epsilon`` or not. On a zero row outside, where s has a kink, ``x / r`` still has a derivative: ``r_j`` is 0.
    A bias does not enter; the derivative by the scale is ``rms_norm(x)`` itself and by the bias 1.
    """
    check_variant(epsilon, epsilon_mode)
    values = np.asarray(x).astype(np.float64)
    row_shape = _row_shape(values, axis)
    rows = values.reshape(*values.shape[: values.ndim + axis], math.prod(row_shape))
    width = rows.shape[-1]
    with np.errstate(all="ignore"):
        mean_square = _mean_square(rows, -1)
        r = _rms(mean_square, epsilon, epsilon_mode)
        slope = _rms_slope(rows, mean_square, r, epsilon, epsilon_mode)
        outer = rows[..., :, None] * slope[..., None, :]
        result = np.eye(width) / r[..., None] - outer / (r * r)[..., None]
        if scale is not None:
            gamma = _as_row(scale, row_shape, "scale").astype(np.float64)
            result = result * np.broadcast_to(gamma, row_shape).reshape(width, 1)
    return np.asarray(result, dtype=np.float64)


def promote(dtype: DTypeLike, scale_dtype: DTypeLike) -> np.dtype[Any]:
    """The op's V: the wider of T and U. ``InputError`` for float16 with bfloat16, of which neither is wider."""
    stored, scale_type = _storage_dtype(dtype), _storage_dtype(scale_dtype)
    if stored != scale_type and stored.itemsize == scale_type.itemsize:
        raise InputError(f"x is {stored.name} and the scale {scale_type.name}: give both one half type")
    return stored if stored.itemsize >= scale_type.itemsize else scale_type


def check_variant(epsilon: float, epsilon_mode: str, scale_order: str = "after_cast") -> None:
    """Raise ``InputError`` unless epsilon is finite and not negative and both names are among the op's."""
    if not 0.0 <= epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon}: it must be finite and not negative")
    if epsilon_mode not in EPSILON_MODES:
        raise InputError(f"epsilon_mode is {epsilon_mode!r}: it must be one of {', '.join(EPSILON_MODES)}")
    if scale_order not in SCALE_ORDERS:
        raise InputError(f"scale_order is {scale_order!r}: it must be one of {', '.join(SCALE_ORDERS)}")


def _rms(mean_square: Array, epsilon: float, epsilon_mode: str) -> Array:
    """r of the spec, in the dtype of ``mean_square``; epsilon is rounded to that dtype first."""
    eps = mean_square.dtype.type(epsilon)
    r: Array
    if epsilon_mode == "inside":
        r = np.sqrt(mean_square + eps)
    elif epsilon_mode == "outside":
        r = np.sqrt(mean_square) + eps
    else:
        r = np.maximum(np.sqrt(mean_square), eps)
    return r


def _rms_slope(rows: Float64Array, mean_square: Array, r: Array, epsilon: float, epsilon_mode: str) -> Float64Array:
    """dr/dx_j of ``jacobian``, shaped like ``rows``."""
    slope: Float64Array
    if epsilon_mode == "inside":
        slope = rows / (rows.shape[-1] * r)
        return slope
    root = np.sqrt(mean_square)
    slope = np.divide(rows, rows.shape[-1] * root, out=np.zeros_like(rows), where=root != 0)
    return np.where(root >= epsilon, slope, 0.0) if epsilon_mode == "clamp" else slope


def _mean_square(rows: Array, axis: int) -> Array:
    mean_square: Array = np.mean(rows * rows, axis=tuple(range(axis, 0)), keepdims=True)
    return mean_square


def _affine(y: Array, scale: Array | None, bias: Array | None) -> Array:
    """``y * scale + bias``, the product and the sum each rounded to the dtype of ``y``."""
    if scale is not None:
        y = y * scale.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y


def _rounded_sum(x: Array, skip: Array) -> Array:
    if x.shape != skip.shape or x.dtype != skip.dtype:
        raise InputError(f"x is {x.dtype}{list(x.shape)} and skip {skip.dtype}{list(skip.shape)}: give both the same")
    with np.errstate(all="ignore"):
        return np.asarray(x + skip)


def _row_shape(rows: Array, axis: int) -> tuple[int, ...]:
    if not -rows.ndim <= axis < 0:
        raise InputError(f"axis is {axis} for an input of rank {rows.ndim}: it must be in [-{rows.ndim}, -1]")
    return rows.shape[axis:]


def _as_row(value: ArrayLike, row_shape: tuple[int, ...], name: str) -> Array:
    array = np.asarray(value)
    if array.size == 1:
        return array.reshape((1,) * len(row_shape))
    if without_leading_ones(array.shape) != without_leading_ones(row_shape):
        raise InputError(
            f"{name} has shape {list(array.shape)}: the normalized axes need {list(row_shape)} or one element"
        )
    return array.reshape(row_shape)


def without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` from its first dimension that is not 1 on: what decides whether a scale fits a row."""
    for index, size in enumerate(shape):
        if size != 1:
            return tuple(shape[index:])
    return ()


def _storage_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind not in _STORAGE:
        raise InputError(f"dtype {kind} is not one of {', '.join(known.name for known in _STORAGE)}: convert the input")
    return kind


def _default_stash(stored: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if stored == np.float64 else np.float32)


def _wider(stash: np.dtype[Any]) -> np.dtype[Any]:
    """Where squares are summed; longdouble is float64 itself on some platforms, and no worse than float64 anywhere."""
    return np.dtype(np.longdouble if stash == np.float64 else np.float64)
