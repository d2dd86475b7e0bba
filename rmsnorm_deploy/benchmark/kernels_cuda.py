"""``python -m rmsnorm_deploy.benchmark kernels --cuda``: the CUDA kernels against their peers on this machine's GPU.

Every contestant of a case computes the same norm on the same buffers, which rotate through twice the second-level
cache (where rows are so few that this takes more than `_MOST_SETS` sets, they stay in it, as a decoder's do). A
contestant's calls are captured in a CUDA graph, so that neither Python nor the driver is timed; graphs take turns, and
the figures are medians over the turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.benchmark.kernels_result import CaseResult, Verdict, print_bars, timings_of, to_json, write_json
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.cli import Parser, positive
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.optional import load_module, one_line

OURS, COPY, EMPTY = "ours", "copy", "empty kernel"
NOT_PEERS = (OURS, COPY, EMPTY)
WRITE_TO_OURS = (*NOT_PEERS, "flashinfer")  # the others allocate a y of their own
EPSILON = 1e-6
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 32_768)
WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# The bars: a share of the copy's bandwidth wherever this much moves, every peer, and the time of an empty kernel.
COPY_SHARE, COPY_BYTES = 0.92, 64 << 20
EMPTY_FACTOR, EMPTY_SHAPE = 1.3, (1, 4096)
_MOST_SETS = 64
_GRAPH_SECONDS = 1e-3  # about what a graph takes: enough for the clock
_SLOWEST, _LAUNCH_SECONDS = 1e12, 3e-6  # bytes and seconds from which a call's time is guessed beforehand
_MOST_CALLS = 100
_MEMORY_SHARE = 0.8
_BUSY_CYCLES = 1_000_000  # the device sleeps for so long, while the host queues what is to be timed


class Case(NamedTuple):
    """One comparison."""

    rows: int
    width: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.rows}x{self.width} {self.dtype}"

    @property
    def bytes_moved(self) -> int:
        """What the op must read and write; the scale is left out."""
        return 2 * self.rows * self.width * DTYPES[self.dtype].itemsize


class Buffers(NamedTuple):
    """x, and a place for y: rows x width, of the case's dtype."""

    x: torch.Tensor
    y: torch.Tensor


class Clock(Protocol):
    """A device to run on, and its clock."""

    device: str

    def cache_bytes(self) -> int:
        """Of the second-level cache."""
        ...

    def free_bytes(self) -> int:
        """Device memory that can be had."""
        ...

    def prepare(self, calls: Sequence[Call], count: int) -> Call:
        """What queues ``count`` calls of these, in rotation, at once."""
        ...

    def seconds(self, prepared: Call) -> float:
        """How long the device takes for it."""
        ...


class GpuClock:
    """The current CUDA device: CUDA graphs, timed by events."""

    device = "cuda"

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def prepare(self, calls: Sequence[Call], count: int) -> Call:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, loads and allocates what a capture could not
            for call in (*calls[:3], *calls[:1]):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def seconds(self, prepared: Call) -> float:
        cuda: Any = torch.cuda  # its events have no types
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda._sleep(_BUSY_CYCLES)
        start.record()
        prepared()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


# ---- contestants


def ours_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """`rmsnorm_cuda` on the current stream, with a workspace where one helps."""
    if ckernel.cuda_library() is None:
        raise BackendUnavailable("the CUDA kernels are not built: run python -m rmsnorm_deploy.native build --cuda")
    made = [_args(case, item, scale) for item in sets]
    workspace = torch.empty(max(ckernel.cuda_workspace_bytes(made[0]), 1), dtype=torch.uint8, device=scale.device)
    for args in made:
        args.workspace, args.workspace_bytes = workspace.data_ptr(), ckernel.cuda_workspace_bytes(args)
    return [_ours_call(args, workspace) for args in made]


def _args(case: Case, item: Buffers, scale: torch.Tensor) -> ckernel.Args:
    dtype, width = ckernel.DTYPES[case.dtype], case.width
    pointers = {"x": item.x.data_ptr(), "y": item.y.data_ptr(), "scale": scale.data_ptr()}
    sizes = {"rows": case.rows, "width": width, "scale_count": width, "x_stride": width, "y_stride": width}
    return ckernel.Args(x_dtype=dtype, param_dtype=dtype, y_dtype=dtype, eps=EPSILON, **pointers, **sizes)


def _ours_call(args: ckernel.Args, _workspace: torch.Tensor) -> Call:
    return lambda: ckernel.run_cuda(args, torch.cuda.current_stream().cuda_stream)


