"""Inputs to judge a model on, made from its manifest: random and adversarial values, at several shapes.

Every array is a function of the seed, the sample's name and the input's name, so adding a sample or an input changes
no other.
"""

from __future__ import annotations

import ast
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.ulp import FORMATS, Array, Array64
from rmsnorm_deploy.runtime.signature import Signature, check_feeds

# torch.export writes 2 as the minimum of dims whose user named none: only a larger one is the user's word
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101)
_FREE_DIM = 3  # the size of a dim the manifest says nothing about

_FLOATS = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@dataclass(frozen=True)
class Sample:
    """One call of the model: arrays by input name, in the model's dtypes (bfloat16 as ``ml_dtypes.bfloat16``).

    ``kind`` is "random", "adversarial" or "user"; ``dims`` the sizes the named dims took.
    """

    name: str
    kind: str
    feeds: dict[str, Array]
    dims: dict[str, int] = field(default_factory=dict)

    @property
    def hides(self) -> bool:
        """Whether its masks hide something; a query that sees nothing then has no defined result."""
        return self.name == _MASKED.replace("_", " ")

    @property
    def has_rows(self) -> bool:
        """Whether no input is empty."""
        return all(array.size for array in self.feeds.values())


def make_samples(manifest: Mapping[str, Any], *, seed: int = 0, adversarial: bool = True) -> list[Sample]:
    """Samples for the inputs in ``manifest``: random values at each shape, then adversarial ones at the example's
    shape.

    Shapes: the example's, one in the leading dim, prime sizes, and none in the leading dim; where the manifest's limits
    forbid a size, it is left out. A model without dynamic dims has the example's only.
    """
    inputs = list(manifest["signature"]["inputs"])
    limits = dict(manifest.get("dims") or {})
    samples = []
    for name, dims in shape_cases(inputs, limits).items():
        samples.append(_sample(f"random, {name}", "random", inputs, limits, dims, seed, "normal"))
    if not adversarial:
        return samples
    example = _example_dims(limits)
    for pattern in _patterns_for(inputs):
        samples.append(_sample(pattern.replace("_", " "), "adversarial", inputs, limits, example, seed, pattern))
    return samples


def sample_of_size(manifest: Mapping[str, Any], size: int, *, seed: int = 0) -> Sample:
    """Random values where every named dim is ``size``, but those that lead an input, which are 1."""
    inputs, limits = list(manifest["signature"]["inputs"]), dict(manifest.get("dims") or {})
    leading = {str(item["shape"][0]) for item in inputs if len(item["shape"]) > 1}
    dims = {name: 1 if name in leading else size for name in limits}
    return _sample(f"random, size {size}", "random", inputs, limits, dims, seed, "normal")


def load_samples(path: Path, manifest: Mapping[str, Any]) -> list[Sample]:
    """The user's own arrays: an .npz with one array an input, named as the inputs are.

    float arrays are cast to the input's dtype (numpy has no bfloat16), integers too where no value changes.

    Raises:
        InputError: no such file, not an .npz, or a name, shape or dtype that does not fit.
    """
    inputs = {item["name"]: item for item in manifest["signature"]["inputs"]}
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{path} is not an .npz of arrays: {error}") from error
    wrong = sorted(set(arrays) ^ set(inputs))
    if wrong:
        missing = wrong[0] in inputs
        problem = f"lacks input {wrong[0]!r}" if missing else f"has an unknown input {wrong[0]!r}"
        raise InputError(f"{path} {problem}; the model takes {', '.join(inputs)}")
    feeds = {name: _fit(path, item, arrays[name]) for name, item in inputs.items()}
    try:
        check_feeds(Signature.from_manifest(manifest), feeds)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return [Sample(f"user, {path.name}", "user", feeds)]


