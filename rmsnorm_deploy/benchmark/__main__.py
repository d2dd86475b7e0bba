"""Time a bundle's model on PyTorch and ONNX Runtime, fused and not, and against the same model with LayerNorm.

Instead of a bundle: ``kernels`` times this package's kernels, ``overhead`` the pipeline against PyTorch's export, and
``fusion`` the fusion of ever more norms, ``parity`` the cost of parity, ``tokens`` a bundle against PyTorch's own
export; each has its own --help.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsnorm_deploy.cli import Parser, positive, positive_number, run_command
from rmsnorm_deploy.errors import EXIT_OK

_SUBCOMMANDS = ("fusion", "kernels", "overhead", "parity", "tokens")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _SUBCOMMANDS:
        command = importlib.import_module(f"rmsnorm_deploy.benchmark.{arguments[0]}")
        return int(command.main(arguments[1:]))
    return run_command(arguments, lambda rest: _run(_parser().parse_args(rest)))


def _parser() -> Parser:
    parser = Parser("python -m rmsnorm_deploy.benchmark", __doc__)
    parser.add_argument(
        "bundle", type=Path, metavar="BUNDLE", help="the folder that the export left, or one of those words"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="for PyTorch and ONNX Runtime alike")
    parser.add_argument("--seconds", type=positive_number, default=None, help="about how long to measure (10)")
    parser.add_argument(
        "--widen-bfloat16",
        action="store_true",
        help="run ops that have no bfloat16 kernel in float32, in all contestants on ONNX Runtime",
    )
    parser.add_argument("--json", action="store_true", help="print all timings as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    from rmsnorm_deploy.benchmark.model import SECONDS, run_benchmark
    from rmsnorm_deploy.bundle import open_bundle
    from rmsnorm_deploy.parity.progress import Progress

    bundle = open_bundle(options.bundle)
    with Progress() as progress:
        report = run_benchmark(
            bundle,
            threads=options.threads,
            seconds=options.seconds or SECONDS,
            widen_bfloat16=options.widen_bfloat16,
            progress=progress,
        )
    print(json.dumps(report.to_json(), indent=1) if options.json else "\n".join(report.summary()))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
