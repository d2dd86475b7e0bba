"""The ONNX domain ``rmsnorm_deploy``: op names, schemas and function bodies (docs/op-spec.md is normative).

A body is composed of small onnxscript functions, one for the row's root mean square and one for the end, then inlined
into one flat function of the model's own opset, so that any ONNX runtime can run the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx_ir as ir
import onnxscript
from onnx_ir.passes.common import IdentityEliminationPass, InlinePass

from rmsnorm_deploy.errors import InputError

DOMAIN = "rmsnorm_deploy"
VERSION = 1
MIN_OPSET = 13
EPSILON_MODES = ("inside", "outside", "clamp")
SCALE_ORDERS = ("after_cast", "before_cast")
HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOAT_TYPES = (*HALF_TYPES, ir.DataType.FLOAT, ir.DataType.DOUBLE)

# What every node carries; a function must declare each attribute that its callers give.
ATTRIBUTES: dict[str, int | float | str] = {
    "axis": -1,
    "epsilon": 1e-6,
    "epsilon_low": 0.0,
    "epsilon_mode": "inside",
    "scale_order": "after_cast",
    "stash_type": 1,
    "plugin_namespace": DOMAIN,
    "plugin_version": "1",
}


@dataclass(frozen=True)
class Variant:
    """What a function body depends on besides types: the part of a node that its op name tells."""

    skip: bool = False
    mode: str = "inside"
    bias: bool = False
    before_cast: bool = False
    double: bool = False

    @property
    def name(self) -> str:
        """The op name, as docs/op-spec.md, 'Names', builds it."""
        return "".join(
            (
                "SkipRMSNorm" if self.skip else "RMSNorm",
                "" if self.mode == "inside" else f"_{self.mode}",
                "_bias" if self.bias else "",
                "_before_cast" if self.before_cast else "",
                "_double" if self.double else "",
            )
        )


@dataclass(frozen=True)
class Signature:
    """The types of one node, from which its body's casts follow: X's, the scale's, and the first normalized axis."""

    x: ir.DataType
    scale: ir.DataType
    axis: int


def can_share_body(a: Signature, b: Signature, opset: int) -> bool:
    """Whether one body can serve nodes of both signatures: CastLike came with opset 15, axes as an input with 18."""
    return (opset >= 15 or (a.x, a.scale) == (b.x, b.scale)) and (opset >= 18 or a.axis == b.axis)


def variants() -> Iterator[Variant]:
    """All variants, in the order in which a library registers their names."""
    flags = (False, True)
    for skip, mode, bias, before_cast, double in product(flags, EPSILON_MODES, flags, flags, flags):
        yield Variant(skip, mode, bias, before_cast, double)


VARIANT_BY_NAME: dict[str, Variant] = {variant.name: variant for variant in variants()}


def is_fused_op(node: ir.Node) -> bool:
    """Whether a node is one of this domain's ops."""
    return node.domain == DOMAIN and node.op_type in VARIANT_BY_NAME


def split_epsilon(epsilon: float) -> tuple[float, float]:
    """``(epsilon, epsilon_low)``: a float64 as the sum of two float32 values, exact to 2^-48 of itself."""
    high = float(np.float32(epsilon))
    return high, float(np.float32(epsilon - high))


@lru_cache(maxsize=1)
def schemas() -> tuple[onnx.defs.OpSchema, ...]:
    """ONNX schemas of all names, for checkers and for ONNX's own shape inference."""
    return tuple(_schema(variant) for variant in variants())