def torch_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """PyTorch's own operator."""
    return [_call(F.rms_norm, item.x, (case.width,), scale, EPSILON) for item in sets]


def compiled_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """torch.compile's kernel for this very shape."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, w: F.rms_norm(x, (case.width,), w, EPSILON), dynamic=False)
    return [_call(compiled, item.x, scale) for item in sets]


def liger_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """Liger-Kernel's Triton kernel, forward alone."""
    ops = _module("liger_kernel.ops.rms_norm", "pip install liger-kernel")
    return [_call(ops.LigerRMSNormFunction.apply, item.x, scale, EPSILON) for item in sets]


def flashinfer_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """FlashInfer's kernel; it has none for float32."""
    if case.dtype == "float32":
        raise BackendUnavailable("flashinfer has no float32 kernel")
    norm = _module("flashinfer.norm", "pip install flashinfer-python")
    return [_call(norm.rmsnorm, item.x, scale, EPSILON, item.y) for item in sets]


def quack_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """quack's CuTe kernel."""
    quack = _module("quack.rmsnorm", "pip install quack-kernels")
    return [_call(lambda x: quack.rmsnorm_fwd(x, scale, eps=EPSILON), item.x) for item in sets]


def copy_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """A device copy of the same bytes."""
    return [_call(item.y.copy_, item.x) for item in sets]


def empty_calls(case: Case, sets: Sequence[Buffers], scale: torch.Tensor) -> list[Call]:
    """A kernel that sleeps for no time."""
    return [_call(torch.cuda._sleep, 0)]


def _module(name: str, install: str) -> Any:
    load_module(name.split(".")[0], install)
    return load_module(name, install)


def _call(function: Callable[..., Any], *args: Any) -> Call:
    return lambda: function(*args)


Maker = Callable[[Case, Sequence[Buffers], torch.Tensor], list[Call]]
CONTESTANTS: dict[str, Maker] = {
    OURS: ours_calls,
    "torch": torch_calls,
    "torch.compile": compiled_calls,
    "liger": liger_calls,
    "flashinfer": flashinfer_calls,
    "quack": quack_calls,
    COPY: copy_calls,
    EMPTY: empty_calls,
}


# ---- measuring


def cases(
    dtypes: Sequence[str] = tuple(DTYPES), rows: Sequence[int] = ROWS, widths: Sequence[int] = WIDTHS
) -> list[Case]:
    """Every combination."""
    return [Case(count, width, dtype) for dtype in dtypes for width in widths for count in rows]


def measure(
    case: Case, clock: Clock, turns: int = 15, contestants: Mapping[str, Maker] = CONTESTANTS
) -> CaseResult[Case]:
    """Run all contestants of one case in turns. A case that does not fit the device's memory has no timings."""
    result = CaseResult(case)
    own_y = sum(name not in WRITE_TO_OURS for name in contestants)
    fitting = int(_MEMORY_SHARE * clock.free_bytes() - own_y * case.bytes_moved / 2) // case.bytes_moved
    if fitting < 1:
        result.missing = dict.fromkeys(contestants, "does not fit the device's memory")
        return result
    wanted = min(_MOST_SETS, math.ceil(2 * clock.cache_bytes() / case.bytes_moved) + 1)
    sets = [_buffers(case, clock.device) for _ in range(min(wanted, fitting))]
    scale = (1 + 0.1 * torch.randn(case.width, device=clock.device)).to(DTYPES[case.dtype])
    guess = _LAUNCH_SECONDS + case.bytes_moved / _SLOWEST
    count = max(1, min(_MOST_CALLS, int(_GRAPH_SECONDS / guess)))
    ready: dict[str, Call] = {}
    with torch.no_grad():
        for name, make in contestants.items():
            try:
                ready[name] = clock.prepare(make(case, sets, scale), count)
            except (BackendUnavailable, ImportError) as error:
                result.missing[name] = one_line(error)
            except Exception as error:  # whatever a peer throws at a shape that it does not take
                if name in (OURS, COPY):
                    raise
                result.missing[name] = f"{type(error).__name__}: {one_line(error)[:200]}"
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(turns):
        for name, prepared in ready.items():
            samples[name].append(clock.seconds(prepared) / count)
    result.timings = timings_of(samples, case.bytes_moved, COPY, idle=EMPTY)
    result.verdicts = judge(result)
    return result


