"""Decides whether a candidate may become the op, by running both side by side.

1. In float64, casts lifted, on random and adversarial rows: equal to 1e-12 relative, zeros, infinities and NaN
   included. Where the graph holds sqrt(d) or 1/d rounded to a dtype, that rounding is allowed for; an epsilon's is not.
2. In the model's own dtypes: of the ways to round that the op has, those are kept whose error against float64 exceeds
   the region's own by no more than a few ULPs on any row; of these the one that keeps most of the region's bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.fusion.evaluate import Array, numpy_dtype
from rmsnorm_deploy.fusion.meaning import BROADCAST, resolve
from rmsnorm_deploy.fusion.recognise import Candidate
from rmsnorm_deploy.fusion.region import CannotProveError, Region, Sizes
from rmsnorm_deploy.opset import FLOAT_TYPES, HALF_TYPES, split_epsilon

EXACT = 1e-12
OWN_DTYPE_ULPS = 4.0
HOPELESS = 1e30  # ULPs of a result that is NaN or infinite
MAX_ELEMENTS = 1 << 24  # of one array of rows


@dataclass(frozen=True)
class Plan:
    """How the op stands in for a region: X's type, the scale's, where it rounds, and the cast behind it, if any."""

    x_type: ir.DataType
    scale_type: ir.DataType
    scale_order: str
    out_type: ir.DataType

    @property
    def op_type(self) -> ir.DataType:
        """The op's own output type V (docs/op-spec.md)."""
        if self.scale_order == "before_cast":
            return self.x_type
        return max((self.x_type, self.scale_type), key=lambda dtype: dtype.bitwidth)

    @property
    def stash_type(self) -> ir.DataType:
        """The dtype of the statistics."""
        return ir.DataType.DOUBLE if self.x_type == ir.DataType.DOUBLE else ir.DataType.FLOAT


@dataclass(frozen=True)
class Proof:
    """A plan that holds, with the largest relative error in float64 and how many elements keep their very bits."""

    plan: Plan
    float64_error: float
    same_bits: float


@dataclass
class Prover:
    """Proves regions; one that has been proved in the same form before costs nothing."""

    _known: dict[str, Proof | str] = field(default_factory=dict)

    def prove(self, region: Region) -> Proof | str:
        """A proof, or the reason why the region is left."""
        key = region.fingerprint()
        if key not in self._known:
            self._known[key] = _prove(region)
        return self._known[key]


def _prove(region: Region) -> Proof | str:
    """Try with few elements outside the row; a region that fixes their number is run at its own size."""
    small, full = (Sizes(region.candidate, small=small) for small in (True, False))
    result = _prove_at(region, small)
    return result if isinstance(result, Proof) or small.root() == full.root() else _prove_at(region, full)


def _prove_at(region: Region, sizes: Sizes) -> Proof | str:
    shape = sizes.root()
    if not 0 < np.prod(shape, dtype=float) <= MAX_ELEMENTS:
        return f"rows of shape {list(shape)} are too large to prove it on, or empty"
    try:
        trial = _Trial(region, sizes, region.leaf_arrays(sizes))
        error = _float64_error(trial)
        return error if isinstance(error, str) else _choose_plan(trial, error)
    except CannotProveError as cause:
        return str(cause)


@dataclass(frozen=True)
class _Trial:
    """A region with numbers for everything but the rows."""

    region: Region
    sizes: Sizes
    leaves: dict[ir.Value, Array]

    @property
    def candidate(self) -> Candidate:
        return self.region.candidate

    def run(self, rows: Array, *, lifted: bool) -> dict[ir.Value, Array]:
        return self.region.run(rows.astype(np.float64) if lifted else rows, self.leaves, self.sizes, lifted=lifted)

    def batches(self, rows: Array) -> Iterator[Array]:
        """The rows laid out in the shape of the root, in as many arrays as it takes."""
        shape, axes = self.sizes.root(), self.candidate.axes
        lead = [size for axis, size in enumerate(shape) if axis not in axes]
        count = int(np.prod(lead))
        for start in range(0, len(rows), count):
            taken = [rows[(start + i) % len(rows)] for i in range(count)]
            block = np.asarray(taken).reshape(*lead, *(shape[axis] for axis in axes))
            yield np.moveaxis(block, range(len(lead), block.ndim), axes)

    @cached_property
    def slack(self) -> float:
        """How far, relative, the region may be off because its constants are rounded."""
        return 4 * _rounding_of_constants(self.region)

    @property
    def width(self) -> int:
        """Elements of a row."""
        shape = self.sizes.root()
        return int(np.prod([shape[axis] for axis in self.candidate.axes]))


