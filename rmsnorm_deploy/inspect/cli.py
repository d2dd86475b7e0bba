"""The command line of inspect."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsnorm_deploy.cli import Parser, console, run_command, stdout_for_result
from rmsnorm_deploy.errors import EXIT_OK, EXIT_PARITY, InputError
from rmsnorm_deploy.export.cli import PRECISIONS, add_source_options
from rmsnorm_deploy.export.progress import Progress
from rmsnorm_deploy.place import MANIFEST

_DESCRIPTION = """\
Print every RMSNorm of a model (its name and place in the source, variant, axes, eps, scale, whether the residual add in
front is taken along, and the proof) and every look-alike with the reason it was left. Nothing is written.

MODEL is a bundle, an ONNX file, or anything python -m rmsnorm_deploy.export takes: that is traced in memory."""
_SOURCE_OPTIONS = {
    "recipe": "--recipe",
    "imports": "--import",
    "allow_classes": "--allow-class",
    "state_key": "--state-key",
    "inputs": "--input",
    "dims": "--dim",
    "precision": "--precision",
    "opset": "--opset",
}
_EXAMPLES = (
    "python -m rmsnorm_deploy.inspect model.onnx",
    "python -m rmsnorm_deploy.inspect block.pt --recipe export/transformer_block.py --precision fp16",
    'python -m rmsnorm_deploy.inspect --zoo --family Llama --family "Gemma 3" --dtype bf16',
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status and prints errors as ``error: ...`` on stderr."""
    return run_command(argv, lambda arguments: _inspect(parse(arguments)))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; InputError for a wrong one."""
    options = parser().parse_args(argv)
    if options.zoo == (options.model is not None):
        raise InputError("give MODEL, or --zoo without one; see python -m rmsnorm_deploy.inspect --help")
    zoo_only = [name for name in ("family", "dtype", "markdown") if getattr(options, name)]
    if zoo_only and not options.zoo:
        raise InputError(f"--{zoo_only[0]} goes with --zoo")
    return options


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = Parser(
        "python -m rmsnorm_deploy.inspect",
        _DESCRIPTION,
        statuses={EXIT_PARITY: "the zoo has an unfused norm or a wrong value"},
        examples=_EXAMPLES,
    )
    made.add_argument("model", metavar="MODEL", type=Path, nargs="?", help="what to look at")
    add_source_options(made)
    made.add_argument("--precision", choices=PRECISIONS, default="keep", help="dtype of weights and activations")
    made.add_argument("--opset", type=int, help="ONNX opset to trace to (default 18)")
    zoo = made.add_argument_group("the zoo: models of many families, exported and judged")
    zoo.add_argument("--zoo", action="store_true", help="run the zoo (minutes)")
    zoo.add_argument("--family", action="append", default=[], help="this family only; may be repeated")
    zoo.add_argument("--dtype", action="append", default=[], help="fp32, fp16 or bf16 only; may be repeated")
    zoo.add_argument("--markdown", action="store_true", help="print the table as in docs/zoo.md")
    made.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else, on stdout")
    return made


def _inspect(options: argparse.Namespace) -> int:
    return _zoo(options) if options.zoo else _model(options)


def _model(options: argparse.Namespace) -> int:
    from rmsnorm_deploy.inspect.explain import inspect_model

    opset = _checked_opset(options)
    progress = Progress(quiet=options.json)
    with stdout_for_result(options.json):
        found = inspect_model(
            options.model,
            precision=options.precision,
            opset=opset,
            progress=progress,
            recipe=options.recipe,
            imports=options.imports,
            allow_classes=options.allow_classes,
            inputs=options.inputs,
            dims=options.dims,
            state_key=options.state_key,
        )
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
        return EXIT_OK
    from rmsnorm_deploy.inspect.tables import print_inspection

    progress.notes(found.notes)
    print_inspection(found, console())
    return EXIT_OK


def _checked_opset(options: argparse.Namespace) -> int:
    """The opset to trace to; InputError for options that the kind of MODEL has no use for."""
    if (options.model / MANIFEST).is_file():
        given = [name for name in _SOURCE_OPTIONS if getattr(options, name) not in (None, [], "keep")]
        if given:
            option = _SOURCE_OPTIONS[given[0]]
            raise InputError(f"{options.model}: a bundle is looked at as it was exported: drop {option}")
        return 0
    from rmsnorm_deploy.export.builtin import check_opset, check_precision
    from rmsnorm_deploy.load.sniff import identify

    kind = identify(options.model)
    check_precision(kind, options.precision)
    return check_opset(kind, options.opset)


def _zoo(options: argparse.Namespace) -> int:
    from rich.text import Text

    from rmsnorm_deploy.inspect.tables import zoo_markdown, zoo_notes, zoo_table
    from rmsnorm_deploy.zoo import run_zoo

    say = None if options.json else lambda text: print(text, file=sys.stderr, flush=True)
    results = list(run_zoo(options.family, options.dtype, say))
    if options.json:
        print(json.dumps([result.to_json() for result in results], indent=1))
    elif options.markdown:
        print(zoo_markdown(results), end="")
    else:
        out = console()
        out.print(zoo_table(results))
        for note in zoo_notes(results):
            out.print(Text(f"- {note}"))
    return EXIT_OK if all(result.ok for result in results) else EXIT_PARITY
