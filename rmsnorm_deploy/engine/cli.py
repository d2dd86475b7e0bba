"""The command line of ``python -m rmsnorm_deploy.engine``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rmsnorm_deploy.cli import BACKEND_ABSENT, Parser, run_command
from rmsnorm_deploy.engine.build import VARIANTS, EngineOptions, build_engines
from rmsnorm_deploy.engine.precision import PRECISIONS
from rmsnorm_deploy.engine.request import MODULES
from rmsnorm_deploy.errors import EXIT_OK, InputError


def parser() -> Parser:
    """All options, with what they default to."""
    made = Parser(
        "python -m rmsnorm_deploy.engine",
        "Build TensorRT engines of a bundle, with and without the plugin.",
        statuses=BACKEND_ABSENT,
    )
    made.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that the export left")
    made.add_argument("--runtime", choices=list(MODULES), default="tensorrt", help="default: tensorrt")
    made.add_argument("--sm", default="", metavar="80,89", help="compute capabilities to build for (tensorrt-rtx only)")
    made.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="INPUT=LEAST:USUAL:GREATEST",
        help="one optimization profile, such as input_ids=1x1:4x128:8x2048; may be given several times",
    )
    made.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="keep",
        help="default: keep, the bundle's own; another is refused with the export that makes such a bundle",
    )
    made.add_argument(
        "--plugin", choices=list(VARIANTS), default="auto", help="default: auto, both and the faster is kept"
    )
    made.add_argument("--plugin-library", type=Path, help="default: the one that native build made")
    made.add_argument("--timing-cache", type=Path, metavar="FILE", help="read where it is there, and written")
    made.add_argument("--verbose", action="store_true", help="everything that TensorRT says")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_command(argv, _build)


def _build(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    options = EngineOptions(
        runtime=arguments.runtime,
        sms=_numbers(arguments.sm),
        profiles=tuple(arguments.profile),
        precision=arguments.precision,
        plugin=arguments.plugin,
        plugin_library=arguments.plugin_library,
        timing_cache=arguments.timing_cache,
        verbose=arguments.verbose,
    )
    for record in build_engines(arguments.bundle, options, lambda text: print(text, file=sys.stderr, flush=True)):
        print(record.path)
    return EXIT_OK


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        raise InputError(f"--sm {text!r}: numbers such as 80,89 are wanted") from None