def shape_cases(inputs: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Sizes of the named dims by the case's name, each different from the ones before it."""
    example = _example_dims(limits)
    leading = {str(item["shape"][0]) for item in inputs if item["shape"] and str(item["shape"][0]) in limits}
    primes = {name: _prime(limits[name], index) for index, name in enumerate(limits)}
    candidates = {
        "example shape": example,
        "one row": {**example, **dict.fromkeys(leading, 1)},
        "prime sizes": {**example, **primes},
        "no rows": {**example, **dict.fromkeys(leading, 0)},
    }
    cases: dict[str, dict[str, int]] = {}
    for name, dims in candidates.items():
        if dims not in cases.values() and all(_allowed(limits[dim], size) for dim, size in dims.items()):
            cases[name] = dims
    return cases or {"example shape": example}


def dim_size(dim: int | str | None, dims: Mapping[str, int], limits: Mapping[str, Any]) -> int:
    """The size of one entry of a shape: a number, a named dim, or an expression of named dims such as ``2*seq + 1``.

    What is none of these may be anything, and gets a size of its own.
    """
    if isinstance(dim, int):
        return dim
    if dim in dims:
        return dims[str(dim)]
    if dim in limits:
        return int(limits[str(dim)].get("example") or _FREE_DIM)
    try:
        return max(_evaluate(ast.parse(str(dim), mode="eval").body, dims), 0)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
        return _FREE_DIM


def _evaluate(node: ast.AST, dims: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return dims[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, dims)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.lower() in ("max", "min"):
        values = [_evaluate(argument, dims) for argument in node.args]
        return max(values) if node.func.id.lower() == "max" else min(values)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, dims), _evaluate(node.right, dims))
    raise TypeError(f"not an expression of dims: {ast.dump(node)}")


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def _example_dims(limits: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(limit.get("example") or max(limit.get("min") or 0, _FREE_DIM)) for name, limit in limits.items()}


def _allowed(limit: Mapping[str, Any], size: int) -> bool:
    low, high = limit.get("min"), limit.get("max")
    too_low = low is not None and size < low
    return not too_low and (high is None or size <= high)


def _prime(limit: Mapping[str, Any], index: int) -> int:
    """A prime within the limits, another for each dim (the first takes 7, the next 11), or the example."""
    fitting = [prime for prime in _PRIMES if _allowed(limit, prime)]
    return fitting[index % len(fitting)] if fitting else int(limit.get("example") or _FREE_DIM)


def _sample(
    name: str,
    kind: str,
    inputs: Sequence[Mapping[str, Any]],
    limits: Mapping[str, Any],
    dims: Mapping[str, int],
    seed: int,
    pattern: str,
) -> Sample:
    feeds = {}
    for item in inputs:
        shape = tuple(dim_size(dim, dims, limits) for dim in item["shape"])
        random = np.random.default_rng([seed, zlib.crc32(name.encode()), zlib.crc32(item["name"].encode())])
        feeds[item["name"]] = _values(item, shape, random, pattern)
    return Sample(name, kind, feeds, dict(dims))


def _values(item: Mapping[str, Any], shape: tuple[int, ...], random: np.random.Generator, pattern: str) -> Array:
    name, dtype = str(item["name"]).lower(), str(item["dtype"])
    if dtype in _FLOATS:
        if "mask" in name:
            # additive, and hides nothing; a finite number may be a factor too
            return (_in_turn(shape) * (-10.0 * (pattern == _MASKED))).astype(_FLOATS[dtype])
        values = PATTERNS[pattern](random, shape, dtype) if len(shape) >= 1 else random.standard_normal(shape)
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(values).astype(_FLOATS[dtype])
    _require_numbers(item)
    if "mask" in name:
        hidden = _in_turn(shape) if pattern == _MASKED else np.zeros(shape, bool)
        return (hidden if "pad" in name else ~hidden).astype(dtype)  # PyTorch's masks of padding say what is hidden
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if not item.get("high") and "position" in name and shape:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
    high = int(item.get("high") or 2)
    return _ID_PATTERNS.get(pattern, _any_ids)(random, shape, high).astype(dtype)


def _require_numbers(item: Mapping[str, Any]) -> None:
    try:
        np.dtype(item["dtype"])
    except TypeError:
        raise InputError(
            f"input {item['name']!r} is of dtype {item['dtype']}, of which no values can be made up: --no-check "
            f"exports the model unproved"
        ) from None


def _in_turn(shape: tuple[int, ...]) -> Array:
    """Every other place along the last axis, but not the first: whichever of the two a mask hides, some are seen."""
    return np.broadcast_to(np.arange(shape[-1] if shape else 1) % 2 == 1, shape or (1,)).reshape(shape)


def _any_ids(random: np.random.Generator, shape: tuple[int, ...], high: int) -> Array:
    return random.integers(0, high, shape)