def _float64_error(trial: _Trial) -> float | str:
    """The largest relative error in float64, or why it is too large."""
    candidate = trial.candidate
    allowed = EXACT + trial.slack
    worst = 0.0
    for rows in trial.batches(_adversarial_rows(trial.width)):
        values = trial.run(rows, lifted=True)
        scale, bias = _scale(candidate, values, rows.ndim), _bias(candidate, values)
        expected = values[candidate.output]
        actual = _followed(op_float64(rows, scale, bias, candidate), candidate, values)
        if expected.shape != actual.shape:
            return f"the result has shape {list(expected.shape)} where the norm's is {list(actual.shape)}"
        error = _relative_error(actual, expected, expected if bias is None else expected - bias)
        if not error <= allowed:
            return f"in float64 it differs from the op by {error:.2g} of a value"
        worst = max(worst, error)
    return worst


def _adversarial_rows(width: int) -> Array:
    """Rows, as a matrix, that tell apart formulas which agree on random ones."""
    generator = np.random.default_rng(7)
    normal = generator.standard_normal((8, width))
    one_hot = np.zeros(width)
    one_hot[width // 2] = 3.0
    spike = generator.standard_normal(width)
    spike[0] = 1e4
    rows = [*normal[:3], np.zeros(width), normal[3] * 1e-3, normal[4] * 1e-8, normal[5] * 1e-20, normal[6] * 1e6]
    special = [np.where(one_hot > 0, value, normal[0]) for value in (np.nan, np.inf)]
    return np.stack([*rows, normal[7] * 1e12, one_hot, spike, np.ones(width), *special])


def _scale(candidate: Candidate, values: dict[ir.Value, Array], rank: int) -> Array | None:
    """The scale in float64, laid out to broadcast over the root."""
    if candidate.activation is not None:
        return values[candidate.activation].astype(np.float64)
    scale = np.asarray(candidate.constant, np.float64)
    for factor in candidate.factors:
        array = values[factor.value].astype(np.float64)
        scale = scale * spread(array, factor.layout, candidate.axes, rank) ** factor.power
    return scale if candidate.factors or candidate.constant != 1 else None


def spread(array: Array, layout: tuple[int, ...], axes: tuple[int, ...], rank: int) -> Array:
    """``array`` with its axis ``layout[i]`` on axis ``axes[i]`` of ``rank`` axes, and size one elsewhere."""
    kept = [entry for entry in layout if entry != BROADCAST]
    others = [axis for axis in range(array.ndim) if axis not in kept]
    flat = np.transpose(array, [*others, *kept]).reshape([array.shape[axis] for axis in kept])
    sizes = [1] * rank
    for axis, entry in zip(axes, layout, strict=True):
        sizes[axis] = 1 if entry == BROADCAST else array.shape[entry]
    return flat.reshape(sizes)


def _bias(candidate: Candidate, values: dict[ir.Value, Array]) -> Array | None:
    return None if candidate.bias is None else values[candidate.bias].astype(np.float64)


def _followed(result: Array, candidate: Candidate, values: dict[ir.Value, Array]) -> Array:
    """What the op gives, times what follows it, in the dtype of the result."""
    if candidate.behind is None:
        return result
    with np.errstate(all="ignore"):
        return np.asarray(result * values[candidate.behind].astype(result.dtype))


def op_float64(x: Array, scale: Array | None, bias: Array | None, candidate: Candidate) -> Array:
    """The op by its definition (docs/op-spec.md), in float64, with the epsilon that its attributes can hold."""
    epsilon = sum(split_epsilon(candidate.epsilon))
    return _op(x.astype(np.float64), scale, bias, candidate, epsilon)


def _op(x: Array, scale: Array | None, bias: Array | None, candidate: Candidate, epsilon: float) -> Array:
    with np.errstate(all="ignore"):
        normalized = x / _root_mean_square(x, candidate, epsilon)
        scaled = normalized if scale is None else normalized * scale
        return scaled if bias is None else scaled + bias


def _root_mean_square(x: Array, candidate: Candidate, epsilon: float) -> Array:
    mean = np.mean(x * x, axis=candidate.axes, keepdims=True)
    eps = x.dtype.type(epsilon)
    if candidate.epsilon_mode == "inside":
        return np.asarray(np.sqrt(mean + eps))
    root = np.sqrt(mean)
    return np.asarray(root + eps if candidate.epsilon_mode == "outside" else np.maximum(root, eps))


def _relative_error(actual: Array, expected: Array, magnitude: Array) -> float:
    """Largest error relative to the element before the bias; infinite where NaN or infinity differ."""
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(actual)):
        return float("inf")
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    difference = np.abs(actual - expected)[finite]
    size = np.maximum(np.abs(magnitude)[finite], np.abs(expected)[finite])
    with np.errstate(all="ignore"):
        relative = np.where(difference == 0, 0.0, difference / size)
    return float(np.max(relative, initial=0.0))


