"""Judge a bundle's model on each backend against float64, in ULPs.

Exit status: 0 all that ran are right, 1 one is not, 2 bad input or usage, 3 a backend asked for by name is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsnorm_deploy.errors import EXIT_OK, EXIT_PARITY, DeployError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except DeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    from rmsnorm_deploy.parity.backends import BACKENDS

    parser = argparse.ArgumentParser(
        prog="python -m rmsnorm_deploy.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, help="the folder that the export left")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        choices=list(BACKENDS),
        help=f"judge this one only, and fail when it is not here; may be repeated: {', '.join(BACKENDS)}",
    )
    parser.add_argument(
        "--inputs", type=Path, metavar="FILE.npz", help="judge on these arrays, named as the inputs are"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs that are made up (0)")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML too")
    return parser


def _run(options: argparse.Namespace) -> int:
    from rmsnorm_deploy.bundle import open_bundle
    from rmsnorm_deploy.parity.junit import write_junit
    from rmsnorm_deploy.parity.progress import Progress
    from rmsnorm_deploy.parity.run import run_parity
    from rmsnorm_deploy.parity.samples import load_samples

    bundle = open_bundle(options.bundle)
    samples = load_samples(options.inputs, bundle.manifest) if options.inputs else None
    with Progress() as progress:
        report = run_parity(bundle, backends=options.backend, seed=options.seed, samples=samples, progress=progress)
    if options.junit:
        write_junit(report, options.junit)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print("\n".join(report.summary()))
    return EXIT_OK if report.ok else EXIT_PARITY


if __name__ == "__main__":
    sys.exit(main())
