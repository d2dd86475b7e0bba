"""Error of an array against float64 truth, in ULPs of the dtype the array is written in.

One ULP is the spacing of the dtype at ``max(|truth|, s)``, where ``s`` is the root mean square of the truth's row (its
last axis; the whole tensor below rank 2). Without ``s`` an element that cancels to nearly zero would count
millions of ULPs although the row as a whole is as exact as the dtype allows: a matmul or a residual sum bounds the
error
against the size of the row, not of the element. The floor is taken a row at a time, not over the tensor, because rows
of
very different size live side by side (a tiny row is where a wrong epsilon shows).

Beyond the dtype's range the truth is what the dtype can say: where finite truth rounds to infinity, infinity is
right. On both sides of that edge infinity is measured as the first value past the range (65536 for float16), so that a
last-bit difference at the edge costs one ULP, and a true overflow thousands. Where the truth itself is NaN or infinite
the
array must hold the same; a difference there, or a NaN anywhere else, is a *mismatch* and its error is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Array64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FloatFormat:
    """``precision`` counts the significant bits with the hidden one; ``emin`` and ``emax`` are the normal exponents."""

    name: str
    precision: int
    emin: int
    emax: int

    @property
    def limit(self) -> float:
        """The first power of two past the range, as float64 holds it (infinity for float64 itself)."""
        return math.inf if self.emax >= 1023 else 2.0 ** (self.emax + 1)


FORMATS = {
    "float16": FloatFormat("float16", 11, -14, 15),
    "bfloat16": FloatFormat("bfloat16", 8, -126, 127),
    "float32": FloatFormat("float32", 24, -126, 127),
    "float64": FloatFormat("float64", 53, -1022, 1023),
}


@dataclass(frozen=True)
class UlpError:
    """Error of one array: ``max``, ``p99``, ``mean`` in ULPs over its ``elements``.

    ``mismatched`` counts elements whose NaN or infinity is not the truth's (they make ``max`` infinite and stay out of
    ``p99`` and ``mean``). ``worst`` is the index of the largest error. ``histogram`` counts elements by
    the bins of ``BIN_EDGES``. For integers and booleans the unit is "differs": each unequal element counts 1, and
    ``exact_type`` is true.
    """

    max: float
    p99: float
    mean: float
    elements: int
    mismatched: int = 0
    worst: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    exact_type: bool = False
    histogram: tuple[int, ...] = ()


# bins of |error| in ULPs: below 1/4, then a bin an octave up to 2^23, and one for all beyond
BIN_EDGES = (0.0, *(2.0**k for k in range(-2, 24)), math.inf)


# of float64: where its exponent is, and what is added to it
_EXPONENT_BITS, _EXPONENT_BIAS = 0x7FF0000000000000, 1023

_BLOCK = 2**15  # elements that are judged at a time: some arrays of that size in float64 fit the second-level cache


def ulp_size(value: Array64, dtype: str) -> Array64:
    """Spacing of ``dtype`` at each ``|value|`` (float64 in and out), down to the spacing of its subnormals."""
    form = FORMATS[dtype]
    binade = np.asarray((np.asarray(value, dtype=np.float64).view(np.int64) & _EXPONENT_BITS).view(np.float64))
    np.maximum(binade, 2.0**form.emin, out=binade)
    np.minimum(binade, 2.0**form.emax, out=binade)
    binade *= 2.0 ** (1 - form.precision)
    return binade


def row_scale(truth: Array64, largest: float | None = None) -> Array64:
    """Root mean square of the finite elements of each row, shaped to broadcast over ``truth``.

    ``largest`` is the largest absolute value in it, where that is known.
    """
    if truth.ndim < 2:
        return row_scale(truth.reshape(1, -1), largest).reshape((1,) * truth.ndim)
    axes = (-1,)
    if truth.size and (_largest(truth) if largest is None else largest) < 1e140:  # no square overflows
        squares = np.einsum("...i,...i->...", truth, truth)[..., np.newaxis]
        if np.all(squares > 1e-280):  # and none has vanished
            return np.asarray(np.sqrt(squares / truth.shape[-1]), dtype=np.float64)
    finite = np.isfinite(truth)
    safe = np.where(finite, truth, 0.0)
    peak = np.max(np.abs(safe), axis=axes, keepdims=True, initial=0.0)
    unit = np.where(peak > 0, peak, 1.0)
    count = np.maximum(finite.sum(axis=axes, keepdims=True), 1)
    return np.asarray(peak * np.sqrt(np.sum((safe / unit) ** 2, axis=axes, keepdims=True) / count), dtype=np.float64)


def ulp_error(got: Array, truth: Array, dtype: str | None = None, *, spread: bool = True) -> UlpError:
    """Error of ``got`` against ``truth``; ``dtype`` is ``got``'s unless given.

    Without ``spread`` the 99th percentile and the histogram are left out (0 and empty): they take as long as the rest.

    ``truth`` is float64 (or whatever widens to it) of ``got``'s shape. Raises ValueError when the shapes differ.
    Complex
    arrays are compared part by part.
    """
    name = dtype or got.dtype.name
    if got.shape != truth.shape:
        raise ValueError(f"shape {got.shape}, expected {truth.shape}")
    if name.startswith("complex"):
        return ulp_error(
            _parts(got), _parts(truth), {"complex64": "float32", "complex32": "float16"}.get(name, "float64")
        )
    if name not in FORMATS:
        return _exact(got, truth)
    return _inexact(got, truth, FORMATS[name], spread)


def worst_of(errors: list[UlpError]) -> UlpError:
    """One summary of several: the largest of each figure, the counts added."""
    if not errors:
        return UlpError(0.0, 0.0, 0.0, 0)
    top = max(errors, key=lambda error: error.max)
    counts = [error.histogram for error in errors if error.histogram]
    return replace(
        top,
        p99=max(error.p99 for error in errors),
        mean=max(error.mean for error in errors),
        elements=sum(error.elements for error in errors),
        mismatched=sum(error.mismatched for error in errors),
        histogram=tuple(int(total) for total in np.sum(counts, axis=0)) if counts else (),
    )


def _parts(array: Array) -> Array:
    return np.stack([array.real, array.imag], axis=-2 if array.ndim else 0)


def _exact(got: Array, truth: Array) -> UlpError:
    differs = got.astype(np.float64) != truth.astype(np.float64)
    count = int(differs.sum())
    worst = tuple(int(i) for i in np.argwhere(differs)[0]) if count else ()
    return UlpError(
        max=float(count > 0),
        p99=float(count > 0.01 * differs.size),
        mean=count / max(differs.size, 1),
        elements=int(differs.size),
        worst=worst,
        got=float(got[worst]) if count else 0.0,
        want=float(truth[worst]) if count else 0.0,
        exact_type=True,
    )


def _inexact(got: Array, truth: Array, form: FloatFormat, spread: bool) -> UlpError:
    if truth.size == 0:
        return UlpError(0.0, 0.0, 0.0, 0, histogram=(0,) * (len(BIN_EDGES) - 1) if spread else ())
    error, mismatch, histogram = _errors_in_blocks(got, truth, form, spread)
    comparable, counted = error.ravel(), histogram
    if mismatch.any():
        comparable = error[~mismatch]
        counted = (*histogram[:-1], histogram[-1] - int(mismatch.sum())) if spread else ()
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), truth.shape))
    return UlpError(
        max=float(error.max()),
        p99=_ninety_nine(comparable, counted) if spread else 0.0,
        mean=float(comparable.mean()) if comparable.size else 0.0,
        elements=int(error.size),
        mismatched=int(mismatch.sum()),
        worst=worst,
        got=float(got[worst]),
        want=float(truth[worst]),
        histogram=histogram,
    )


def _ninety_nine(error: Array64, counts: Sequence[int]) -> float:
    """The 99th percentile of ``error`` (between two elements, on the line through them); ``counts`` are by bin.

    Only the bins from the one that holds it on are sorted.
    """
    if not error.size:
        return 0.0
    place = 0.99 * (error.size - 1)
    below = np.cumsum([0, *counts])
    bin_ = int(np.searchsorted(below, int(place), side="right")) - 1
    top = error[error >= BIN_EDGES[bin_]]
    low = int(place) - int(below[bin_])
    high = min(low + 1, top.size - 1)
    top.partition((low, high))
    return float(top[low] + (top[high] - top[low]) * (place - int(place)))


def _errors_in_blocks(
    got: Array, truth: Array, form: FloatFormat, spread: bool
) -> tuple[Array64, npt.NDArray[np.bool_], tuple[int, ...]]:
    """Errors, mismatches (both as rows) and, with ``spread``, counts by bin. Some rows at a time: what is worked on
    stays in a cache."""
    width = truth.shape[-1] if truth.ndim > 1 else truth.size
    rows, true_rows = got.reshape(-1, width), truth.reshape(-1, width)
    error, mismatch = np.empty(true_rows.shape), np.empty(true_rows.shape, dtype=bool)
    counts = np.zeros(len(BIN_EDGES) - 1, dtype=np.int64)
    step = max(1, _BLOCK // width)
    for start in range(0, len(true_rows), step):
        block = slice(start, start + step)
        wide = rows[block].astype(np.float64, copy=False), true_rows[block].astype(np.float64, copy=False)
        error[block], mismatch[block] = _element_errors(*wide, form)
        if spread:
            counts += _counts(error[block])
    return error, mismatch, tuple(int(count) for count in counts) if spread else ()


def _counts(error: Array64) -> npt.NDArray[np.int64]:
    """Elements by the bins of ``BIN_EDGES``, which are the octaves of floating point."""
    octave = (np.ascontiguousarray(error).view(np.int64) >> 52) - _EXPONENT_BIAS
    bins = np.clip(octave + 3, 0, len(BIN_EDGES) - 2)
    return np.bincount(bins.ravel(), minlength=len(BIN_EDGES) - 1)


def _element_errors(got: Array64, truth: Array64, form: FloatFormat) -> tuple[Array64, npt.NDArray[np.bool_]]:
    """Error of each element in ULPs (infinite where mismatched), and where NaN or infinity is not the truth's."""
    largest = _largest(truth)
    if max(_largest(got), largest) < form.limit:  # nothing to clip, and nothing that is not a number
        plain = got - truth
        np.abs(plain, out=plain)
        size = np.abs(truth)
        np.maximum(size, row_scale(truth, largest), out=size)
        plain /= ulp_size(size, form.name)
        return plain, np.zeros(truth.shape, dtype=bool)
    known = np.isfinite(truth)
    inside = np.clip(truth, -form.limit, form.limit)
    seen = np.clip(got, -form.limit, form.limit) if math.isfinite(form.limit) else got
    same = np.where(np.isnan(truth), np.isnan(got), got == truth)
    mismatch = np.where(known, np.isnan(seen) | np.isinf(seen), ~same)
    scale = np.maximum(np.abs(np.where(known, inside, 0.0)), row_scale(np.where(known, inside, np.nan)))
    # a NaN or infinity in either operand is a mismatch or agrees already, and is set below
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(seen - inside) / ulp_size(scale, form.name)
    error = np.where(known, error, 0.0)
    return np.where(mismatch, math.inf, error), mismatch


def _largest(array: Array64) -> float:
    """The largest absolute value, infinite if there is a NaN."""
    if not array.size:
        return 0.0
    top = max(float(array.max()), -float(array.min()))  # both are NaN if one element is
    return math.inf if math.isnan(top) else top
