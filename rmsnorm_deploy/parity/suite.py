"""Every variant of the op, on every backend of this machine: ``python -m rmsnorm_deploy.parity --suite``.

Each backend is given the same rows (rows.py): every epsilon mode, scale order, bias and residual add, in every dtype
that the op has, over rows of many widths and over two axes. The error has a limit that depends on dtype and width alone
(`judge.norm_budget`); NaN and infinity must be where float64 has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from rmsnorm_deploy import reference
from rmsnorm_deploy.errors import EXIT_OK, EXIT_PARITY, DeployError
from rmsnorm_deploy.opset import DOMAIN, EPSILON_MODES, VERSION, Variant, node_attributes, split_epsilon
from rmsnorm_deploy.parity.backends import BACKENDS
from rmsnorm_deploy.parity.judge import judge, norm_budget
from rmsnorm_deploy.parity.result import FAIL, NOT_RUN, PASS
from rmsnorm_deploy.parity.rows import adversarial_rows, laid_out, split
from rmsnorm_deploy.parity.scratch import Scratch, open_backend
from rmsnorm_deploy.parity.ulp import Array, UlpError, ulp_error

# the dtype of the rows, and that of scale and bias
DTYPES = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float64", "float64"),
)
# the shape (a name is as many rows as there are), the first normalized axis, epsilon
SHAPES: tuple[tuple[list[Any], int, float], ...] = (
    (["rows", 1], -1, 1e-6),
    (["rows", 7], -1, 1e-12),
    ([2, "rows", 64], -1, 1e-5),
    (["rows", 576], -1, 0.0),
    (["rows", 1, 2048], -1, 1e-6),
    ([0, 64], -1, 1e-6),
    (["rows", 4, 24], -2, 1e-6),
)
_NUMPY = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_IR = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
}


@dataclass(frozen=True)
class Case:
    """One call of the op: a variant on one shape, with its arrays."""

    name: str
    variant: Variant
    axis: int
    epsilon: float
    arrays: Mapping[str, Array]  # X, skip, scale, bias: those that the variant takes

    @property
    def scale_order(self) -> str:
        return "before_cast" if self.variant.before_cast else "after_cast"


@dataclass(frozen=True)
class SuiteResult:
    """One backend and one pair of dtypes: the worst of its cases, and how much of its limit that is."""

    backend: str
    dtypes: tuple[str, str]
    verdict: str
    cases: int = 0
    max: float = 0.0
    mean: float = 0.0
    share: float = 0.0
    worst: str = ""
    reason: str | None = None


Outputs = Mapping[str, Sequence[Array]]  # Y, and the sum where there is one, by the case's name
Backend = Callable[[Sequence[Case]], Outputs]


def cases_for(dtypes: tuple[str, str], seed: int = 0) -> list[Case]:
    """Every variant on every shape, for one pair of dtypes."""
    return list(_cases(dtypes, seed))


def _cases(dtypes: tuple[str, str], seed: int) -> Iterator[Case]:
    x_dtype, scale_dtype = dtypes
    orders = (False, True) if x_dtype in ("float16", "bfloat16") else (False,)
    for number, (shape, axis, epsilon) in enumerate(SHAPES):
        width = math.prod(int(size) for size in shape[axis:])
        random = np.random.default_rng([seed, number])
        scale, bias = (random.uniform(low, 1.5, shape[axis:]).astype(_NUMPY[scale_dtype]) for low in (0.5, -1.5))
        for skip, mode, has_bias, before_cast in product((False, True), EPSILON_MODES, (False, True), orders):
            rows = laid_out(adversarial_rows(width, x_dtype, epsilon, mode, seed), shape, axis)
            variant = Variant(skip, mode, has_bias, before_cast, x_dtype == "float64")
            arrays = dict(zip(("X", "skip"), split(rows, seed), strict=True)) if skip else {"X": rows}
            arrays |= {"scale": scale, **({"bias": bias} if has_bias else {})}
            yield Case(f"{variant.name} on {shape} axis {axis}", variant, axis, epsilon, arrays)


def backends() -> dict[str, Backend]:
    """What can run the op, by title."""
    runtimes = ("onnxruntime", "onnxruntime-unoptimized", "onnxruntime-kernels", "onnxruntime-cuda")
    return {
        "PyTorch functional": _torch_functional,
        "PyTorch operators": _torch_operators,
        "onnx reference": _onnx_reference,
        **{BACKENDS[name].title: partial(_in_runtime, name) for name in runtimes},
    }


def run_suite(seed: int = 0, only: Sequence[str] | None = None) -> Iterator[SuiteResult]:
    """A result for each backend (``only`` those titles) and pair of dtypes, as it comes."""
    for dtypes in DTYPES:
        cases = cases_for(dtypes, seed)
        for title, backend in backends().items():
            if only is None or title in only:
                yield _judge(title, dtypes, backend, cases)


def _judge(title: str, dtypes: tuple[str, str], backend: Backend, cases: Sequence[Case]) -> SuiteResult:
    try:
        outputs = backend(cases)
    except DeployError as error:
        return SuiteResult(title, dtypes, NOT_RUN, reason=str(error))
    worst = SuiteResult(title, dtypes, PASS, len(cases))
    for case in cases:
        budget = norm_budget(dtypes[0], math.prod(case.arrays["X"].shape[case.axis :]))
        for found in errors(case, outputs[case.name], dtypes[0]):
            verdict = FAIL if FAIL in (worst.verdict, judge(found, None, budget)) else PASS
            share = max(found.max / budget.max, found.mean / budget.mean)
            if share >= worst.share:
                worst = SuiteResult(title, dtypes, verdict, len(cases), found.max, found.mean, share, case.name)
    return worst


def errors(case: Case, got: Sequence[Array], unit: str) -> list[UlpError]:
    """Of Y, given the sum that was returned, and of the sum; in ULPs of the rows' dtype."""
    arrays = case.arrays
    total = got[1] if case.variant.skip else arrays["X"]
    truth = reference.rms_norm(
        total,
        arrays["scale"],
        arrays.get("bias"),
        axis=case.axis,
        epsilon=case.epsilon,
        epsilon_mode=case.variant.mode,
    )
    found = [_error(*_beside_bias(got[0], truth, arrays.get("bias")), unit)]
    if case.variant.skip:
        with np.errstate(invalid="ignore"):
            found.append(_error(total, arrays["X"].astype(np.float64) + arrays["skip"].astype(np.float64), unit))
    return found


