"""`python -m rmsnorm_deploy.doctor`: what can run here, and what to install for the rest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm_deploy.errors import EXIT_OK
from rmsnorm_deploy.runtime.status import PROVIDER_INSTALL, BackendStatus, available, versions


def backend_table(statuses: Sequence[BackendStatus]) -> Table:
    """Every backend with its state, and what it is or what to install."""
    table = Table(title="Backends", title_justify="left")
    for heading in ("Backend", "State", "Detail"):
        table.add_column(heading, overflow="fold")
    for status in statuses:
        detail = f"{status.version}: {status.detail}" if status.version else status.detail
        lines = [detail] if status.install is None else [detail, f"to get it: {status.install}"]
        table.add_row(Text(status.name), _state(status), Text("\n".join(lines)))
    return table


def _state(status: BackendStatus) -> Text:
    if status.available:
        return Text("ready", "green")
    return Text("builds only" if status.builds else "absent", "yellow")


def is_exotic(status: BackendStatus) -> bool:
    """A provider that is absent and that no package from the index would bring: `--json` lists them."""
    provider = status.name.removeprefix("onnxruntime ")
    return (
        provider != status.name and not status.available and status.version is None and provider not in PROVIDER_INSTALL
    )


def version_table(packages: dict[str, str | None]) -> Table:
    """Package versions, absent ones said to be so."""
    table = Table(title="Versions", title_justify="left")
    table.add_column("Package")
    table.add_column("Version")
    for name, version in packages.items():
        table.add_row(name, version if version else Text("not installed", "yellow"))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; always 0, since an absent backend is no error."""
    parser = argparse.ArgumentParser(prog="python -m rmsnorm_deploy.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(argv)
    statuses, packages = available(), versions()
    if options.json:
        print(json.dumps({"backends": [status.to_json() for status in statuses], "versions": packages}, indent=1))
        return EXIT_OK
    console = Console()
    exotic = [status.name.removeprefix("onnxruntime ") for status in statuses if is_exotic(status)]
    console.print(backend_table([status for status in statuses if not is_exotic(status)]))
    if exotic:
        console.print(f"Not in this build of onnxruntime either: {', '.join(exotic)}", style="dim")
    console.print(version_table(packages))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
