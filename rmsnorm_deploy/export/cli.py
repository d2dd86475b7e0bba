"""The command line of the export: options in, one exit status out, at most one line of error."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rmsnorm_deploy import __version__
from rmsnorm_deploy.errors import EXIT_INPUT, EXIT_OK, EXIT_PARITY, BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.export.progress import Progress

EXIT_FAULT = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
TARGETS = ("onnxruntime", "pytorch", "tensorrt", "tensorrt-rtx")
PRECISIONS = ("keep", "fp32", "fp16", "bf16")

_DESCRIPTION = """\
Export a PyTorch or ONNX model to a bundle: a folder with the ONNX model, every RMSNorm in it as one fused op, and the
evidence that it computes what the model computed.

MODEL is a file from torch.save (a whole module, or a state dict with --recipe), a TorchScript archive, a .pt2, a
safetensors, GGUF or ONNX file, a Hugging Face directory, or a recipe (.py)."""
_EPILOG = """\
exit status: 0 all right, 1 parity failed, 2 bad input or usage, 3 a backend asked for by name is not there,
70 a fault of this program (--debug shows where)

examples:
  python -m rmsnorm_deploy.export export/transformer_block.py
  python -m rmsnorm_deploy.export block.pt --import modeling.py --input 'x=float32[batch,seq,512]' --dim seq=1:2048
  python -m rmsnorm_deploy.export weights.safetensors --recipe export/llama_tiny.py --precision fp16"""


class OneLineParser(argparse.ArgumentParser):
    """argparse with one line for an error, and no usage text in front of it."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status and prints errors as ``error: ...`` on stderr."""
    return run_command(argv, lambda arguments: _export(parse(arguments)))


def run_command(argv: Sequence[str] | None, command: Callable[[list[str]], int]) -> int:
    """The exit status of ``command``; whatever goes wrong in it becomes one line on stderr and a status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        _quiet(debug)
        return command(arguments)
    except DeployError as error:
        return _fail(str(error), error.exit_code, debug)
    except BrokenPipeError:  # whoever read the output has had enough; what is left must not be flushed into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        return _fail("interrupted; nothing half-written was left behind", EXIT_INTERRUPTED, debug)
    except Exception as error:  # the last resort: a fault here must still be one line and a status
        hint = "" if debug else "; run again with --debug for the traceback"
        return _fail(f"internal fault, {type(error).__name__}: {_one_line(str(error))[:300]}{hint}", EXIT_FAULT, debug)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked as far as is possible without reading the model; InputError for a wrong one."""
    options = parser().parse_args(argv)
    options.targets = _targets(options.targets)
    options.out = options.out or default_out(options.model)
    return options


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = OneLineParser(
        prog="python -m rmsnorm_deploy.export",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("model", metavar="MODEL", type=Path, help="what to export")
    add_source_options(made)
    result = made.add_argument_group("what to make of it")
    result.add_argument("--precision", choices=PRECISIONS, default="keep", help="dtype of weights and activations")
    result.add_argument("--opset", type=int, default=18, help="ONNX opset of the model (default 18)")
    result.add_argument("--out", metavar="DIR", type=Path, help="the bundle (default: MODEL's name with .bundle)")
    result.add_argument("--force", action="store_true", help="replace a bundle that is there already")
    result.add_argument("--targets", metavar="A,B", default="", help=f"check these only: {', '.join(TARGETS)}")
    result.add_argument("--no-check", action="store_true", help="leave out the parity check")
    result.add_argument("--no-benchmark", action="store_true", help="leave out the timing")
    made.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else, on stdout")
    made.add_argument("--debug", action="store_true", help="show warnings, and the traceback of an error")
    made.add_argument("--version", action="version", version=f"rmsnorm_deploy {__version__}")
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
    if out.exists() or out.is_symlink():
        if not out.is_dir():
            raise InputError(f"--out {out}: there is a file of that name")
        if any(out.iterdir()) and not (out / "manifest.json").is_file():
            raise InputError(f"--out {out}: a directory that is not a bundle: nothing in it is touched, name another")
        if any(out.iterdir()) and not force:
            raise InputError(f"--out {out}: a bundle is there already: give --force to replace it, or another --out")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {parent} cannot be written to")


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
            raise BackendUnavailable(f"--targets {target}: {_one_line(detail)}{install}")


def _export(options: argparse.Namespace) -> int:
    check_out(options.out, options.force)
    check_targets(options.targets)
    progress = Progress(quiet=options.json)
    with progress("load"):
        from rmsnorm_deploy.load import load_source  # torch is imported here, after the options were found right

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

    from rmsnorm_deploy.export import pipeline

    settings = pipeline.Options(
        out_dir=options.out,
        precision=options.precision,
        opset=options.opset,
        targets=options.targets,
        check=not options.no_check,
        benchmark=not options.no_benchmark,
        force=options.force,
    )
    bundle = pipeline.run(source, settings, progress)
    progress.notes(source.notes[said:])
    result = summary(bundle.path)
    if options.json:
        print(json.dumps({**result, "notes": source.notes}, indent=1))
    else:
        _print_summary(bundle, result)
    return EXIT_PARITY if result["parity"] is not None and not result["parity"].get("ok", False) else EXIT_OK


def summary(path: Path) -> dict[str, Any]:
    """What a bundle holds, for ``--json``: its manifest, parity and benchmark; None for what was left out."""
    return {"bundle": str(path), **{name: _read(path / f"{name}.json") for name in ("manifest", "parity", "benchmark")}}


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _print_summary(bundle: Any, result: dict[str, Any]) -> None:
    from rich.console import Console

    from rmsnorm_deploy import report

    report.print_summary(bundle, result["parity"], result["benchmark"], Console())


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in TARGETS:
            raise InputError(f"--targets {name}: not a backend; there is {', '.join(TARGETS)}")
    return names


def _quiet(debug: bool) -> None:
    """Silence what other packages say about themselves; warnings about the user's model stay."""
    if debug:
        return
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings(
            "ignore", category=category, module=r"(torch|onnx|onnxscript|onnx_ir|transformers)(\.|$)"
        )
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """A warning in one line, without the source line that raised it."""
    print(f"warning: {_one_line(str(message))[:300]}", file=sys.stderr)


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {_one_line(message)}", file=sys.stderr)
    return status


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


__all__ = ["EXIT_FAULT", "EXIT_INPUT", "main", "parse", "parser"]
