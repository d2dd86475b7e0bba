"""Judge a bundle's model on each backend against float64, in ULPs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsnorm_deploy.cli import BACKEND_ABSENT, Parser, positive, run_command
from rmsnorm_deploy.errors import EXIT_OK, EXIT_PARITY, InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_command(argv, lambda arguments: _run(_parser().parse_args(arguments)))


def _parser() -> Parser:
    from rmsnorm_deploy.parity.backends import BACKENDS

    parser = Parser(
        "python -m rmsnorm_deploy.parity",
        __doc__,
        statuses={EXIT_OK: "all that ran are right", EXIT_PARITY: "one is not", **BACKEND_ABSENT},
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, nargs="?", help="the folder that the export left")
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
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="name the first norm that differs on each backend, whether it fails or not",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where a norm at fault is saved alone, with its input (BUNDLE.bisect)",
    )
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML too")
    parser.add_argument(
        "--suite", action="store_true", help="in the place of a bundle: every variant of the op on every backend here"
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="plant faults in the bundle's model (without one: in tiny Llamas) and count which are caught and named",
    )
    parser.add_argument(
        "--seeds", type=positive, default=200, help="with --faults: seeds on which a clean bundle must pass"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.suite:
        from rmsnorm_deploy.parity.suite import main as suite

        return suite(seed=options.seed)
    if options.faults:
        from rmsnorm_deploy.parity.faults import main as faults

        return faults(options.bundle, options.seeds)
    if options.bundle is None:
        raise InputError("name a bundle, or give --suite or --faults; see python -m rmsnorm_deploy.parity --help")
    return _judge(options)


def _beside(bundle: Path) -> Path:
    """Sibling bundles have norms of the same name."""
    path = bundle.resolve()
    return path.with_name(f"{path.name}.bisect")


def _judge(options: argparse.Namespace) -> int:
    from rmsnorm_deploy.bundle import open_bundle
    from rmsnorm_deploy.parity.junit import require_writable, write_junit
    from rmsnorm_deploy.parity.lone_norm import snippet
    from rmsnorm_deploy.parity.progress import Progress
    from rmsnorm_deploy.parity.run import run_parity
    from rmsnorm_deploy.parity.samples import load_samples

    bundle = open_bundle(options.bundle)
    if options.junit:
        require_writable(options.junit)
    samples = load_samples(options.inputs, bundle.manifest) if options.inputs else None
    with Progress() as progress:
        folder = options.out or _beside(options.bundle)
        report = run_parity(
            bundle,
            backends=options.backend,
            seed=options.seed,
            samples=samples,
            progress=progress,
            bisect=options.bisect,
            save_to=folder,
        )
    if options.junit:
        write_junit(report, options.junit)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        print("\n".join(report.summary()))
        saved = {finding.saved: finding for finding in report.findings if finding.saved}
        for files, finding in saved.items():
            what = finding.norm or f"What gives {finding.value}"
            print(f"\n{what} alone, with its input: {folder / files[0]}; to run it:\n{snippet(folder, files)}")
    return EXIT_OK if report.ok else EXIT_PARITY


if __name__ == "__main__":
    sys.exit(main())
