"""What parity of a bundle costs in processor time and memory, beside one pass of the float64 model over its inputs."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_deploy.bundle import open_bundle
from rmsnorm_deploy.cli import Parser, positive, run_command
from rmsnorm_deploy.collector import rare_collections
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.backends import BACKENDS, HeldBundle
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.oracle import open_oracle
from rmsnorm_deploy.parity.run import run_parity
from rmsnorm_deploy.parity.samples import Sample, make_samples, sample_of_size

_JUDGED = ("pytorch", "onnxruntime", "onnxruntime-unoptimized", "onnxruntime-kernels")
Figures = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    return run_command(argv, _run)


def _run(argv: list[str]) -> int:
    parser = Parser("python -m rmsnorm_deploy.benchmark parity", __doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the folder that the export left")
    parser.add_argument(
        "--size",
        type=positive,
        metavar="N",
        help="one input, whose named dims are N but the first, which is 1 (parity's own inputs)",
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        choices=list(BACKENDS),
        help=f"judge this one; may be repeated ({', '.join(_JUDGED)})",
    )
    parser.add_argument("--repeat", type=positive, default=3, help="runs of each, of which the least time counts (3)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    open_bundle(options.bundle)  # what is wrong with it is said at once
    figures = measure(options.bundle, options.size, options.backend or list(_JUDGED), options.repeat)
    print(json.dumps(figures) if options.json else "\n".join(_lines(figures)))
    return 0


def measure(path: Path, size: int | None, backends: Sequence[str], repeat: int = 3) -> Figures:
    """Seconds of processor time, of all threads, and bytes. Each run has a process of its own, and what it does before
    it computes counts; a busy machine adds to every time, so the least of ``repeat`` is given.

    ``reading``: from the files to the traced program, which both need. ``parity``: all that follows. ``forward``: to
    lift that program and run it once over each input; ``again``: to run it once more, its weights wide already.
    ``peak``: the most memory that was resident in parity beyond that of Python with its libraries; files that are
    mapped count. ``float64``: the weights in float64.
    """
    judged = [_alone(_parity, path, size, list(backends)) for _ in range(repeat)]
    passed = [_alone(_forward, path, size) for _ in range(repeat)]
    return {
        **judged[0],
        **passed[0],
        **{
            name: min(run[name] for run in (*judged, *passed) if name in run) for name in ("reading", "parity", "again")
        },
        "forward": min(run["forward"] for run in passed),
        "float64": 8 * sum(math.prod(tensor.dims) for tensor in read_model(path / "model.onnx").graph.initializer),
    }


def _alone(task: Callable[..., Figures], *arguments: Any) -> Figures:
    """What a task gives in a process that has done nothing before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        figures = pool.apply(task, arguments)
        pool.close()  # and let it end by itself: what torch has open would be reported as lost
        pool.join()
    return figures


def _parity(path: Path, size: int | None, backends: Sequence[str]) -> Figures:
    import onnxruntime  # noqa: F401  # its libraries are none of parity's memory
    import torch  # noqa: F401

    libraries = _peak()
    held, samples, reading = _read(path, size)
    start = time.process_time()
    report = run_parity(held, samples=samples, backends=backends)
    return {
        "inputs": [sample.name for sample in samples],
        "verdicts": {backend.name: backend.verdict for backend in report.backends},
        "reading": reading,
        "parity": time.process_time() - start,
        "peak": _peak() - libraries,
    }


def _forward(path: Path, size: int | None) -> Figures:
    held, samples, reading = _read(path, size)
    times = [time.process_time()]
    oracle = open_oracle(held)
    for _ in range(2):
        for sample in samples:
            with contextlib.suppress(InputError):  # parity leaves out an input that the model refuses
                oracle(sample.feeds)
        times.append(time.process_time())
    return {"reading": reading, "forward": times[1] - times[0], "again": times[2] - times[1]}


def _read(path: Path, size: int | None) -> tuple[HeldBundle, list[Sample], float]:
    bundle = open_bundle(path)
    samples = make_samples(bundle.manifest) if size is None else [sample_of_size(bundle.manifest, size)]
    start = time.process_time()
    with rare_collections():
        held = HeldBundle(bundle)
    return held, samples, time.process_time() - start


def _peak() -> int:
    """The most bytes that this process had in memory; what getrusage gives begins with the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _lines(figures: Figures) -> list[str]:
    ratio, memory = figures["parity"] / figures["forward"], figures["peak"] / figures["float64"]
    return [
        f"{'; '.join(figures['inputs'])} ({', '.join(f'{name}: {v}' for name, v in figures['verdicts'].items())})",
        f"reading the traced program takes {figures['reading']:.1f} s of processor time",
        f"parity {figures['parity']:.1f} s, {ratio:.1f} times one float64 forward pass of {figures['forward']:.1f} s "
        f"({figures['again']:.1f} s once its weights are wide)",
        f"peak memory {figures['peak'] / 1e9:.2f} GB, {memory:.1f} times the weights in float64 "
        f"({figures['float64'] / 1e9:.2f} GB)",
    ]