def _schema(variant: Variant) -> onnx.defs.OpSchema:
    parameter = onnx.defs.OpSchema.FormalParameter
    option = onnx.defs.OpSchema.FormalParameterOption
    types = ["tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"]
    inputs = [parameter("X", "T", "The rows.")]
    if variant.skip:
        inputs.append(parameter("skip", "T", "The residual that is added to X first."))
    inputs.append(parameter("scale", "U", "Multiplies the normalized row.", param_option=option.Optional))
    if variant.bias:
        inputs.append(parameter("bias", "U", "Is added last."))
    outputs = [parameter("Y", "V", "The normalized rows.")]
    if variant.skip:
        outputs.append(parameter("sum", "T", "X + skip."))
    return onnx.defs.OpSchema(
        variant.name,
        DOMAIN,
        VERSION,
        doc="RMSNorm over the last -axis axes; see docs/op-spec.md.",
        inputs=inputs,
        outputs=outputs,
        type_constraints=[(letter, types, "floating point") for letter in "TUV"],
        attributes=[
            onnx.defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, value))
            for name, value in ATTRIBUTES.items()
        ],
    )


def function_body(variant: Variant, signatures: frozenset[Signature], opset: int) -> ir.Function:
    """The model-local function of one variant, for the node types it has to serve.

    Casts that no node needs are left out: ONNX Runtime is faster without them.

    Raises:
        InputError: the opset is older than 13, or has no op that the types ask for.
    """
    if opset < MIN_OPSET:
        raise InputError(f"opset {opset} is too old for the RMSNorm op: it needs {MIN_OPSET} or newer")
    parts = _Parts(opset, variant, signatures)
    body = onnxscript.script(parts.domain, default_opset=parts.op)(_outer(parts))
    model = ir.Model(
        ir.Graph([], [], nodes=[], opset_imports={"": opset, DOMAIN: VERSION}),
        ir_version=10,
        functions=[_as_ir(body), *(_as_ir(part) for part in parts.used)],
    )
    InlinePass(lambda function: function.name.startswith("_"))(model)
    IdentityEliminationPass()(model)
    function = model.functions[DOMAIN, body.name, ""]
    function.name = variant.name
    function.opset_imports.clear()
    function.opset_imports[""] = opset
    for name, value in ATTRIBUTES.items():
        if name not in function.attributes:
            function.attributes[name] = node_attribute(name, value)
    return function


def node_attribute(name: str, value: int | float | str) -> ir.Attr:
    """An attribute of the type that its value has."""
    if isinstance(value, str):
        return ir.AttrString(name, value)
    return ir.AttrInt64(name, value) if isinstance(value, int) else ir.AttrFloat32(name, value)


def node_attributes(**given: int | float | str) -> list[ir.Attr]:
    """Every attribute of a node, with the defaults for those not given."""
    return [node_attribute(name, given.get(name, default)) for name, default in ATTRIBUTES.items()]


def _as_ir(function: Any) -> ir.Function:
    converted = ir.from_proto(function.to_function_proto())
    assert isinstance(converted, ir.Function)
    return converted


