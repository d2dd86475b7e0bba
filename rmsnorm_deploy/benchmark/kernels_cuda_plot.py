"""The CUDA kernel benchmark as a picture: share of a copy's bandwidth by width, and the time of a single row.

python -m rmsnorm_deploy.benchmark.kernels_cuda_plot docs/kernels_cuda.json docs/kernels_cuda.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmsnorm_deploy.benchmark.kernels_figure import new_figure, save

Points = dict[str, list[tuple[int, float]]]


def plot(data: Mapping[str, Any], path: Path) -> None:
    """Draw what `kernels_cuda.to_json` returns: a column for each dtype.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    dtypes = list(dict.fromkeys(case["case"]["dtype"] for case in data["cases"]))
    figure = new_figure(4 * max(len(dtypes), 1), 7)
    axes = figure.subplots(2, max(len(dtypes), 1), squeeze=False)
    for column, dtype in enumerate(dtypes):
        own = [case for case in data["cases"] if case["case"]["dtype"] == dtype and case["timings"]]
        _draw(axes[0][column], most_rows(own), f"{dtype}: share of a copy, most rows", log=False)
        _draw(axes[1][column], one_row(own), f"{dtype}: one row, microseconds", log=True)
    figure.suptitle(str(data["machine"]["gpu"]))
    save(figure, path)


def most_rows(cases: list[Any]) -> Points:
    """Each contestant's share of the copy's bandwidth at the case of each width that moves most."""
    largest: dict[int, Any] = {}
    for case in cases:
        width = case["case"]["width"]
        if width not in largest or case["case"]["rows"] > largest[width]["case"]["rows"]:
            largest[width] = case
    return _points(list(largest.values()), "share_of_copy")


def one_row(cases: list[Any]) -> Points:
    """Each contestant's median at one row."""
    return _points([case for case in cases if case["case"]["rows"] == 1], "median")


def _points(cases: list[Any], key: str) -> Points:
    points: Points = {}
    for case in sorted(cases, key=lambda case: int(case["case"]["width"])):
        for timing in case["timings"]:
            if timing[key] is not None:
                points.setdefault(timing["name"], []).append((case["case"]["width"], timing[key]))
    return points


def _draw(axes: Any, points: Points, title: str, log: bool) -> None:
    for name, values in points.items():
        axes.plot(*zip(*values, strict=True), marker=".", label=name, linewidth=2 if name == "ours" else 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log" if log else "linear")
    axes.set_xlabel("width")
    axes.set_title(title, fontsize=10)
    if points:
        axes.legend(fontsize=7)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