def _rounding_of_constants(region: Region) -> float:
    """How far the scalars of a region that stand for powers of sqrt(d) are off, relative, all together."""
    width = float(region.candidate.width or 1)
    tensors = [value.const_value for value in region.leaves]
    tensors += [node.attributes["value"].as_tensor() for node in region.nodes if "value" in node.attributes]
    total = 0.0
    for tensor in tensors:
        if tensor is not None and tensor.size == 1 and tensor.dtype.is_floating_point():
            number = abs(float(tensor.numpy().reshape(-1)[0]))
            half_powers = resolve({number: 1.0}, region.candidate.width)[1] if number > 0 else 0
            total += abs(number / width ** (half_powers / 2) - 1) if half_powers else 0.0
    return total


def _choose_plan(trial: _Trial, error: float) -> Proof | str:
    candidate = trial.candidate
    x_type, out_type = candidate.root.dtype, candidate.output.dtype
    if x_type not in FLOAT_TYPES or out_type not in FLOAT_TYPES:
        return f"its dtype is {x_type} in and {out_type} out: the op needs floating point"
    plans = list(_plans(trial.region, x_type, out_type))
    same, excess, count = np.zeros(len(plans)), np.zeros(len(plans)), 0
    for batch in trial.batches(_rows_of(x_type, trial.width)):
        values = trial.run(batch, lifted=True)
        result, truth = trial.run(batch, lifted=False)[candidate.output], values[candidate.output]
        scale, bias = _scale(candidate, values, batch.ndim), _bias(candidate, values)
        own = _row_ulps(result, truth, out_type, candidate.axes)
        count += truth.size
        for i, plan in enumerate(plans):
            fused = _followed(op_rounded(batch, scale, bias, candidate, plan), candidate, values)
            same[i] += np.count_nonzero((fused == result) | (np.isnan(fused) & np.isnan(result)))
            excess[i] = max(excess[i], np.max(_row_ulps(fused, truth, out_type, candidate.axes) - 2 * own))
    fair = excess <= OWN_DTYPE_ULPS + trial.slack * 2.0 ** _MANTISSA_BITS[out_type]
    if not fair.any():
        return f"in {out_type} the op would be off by {np.min(excess):.1f} ULP more than the graph is"
    best = int(np.argmax(np.where(fair, same, -1)))
    return Proof(plans[best], error, float(same[best] / count))


def _rows_of(dtype: ir.DataType, width: int) -> Array:
    """Rows of all sizes that a dtype holds."""
    generator = np.random.default_rng(11)
    rows = generator.standard_normal((14, 1)) * generator.standard_normal((14, width))
    if dtype == ir.DataType.FLOAT16:
        rows[-2:] = generator.uniform(1, 6, (2, width)) * ((1e4,), (1e-7,))
    else:
        rows[-2:] = generator.uniform(1, 6, (2, width)) * ((1e25,), (1e-30,))
    return np.asarray(rows.astype(numpy_dtype(dtype)))