class _Parts:
    """The onnxscript functions from which a body is put together."""

    def __init__(self, opset: int, variant: Variant, signatures: frozenset[Signature]) -> None:
        self.op: Any = onnxscript.values.Opset("", opset)
        self.domain: Any = onnxscript.values.Opset(DOMAIN, VERSION)
        self.variant = variant
        self.stash = int(ir.DataType.DOUBLE if variant.double else ir.DataType.FLOAT)
        self.x_types = {signature.x for signature in signatures}
        self.scale_types = {signature.scale for signature in signatures}
        self.mixed = any(signature.scale != signature.x for signature in signatures)
        self.last_axis_only = {signature.axis for signature in signatures} == {-1}
        self.axes_input = opset >= 18
        self.axis = min(signature.axis for signature in signatures)
        if not all(can_share_body(a, b, opset) for a, b in combinations(signatures, 2)):
            raise InputError(f"opset {opset} can't hold these norms in one body: {signatures}; use opset 18 or newer")
        self.used: list[Any] = []
        self.rms = self._script(self._rms())
        self.widen = self._script(self._cast_to_stash(self.x_types == {ir.DataType(self.stash)}))
        self.finish = self._script(self._finish())

    def _script(self, function: Callable[..., Any]) -> Any:
        scripted = onnxscript.script(self.domain, default_opset=self.op)(function)
        self.used.append(scripted)
        return scripted

    def _rms(self) -> Callable[..., Any]:
        mean_square = self._script(self._mean_square())
        epsilon_of = self._script(self._epsilon())
        op = self.op

        def _rms_inside(x, epsilon: float, epsilon_low: float, axis: int):  # type: ignore[no-untyped-def]
            mean = mean_square(x, axis=axis)
            return op.Sqrt(op.Add(mean, epsilon_of(x, epsilon=epsilon, epsilon_low=epsilon_low)))

        def _rms_outside(x, epsilon: float, epsilon_low: float, axis: int):  # type: ignore[no-untyped-def]
            mean = mean_square(x, axis=axis)
            return op.Add(op.Sqrt(mean), epsilon_of(x, epsilon=epsilon, epsilon_low=epsilon_low))

        def _rms_clamp(x, epsilon: float, epsilon_low: float, axis: int):  # type: ignore[no-untyped-def]
            mean = mean_square(x, axis=axis)
            return op.Max(op.Sqrt(mean), epsilon_of(x, epsilon=epsilon, epsilon_low=epsilon_low))

        return {"inside": _rms_inside, "outside": _rms_outside, "clamp": _rms_clamp}[self.variant.mode]

    def _mean_square(self) -> Callable[..., Any]:
        op = self.op
        two = onnx.numpy_helper.from_array(_scalar(2.0, self.variant.double), "two")
        axes = list(range(self.axis, 0))

        def _mean_square_last_axis(x, axis: int):  # type: ignore[no-untyped-def]
            return op.ReduceMean(op.Pow(x, op.Constant(value=two)), op.Constant(value_ints=[-1]), keepdims=1)

        def _mean_square_from_axis(x, axis: int):  # type: ignore[no-untyped-def]
            axes_range = op.Range(op.Constant(value_int=axis), op.Constant(value_int=0), op.Constant(value_int=1))
            return op.ReduceMean(op.Pow(x, op.Constant(value=two)), axes_range, keepdims=1)

        def _mean_square_axes_attribute(x, axis: int):  # type: ignore[no-untyped-def]
            return op.ReduceMean(op.Pow(x, op.Constant(value=two)), axes=axes, keepdims=1)

        if not self.axes_input:
            return _mean_square_axes_attribute
        return _mean_square_last_axis if self.last_axis_only else _mean_square_from_axis

    def _epsilon(self) -> Callable[..., Any]:
        op = self.op

        def _epsilon_float(x, epsilon: float, epsilon_low: float):  # type: ignore[no-untyped-def]
            return op.Constant(value_float=epsilon)

        def _epsilon_double(x, epsilon: float, epsilon_low: float):  # type: ignore[no-untyped-def]
            high = op.Cast(op.Constant(value_float=epsilon), to=11)
            return op.Add(high, op.Cast(op.Constant(value_float=epsilon_low), to=11))

        return _epsilon_double if self.variant.double else _epsilon_float

    def _cast_to_stash(self, needless: bool) -> Callable[..., Any]:
        op, stash = self.op, self.stash

        def _widen(x):  # type: ignore[no-untyped-def]
            return op.Cast(x, to=stash)

        def _keep(x):  # type: ignore[no-untyped-def]
            return op.Identity(x)

        return _keep if needless else _widen

    def _finish(self) -> Callable[..., Any]:
        """From the normalized row in the stash type to Y."""
        op, scale_in_stash = self.op, self._script(self._cast_to_stash(False))
        to_x, to_scale = self._script(self._to_x()), self._script(self._to_scale())

        def _scale_before_cast(n, x, scale):  # type: ignore[no-untyped-def]
            return to_x(op.Mul(n, scale_in_stash(scale)), x)

        def _scale_bias_before_cast(n, x, scale, bias):  # type: ignore[no-untyped-def]
            return to_x(op.Add(op.Mul(n, scale_in_stash(scale)), scale_in_stash(bias)), x)

        def _scale_after_cast(n, x, scale):  # type: ignore[no-untyped-def]
            return op.Mul(to_scale(to_x(n, x), scale), scale)

        def _scale_bias_after_cast(n, x, scale, bias):  # type: ignore[no-untyped-def]
            return op.Add(op.Mul(to_scale(to_x(n, x), scale), scale), bias)

        if self.variant.before_cast:
            return _scale_bias_before_cast if self.variant.bias else _scale_before_cast
        return _scale_bias_after_cast if self.variant.bias else _scale_after_cast

    def _to_x(self) -> Callable[..., Any]:
        """A cast of a value of the stash type to X's type."""
        op, only = self.op, int(next(iter(self.x_types)))

        def _to_x_type(n, x):  # type: ignore[no-untyped-def]
            return op.Cast(n, to=only)

        if len(self.x_types) > 1:
            return self._like()
        return self._keep() if only == self.stash else _to_x_type

    def _to_scale(self) -> Callable[..., Any]:
        """A cast of a value of X's type to the scale's: the same type, or the stash type if that is another."""
        op, stash = self.op, self.stash

        def _to_stash(n, scale):  # type: ignore[no-untyped-def]
            return op.Cast(n, to=stash)

        if not self.mixed:
            return self._keep()
        return _to_stash if self.scale_types == {ir.DataType(stash)} else self._like()

    def _like(self) -> Callable[..., Any]:
        op = self.op

        def _cast_like(n, other):  # type: ignore[no-untyped-def]
            return op.CastLike(n, other)

        return _cast_like

    def _keep(self) -> Callable[..., Any]:
        op = self.op

        def _same(n, other):  # type: ignore[no-untyped-def]
            return op.Identity(n)

        return _same