def _beside_bias(got: Array, truth: Array, bias: Array | None) -> tuple[Array, Array]:
    """Both with the bias as more columns: where the product and the bias cancel, the sum is as exact as they are."""
    if bias is None or got.shape != truth.shape:
        return got, truth
    columns = np.broadcast_to(bias.astype(got.dtype), got.shape)
    return np.concatenate([got, columns], axis=-1), np.concatenate([truth, columns.astype(np.float64)], axis=-1)


def _error(got: Array, truth: Array, unit: str) -> UlpError:
    if got.shape != truth.shape:
        return UlpError(math.inf, math.inf, math.inf, int(truth.size), int(truth.size))
    return ulp_error(got, truth, unit)


# --- the backends


def model_of(cases: Sequence[Case]) -> tuple[ir.Model, dict[str, Array], dict[str, list[str]]]:
    """One model with a node a case, what to feed it, and the names of each case's outputs."""
    from rmsnorm_deploy.fusion.rewrite import attach_functions

    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18, DOMAIN: VERSION}, name="suite")
    model = ir.Model(graph, ir_version=10)
    feeds, outputs = dict[str, Array](), dict[str, list[str]]()
    for number, case in enumerate(cases):
        values = []
        for role, array in case.arrays.items():
            name = f"{role}{number}"
            dtype = _IR[array.dtype.name]
            values.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape)))
            feeds[name] = array
        node = _node(case, values, number)
        graph.append(node)
        graph.inputs.extend(values)
        graph.outputs.extend(node.outputs)
        outputs[case.name] = [str(value.name) for value in node.outputs]
    attach_functions(model)
    return model, feeds, outputs


def _node(case: Case, values: Sequence[ir.Value], number: int) -> ir.Node:
    variant = case.variant
    high, low = split_epsilon(case.epsilon)
    attributes = node_attributes(
        axis=case.axis,
        epsilon=high,
        epsilon_low=low,
        epsilon_mode=variant.mode,
        scale_order=case.scale_order,
        stash_type=11 if variant.double else 1,
    )
    node = ir.Node(DOMAIN, variant.name, values, attributes, num_outputs=1 + variant.skip, name=f"norm{number}")
    x, scale = values[0].dtype, values[1 + variant.skip].dtype
    assert x is not None
    assert scale is not None
    wide = x if variant.before_cast else max(x, scale, key=lambda dtype: dtype.bitwidth)
    for output, name, dtype in zip(node.outputs, ("Y", "sum"), (wide, x), strict=False):
        output.name, output.type = f"{name}{number}", ir.TensorType(dtype)
        output.shape = values[0].shape
    return node


def _by_axis(cases: Sequence[Case]) -> list[list[Case]]:
    """A body is for one first axis, in opsets where it is an attribute, and is fastest so in every other."""
    return [[case for case in cases if case.axis == axis] for axis in sorted({case.axis for case in cases})]


