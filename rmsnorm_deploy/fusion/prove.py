"""Decides whether a candidate may become the op, by running both side by side.

1. In float64, casts lifted, on random and adversarial rows: equal to 1e-12 relative, zeros, infinities and NaN included.
   Where the graph holds sqrt(d) or 1/d as a rounded constant, that rounding (2^-22) is allowed; an epsilon never is.
2. In the model's own dtypes: the ways to round that the op has are tried, and the one that agrees with the region in
   most bits is taken; its error against float64 must not exceed the region's own by more than a few ULPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.fusion.evaluate import Array, is_float, numpy_dtype
from rmsnorm_deploy.fusion.meaning import BROADCAST, resolve
from rmsnorm_deploy.fusion.recognise import Candidate
from rmsnorm_deploy.fusion.region import CannotProveError, Region, extract
from rmsnorm_deploy.opset import FLOAT_TYPES, HALF_TYPES, split_epsilon

EXACT = 1e-12
ROUNDED_CONSTANT = 2.0**-22
OWN_DTYPE_ULPS = 4.0


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
    """Proves candidates; one that has been proved in the same form before costs nothing."""

    _known: dict[str, Proof | str] = field(default_factory=dict)

    def prove(self, candidate: Candidate) -> Proof | str:
        """A proof, or the reason why the region is left."""
        try:
            region = extract(candidate)
            key = region.fingerprint()
            if key not in self._known:
                self._known[key] = _prove(region)
            return self._known[key]
        except CannotProveError as error:
            return str(error)


def _prove(region: Region) -> Proof | str:
    candidate = region.candidate
    leaves = region.leaf_arrays()
    shape = _row_shape(region)
    allowed = ROUNDED_CONSTANT if _has_rounded_constant(region) else EXACT
    worst = 0.0
    for rows in _batches(_adversarial_rows(shape, candidate.axes), shape, candidate.axes):
        values = region.run(rows, leaves, lifted=True)
        scale, bias = _scale(candidate, values, rows.ndim), _bias(candidate, values)
        expected = values[candidate.output]
        actual = op_float64(rows, scale, bias, candidate)
        if expected.shape != actual.shape:
            return f"the result has shape {list(expected.shape)} where the norm's is {list(actual.shape)}"
        error = _relative_error(actual, expected, (expected - bias) if bias is not None else expected)
        if not error <= allowed:
            return f"in float64 it differs from the op by {error:.2g} of a value"
        worst = max(worst, error)
    return _choose_plan(region, leaves, shape, worst)


def _row_shape(region: Region) -> tuple[int, ...]:
    return region.shape(region.candidate.root)


def _adversarial_rows(shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """Rows, as a matrix, that tell apart formulas which agree on random ones."""
    width = int(np.prod([shape[axis] for axis in axes]))
    generator = np.random.default_rng(7)
    normal = generator.standard_normal((8, width))
    one_hot = np.zeros(width)
    one_hot[width // 2] = 3.0
    spike = generator.standard_normal(width)
    spike[0] = 1e4
    rows = [*normal[:3], np.zeros(width), normal[3] * 1e-3, normal[4] * 1e-8, normal[5] * 1e-20, normal[6] * 1e6]
    return np.stack([*rows, normal[7] * 1e12, one_hot, spike, np.ones(width)])


def _batches(rows: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterator[Array]:
    """The rows laid out as arrays of ``shape``, as many arrays as it takes."""
    lead = [size for axis, size in enumerate(shape) if axis not in axes]
    count = int(np.prod(lead))
    for start in range(0, len(rows), max(count, 1)):
        taken = [rows[(start + i) % len(rows)] for i in range(count)]
        block = np.asarray(taken).reshape(*lead, *(shape[axis] for axis in axes))
        yield np.moveaxis(block, range(len(lead), block.ndim), axes)


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


def _has_rounded_constant(region: Region) -> bool:
    """Whether a scalar of the graph is a rounded power of sqrt(d), which the op doesn't have to multiply by."""
    width = region.candidate.width
    constants = [v.const_value.numpy() for v in region.leaves if v.const_value is not None and v.const_value.size == 1]
    for node in region.nodes:
        value = node.attributes.get("value") if node.op_type == "Constant" else None
        if value is not None and value.as_tensor().size == 1:
            constants.append(value.as_tensor().numpy())
    numbers = [abs(float(c.reshape(-1)[0])) for c in constants if is_float(c)]
    return any(n > 0 and resolve({n: 1.0}, width)[1] != 0 for n in numbers)


