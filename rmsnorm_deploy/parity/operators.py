"""Operators that the onnx package's reference evaluator lacks or computes wrongly, written down in numpy.

Those of ONNX Runtime's own domain are what its optimizer writes on a CPU. Each computes in the dtype of its operands:
float64 in a lifted model; half types take statistics and activations in single precision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_conv import Conv
from onnx.reference.ops.op_loop import Loop as StandardLoop

from rmsnorm_deploy.parity.ulp import Array


def _mean(x: Array, axis: int) -> Array:
    return np.asarray(np.mean(x, axis=tuple(range(axis % x.ndim, x.ndim)), keepdims=True))


def _wide(x: Array) -> Array:
    """Half types in single precision, in which their statistics are taken."""
    return x.astype(np.promote_types(x.dtype, np.float32))


def _rms(x: Array, scale: Array, axis: int, epsilon: float) -> Array:
    wide = _wide(x)
    return np.asarray((wide / np.sqrt(_mean(wide * wide, axis) + epsilon)).astype(x.dtype) * scale)


class LayerNormalization(OpRun):
    """The standard operator; the onnx package's own refuses a float64 stash, and is wrong in half precision."""

    op_domain = ""

    def _run(
        self,
        X: Array,
        Scale: Array,
        B: Array | None = None,
        axis: int = -1,
        epsilon: float = 1e-5,
        stash_type: int = 1,
    ) -> tuple[Array, ...]:
        wide = _wide(X)
        mean = _mean(wide, axis)
        centred = wide - mean
        inverse = np.reciprocal(np.sqrt(_mean(centred * centred, axis) + epsilon))
        y = (centred * inverse).astype(X.dtype) * Scale
        return (y if B is None else y + B, mean, inverse)[: len(self.onnx_node.output)]


