"""What this package's pipeline costs on top of PyTorch's own ONNX export, in time and in memory.

Both run in child processes of their own, in turn, on the same loaded model: torch.export, torch.onnx.export with its
optimizer, and save; against trace, weights, fuse, write and check. Bars: load, weights, fuse, write and check together
at most 15% of PyTorch's time, and peak memory at most 1.25 times its peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rmsnorm_deploy.cli import Parser, positive, run_command
from rmsnorm_deploy.errors import EXIT_OK, InputError

TIME_BAR, MEMORY_BAR = 0.15, 1.25
_OURS = ("load", "weights", "fuse", "write", "check")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit status."""
    return run_command(argv, lambda arguments: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.child:
        print(json.dumps(_CHILDREN[options.child](options.model, options.recipe)))
        return EXIT_OK
    return _compare(options)


def _parser() -> Parser:
    parser = Parser("python -m rmsnorm_deploy.benchmark overhead", __doc__)
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="anything that the export takes and PyTorch can trace"
    )
    parser.add_argument("--recipe", type=Path, metavar="FILE.py")
    parser.add_argument("--runs", type=positive, default=3, help="of each, in turn (3)")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--child", choices=sorted(_CHILDREN), help=argparse.SUPPRESS)
    return parser


def _compare(options: argparse.Namespace) -> int:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in _CHILDREN}
    for number in range(options.runs):
        for name in _CHILDREN:
            print(f"run {number + 1} of {options.runs}: {name}", file=sys.stderr, flush=True)
            runs[name].append(_child(name, options))
    torch_seconds = statistics.median(run["export"] for run in runs["torch"])
    ours = statistics.median(sum(run[stage] for stage in _OURS) for run in runs["rmsnorm_deploy"])
    memory = [statistics.median(run["peak_bytes"] for run in runs[name]) for name in ("rmsnorm_deploy", "torch")]
    result: dict[str, Any] = {
        "model": str(options.model),
        "torch_export_seconds": torch_seconds,
        "overhead_seconds": ours,
        "overhead_share": ours / torch_seconds,
        "peak_bytes": memory[0],
        "torch_peak_bytes": memory[1],
        "memory_ratio": memory[0] / memory[1],
        "runs": runs,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return EXIT_OK
    print(f"torch.onnx.export          {torch_seconds:8.1f} s   peak {memory[1] / 2**30:6.2f} GiB")
    for stage in ("load", "trace", "weights", "fuse", "write", "check"):
        print(f"  {stage:<10} {statistics.median(run[stage] for run in runs['rmsnorm_deploy']):22.2f} s")
    print(f"rmsnorm_deploy, peak memory             peak {memory[0] / 2**30:6.2f} GiB")
    print(f"all but the trace          {result['overhead_share']:8.1%} of torch's time   bar {TIME_BAR:.0%}")
    print(f"peak memory                {result['memory_ratio']:8.2f} of torch's peak   bar {MEMORY_BAR}")
    return EXIT_OK


def _child(name: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "rmsnorm_deploy.benchmark", "overhead", str(options.model), "--child", name]
    if options.recipe:
        command += ["--recipe", str(options.recipe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != EXIT_OK:
        raise InputError(f"{name} ended with status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _torch_child(model: Path, recipe: Path | None) -> dict[str, float]:
    import torch

    from rmsnorm_deploy.load import load_source

    source = load_source(model, recipe=recipe)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = torch.onnx.export(
            source.model,
            source.args,
            kwargs=source.kwargs,
            dynamic_shapes=source.dynamic_shapes,
            dynamo=True,
            opset_version=18,
            verbose=False,
        )
        assert program is not None
        program.save(str(Path(folder) / "model.onnx"), external_data=True)
    return {"export": time.perf_counter() - start, "peak_bytes": _peak()}


def _our_child(model: Path, recipe: Path | None) -> dict[str, float]:
    import transformers  # noqa: F401  importing it is no part of loading a model, and PyTorch's side has it too

    from rmsnorm_deploy.export.pipeline import Options, run
    from rmsnorm_deploy.load import load_source

    stages: dict[str, float] = {}

    @contextmanager
    def clock(stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        stages[stage] = time.perf_counter() - start

    with clock("load"):
        source = load_source(model, recipe=recipe)
    with tempfile.TemporaryDirectory() as folder:
        run(source, Options(Path(folder) / "bundle", check=False, benchmark=False), clock)
    return {**stages, "peak_bytes": _peak()}


def _peak() -> float:
    """Peak resident memory of this process, in bytes."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


_CHILDREN = {"torch": _torch_child, "rmsnorm_deploy": _our_child}