def _in_runtime(name: str, cases: Sequence[Case]) -> Outputs:
    results = dict[str, list[Array]]()
    for group in _by_axis(cases):
        model, feeds, outputs = model_of(group)
        dtypes = {value.name: _dtype_name(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        with Scratch() as scratch:
            ranks = {key: array.ndim for key, array in feeds.items()}
            file = scratch.alone(ir.to_proto(model), {str(k): v for k, v in dtypes.items()}, ranks)
            got = open_backend(file, BACKENDS[name]).run(feeds)
        results |= {case: [np.asarray(got[key]) for key in names] for case, names in outputs.items()}
    return results


def _dtype_name(value: ir.Value) -> str:
    return next(name for name, dtype in _IR.items() if dtype == value.dtype)


def _onnx_reference(cases: Sequence[Case]) -> Outputs:
    from onnx.reference import ReferenceEvaluator

    results = dict[str, list[Array]]()
    for group in _by_axis(cases):
        model, feeds, outputs = model_of(group)
        names = [name for several in outputs.values() for name in several]
        with np.errstate(all="ignore"):
            values = ReferenceEvaluator(ir.to_proto(model)).run(names, feeds)
        got = dict(zip(names, values, strict=True))
        results |= {case: [np.asarray(got[key]) for key in several] for case, several in outputs.items()}
    return results


def _torch_functional(cases: Sequence[Case]) -> Outputs:
    from rmsnorm_deploy.norm import rms_norm, skip_rms_norm

    def call(case: Case, tensors: Mapping[str, Any]) -> Any:
        row = tensors["X"].shape[case.axis :]
        options: dict[str, Any] = {
            "bias": tensors.get("bias"),
            "epsilon_mode": case.variant.mode,
            "scale_order": case.scale_order,
        }
        if case.variant.skip:
            return skip_rms_norm(tensors["X"], tensors["skip"], row, tensors["scale"], case.epsilon, **options)
        return (rms_norm(tensors["X"], row, tensors["scale"], case.epsilon, **options),)

    return _in_torch(cases, call)


def _torch_operators(cases: Sequence[Case]) -> Outputs:
    from rmsnorm_deploy import torch_ops

    def call(case: Case, tensors: Mapping[str, Any]) -> Any:
        options = (case.axis, case.epsilon, case.variant.mode, case.scale_order, case.variant.double)
        scale, bias = tensors["scale"], tensors.get("bias")
        if case.variant.skip:
            return torch_ops.skip_rms_norm(tensors["X"], tensors["skip"], scale, bias, *options)
        return (torch_ops.rms_norm(tensors["X"], scale, bias, *options),)

    return _in_torch(cases, call)


def _in_torch(cases: Sequence[Case], call: Callable[[Case, Mapping[str, Any]], Any]) -> Outputs:
    import torch

    from rmsnorm_deploy.runtime.tensors import to_numpy, to_torch

    results = {}
    with torch.no_grad():
        for case in cases:
            tensors = {role: to_torch(array) for role, array in case.arrays.items()}
            results[case.name] = [to_numpy(tensor) for tensor in call(case, tensors)]
    return results


# --- the command


def _short(reason: str) -> str:
    """ONNX Runtime's words for a kernel that it lacks, without the file's name and the node's."""
    found = re.search(r"NOT_IMPLEMENTED : (.*?) with name", reason)
    return found[1] if found else reason


def main(seed: int = 0) -> int:
    """Run the suite and print a table; the exit status is 1 if a backend is off its limit."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("backend", "rows", "scale", "verdict"):
        table.add_column(column, no_wrap=True)
    for column in ("cases", "max ULP", "mean ULP", "of limit"):
        table.add_column(column, justify="right")
    failed, notes = list[SuiteResult](), dict[tuple[str, str], list[str]]()
    for result in run_suite(seed):
        cells = (str(result.cases), f"{result.max:.3g}", f"{result.mean:.3g}", f"{result.share:.0%}")
        ran = result.verdict != NOT_RUN
        table.add_row(result.backend, *result.dtypes, result.verdict, *(cells if ran else ("", "", "", "")))
        if result.verdict == FAIL:
            failed.append(result)
        if result.reason:
            notes.setdefault((result.backend, _short(result.reason)), []).append(result.dtypes[0])
    console = Console()
    console.print(table)
    for (backend, reason), dtypes in notes.items():
        names = ", ".join(dict.fromkeys(dtypes))
        console.print(f"not run: {backend} ({names}): {reason}", markup=False, highlight=False, soft_wrap=True)
    for result in failed:
        text = f"failed: {result.backend}, {result.dtypes[0]}, {result.worst}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    limits = ", ".join(
        f"{budget.max:.3g} at {width}" for width in (64, 576, 2048) if (budget := norm_budget("float32", width))
    )
    half = norm_budget("float16", 64)
    console.print(
        f"limits in ULPs of the rows' dtype: half types {half.max} ({half.mean} on average), others by width {limits}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return EXIT_PARITY if failed else EXIT_OK