class RMSNormalization(OpRun):
    """The standard operator of opset 23, whatever its stash type."""

    op_domain = ""

    def _run(self, X: Array, scale: Array, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> tuple[Array]:
        return (_rms(X, scale, axis, epsilon),)


class SimplifiedLayerNormalization(OpRun):
    """What ONNX Runtime's optimizer writes for an RMSNorm, in the default domain though in no standard."""

    op_domain = ""

    def _run(
        self, X: Array, scale: Array, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
    ) -> tuple[Array, ...]:
        wide = _wide(X)
        inverse = np.reciprocal(np.sqrt(_mean(wide * wide, axis) + epsilon))
        return (_rms(X, scale, axis, epsilon), inverse)[: len(self.onnx_node.output)]


class SkipSimplifiedLayerNormalization(OpRun):
    """The residual sum and the norm after it, of ONNX Runtime's contrib domain."""

    op_domain = "com.microsoft"

    def _run(
        self, X: Array, skip: Array, gamma: Array, bias: Array | None = None, epsilon: float = 1e-5
    ) -> tuple[Array, ...]:
        total = X + skip if bias is None else X + skip + bias
        empty = np.zeros(0)
        return (_rms(total, gamma, -1, epsilon), empty, empty, total)[: len(self.onnx_node.output)]


class SkipLayerNormalization(OpRun):
    """The residual sum and the LayerNorm after it."""

    op_domain = "com.microsoft"

    def _run(
        self,
        X: Array,
        skip: Array,
        gamma: Array,
        beta: Array | None = None,
        bias: Array | None = None,
        epsilon: float = 1e-5,
    ) -> tuple[Array, ...]:
        total = X + skip if bias is None else X + skip + bias
        wide = _wide(total)
        centred = wide - _mean(wide, -1)
        y = (centred / np.sqrt(_mean(centred * centred, -1) + epsilon)).astype(X.dtype) * gamma
        empty = np.zeros(0)
        return (y if beta is None else y + beta, empty, empty, total)[: len(self.onnx_node.output)]


class Loop(StandardLoop):
    """The standard operator; the onnx package's own takes a condition that is left out for false, and lays what is
    scanned end to end."""

    op_domain = ""
    body: Any
    _run_body: Any

    def _run(
        self,
        M: Array | None,
        cond: Array | None,
        *carried: Any,
        context: dict[str, Any] | None = None,
        body: Any = None,
        attributes: Any = None,
        bindings: Any = None,
    ) -> tuple[Any, ...]:
        going, step, state = True if cond is None else bool(cond), 0, list(carried)
        scanned: list[list[Array]] = [[] for _ in range(self.K)]
        while going and (M is None or step < int(M)):
            given = (np.array(step, np.int64), np.array(going), *state)
            feeds = {**(context or {}), **dict(zip(self.body.input_names, given, strict=True))}
            condition, *results = self._run_body(feeds, attributes=attributes, bindings=bindings)
            going, step, state = bool(condition), step + 1, results[: self.N]
            for rows, row in zip(scanned, results[self.N :], strict=True):
                rows.append(row)
        return (*state, *(np.stack(rows) if rows else np.zeros(0) for rows in scanned))


def _gelu(x: Array) -> Array:
    wide = _wide(x)
    # numpy has no error function
    erf = torch.erf(torch.from_numpy(np.asarray(wide / np.sqrt(2.0), order="C"))).numpy()
    return np.asarray(0.5 * wide * (1 + erf.reshape(wide.shape)), x.dtype)


class Gelu(OpRun):
    """x Phi(x), Phi being the normal distribution's."""

    op_domain = "com.microsoft"
    op_schema = None  # the standard operator of that name has another

    def _run(self, X: Array) -> tuple[Array]:
        return (_gelu(X),)


class BiasGelu(OpRun):
    """Gelu of a sum."""

    op_domain = "com.microsoft"

    def _run(self, A: Array, B: Array) -> tuple[Array]:
        return (_gelu(A + B),)


class FastGelu(OpRun):
    """The approximation of Gelu by a tanh, of a sum where a bias is given; the factors are ONNX Runtime's."""

    op_domain = "com.microsoft"

    def _run(self, X: Array, bias: Array | None = None) -> tuple[Array]:
        x = _wide(X if bias is None else X + bias)
        cubic = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        return (np.asarray(0.5 * x * (1 + np.tanh(cubic)), X.dtype),)


class QuickGelu(OpRun):
    """x sigmoid(alpha x): SiLU where alpha is 1."""

    op_domain = "com.microsoft"

    def _run(self, X: Array, alpha: float = 1.702) -> tuple[Array]:
        x = _wide(X)
        return (np.asarray(x * _sigmoid(float(alpha) * x), X.dtype),)


def _elu(x: Array, alpha: float, scale: float = 1.0) -> Array:
    """In numpy's expm1: the exponential less one is nothing at subnormal numbers, even in float64."""
    wide = _wide(x)
    return np.asarray(scale * np.where(wide > 0, wide, alpha * np.expm1(np.minimum(wide, 0))), x.dtype)


class Elu(OpRun):
    """The standard operator; the onnx package's own loses all digits at small numbers."""

    op_domain = ""

    def _run(self, x: Array, alpha: float = 1.0) -> tuple[Array]:
        return (_elu(x, alpha),)


class Selu(OpRun):
    """The standard operator, for the same reason."""

    op_domain = ""

    def _run(self, x: Array, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805) -> tuple[Array]:
        return (_elu(x, alpha, gamma),)


class Celu(OpRun):
    """The standard operator, for the same reason."""

    op_domain = ""

    def _run(self, x: Array, alpha: float = 1.0) -> tuple[Array]:
        return (np.asarray(np.where(x > 0, x, _elu(x / alpha, alpha)), x.dtype),)


class FusedMatMul(OpRun):
    """alpha times a product, of operands that are transposed or whose leading dim is moved to the rows first."""

    op_domain = "com.microsoft"

    def _run(
        self,
        A: Array,
        B: Array,
        alpha: float = 1.0,
        transA: int = 0,
        transB: int = 0,
        transBatchA: int = 0,
        transBatchB: int = 0,
    ) -> tuple[Array]:
        a, b = _turned(A, transA, transBatchA), _turned(B, transB, transBatchB)
        return (np.asarray(np.matmul(a, b) * float(alpha), A.dtype),)


def _turned(x: Array, swap: int, from_batch: int) -> Array:
    if from_batch:
        x = np.moveaxis(x, 0, -2)
    return np.swapaxes(x, -1, -2) if swap and x.ndim > 1 else x


class FusedGemm(OpRun):
    """Gemm and the activation behind it."""

    op_domain = "com.microsoft"

    def _run(
        self,
        A: Array,
        B: Array,
        C: Array | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        transA: int = 0,
        transB: int = 0,
        activation: str = "",
        activation_alpha: float = 0.0,
        activation_beta: float = 0.0,
        activation_gamma: float = 0.0,
    ) -> tuple[Array]:
        product = np.matmul(A.T if transA else A, B.T if transB else B) * float(alpha)
        total = product if C is None else product + C * float(beta)
        activated = _activated(total, activation, [float(activation_alpha), float(activation_beta)])
        return (np.asarray(activated, A.dtype),)


class FusedConv(Conv):
    """Conv, a sum and an activation behind it."""

    op_domain = "com.microsoft"

    def _run(  # type: ignore[override]
        self,
        X: Array,
        W: Array,
        B: Array | None = None,
        Z: Array | None = None,
        activation: str = "",
        activation_params: list[float] | None = None,
        **geometry: Any,
    ) -> tuple[Array]:
        (y,) = super()._run(X, W, B, **{"auto_pad": "NOTSET", "group": 1, **geometry})  # type: ignore[no-untyped-call]
        total = y if Z is None else y + Z
        return (np.asarray(_activated(total, activation, [float(x) for x in activation_params or ()]), X.dtype),)


def _sigmoid(x: Array) -> Array:
    """By way of tanh, which does not overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def _activated(x: Array, kind: str, parameters: list[float]) -> Array:
    """What ONNX Runtime fuses into the product in front of it.

    Raises ValueError for any other.
    """
    if kind == "Relu":
        return np.maximum(x, 0)
    if kind == "Tanh":
        return np.asarray(np.tanh(x))
    if kind == "Sigmoid":
        return _sigmoid(x)
    if kind == "LeakyRelu":
        return np.where(x < 0, parameters[0] * x, x)
    if kind == "Clip":
        return np.clip(x, parameters[0], parameters[1])
    if kind == "HardSigmoid":
        return np.clip(parameters[0] * x + parameters[1], 0, 1)
    if kind:
        raise ValueError(f"no such activation: {kind}")
    return x


OWN_OPERATORS = (
    Loop,
    LayerNormalization,
    RMSNormalization,
    SimplifiedLayerNormalization,
    SkipSimplifiedLayerNormalization,
    SkipLayerNormalization,
    Gelu,
    BiasGelu,
    FastGelu,
    QuickGelu,
    Elu,
    Selu,
    Celu,
    FusedMatMul,
    FusedGemm,
    FusedConv,
)
