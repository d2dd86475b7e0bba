"""``python -m rmsnorm_deploy.benchmark kernels``: the CPU kernels against their peers, in one interleaved run.

Every contestant of a case computes the same op on the same buffers. They take turns, a batch of calls each, so that
what else the machine does meanwhile hits all of them; the figures are medians over the turns. "warm" uses one set of
buffers over and over, as in a model whose activations fit into the caches; "cold" goes through enough of them that none
is still in one. A bar is judged on the one that it names.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.benchmark.kernels_cases import DTYPES, Case, cases
from rmsnorm_deploy.benchmark.kernels_measure import measure
from rmsnorm_deploy.benchmark.kernels_peers import installed
from rmsnorm_deploy.benchmark.kernels_result import CaseResult, print_bars, to_json, write_json
from rmsnorm_deploy.cli import Parser, positive, run_command


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
    data = to_json(_machine(), results)
    if arguments.plot:
        from rmsnorm_deploy.benchmark.kernels_plot import plot

        plot(data, Path(arguments.plot))
    if arguments.json:
        write_json(data, Path(arguments.json))
    return 1 if print_bars(results) and arguments.check else 0


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
        "onnxruntime": installed("onnxruntime"),
        "openvino": installed("openvino"),
    }


def _print_result(result: CaseResult[Case]) -> None:
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
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
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
