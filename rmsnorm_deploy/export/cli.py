"""The command line of the export: options in, one exit status out, at most one line of error."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.cli import BACKEND_ABSENT, PARITY_FAILED, Parser, console, one_line, run_command, stdout_for_result
from rmsnorm_deploy.errors import EXIT_OK, EXIT_PARITY, BackendUnavailable, InputError
from rmsnorm_deploy.export.progress import Progress
from rmsnorm_deploy.place import check_place

if TYPE_CHECKING:
    from rmsnorm_deploy.bundle import Bundle

TARGETS = ("onnxruntime", "pytorch", "tensorrt", "tensorrt-rtx")
PRECISIONS = ("keep", "fp32", "fp16", "bf16")

_DESCRIPTION = """\
Export a PyTorch or ONNX model to a bundle: a folder with the ONNX model, every RMSNorm in it as one fused op, and the
evidence that it computes what the model computed.

MODEL is a file from torch.save (a whole module, or a state dict with --recipe), a TorchScript archive, a .pt2, a
safetensors, GGUF or ONNX file, a Hugging Face directory, or a recipe (.py)."""
_EXAMPLES = (
    "python -m rmsnorm_deploy.export export/transformer_block.py",
    "python -m rmsnorm_deploy.export block.pt --import modeling.py --input 'x=float32[batch,seq,512]' --dim seq=1:2048",
    "python -m rmsnorm_deploy.export weights.safetensors --recipe export/llama_tiny.py --precision fp16",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status and prints errors as ``error: ...`` on stderr."""
    return run_command(argv, lambda arguments: _export(parse(arguments)))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked as far as is possible without reading the model; InputError for a wrong one."""
    options = parser().parse_args(argv)
    options.targets = _targets(options.targets)
    options.out = options.out or default_out(options.model)
    return options


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = Parser(
        "python -m rmsnorm_deploy.export",
        _DESCRIPTION,
        statuses={**PARITY_FAILED, **BACKEND_ABSENT},
        examples=_EXAMPLES,
    )
    made.add_argument("model", metavar="MODEL", type=Path, help="what to export")
    add_source_options(made)
    result = made.add_argument_group("what to make of it")
    result.add_argument("--precision", choices=PRECISIONS, default="keep", help="dtype of weights and activations")
    result.add_argument("--opset", type=int, help="ONNX opset of the model (default 18)")
    result.add_argument("--out", metavar="DIR", type=Path, help="the bundle (default: MODEL's name with .bundle)")
    result.add_argument("--force", action="store_true", help="replace a bundle that is there already")
    result.add_argument("--targets", metavar="A,B", default="", help=f"check these only: {', '.join(TARGETS)}")
    result.add_argument("--no-check", action="store_true", help="leave out the parity check")
    result.add_argument("--no-benchmark", action="store_true", help="leave out the timing")
    made.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else, on stdout")
    return made


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what MODEL is, with the names of `load_source`'s arguments."""
    source = parser.add_argument_group("what the model is")
    source.add_argument("--recipe", metavar="FILE.py", type=Path, help="builds the model of a state dict; gives inputs")
    source.add_argument("--import", metavar="FILE.py", dest="imports", action="append", default=[], type=Path,
                        help="run this file and allow its classes in a pickled model; may be repeated")  # fmt: skip
    source.add_argument("--allow-class", metavar="MOD.CLASS", dest="allow_classes", action="append", default=[],
                        help="allow this class (or MOD.*) in a pickled model; may be repeated")  # fmt: skip
    source.add_argument("--state-key", metavar="KEY", help="which entry of a checkpoint holds the weights")
    source.add_argument("--input", metavar="SPEC", dest="inputs", action="append", default=[],
                        help="an input, as x=float32[batch,seq,64] or ids=int64[batch,seq]:32000 (values below 32000) "
                        "or scale=0.5; names of dims are dynamic; may be repeated")  # fmt: skip
    source.add_argument("--dim", metavar="NAME=MIN:MAX", dest="dims", action="append", default=[],
                        help="the sizes a named dim may have, as batch=1:32 or seq=1:; may be repeated")  # fmt: skip


def default_out(model: Path) -> Path:
    """``<model stem>.bundle`` in the current directory."""
    name = Path(os.path.abspath(model))
    return Path(f"{(name.name if name.is_dir() else name.stem) or 'model'}.bundle")


def check_out(out: Path, force: bool) -> None:
    """Raise InputError, before any work is done, when a bundle cannot be written to ``out``."""
    try:
        check_place(out, replace=force)
    except InputError as error:
        raise InputError(f"--out {error}") from error


def check_targets(targets: Sequence[str]) -> None:
    """Raise BackendUnavailable for a target that is not on this machine, with the way to get it."""
    if not targets:
        return
    from rmsnorm_deploy.runtime import available  # asks every backend, so only when one is named

    statuses = available()
    for target in targets:
        mine = [s for s in statuses if s.name == target or s.name.startswith(f"{target} ")]
        if not any(s.available or s.builds for s in mine):
            detail = mine[0].detail if mine else "not known on this machine"
            install = next((f"; to get it: {s.install}" for s in mine if s.install), "")
            raise BackendUnavailable(f"--targets {target}: {one_line(detail)}{install}")


def _export(options: argparse.Namespace) -> int:
    with stdout_for_result(options.json):
        bundle, notes = _exported(options)
    result = summary(bundle.path)
    if options.json:
        print(json.dumps({**result, "notes": notes}, indent=1))
    else:
        _print_summary(bundle, result)
    return EXIT_PARITY if result["parity"] is not None and not result["parity"].get("ok", False) else EXIT_OK


def _exported(options: argparse.Namespace) -> tuple[Bundle, list[str]]:
    """The bundle, and the choices that were made for the user."""
    check_out(options.out, options.force)
    check_targets(options.targets)
    progress = Progress(quiet=options.json)
    with progress("load"):
        from rmsnorm_deploy.export import pipeline  # torch is imported here, after the options were found right
        from rmsnorm_deploy.export.builtin import check_opset, check_precision
        from rmsnorm_deploy.load import load_source
        from rmsnorm_deploy.load.sniff import identify

        kind = identify(options.model)
        opset = check_opset(kind, options.opset)
        check_precision(kind, options.precision)
        source = load_source(
            options.model,
            recipe=options.recipe,
            imports=options.imports,
            allow_classes=options.allow_classes,
            inputs=options.inputs,
            dims=options.dims,
            state_key=options.state_key,
        )
    progress.notes(source.notes)
    said = len(source.notes)

    settings = pipeline.Options(
        out_dir=options.out,
        precision=options.precision,
        opset=opset,
        targets=options.targets,
        check=not options.no_check,
        benchmark=not options.no_benchmark,
        force=options.force,
    )
    bundle = pipeline.run(source, settings, progress)
    progress.notes(source.notes[said:])
    return bundle, source.notes


def summary(path: Path) -> dict[str, Any]:
    """What a bundle holds, for ``--json``: its manifest, parity and benchmark; None for what was left out."""
    return {"bundle": str(path), **{name: _read(path / f"{name}.json") for name in ("manifest", "parity", "benchmark")}}


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _print_summary(bundle: Any, result: dict[str, Any]) -> None:
    from rmsnorm_deploy import report

    report.print_summary(bundle, result["parity"], result["benchmark"], console())


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in TARGETS:
            raise InputError(f"--targets {name}: not a backend; there is {', '.join(TARGETS)}")
    return names
