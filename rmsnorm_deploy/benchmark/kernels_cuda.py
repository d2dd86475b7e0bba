"""``python -m rmsnorm_deploy.benchmark kernels --cuda``: the CUDA kernels against their peers on this machine's GPU.

Every contestant of a case computes the same norm on the same buffers, which rotate through twice the second-level
cache (where rows are so few that this takes more than `_MOST_SETS` sets, they stay in it, as a decoder's do). A
contestant's calls are captured in a CUDA graph, so that neither Python nor the driver is timed; graphs take turns, and
the figures are medians over the turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.benchmark.kernels_cuda_cases import (
    COPY,
    DTYPES,
    EMPTY,
    OURS,
    ROWS,
    WIDTHS,
    Buffers,
    Case,
    cases,
    judge,
)
from rmsnorm_deploy.benchmark.kernels_cuda_clock import Clock, GpuClock
from rmsnorm_deploy.benchmark.kernels_cuda_peers import CONTESTANTS, WRITE_TO_OURS, Maker
from rmsnorm_deploy.benchmark.kernels_result import CaseResult, print_bars, timings_of, to_json, write_json
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.cli import Parser, positive
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.optional import one_line

_MOST_SETS = 64
_GRAPH_SECONDS = 1e-3  # about what a graph takes: enough for the clock
_SLOWEST, _LAUNCH_SECONDS = 1e12, 3e-6  # bytes and seconds from which a call's time is guessed beforehand
_MOST_CALLS = 100
_MEMORY_SHARE = 0.8


# ---- measuring


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
