"""The op in float64 numpy for the kernel tests: exact, with the specification's roundings, and a bound of the error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
# Half of the smallest subnormal: what rounding costs where the relative bound ends.
FLOOR = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134, "float64": 2.0**-1075}
DTYPE_PAIRS = [
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float64", "float64"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
]


@dataclass(frozen=True)
class Case:
    """One variant of the op with the dtypes of x and of its parameters."""

    x: str
    param: str
    eps_mode: str = "inside"
    order: str = "after_cast"
    bias: bool = False
    skip: bool = False
    double: bool = False
    eps: float = 1e-6

    @property
    def y(self) -> str:
        return self.param if self.order == "after_cast" else self.x

    @property
    def stash(self) -> str:
        return "float64" if self.double else "float32"


def rounded(value: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        return value.astype(NUMPY[dtype]).astype(np.float64)


def truth(
    case: Case, x: Array, skip: Array | None, scale: Array, bias: Array | None
) -> tuple[Array, Array, Array, Array]:
    """exact y, y with each rounding, the allowed |error| against the exact one, and sum; rows along the last axis."""
    total = x.astype(np.float64)
    if skip is not None:
        total = rounded(total + skip.astype(np.float64), case.x)
    v = rounded(total, case.stash)
    mean = np.mean(v * v, axis=-1, keepdims=True)
    eps = float(rounded(np.float64(case.eps), case.stash))
    if case.eps_mode == "inside":
        r = np.sqrt(mean + eps)
    elif case.eps_mode == "outside":
        r = np.sqrt(mean) + eps
    else:
        r = np.maximum(np.sqrt(mean), eps)
    with np.errstate(all="ignore"):
        n = v / r
    step = case.y if case.order == "after_cast" else case.stash
    s = rounded(scale.astype(np.float64), step)
    b = rounded(bias.astype(np.float64), step) if bias is not None else np.float64(0)
    exact = n * s + b
    y = rounded(n, case.stash)
    y = rounded(y, case.x) if case.order == "after_cast" else y
    y = rounded(y * s, step)
    y = rounded(y + b, step) if bias is not None else y
    return exact, rounded(y, case.y), _bound(case, n, s, exact), total


def _bound(case: Case, n: Array, s: Array, exact: Array) -> Array:
    """Each rounding of the specification at its worst, and four of the stash type's for the statistics."""
    step = case.y if case.order == "after_cast" else case.stash
    first = HALF_ULP[case.x] if case.order == "after_cast" else 0.0
    product = np.abs(n * s) * (first + 8 * HALF_ULP[case.stash] + HALF_ULP[step])
    floor = FLOOR[case.y] + FLOOR[step] + (FLOOR[case.x] * np.abs(s) if first else 0.0)
    return (product + np.abs(exact) * (HALF_ULP[step] + HALF_ULP[case.y])) * 1.01 + floor


def rows(rng: np.random.Generator, count: int, width: int, dtype: str) -> Array:
    """Rows of several magnitudes, a row of zeros among them where there are three or more."""
    x = rng.standard_normal((count, width)) * rng.choice([0.01, 1.0, 20.0], size=(count, 1))
    if count >= 3:
        x[count // 2] = 0
    return x.astype(NUMPY[dtype])