def _scalar(value: float, double: bool) -> Any:
    return np.array(value, np.float64 if double else np.float32)


def _outer(parts: _Parts) -> Callable[..., Any]:
    """The op itself, of which onnxscript takes the parameters as they stand."""
    op, rms, widen, finish = parts.op, parts.rms, parts.widen, parts.finish

    def norm(X, scale, axis: int, epsilon: float, epsilon_low: float):  # type: ignore[no-untyped-def]
        x = widen(X)
        Y = finish(op.Div(x, rms(x, epsilon=epsilon, epsilon_low=epsilon_low, axis=axis)), X, scale)
        return Y  # noqa: RET504 (a function's outputs are named by what it returns)

    def norm_bias(X, scale, bias, axis: int, epsilon: float, epsilon_low: float):  # type: ignore[no-untyped-def]
        x = widen(X)
        Y = finish(op.Div(x, rms(x, epsilon=epsilon, epsilon_low=epsilon_low, axis=axis)), X, scale, bias)
        return Y  # noqa: RET504

    def skip_norm(X, skip, scale, axis: int, epsilon: float, epsilon_low: float):  # type: ignore[no-untyped-def]
        total = op.Add(X, skip)
        x = widen(total)
        Y = finish(op.Div(x, rms(x, epsilon=epsilon, epsilon_low=epsilon_low, axis=axis)), total, scale)
        return Y, total

    def skip_norm_bias(X, skip, scale, bias, axis: int, epsilon: float, epsilon_low: float):  # type: ignore[no-untyped-def]
        total = op.Add(X, skip)
        x = widen(total)
        Y = finish(op.Div(x, rms(x, epsilon=epsilon, epsilon_low=epsilon_low, axis=axis)), total, scale, bias)
        return Y, total

    plain, biased = (skip_norm, skip_norm_bias) if parts.variant.skip else (norm, norm_bias)
    return biased if parts.variant.bias else plain
