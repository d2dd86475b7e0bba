"""What all commands share: one kind of parser, one exit status for each outcome, at most one line of error."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rmsnorm_deploy import __version__
from rmsnorm_deploy.errors import (
    EXIT_BACKEND,
    EXIT_FAULT,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PARITY,
    EXIT_PIPE,
    EXIT_TERMINATED,
    DeployError,
    InputError,
)
from rmsnorm_deploy.spoken import spoken

if TYPE_CHECKING:
    from rich.console import Console

STATUSES = {
    EXIT_OK: "all right",
    EXIT_INPUT: "bad input or usage",
    EXIT_FAULT: "a fault of this program; --debug shows where",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_TERMINATED: "terminated",
}
_UNBROKEN = 10_000
PARITY_FAILED = {EXIT_PARITY: "parity failed"}
BACKEND_ABSENT = {EXIT_BACKEND: "a backend asked for by name is not there"}


class Parser(argparse.ArgumentParser):
    """argparse with one line for an error, ``--debug`` and ``--version`` in every command, and one layout of help."""

    def __init__(
        self,
        prog: str,
        description: str | None = None,
        *,
        statuses: Mapping[int, str] | None = None,
        examples: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """``statuses``: exit statuses besides, or in the place of, those all commands have; ``examples``: calls."""
        options = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        super().__init__(
            prog, description=description, epilog=_epilog(statuses or {}, examples), add_help=False, **options
        )
        self._common = self.add_argument_group("as in every command")
        self._common.add_argument("-h", "--help", action="help", help="show this help and end")
        self._common.add_argument("--debug", action="store_true", help="show warnings, and the traceback of an error")
        self._common.add_argument("--version", action="version", version=f"rmsnorm_deploy {__version__}")

    def format_help(self) -> str:
        """The help, with what is the command's own before what every command has."""
        self._action_groups.sort(key=lambda group: group is self._common)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise InputError: `run_command` makes the line and the status of it."""
        raise InputError(f"{message}; see {self.prog} --help")


def _epilog(statuses: Mapping[int, str], examples: Sequence[str]) -> str:
    lines = ["exit status:"]
    lines += [f"  {status:3}  {meaning}" for status, meaning in sorted({**STATUSES, **statuses}.items())]
    return "\n".join([*lines, *(["", "examples:"] if examples else []), *(f"  {call}" for call in examples)])


def positive(text: str) -> int:
    """A whole number above 0, as a type of argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_number(text: str) -> float:
    """A number above 0, as a type of argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


@contextlib.contextmanager
def stdout_for_result(only: bool) -> Iterator[None]:
    """With ``only``, what a model or recipe prints meanwhile goes to stderr: stdout is left to the result."""
    with contextlib.redirect_stdout(sys.stderr) if only else contextlib.nullcontext():
        yield


def console() -> Console:
    """Standard output as wide as the terminal; in a pipe or a file no line is broken, unless COLUMNS says how wide."""
    from rich.console import Console

    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_UNBROKEN if plain else None)


def run_command(argv: Sequence[str] | None, command: Callable[[list[str]], int]) -> int:
    """The exit status of ``command``; whatever goes wrong in it becomes one line on stderr and a status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        with _sigterm_raises(), warnings.catch_warnings():
            quiet(debug)
            return command(arguments)
    except DeployError as error:
        return _fail(str(error), error.exit_code, debug)
    except BrokenPipeError:  # whoever read the output has had enough; what is left must not be flushed into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except _Terminated:
        return _fail("terminated", EXIT_TERMINATED, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED, debug)
    except MemoryError as error:
        return _fail(f"not enough memory: {error}: smaller sizes in the file or in --dim need less", EXIT_INPUT, debug)
    except OSError as error:
        if error.strerror is None:
            return _fault(error, debug)
        where = f"{os.fspath(error.filename)!s}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror}", EXIT_INPUT, debug)
    except Exception as error:  # the last resort: a fault here must still be one line and a status
        return _fault(error, debug)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, made an exception so that what is half-written is taken away as after Ctrl-C."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handler) or signal.SIG_DFL  # None: set by other than Python
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def quiet(debug: bool) -> None:
    """Silence what other packages say about themselves; warnings about the user's model stay."""
    if debug:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when a recipe or a pickle imports it
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
    print(f"warning: {one_line(str(message))[:300]}", file=sys.stderr)


def _fault(error: Exception, debug: bool) -> int:
    hint = "" if debug else "; run again with --debug for the traceback"
    return _fail(f"internal fault, {type(error).__name__}: {one_line(str(error))[:300]}{hint}", EXIT_FAULT, debug)


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {one_line(message)}", file=sys.stderr)
    return status


def one_line(text: str) -> str:
    """``text`` with every run of white space as one space, and folders as they are spoken of."""
    return re.sub(r"\s+", " ", spoken(text)).strip()