def _plans(region: Region, x_type: ir.DataType, out_type: ir.DataType) -> Iterator[Plan]:
    """The ways to round, most likely first.

    Without a scale both orders are the same numbers, and the body that rounds last runs in more places: ONNX Runtime's
    CPU provider fuses it in float16, and has no product in bfloat16 for the other.
    """
    if x_type in HALF_TYPES:
        scale_type = _scale_type(region.candidate, x_type)
        orders = ("after_cast", "before_cast")
        for order in orders if _is_scaled(region.candidate) else reversed(orders):
            yield Plan(x_type, scale_type, order, out_type)
    if x_type == ir.DataType.FLOAT or (x_type in HALF_TYPES and out_type == ir.DataType.FLOAT):
        yield Plan(ir.DataType.FLOAT, ir.DataType.FLOAT, "after_cast", out_type)
    if x_type == ir.DataType.DOUBLE or any(node.outputs[0].dtype == ir.DataType.DOUBLE for node in region.nodes):
        yield Plan(ir.DataType.DOUBLE, ir.DataType.DOUBLE, "after_cast", out_type)


def _is_scaled(candidate: Candidate) -> bool:
    parts = (candidate.activation, candidate.bias)
    return bool(candidate.factors) or candidate.constant != 1 or any(part is not None for part in parts)


def _scale_type(candidate: Candidate, x_type: ir.DataType) -> ir.DataType:
    """A half scale stays half if it is the weight as it is; anything that was computed is kept in float32."""
    if candidate.activation is not None:
        return x_type if candidate.activation.dtype == x_type else ir.DataType.FLOAT
    values = [factor.value for factor in candidate.factors] + ([candidate.bias] if candidate.bias is not None else [])
    plain = candidate.constant == 1 and len(candidate.factors) <= 1 and all(f.power == 1 for f in candidate.factors)
    if plain and all(value.dtype == x_type for value in values):
        return x_type
    return ir.DataType.FLOAT


def op_rounded(x: Array, scale: Array | None, bias: Array | None, candidate: Candidate, plan: Plan) -> Array:
    """The op by its definition with the roundings of ``plan``; returns the dtype of the candidate's output."""
    stash, x_type = numpy_dtype(plan.stash_type), numpy_dtype(plan.x_type)
    high, low = split_epsilon(candidate.epsilon)
    epsilon = high + low if plan.stash_type == ir.DataType.DOUBLE else high
    wide = x.astype(x_type).astype(stash)
    scale_type = numpy_dtype(plan.scale_type)
    scale = None if scale is None else scale.astype(scale_type).astype(stash)
    bias = None if bias is None else bias.astype(scale_type).astype(stash)
    with np.errstate(all="ignore"):
        normalized = wide / _root_mean_square(wide, candidate, epsilon)
        out = numpy_dtype(plan.op_type)
        if plan.scale_order == "after_cast":
            normalized = normalized.astype(x_type).astype(stash)
            scaled = normalized if scale is None else (normalized * scale).astype(out).astype(stash)
            result = scaled if bias is None else scaled + bias
        else:
            scaled = normalized if scale is None else normalized * scale
            result = scaled if bias is None else scaled + bias
        return np.asarray(result.astype(out).astype(numpy_dtype(plan.out_type)))


_MANTISSA_BITS = {
    ir.DataType.FLOAT16: 10,
    ir.DataType.BFLOAT16: 7,
    ir.DataType.FLOAT: 23,
    ir.DataType.DOUBLE: 52,
}


def _row_ulps(actual: Array, truth: Array, dtype: ir.DataType, axes: tuple[int, ...]) -> Array:
    """For each row the largest error, in units of the last place of the row's largest element."""
    error = np.nan_to_num(np.abs(actual.astype(np.float64) - truth), nan=HOPELESS, posinf=HOPELESS)
    size = np.nan_to_num(np.max(np.abs(truth), axis=axes), nan=0.0, posinf=0.0)
    ulp = np.where(size > 0, size * 2.0 ** -_MANTISSA_BITS[dtype], np.inf)
    return np.asarray(np.minimum(np.max(error, axis=axes) / ulp, HOPELESS))