def _choose_plan(region: Region, leaves: dict[ir.Value, Array], shape: tuple[int, ...], error: float) -> Proof | str:
    candidate = region.candidate
    x_type, out_type = candidate.root.dtype, candidate.output.dtype
    if x_type not in FLOAT_TYPES or out_type not in FLOAT_TYPES:
        return f"its dtype is {x_type} in and {out_type} out: the op needs floating point"
    plans = list(_plans(candidate, x_type, out_type))
    if len(plans) == 1 and x_type == ir.DataType.DOUBLE:
        return Proof(plans[0], error, 1.0)
    generator = np.random.default_rng(11)
    rows = (generator.standard_normal((12, 1)) * generator.standard_normal((12, _width(shape, candidate)))).astype(
        numpy_dtype(x_type)
    )
    same = np.zeros(len(plans))
    worst = np.zeros(len(plans) + 1)
    count = 0
    for batch in _batches(rows, shape, candidate.axes):
        typed = region.run(batch, leaves, lifted=False)
        values = region.run(batch.astype(np.float64), leaves, lifted=True)
        truth, region_result = values[candidate.output], typed[candidate.output]
        scale, bias = _scale(candidate, values, batch.ndim), _bias(candidate, values)
        count += truth.size
        worst[-1] = max(worst[-1], _ulps(region_result, truth, out_type))
        for i, plan in enumerate(plans):
            result = op_rounded(batch, scale, bias, candidate, plan)
            same[i] += np.count_nonzero(result == region_result)
            worst[i] = max(worst[i], _ulps(result, truth, out_type))
    best = int(np.argmax(same))
    if not worst[best] <= 2 * worst[-1] + OWN_DTYPE_ULPS:
        return f"in {out_type} the op would be off by {worst[best]:.1f} ULP, the graph by {worst[-1]:.1f}"
    return Proof(plans[best], error, float(same[best] / max(count, 1)))


def _width(shape: tuple[int, ...], candidate: Candidate) -> int:
    return int(np.prod([shape[axis] for axis in candidate.axes]))


def _plans(candidate: Candidate, x_type: ir.DataType, out_type: ir.DataType) -> Iterator[Plan]:
    """The ways to round, most likely first."""
    if x_type == ir.DataType.DOUBLE:
        yield Plan(x_type, ir.DataType.DOUBLE, "after_cast", out_type)
        return
    if x_type == ir.DataType.FLOAT:
        yield Plan(x_type, ir.DataType.FLOAT, "after_cast", out_type)
        return
    scale_type = _scale_type(candidate, x_type)
    yield Plan(x_type, scale_type, "after_cast", out_type)
    yield Plan(x_type, scale_type, "before_cast", out_type)
    if out_type == ir.DataType.FLOAT:
        yield Plan(ir.DataType.FLOAT, ir.DataType.FLOAT, "after_cast", out_type)


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
    epsilon = split_epsilon(candidate.epsilon)[0]
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


def _ulps(actual: Array, truth: Array, dtype: ir.DataType) -> float:
    """Largest error in units of the last place of the row's largest element."""
    size = np.max(np.abs(truth), initial=0.0)
    if size == 0 or not np.isfinite(size):
        return 0.0
    error = np.nan_to_num(np.abs(actual.astype(np.float64) - truth), nan=np.inf)
    return float(np.max(error, initial=0.0) / (size * 2.0 ** -_MANTISSA_BITS[dtype]))


def is_half(dtype: ir.DataType) -> bool:
    """Whether a dtype is float16 or bfloat16."""
    return dtype in HALF_TYPES
