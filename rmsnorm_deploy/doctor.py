"""Say what can run here, and what to install for the rest."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from rmsnorm_deploy.cli import Parser, run_command
from rmsnorm_deploy.errors import EXIT_OK
from rmsnorm_deploy.runtime.status import PROVIDER_INSTALL, BackendStatus, available, versions

_STYLES = {"ready": "green", "builds only": "yellow", "absent": "yellow"}
_INDENT = " " * (max(map(len, _STYLES)) + 2)


def backend_lines(statuses: Sequence[BackendStatus], width: int | None) -> Iterator[Text]:
    """Each backend's state and name, and below what it is or what to install.

    Lines are broken at spaces alone, to stay within ``width``: a path or a command can be copied. None breaks nothing.
    """
    for status in statuses:
        state = _state(status)
        version = f" {status.version}" if status.version else ""
        yield Text.assemble((f"{state:<{len(_INDENT)}}", _STYLES[state]), (status.name, "bold"), version)
        details = [status.detail] if status.install is None else [status.detail, f"to get it: {status.install}"]
        for detail in details:
            yield from (Text(line) for line in _wrapped(detail, width))


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [_INDENT + text]
    wrapper = textwrap.TextWrapper(
        width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def _state(status: BackendStatus) -> str:
    if status.available:
        return "ready"
    return "builds only" if status.builds else "absent"


def is_exotic(status: BackendStatus) -> bool:
    """A provider that is absent and that no package from the index would bring: `--json` lists them."""
    provider = status.name.removeprefix("onnxruntime ")
    return (
        provider != status.name and not status.available and status.version is None and provider not in PROVIDER_INSTALL
    )


def version_lines(packages: dict[str, str | None]) -> Iterator[Text]:
    """Package versions, absent ones said to be so."""
    column = max(map(len, packages)) + 2
    for name, version in packages.items():
        yield Text.assemble(f"{name:<{column}}", version if version else ("not installed", "yellow"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 whatever is absent, which is no error."""
    return run_command(argv, lambda arguments: _run(_parser().parse_args(arguments)))


def _parser() -> Parser:
    parser = Parser("python -m rmsnorm_deploy.doctor", __doc__, statuses={EXIT_OK: "all right, whatever is absent"})
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _run(options: argparse.Namespace) -> int:
    statuses, packages = available(), versions()
    if options.json:
        print(json.dumps({"backends": [status.to_json() for status in statuses], "versions": packages}, indent=1))
        return EXIT_OK
    console = Console(highlight=False, soft_wrap=True)
    width = console.width if console.is_terminal else None
    exotic = [status.name.removeprefix("onnxruntime ") for status in statuses if is_exotic(status)]
    console.print(Text("Backends", "bold"))
    for line in backend_lines([status for status in statuses if not is_exotic(status)], width):
        console.print(line)
    if exotic:
        absent = f"not in this build of onnxruntime: {', '.join(exotic)}"
        console.print(Text("\n".join([f"{'absent':<{len(_INDENT)}}other providers", *_wrapped(absent, width)]), "dim"))
    console.print(Text("\nVersions", "bold"))
    for line in version_lines(packages):
        console.print(line)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
