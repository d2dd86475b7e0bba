"""The kernel benchmark as a picture: bandwidth of each contestant, a group of bars for each case.

python -m rmsnorm_deploy.benchmark.kernels_plot docs/kernels_cpu.json docs/kernels_cpu.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_deploy.benchmark.kernels_cases import OURS
from rmsnorm_deploy.benchmark.kernels_figure import new_figure, save

COLORS = {OURS: "#0a7d5a", "memcpy": "#b8b8b8", "onnxruntime's best": "#d08a1d", "torch rms_norm": "#c4472f"}


def plot(data: Mapping[str, Any], path: Path) -> None:
    """Draw what `kernels.to_json` returns, the cases on one thread, to a file of a type that matplotlib writes.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    cases = [case for case in data["cases"] if case["case"]["threads"] == 1 and case["case"]["rows"] > 1]
    figure = new_figure(11, 4.5)
    axes = figure.add_subplot()
    width = 0.8 / len(COLORS)
    for place, (name, color) in enumerate(COLORS.items()):
        at = [index + (place - len(COLORS) / 2 + 0.5) * width for index in range(len(cases))]
        axes.bar(at, [_gigabytes(case["timings"], name) for case in cases], width, label=name, color=color)
    axes.set_xticks(range(len(cases)), [_title(case["case"]) for case in cases], fontsize=8)
    axes.set_ylabel("GB/s (log)")
    axes.set_yscale("log")
    axes.set_title(f"{data['machine']['cpu']}, 1 thread: bytes that must move, over the median time", fontsize=10)
    axes.legend(ncols=len(COLORS), fontsize=8, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(top=axes.get_ylim()[1] * 2)
    save(figure, path)


def _gigabytes(timings: Sequence[Mapping[str, Any]], name: str) -> float:
    if name != "onnxruntime's best":
        return max((float(item["gigabytes"]) for item in timings if item["name"] == name), default=0.0)
    own = [item for item in timings if item["name"].startswith("onnxruntime") and "LayerNorm" not in _kind(item)]
    return max((float(item["gigabytes"]) for item in own), default=0.0)


def _kind(item: Mapping[str, Any]) -> str:
    """The op's name, where a plain LayerNormalization is not an RMSNorm."""
    name = str(item["name"]).removeprefix("onnxruntime ")
    return "" if "Simplified" in name else name


def _title(case: Mapping[str, Any]) -> str:
    op = "skip " if case["skip"] else ""
    return f"{op}{case['rows']}x{case['width']}\n{case['dtype']}\n{'cold' if case['cold'] else 'warm'}"


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