def _buffers(case: Case, device: str) -> Buffers:
    dtype, shape = DTYPES[case.dtype], (case.rows, case.width)
    return Buffers(torch.randn(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))


def judge(result: CaseResult[Case]) -> list[Verdict]:
    """The bars that this case has, each a ratio that must reach its bar."""
    case = result.case
    times = {timing.name: timing.median for timing in result.timings}
    if OURS not in times:
        return []
    verdicts = []
    if case.bytes_moved >= COPY_BYTES:
        verdicts.append(_verdict("share of the copy's bandwidth", times[COPY] / times[OURS], COPY_SHARE))
    peers = {name: time for name, time in times.items() if name not in NOT_PEERS}
    if peers:
        best = min(peers, key=lambda name: peers[name])
        verdicts.append(_verdict(f"against {best}", peers[best] / times[OURS], 1.0))
    if (case.rows, case.width) == EMPTY_SHAPE and EMPTY in times:
        what = f"{EMPTY_FACTOR} times an empty kernel's time, over ours"
        verdicts.append(_verdict(what, EMPTY_FACTOR * times[EMPTY] / times[OURS], 1.0))
    return verdicts


def _verdict(what: str, ratio: float, bar: float) -> Verdict:
    return Verdict(what, ratio, bar, ratio >= bar)


# ---- command line


def run(argv: Sequence[str]) -> int:
    """Measure, print a line for each case, and return 0; with ``--check``, 1 where a bar is missed.

    Raises:
        BackendUnavailable: no GPU, or the kernels are not built.
    """
    from rmsnorm_deploy.runtime.cuda import no_gpu_cure, no_gpu_reason

    arguments = _parser().parse_args(argv)
    reason = no_gpu_reason()
    if reason:
        raise BackendUnavailable(f"{reason}: needs {no_gpu_cure()}")
    if ckernel.cuda_library() is None:
        raise BackendUnavailable("the CUDA kernels are not built: run python -m rmsnorm_deploy.native build --cuda")
    wanted = {name: make for name, make in CONTESTANTS.items() if arguments.compiled or name != "torch.compile"}
    results = []
    for case in cases(arguments.dtype, arguments.rows, arguments.widths):
        results.append(measure(case, GpuClock(), arguments.turns, wanted))
        print(line_of(results[-1]), flush=True)
        if arguments.json:  # as far as it went, should something stop it
            write_json(to_json(machine(), results), Path(arguments.json))
    if arguments.plot:
        from rmsnorm_deploy.benchmark.kernels_cuda_plot import plot

        plot(to_json(machine(), results), Path(arguments.plot))
    return 1 if print_bars(results) and arguments.check else 0


def line_of(result: CaseResult[Case]) -> str:
    """One line: our time and bandwidth, the best peer, and the bars."""
    times = {timing.name: timing for timing in result.timings}
    if OURS not in times:
        return f"{result.case}: {next(iter(result.missing.values()), 'nothing ran')}"
    ours = times[OURS]
    text = f"{result.case}: {ours.median:.2f} us, {ours.gigabytes:.0f} GB/s, {ours.share_of_copy or 0:.0%} of a copy"
    words = [f"{verdict.what} {verdict.ratio:.2f} {'met' if verdict.met else 'MISSED'}" for verdict in result.verdicts]
    return "; ".join([text, *words])


def machine() -> dict[str, Any]:
    """The GPU and the versions that matter, as plain values."""
    there = torch.cuda.is_available()
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device()) if there else None
    return {
        "gpu": properties.name if there else None,
        "compute_capability": f"{properties.major}.{properties.minor}" if there else None,
        "multiprocessors": properties.multi_processor_count if there else None,
        "l2_bytes": GpuClock().cache_bytes() if there else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def _parser() -> Parser:
    parser = Parser(
        "python -m rmsnorm_deploy.benchmark kernels --cuda",
        "The CUDA kernels against their peers: those of torch, Liger, FlashInfer and quack that are installed.",
        statuses={1: "a bar was missed (with --check)", 3: "no GPU, or the kernels are not built"},
    )
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=positive, default=list(ROWS), metavar="N")
    parser.add_argument("--widths", nargs="+", type=positive, default=list(WIDTHS), metavar="N")
    parser.add_argument("--turns", type=positive, default=15, metavar="N", help="turns of each contestant (15)")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile's, seconds a case to compile")
    parser.add_argument("--plot", metavar="FILE", help="draw them (.svg or .png; needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="end with status 1 where a bar is missed")
    return parser
