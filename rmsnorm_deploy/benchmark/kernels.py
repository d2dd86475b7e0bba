"""``python -m rmsnorm_deploy.benchmark kernels``: the CPU kernels against their peers, in one interleaved run.

Every contestant of a case computes the same op on the same buffers. They take turns, a batch of calls each, so that
what else the machine does meanwhile hits all of them; the figures are medians over the turns. "warm" uses one set of
buffers over and over, as in a model whose activations fit into the caches; "cold" goes through enough of them that none
is still in one. A bar is judged on the one that it names.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from rmsnorm_deploy import ckernel, native
from rmsnorm_deploy.cli import Parser, positive, run_command
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.optional import load_module

OURS, BARE, COPY = "ours in onnxruntime", "ours, bare", "memcpy"
EPSILON = 1e-6
COLD_BYTES = 96 << 20
_TURN_SECONDS = 0.0015
# Threads of the contestant before keep spinning for some milliseconds, on the cores that the next one needs.
_SETTLE_SECONDS = 0.02
# A contestant that has taken this long, as slow ones do, has no more turns than these.
_MOST_SECONDS = 0.25
_LEAST_TURNS = 9
_DTYPES = {
    "float32": (torch.float32, TensorProto.FLOAT),
    "float16": (torch.float16, TensorProto.FLOAT16),
    "bfloat16": (torch.bfloat16, TensorProto.BFLOAT16),
}


class Case(NamedTuple):
    """One comparison."""

    rows: int
    width: int
    dtype: str
    skip: bool
    threads: int
    cold: bool

    def __str__(self) -> str:
        op = "SkipRMSNorm" if self.skip else "RMSNorm"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{op} {self.rows}x{self.width} {self.dtype}, {threads}, {'cold' if self.cold else 'warm'}"

    @property
    def bytes_moved(self) -> int:
        """What the op must read and write; the scale is left out."""
        return self.rows * self.width * _DTYPES[self.dtype][0].itemsize * (4 if self.skip else 2)


class Bar(NamedTuple):
    """What is asked of a case: the best of ``peers`` takes at least ``factor`` times as long as ``ours``."""

    rows: int
    width: int
    dtype: str
    skip: bool
    ours: str
    peers: tuple[str, ...]
    factor: float
    cold: bool
    threads: tuple[int, ...] = (1, 2)


_BEST_OWN = ("onnxruntime SimplifiedLayerNormalization", "onnxruntime RMSNormalization")
_BEST_SKIP = ("onnxruntime SkipSimplifiedLayerNormalization",)
# Up to 32 x 4096 a model's activations are still in a cache when a norm reads them; from 512 x 4096 on they are not.
BARS = (
    Bar(1, 64, "float32", False, OURS, _BEST_OWN, 1.0, cold=False),
    Bar(32, 4096, "float32", False, OURS, _BEST_OWN, 1.5, cold=False),
    Bar(512, 4096, "float32", False, OURS, _BEST_OWN, 1.0, cold=True),
    Bar(2048, 4096, "float32", False, OURS, _BEST_OWN, 1.3, cold=True),
    *(Bar(rows, 4096, "float16", False, OURS, _BEST_OWN, 1.5, cold=rows > 32) for rows in (32, 512, 2048)),
    *(Bar(rows, 4096, "bfloat16", False, OURS, _BEST_OWN, 8.0, cold=rows > 32) for rows in (32, 512, 2048)),
    Bar(512, 4096, "float32", True, OURS, _BEST_SKIP, 1.3, cold=True),
    Bar(2048, 4096, "float32", False, BARE, (COPY,), 0.85, cold=True, threads=(1,)),
    Bar(32, 4096, "float32", False, BARE, (COPY,), 0.60, cold=True, threads=(1,)),
)


@dataclass
class Timing:
    """Microseconds a call: the median turn, and the 5th and 95th percentile of turns."""

    name: str
    median: float
    p5: float
    p95: float
    gigabytes: float
    share_of_copy: float | None = None


@dataclass
class Verdict:
    """A bar and what was measured against it; ratio is None where a side of it could not run."""

    what: str
    ratio: float | None
    bar: float
    met: bool | None


@dataclass
class CaseResult:
    """All contestants of one case, and why others are missing."""

    case: Case
    timings: list[Timing] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)


# ---- contestants


@dataclass
class Buffers:
    """One set of tensors; y and total are written."""

    x: torch.Tensor
    skip: torch.Tensor
    y: torch.Tensor
    total: torch.Tensor


Call = Callable[[], object]


def make_buffers(case: Case) -> list[Buffers]:
    """Enough sets of tensors for the case's caches: one when warm."""
    dtype = _DTYPES[case.dtype][0]
    size = case.rows * case.width * dtype.itemsize * (4 if case.skip else 2)
    count = max(2, -(-COLD_BYTES // size)) if case.cold else 1
    shape = (case.rows, case.width)
    x = torch.randn(shape).to(dtype)
    return [
        Buffers(x.clone(), x.clone(), torch.zeros_like(x), torch.zeros_like(x) if case.skip else x.new_empty(0))
        for _ in range(min(count, 512))
    ]


def bare_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """Our kernel with nothing around it but ctypes."""
    library = ckernel.cpu_library()
    if library is None:
        raise BackendUnavailable("not built: run python -m rmsnorm_deploy.native build")
    pool = library.rmsnorm_cpu_pool(case.threads)
    return [_bare_call(library, _arguments(case, item, scale), pool, item) for item in sets]


def _bare_call(library: ctypes.CDLL, args: ckernel.Args, pool: int | None, keep: Buffers) -> Call:
    pointer = ctypes.byref(args)

    def call(keep: Buffers = keep) -> object:
        return library.rmsnorm_cpu(pointer, pool)

    return call


def _arguments(case: Case, item: Buffers, scale: torch.Tensor) -> ckernel.Args:
    number = ckernel.DTYPES[case.dtype]
    strides = dict.fromkeys(("x_stride", "skip_stride", "y_stride", "sum_stride"), case.width)
    return ckernel.Args(
        x_dtype=number,
        param_dtype=number,
        y_dtype=number,
        eps=EPSILON,
        rows=case.rows,
        width=case.width,
        scale_count=case.width,
        **strides,
        x=item.x.data_ptr(),
        skip=item.skip.data_ptr() if case.skip else None,
        scale=scale.data_ptr(),
        y=item.y.data_ptr(),
        sum=item.total.data_ptr() if case.skip else None,
    )


def copy_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """A copy of as many bytes as the op reads: memcpy, on one thread whatever the case has."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return [_copy_call(copy, item, case.skip) for item in sets]


def _copy_call(copy: Any, item: Buffers, skip: bool) -> Call:
    x, y, size = item.x.data_ptr(), item.y.data_ptr(), item.x.numel() * item.x.element_size()
    if not skip:
        return lambda: copy(y, x, size)
    z, total = item.skip.data_ptr(), item.total.data_ptr()
    return lambda: (copy(y, x, size), copy(total, z, size))


def torch_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """PyTorch's own op."""

    def call(item: Buffers) -> object:
        x = item.x + item.skip if case.skip else item.x
        return F.rms_norm(x, [case.width], scale, EPSILON)

    return [lambda item=item: call(item) for item in sets]  # type: ignore[misc]


def compiled_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """What torch.compile makes of PyTorch's own op."""

    def norm(x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + skip if case.skip else x
        return F.rms_norm(total, [case.width], scale, EPSILON), total

    torch.compiler.reset()  # each case is compiled for itself, and only so many are remembered
    compiled = torch.compile(norm, fullgraph=True, dynamic=False)
    try:
        with torch.no_grad():
            compiled(sets[0].x, sets[0].skip)
    except RuntimeError as error:  # no C++ compiler, for one
        raise BackendUnavailable(f"torch.compile: {' '.join(str(error).split())[:200]}") from error

    def call(item: Buffers) -> object:
        with torch.no_grad():
            return compiled(item.x, item.skip)

    return [lambda item=item: call(item) for item in sets]  # type: ignore[misc]


def layer_norm_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """PyTorch's LayerNorm, for scale."""

    def call(item: Buffers) -> object:
        x = item.x + item.skip if case.skip else item.x
        return F.layer_norm(x, [case.width], scale, None, EPSILON)

    return [lambda item=item: call(item) for item in sets]  # type: ignore[misc]


class OrtOp(NamedTuple):
    """An op of ONNX Runtime as a one-node model."""

    op_type: str
    domain: str
    opset: int
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    custom: bool = False
    bias: bool = False


_NORM: dict[str, Any] = {"axis": -1, "epsilon": EPSILON}
_OURS = {**_NORM, "scale_order": "after_cast", "epsilon_mode": "inside", "stash_type": 1}
NORM_OPS = {
    OURS: OrtOp("RMSNorm", "rmsnorm_deploy", 1, ("y",), _OURS, custom=True),
    "onnxruntime SimplifiedLayerNormalization": OrtOp("SimplifiedLayerNormalization", "", 18, ("y",), _NORM),
    "onnxruntime RMSNormalization": OrtOp("RMSNormalization", "", 23, ("y",), _NORM),
    "onnxruntime LayerNormalization": OrtOp("LayerNormalization", "", 18, ("y",), _NORM, bias=True),
}
SKIP_OPS = {
    OURS: OrtOp("SkipRMSNorm", "rmsnorm_deploy", 1, ("y", "total"), _OURS, custom=True),
    "onnxruntime SkipSimplifiedLayerNormalization": OrtOp(
        "SkipSimplifiedLayerNormalization", "com.microsoft", 1, ("y", "", "", "total"), {"epsilon": EPSILON}
    ),
}


def ort_calls(op: OrtOp, case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """ONNX Runtime with its inputs and outputs bound, so that nothing is allocated or copied in a call."""
    session = _session(op, case, scale)
    element = _DTYPES[case.dtype][1]
    return [_bound_call(session, _bind(session, element, item)) for item in sets]


def _bound_call(session: Any, binding: Any) -> Call:
    return lambda: session.run_with_iobinding(binding)


def _session(op: OrtOp, case: Case, scale: torch.Tensor) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = case.threads
    options.log_severity_level = 4
    if op.custom:
        native.register(options)
    try:
        return ort.InferenceSession(_model(op, case, scale), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the exceptions of ONNX Runtime have no common base
        raise BackendUnavailable(f"onnxruntime {ort.__version__}: {' '.join(str(error).split())[:200]}") from error


def _model(op: OrtOp, case: Case, scale: torch.Tensor) -> bytes:
    element = _DTYPES[case.dtype][1]
    shape = [case.rows, case.width]
    tensors = ["x", "skip"] if case.skip else ["x"]
    parameters = ["scale", "bias"] if op.bias else ["scale"]
    node = helper.make_node(op.op_type, [*tensors, *parameters], list(op.outputs), domain=op.domain, **op.attributes)
    graph = helper.make_graph(
        [node],
        "norm",
        [helper.make_tensor_value_info(name, element, shape) for name in tensors],
        [helper.make_tensor_value_info(name, element, shape) for name in op.outputs if name],
        [_initializer("scale", scale, element)]
        + ([_initializer("bias", torch.zeros_like(scale), element)] if op.bias else []),
    )
    opsets = [helper.make_opsetid("", op.opset if op.domain == "" else 18)]
    opsets += [helper.make_opsetid(op.domain, op.opset)] if op.domain else []
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def _initializer(name: str, value: torch.Tensor, element: int) -> onnx.TensorProto:
    raw = value.view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, element, list(value.shape), raw, raw=True)


def _bind(session: Any, element: int, item: Buffers) -> Any:
    binding = session.io_binding()
    shape = list(item.x.shape)
    tensors = {"x": item.x, "skip": item.skip, "y": item.y, "total": item.total}
    # Numpy's types are what every version takes; a number stands for the one that numpy does not have.
    kind: Any = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}.get(element, element)  # type: ignore[call-overload]
    for value in session.get_inputs():
        binding.bind_input(value.name, "cpu", 0, kind, shape, tensors[value.name].data_ptr())
    for value in session.get_outputs():
        binding.bind_output(value.name, "cpu", 0, kind, shape, tensors[value.name].data_ptr())
    return binding


def openvino_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """OpenVINO's CPU plugin, which fuses RMSNormalization; float32 is not narrowed there to what the CPU has."""
    ov: Any = load_module("openvino", "pip install openvino")
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": case.threads, "PERFORMANCE_HINT": "LATENCY"}
    if case.dtype == "float32":
        options["INFERENCE_PRECISION_HINT"] = "f32"
    core = ov.Core()
    try:
        model = core.compile_model(core.read_model(_openvino_model(case, scale)), "CPU", options)
    except RuntimeError as error:
        raise BackendUnavailable(f"openvino {ov.__version__}: {' '.join(str(error).split())[:200]}") from error
    kind = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}[case.dtype]
    return [_openvino_call(ov, model, kind, item, case.skip) for item in sets]


def _openvino_model(case: Case, scale: torch.Tensor) -> bytes:
    element, shape = _DTYPES[case.dtype][1], [case.rows, case.width]
    norm = helper.make_node("RMSNormalization", ["total" if case.skip else "x", "scale"], ["y"], **_NORM)
    add = [helper.make_node("Add", ["x", "skip"], ["total"])] if case.skip else []

    def values(*names: str) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, element, shape) for name in names]

    inputs, outputs = (("x", "skip"), ("y", "total")) if case.skip else (("x",), ("y",))
    graph = helper.make_graph(
        [*add, norm], "norm", values(*inputs), values(*outputs), [_initializer("scale", scale, element)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return bytes(model.SerializeToString())


def _openvino_call(ov: Any, model: Any, kind: Any, item: Buffers, skip: bool) -> Call:
    request = model.create_infer_request()

    def shared(tensor: torch.Tensor) -> Any:
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        return ov.Tensor(bits.numpy(), ov.Shape(list(tensor.shape)), kind)

    for at, tensor in enumerate((item.x, item.skip) if skip else (item.x,)):
        request.set_input_tensor(at, shared(tensor))
    for at, tensor in enumerate((item.y, item.total) if skip else (item.y,)):
        request.set_output_tensor(at, shared(tensor))
    return lambda: request.infer()


def contestants(case: Case, compiled: bool = False) -> dict[str, Callable[[list[Buffers], torch.Tensor], list[Call]]]:
    """Name -> what makes the calls, one for each set of buffers."""
    table: dict[str, Callable[[list[Buffers], torch.Tensor], list[Call]]] = {}
    for name, op in (SKIP_OPS if case.skip else NORM_OPS).items():
        table[name] = lambda sets, scale, op=op: ort_calls(op, case, sets, scale)  # type: ignore[misc]
    table[BARE] = lambda sets, scale: bare_calls(case, sets, scale)
    table["torch rms_norm"] = lambda sets, scale: torch_calls(case, sets, scale)
    table["torch layer_norm"] = lambda sets, scale: layer_norm_calls(case, sets, scale)
    if compiled:
        table["torch.compile rms_norm"] = lambda sets, scale: compiled_calls(case, sets, scale)
    if _version("openvino"):
        table["openvino RMSNormalization"] = lambda sets, scale: openvino_calls(case, sets, scale)
    table[COPY] = lambda sets, scale: copy_calls(case, sets, scale)
    return table


# ---- measuring


def measure(case: Case, turns: int = 41, compiled: bool = False) -> CaseResult:
    """Run all contestants of one case in turns; with ``compiled`` torch.compile too, which takes it seconds."""
    result = CaseResult(case)
    torch.set_num_threads(case.threads)
    sets = make_buffers(case)
    scale = (1 + 0.1 * torch.randn(case.width)).to(_DTYPES[case.dtype][0])
    ready: dict[str, list[Call]] = {}
    for name, make in contestants(case, compiled).items():
        try:
            ready[name] = make(sets, scale)
        except (BackendUnavailable, ImportError) as error:
            result.missing[name] = str(error)
    samples = _take_turns(ready, turns, _SETTLE_SECONDS if case.threads > 1 else 0.0)
    copy = statistics.median(samples[COPY])
    for name, values in samples.items():
        timing = _timing(name, values, case.bytes_moved)
        timing.share_of_copy = copy / statistics.median(values)
        result.timings.append(timing)
    result.verdicts = [verdict for bar in BARS for verdict in _judge(bar, result)]
    return result


def _take_turns(ready: dict[str, list[Call]], turns: int, settle: float) -> dict[str, list[float]]:
    batches = {name: _batch(calls) for name, calls in ready.items()}
    samples: dict[str, list[float]] = {name: [] for name in ready}
    spent = dict.fromkeys(ready, 0.0)
    at = dict.fromkeys(ready, 0)
    for turn in range(turns):
        for name, calls in ready.items():
            if turn >= _LEAST_TURNS and spent[name] > _MOST_SECONDS:
                continue
            count, start = batches[name], at[name]
            order = [calls[(start + i) % len(calls)] for i in range(count)]
            time.sleep(settle)
            calls[(start - 1) % len(calls)]()  # wakes the threads again
            began = time.perf_counter()
            for call in order:
                call()
            seconds = time.perf_counter() - began
            samples[name].append(seconds / count)
            spent[name] += seconds
            at[name] = start + count
    return samples


def _batch(calls: list[Call]) -> int:
    """Calls in a turn: enough for the clock, after a few to warm up."""
    for call in calls[:3] * 2:
        call()
    began = time.perf_counter()
    for call in calls[:5]:
        call()
    seconds = (time.perf_counter() - began) / len(calls[:5])
    return max(1, min(2000, int(_TURN_SECONDS / seconds)))


def _timing(name: str, values: list[float], size: int) -> Timing:
    ordered = sorted(values)
    median = statistics.median(ordered)
    p5, p95 = ordered[int(0.05 * (len(ordered) - 1))], ordered[round(0.95 * (len(ordered) - 1))]
    return Timing(name, median * 1e6, p5 * 1e6, p95 * 1e6, size / median / 1e9)


def _judge(bar: Bar, result: CaseResult) -> list[Verdict]:
    case = result.case
    if (bar.rows, bar.width, bar.dtype, bar.skip) != (case.rows, case.width, case.dtype, case.skip):
        return []
    if case.threads not in bar.threads or case.cold != bar.cold:
        return []
    times = {timing.name: timing.median for timing in result.timings}
    peers = {name: times[name] for name in bar.peers if name in times}
    what = f"{bar.ours} against {min(peers, key=lambda name: peers[name]) if peers else ' or '.join(bar.peers)}"
    if bar.ours not in times or not peers:
        return [Verdict(what, None, bar.factor, None)]
    ratio = min(peers.values()) / times[bar.ours]
    return [Verdict(what, ratio, bar.factor, ratio >= bar.factor)]


def cases(dtypes: Sequence[str], threads: Sequence[int], caches: Sequence[str] = ()) -> list[Case]:
    """Every case with a bar, for these dtypes and numbers of threads; caches, "warm" or "cold", replace the bar's."""
    wanted = [bar for bar in BARS if bar.dtype in dtypes]
    found = {
        Case(bar.rows, bar.width, bar.dtype, bar.skip, count, cold)
        for bar in wanted
        for count in threads
        for cold in ([cache == "cold" for cache in caches] or [bar.cold])
    }
    return sorted(found, key=lambda case: (case.skip, case.dtype, case.cold, case.rows, case.threads))


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    return run_command(argv, _run)


def _run(argv: list[str]) -> int:
    """Measure, print a table for each case with its bars, and return 0; with ``--check``, 1 where a bar is missed."""
    if "--cuda" in argv:
        from rmsnorm_deploy.benchmark import kernels_cuda

        return kernels_cuda.run([item for item in argv if item != "--cuda"])
    arguments = _parser().parse_args(argv)
    results = []
    for case in cases(arguments.dtype, arguments.threads, arguments.cache):
        results.append(measure(case, arguments.turns, arguments.compiled))
        _print_result(results[-1])
    if arguments.plot:
        from rmsnorm_deploy.benchmark.kernels_plot import plot

        plot(to_json(results), Path(arguments.plot))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(to_json(results), indent=1) + "\n")
    verdicts = [verdict for result in results for verdict in result.verdicts]
    missed = [verdict for verdict in verdicts if verdict.met is False]
    print(f"{sum(verdict.met is True for verdict in verdicts)} of {len(verdicts)} bars met, {len(missed)} missed")
    return 1 if arguments.check and missed else 0


def to_json(results: Sequence[CaseResult]) -> dict[str, Any]:
    """All results and what they were measured on, as plain values."""
    return {
        "machine": _machine(),
        "cases": [{**asdict(result), "case": result.case._asdict()} for result in results],
    }


def _machine() -> dict[str, Any]:
    library = ckernel.cpu_library()
    cpu = Path("/proc/cpuinfo")
    models = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_at_the_end": os.getloadavg()[0],
        "isa": library.rmsnorm_cpu_isa().decode() if library else None,
        "torch": torch.__version__,
        "onnxruntime": _version("onnxruntime"),
        "openvino": _version("openvino"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_result(result: CaseResult) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120, highlight=False)
    table = Table("contestant", title=str(result.case), title_justify="left", expand=False)
    for heading in ("median us", "p5", "p95", "GB/s", "of memcpy"):
        table.add_column(heading, justify="right")
    for item in sorted(result.timings, key=lambda item: item.median):
        share = f"{item.share_of_copy:.0%}" if item.share_of_copy else ""
        numbers = (item.median, item.p5, item.p95, item.gigabytes)
        table.add_row(item.name, *(f"{number:.2f}" for number in numbers), share)
    console.print(table)
    for name, reason in result.missing.items():
        console.print(f"  {name} did not run: {reason}", markup=False)
    for verdict in result.verdicts:
        ratio = "could not be measured" if verdict.ratio is None else f"{verdict.ratio:.2f}x"
        word = {True: "met", False: "MISSED", None: "-"}[verdict.met]
        console.print(f"  {verdict.what}: {ratio}, bar {verdict.bar:.2f}x: {word}", markup=False)


def _parser() -> Parser:
    parser = Parser(
        "python -m rmsnorm_deploy.benchmark kernels",
        "The CPU kernels against their peers; with --cuda, the CUDA kernels (--cuda --help has their options).",
        statuses={1: "a bar was missed (with --check)"},
    )
    parser.add_argument("--dtype", nargs="+", choices=list(_DTYPES), default=list(_DTYPES))
    parser.add_argument("--threads", nargs="+", type=positive, default=[1, 2], metavar="N")
    parser.add_argument("--cache", nargs="+", choices=["warm", "cold"], default=[], help="default: what a bar names")
    parser.add_argument("--turns", type=positive, default=41, metavar="N", help="turns of each contestant (41)")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile's, for which it compiles seconds")
    parser.add_argument("--plot", metavar="FILE", help="draw the cases on one thread (.svg or .png; needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="end with status 1 where a bar is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
