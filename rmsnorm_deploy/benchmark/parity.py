"""What parity of a bundle costs in processor time and memory, beside one pass of the float64 model over its inputs."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmsnorm_deploy.bundle import open_bundle
from rmsnorm_deploy.cli import Parser, positive, run_command
from rmsnorm_deploy.parity.backends import BACKENDS, HeldBundle
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.oracle import BundleLike, open_oracle
from rmsnorm_deploy.parity.run import run_parity
from rmsnorm_deploy.parity.samples import Sample, make_samples, sample_of_size

_JUDGED = ("pytorch", "onnxruntime", "onnxruntime-unoptimized", "onnxruntime-kernels")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    return run_command(argv, _run)


def _run(argv: list[str]) -> int:
    parser = Parser("python -m rmsnorm_deploy.benchmark parity", __doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the folder that the export left")
    parser.add_argument(
        "--size", type=positive, metavar="N", help="one input, its free dims N but the first, which is 1 (the default "
        "inputs of parity)"
    )  # fmt: skip
    parser.add_argument(
        "--backend", action="append", choices=list(BACKENDS), help=f"judge this one; may be repeated {_JUDGED}"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    figures = measure(open_bundle(options.bundle), options.size, options.backend or list(_JUDGED))
    print(json.dumps(figures) if options.json else "\n".join(_lines(figures)))
    return 0


def measure(bundle: BundleLike, size: int | None, backends: Sequence[str]) -> dict[str, Any]:
    """Seconds of processor time (all threads) and bytes.

    ``reading``: from the files to the traced program, which both need. ``parity``: all that follows. ``forward``: to
    lift that program and run it once over each input, ``again`` to run it once more, its weights wide already; of
    three times the least, for neither may be slower than it is for the ratio's sake.
    ``peak``: the most memory that was resident by the end of parity beyond that of Python with its libraries; files
    that are mapped count. ``float64``: the weights in float64.
    """
    import onnxruntime  # noqa: F401  # its libraries are none of parity's memory
    import torch  # noqa: F401

    samples = make_samples(bundle.manifest) if size is None else [sample_of_size(bundle.manifest, size)]
    libraries = _peak()
    start = time.process_time()
    held = HeldBundle(bundle)
    read = time.process_time()
    report = run_parity(held, samples=samples, backends=backends)
    done = time.process_time()
    figures = {
        "inputs": [sample.name for sample in samples],
        "verdicts": {backend.name: backend.verdict for backend in report.backends},
        "reading": read - start,
        "parity": done - read,
        "peak": _peak() - libraries,
        "float64": 8 * _elements(bundle.model_path),
    }
    return {**figures, **_forward(held, samples)}


def _forward(bundle: BundleLike, samples: Sequence[Sample]) -> dict[str, float]:
    times = [_lift_and_run(bundle, samples) for _ in range(3)]
    return {"forward": min(first for first, _ in times), "again": min(again for _, again in times)}


def _lift_and_run(bundle: BundleLike, samples: Sequence[Sample]) -> tuple[float, float]:
    start = time.process_time()
    oracle = open_oracle(bundle)
    times = [start]
    for _ in range(2):
        for sample in samples:
            oracle(sample.feeds)
        times.append(time.process_time())
    return times[1] - times[0], times[2] - times[1]


def _elements(model: Path) -> int:
    return sum(math.prod(tensor.dims) for tensor in read_model(model).graph.initializer)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _lines(figures: dict[str, Any]) -> list[str]:
    ratio, memory = figures["parity"] / figures["forward"], figures["peak"] / figures["float64"]
    return [
        f"{', '.join(figures['inputs'])}; {', '.join(f'{k}: {v}' for k, v in figures['verdicts'].items())}",
        f"reading the traced program {figures['reading']:.1f} s of processor time",
        f"parity {figures['parity']:.1f} s, {ratio:.1f} times one float64 forward pass ({figures['forward']:.1f} s; "
        f"{figures['again']:.1f} s with its weights wide already)",
        f"peak memory {figures['peak'] / 1e9:.2f} GB, {memory:.1f} times the weights in float64 "
        f"({figures['float64'] / 1e9:.2f} GB)",
    ]