def _edge_ids(random: np.random.Generator, shape: tuple[int, ...], high: int) -> Array:
    """The first and the last valid id, in turn."""
    return (np.arange(math.prod(shape)) % 2 * (high - 1)).reshape(shape)


def _same_id(random: np.random.Generator, shape: tuple[int, ...], high: int) -> Array:
    return np.full(shape, random.integers(0, high))


_MASKED = "masks_in_part"
_ID_PATTERNS = {"edge_ids": _edge_ids, "one_id_throughout": _same_id}


def _normal(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    return random.standard_normal(shape)


def _zero_rows(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    """Every other row is zero, the first one too."""
    rows = np.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)
    return random.standard_normal(shape) * (rows % 2)


def _tiny(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    """Mean squares near the usual epsilons, where the epsilon's size and place decide the result."""
    return random.standard_normal(shape) * 10.0 ** random.uniform(-4, -2, (*shape[:-1], 1))


def _subnormal(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    smallest = 2.0 ** FORMATS[dtype].emin
    return random.standard_normal(shape) * smallest * 0.25


def _huge(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    """As large as squares in float32 (float64 for float64) allow; for float16 half of its own range."""
    size = {"float16": 8e3, "float64": 1e100}.get(dtype, 1e15)
    return random.standard_normal(shape) * size


def _spiky(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    """Small values with one outlier a row, as trained transformers have."""
    values = random.standard_normal(shape) * 1e-2
    return np.where(_one_a_row(random, shape), 300.0, values)


def _one_hot(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    return _one_a_row(random, shape).astype(np.float64)


def _mixed(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array64:
    """1e6 and 1e-6 side by side in each row (1e4 and 1e-4 in float16)."""
    size = 1e4 if dtype == "float16" else 1e6
    return random.standard_normal(shape) * np.where(random.random(shape) < 0.5, size, 1 / size)


def _one_a_row(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    width = max(shape[-1], 1)
    return np.equal(np.arange(shape[-1]), random.integers(0, width, (*shape[:-1], 1)))


PATTERNS: dict[str, Callable[[np.random.Generator, tuple[int, ...], str], Array64]] = {
    "normal": _normal,
    "zero_rows": _zero_rows,
    "tiny": _tiny,
    "subnormal": _subnormal,
    "huge": _huge,
    "spiky": _spiky,
    "one_hot": _one_hot,
    "mixed_magnitudes": _mixed,
    "edge_ids": _normal,
    "one_id_throughout": _normal,
    _MASKED: _normal,
}


def _patterns_for(inputs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Adversarial floats where the model takes floats (other than a mask), edge ids where it takes ids, and masks that
    hide something where it takes masks."""
    floats = any(item["dtype"] in _FLOATS and item["shape"] and "mask" not in item["name"].lower() for item in inputs)
    ids = any((item.get("high") or 0) > 1 for item in inputs)
    masks = any("mask" in item["name"].lower() and item["shape"] for item in inputs)
    chosen = [name for name in PATTERNS if name not in ("normal", _MASKED, *_ID_PATTERNS)] if floats else []
    return ([_MASKED] if masks else []) + chosen + (list(_ID_PATTERNS) if ids else [])


def _fit(path: Path, item: Mapping[str, Any], array: Array) -> Array:
    name, dtype = item["name"], str(item["dtype"])
    if array.ndim != len(item["shape"]):
        raise InputError(f"{path}: input {name!r} has rank {array.ndim}, the model takes rank {len(item['shape'])}")
    if dtype in _FLOATS:
        if array.dtype.kind not in "fiu" and array.dtype != np.dtype(ml_dtypes.bfloat16):
            raise InputError(f"{path}: input {name!r} is {array.dtype}, the model takes {dtype}")
        return array.astype(_FLOATS[dtype])
    fitted = array.astype(dtype)
    if array.dtype.kind not in "iub" or not np.array_equal(fitted, array):
        raise InputError(f"{path}: input {name!r} is {array.dtype}, and its values do not fit the model's {dtype}")
    high = item.get("high")
    if high and fitted.size and (fitted.min() < 0 or fitted.max() >= high):
        raise InputError(f"{path}: input {name!r} holds ids outside 0..{high - 1}, past the model's table")
    return fitted
