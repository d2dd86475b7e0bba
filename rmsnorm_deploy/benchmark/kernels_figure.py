"""Figures of the kernel benchmarks: matplotlib where it is installed, and files that depend on the data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rmsnorm_deploy.runtime.optional import load_module


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    load_module("matplotlib", "pip install matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """To a file of a type that matplotlib writes: the same bytes for the same data and name."""
    matplotlib: Any = load_module("matplotlib", "pip install matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
