"""``python -m rmsnorm_deploy``: the commands there are, each of which runs as ``python -m rmsnorm_deploy.NAME`` too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from rmsnorm_deploy.cli import Parser, run_command
from rmsnorm_deploy.errors import EXIT_OK, InputError

# name: where its main() is, and what it does
_COMMANDS = {
    "export": ("export.cli", "a PyTorch or ONNX model to a bundle, with parity, timing and report"),
    "inspect": ("inspect.cli", "every RMSNorm and every look-alike of a model; writes nothing"),
    "verify": ("verify", "that a bundle's files are as exported, and parity again"),
    "parity": ("parity.__main__", "a bundle's backends against float64; finds the norm that differs"),
    "benchmark": ("benchmark.__main__", "speed of a bundle, of the kernels, of the export itself"),
    "engine": ("engine.cli", "TensorRT engines of a bundle, with and without the plugin"),
    "native": ("native", "builds the compiled kernels"),
    "doctor": ("doctor", "what is there on this machine, and what to install"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """List the commands, or run the one that is named first; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        command = importlib.import_module(f"rmsnorm_deploy.{_COMMANDS[arguments[0]][0]}")
        return int(command.main(arguments[1:]))
    return run_command(arguments, _list)


def _list(arguments: list[str]) -> int:
    commands = [f"  python -m rmsnorm_deploy.{name:<10} {purpose}" for name, (_, purpose) in _COMMANDS.items()]
    parser = Parser("python -m rmsnorm_deploy", "\n".join(["Commands, each with its own --help:", *commands]))
    parser.add_argument("command", metavar="COMMAND", nargs="?", help="one of them")
    if (given := parser.parse_args(arguments).command) is not None:
        raise InputError(f"{given}: no such command; there is {', '.join(_COMMANDS)}")
    print("\n".join(commands))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
