"""Plots as inline SVG: text stays text, and every colour is a variable of the page, so that they follow its theme."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rmsnorm_deploy.benchmark.result import Timing, milliseconds
from rmsnorm_deploy.parity.norm_result import SiteError
from rmsnorm_deploy.parity.result import BackendResult
from rmsnorm_deploy.parity.ulp import BIN_EDGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# what matplotlib draws with, and what the page has in its place
_INK, _FAINT = "#000001", "#000002"
_SERIES = ("#000011", "#000012", "#000013", "#000014", "#000015", "#000016")
_VARIABLES = {
    _INK: "var(--ink)",
    _FAINT: "var(--line)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, 1)},
}
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))

WIDTHS = {"wide": 7.2, "narrow": 3.6}  # inches at 96 points: the page's column, and a phone's


def error_plot(backends: Sequence[BackendResult], budget: float | None, width: str) -> str:
    """The share of elements whose error is larger than so many ULPs, a line a backend."""
    shown = [backend for backend in backends if backend.error is not None and any(backend.error.histogram)]
    figure = _figure(width, _height(width, len(shown)))
    axes = figure.subplots()
    _dress(axes)
    for index, backend in enumerate(shown):
        x, y = _exceedance(backend)
        axes.step(
            x,
            y,
            where="post",
            color=_SERIES[index % len(_SERIES)],
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=1.8,
            label=backend.title,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("error in ULPs")
    axes.set_ylabel("share of elements with more")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.12g}%")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value:.0e}")
    if budget is not None:
        axes.axvline(budget, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        place = axes.get_xaxis_transform()  # x in ULPs, y in shares of the height
        axes.annotate("budget", (budget, 0.04), xycoords=place, xytext=(4, 0), textcoords="offset points", color=_INK)
    axes.grid(color=_FAINT, linewidth=0.6)
    figure.legend(loc="outside upper left", frameon=False, labelcolor=_INK, ncols=1 if width == "narrow" else 2)
    return _svg(figure, f"error-{width}")


def depth_plot(sites: Mapping[str, Sequence[SiteError]], width: str) -> str:
    """The mean error at each norm in the graph's order, a line a backend by its title, and one for before fusing."""
    figure = _figure(width, _height(width, len(sites) + 1))
    axes = figure.subplots()
    _dress(axes)
    lines = {title: [(site.depth + 1, site.error_mean) for site in each] for title, each in sites.items()}
    before = next(iter(sites.values()))
    lines["before fusing"] = [(site.depth + 1, site.before_mean) for site in before]
    for index, (title, points) in enumerate(lines.items()):
        shown = [(x, y) for x, y in points if y is not None and 0 < y < math.inf]
        if shown:
            axes.plot(
                [x for x, _ in shown],
                [y for _, y in shown],
                color=_SERIES[index % len(_SERIES)],
                linestyle=_DASHES[index % len(_DASHES)],
                marker="o" if len(shown) < 30 else None,
                markersize=3.5,
                linewidth=1.8,
                label=title,
            )
    axes.set_yscale("log", base=2)
    axes.set_xlabel("norm, in the order of the graph")
    axes.set_ylabel("mean error in ULPs")
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value:.0e}")
    axes.grid(color=_FAINT, linewidth=0.6)
    figure.legend(loc="outside upper left", frameon=False, labelcolor=_INK, ncols=1 if width == "narrow" else 2)
    return _svg(figure, f"depth-{width}")


def speed_plot(timings: Sequence[Timing], width: str, name: str) -> str:
    """A bar a contestant: the median, with a line from the 5th to the 95th percentile of the rounds.

    A panel a backend, each on a scale of its own: what is compared is within a backend.
    """
    panels = [[timing for timing in timings if timing.backend == kind] for kind in _backends(timings)]
    figure = _figure(width, sum(0.5 * len(panel) + 0.5 for panel in panels))
    heights = [len(panel) + 0.7 for panel in panels]
    for axes, panel in zip(
        figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0], panels, strict=True
    ):
        _dress(axes)
        _bars(axes, panel, 4 if width == "narrow" else 6)
    return _svg(figure, f"{name}-{width}")


def _height(width: str, lines: int) -> float:
    """Inches of a plot whose legend has so many lines: in two columns, or in one on a phone."""
    return 2.6 + 0.2 * (math.ceil(lines / 2) if width == "wide" else lines)


def _backends(timings: Sequence[Timing]) -> list[str]:
    return list(dict.fromkeys(timing.backend for timing in timings))


def _bars(axes: Axes, timings: Sequence[Timing], ticks: int) -> None:
    slowest = max(timing.median for timing in timings)
    reach = max(1.05 * slowest, min(max(timing.p95 for timing in timings), 1.6 * slowest))
    for row, timing in enumerate(timings):
        colour = _SERIES[1 if "layernorm" in timing.name else 2 if "copy" in timing.name else 0]
        axes.barh(row, timing.median, height=0.34, color=colour)
        axes.plot([timing.p5, timing.p95], [row, row], color=_INK, linewidth=1.2, solid_capstyle="butt")
        axes.text(0, row - 0.27, timing.title, va="bottom", color=_INK, parse_math=False)
        axes.text(
            reach, row - 0.27, milliseconds(timing.median), va="bottom", ha="right", color=_INK, fontweight="bold"
        )
    axes.set_ylim(len(timings) - 0.6, -0.75)
    axes.set_xlim(0, reach)
    axes.set_yticks([])
    axes.locator_params(axis="x", nbins=ticks)
    axes.xaxis.set_major_formatter(lambda value, _: milliseconds(value) if value else "0")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _exceedance(backend: BackendResult) -> tuple[list[float], list[float]]:
    """Bin edges and the share of elements at or beyond each, down to one element."""
    assert backend.error is not None
    counts = backend.error.histogram
    total = sum(counts)
    x, y, beyond = [], [], total - counts[0]
    for edge, count in zip(BIN_EDGES[1:-1], counts[1:], strict=True):
        if beyond == 0:
            break
        x.append(edge)
        y.append(beyond / total)
        beyond -= count
    floor = 0.5 / total
    return ([*x, x[-1] * 2] if x else [BIN_EDGES[1]]), ([*y, floor] if y else [floor])


def _figure(width: str, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTHS[width], height), layout="constrained")
    figure.patch.set_visible(False)
    return figure


def _dress(axes: Axes) -> None:
    """The page's colours, and no more frame than a plot needs."""
    axes.patch.set_visible(False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(_FAINT)
    axes.tick_params(colors=_INK, which="both", length=0, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for the middle of a page: no prolog, ids of its own, the page's colours and font."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>\s*", "", text, flags=re.DOTALL)  # it would hold for the whole page
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    text = re.sub(r"font(-family)?:([^;\"]*?)'DejaVu Sans'[^;\"]*", _own_font, text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1).strip()


def _own_font(match: re.Match[str]) -> str:
    """The page's family in the place of matplotlib's, with the size and weight kept."""
    return "font-family: inherit" if match[1] else f"font:{match[2]}var(--sans)"
