"""Rows that tell one norm from another: around its epsilon, at the edges of its dtype, one for each kind of mistake."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from rmsnorm_deploy.parity.ulp import FORMATS, Array, Array64

NORMAL_ROWS = 8  # the first so many are plain random rows

_NUMPY = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_AROUND_EPSILON = (0.01, 0.1, 0.3, 0.7, 1.0, 1.5, 3.0, 10.0, 100.0)


def adversarial_rows(width: int, dtype: str, epsilon: float, epsilon_mode: str, seed: int = 0) -> Array:
    """``(rows, width)`` in ``dtype``; every row has another size, so that none can stand for its neighbour.

    Plain ones first, then rows whose root mean square is around what epsilon is added to, each element once at the
    row's full size, spikes, one-hot and mixed rows, huge and subnormal ones, a zero row, one with infinity and one with
    NaN.
    """
    random = np.random.default_rng([seed, width])
    plain = random.standard_normal((NORMAL_ROWS, width)) * 2.0 ** np.arange(NORMAL_ROWS).reshape(-1, 1) / 8
    signs = np.where(random.random((4, width)) < 0.5, -1.0, 1.0) * np.array([[1.0], [3.0], [0.3], [10.0]])
    centre = (math.sqrt(epsilon) if epsilon_mode == "inside" else epsilon) or 1e-3
    around = _unit(random, len(_AROUND_EPSILON), width) * centre * np.array(_AROUND_EPSILON).reshape(-1, 1)
    rows = np.concatenate([plain, around, signs, _shapes(random, width, dtype), _special(random, width)])
    if dtype != "float64" and epsilon < (1e-30 if epsilon_mode == "inside" else 1e-15):
        rows = _within_single(rows)
    with np.errstate(over="ignore", under="ignore"):
        return rows.astype(_NUMPY[dtype])


def split(rows: Array, seed: int = 0) -> tuple[Array, Array]:
    """Two arrays of the dtype of ``rows`` that sum to them but for rounding, in other shares at each element."""
    wide = rows.astype(np.float64)
    share = np.random.default_rng([seed, 7]).uniform(-0.4, 1.4, rows.shape)
    finite = np.isfinite(wide)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        first = np.where(finite, wide * share, wide).astype(rows.dtype)
        rest = np.where(finite, wide - np.where(finite, first.astype(np.float64), 0.0), 0.0)
    return first, rest.astype(rows.dtype)


def laid_out(rows: Array, shape: list[Any], axis: int) -> Array:
    """``rows`` in a tensor of a norm's ``shape``, whose first free leading dim takes as many as there are.

    Where no leading dim is free the rows are repeated or cut to fill it.
    """
    row = [int(size) for size in shape[axis:]]
    lead = list(shape[: len(shape) + axis])
    fixed = math.prod(size for size in lead if isinstance(size, int))
    free = [index for index, size in enumerate(lead) if not isinstance(size, int)]
    sizes = [size if isinstance(size, int) else 1 for size in lead]
    if free:
        sizes[free[-1]] = -(-len(rows) // max(fixed, 1))
    count = math.prod(sizes)
    return np.resize(rows, (count, rows.shape[1])).reshape(*sizes, *row)


def width_of(record: Mapping[str, Any]) -> int | None:
    """Elements of a norm's row; None where the manifest does not know it."""
    row = record["shape"][record["axis"] :] if record["shape"] else []
    return math.prod(row) if row and all(isinstance(size, int) for size in row) else None


def _within_single(rows: Array64) -> Array64:
    """Without an epsilon, a norm with statistics in single precision is not asked for rows whose squares vanish there:
    those are made larger."""
    size = np.max(np.abs(rows), axis=-1, keepdims=True)
    small = (size > 0) & (size < 1e-14)
    return np.asarray(np.where(small, rows / np.where(small, size, 1.0) * 1e-12, rows), dtype=np.float64)


def _unit(random: np.random.Generator, count: int, width: int) -> Array64:
    rows = random.standard_normal((count, width))
    return np.asarray(rows / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True)), dtype=np.float64)


def _shapes(random: np.random.Generator, width: int, dtype: str) -> Array64:
    """Spikes, one-hot rows at both ends, mixed sizes, a ramp, and the dtype's large and subnormal values."""
    ends = np.zeros((3, width))
    ends[0, 0] = ends[1, -1] = ends[2, width // 2] = 1.0
    spike = random.standard_normal((2, width)) * 1e-2
    spike[0, -1] = spike[1, 0] = 300.0
    large = 1e4 if dtype == "float16" else 1e6
    mixed = random.standard_normal((1, width)) * np.where(random.random(width) < 0.5, large, 1 / large)
    ramp = np.linspace(-2.0, 3.0, width).reshape(1, -1)
    huge = random.standard_normal((1, width)) * {"float16": 8e3, "float64": 1e100}.get(dtype, 1e15)
    subnormal = random.standard_normal((1, width)) * 2.0 ** FORMATS[dtype].emin * 0.25
    return np.concatenate([ends, spike, mixed, ramp, huge, subnormal])


def _special(random: np.random.Generator, width: int) -> Array64:
    rows = random.standard_normal((4, width))
    rows[0] = 0.0
    rows[1, 0] = np.inf
    rows[2, -1] = np.nan
    return rows
