"""The HTML report: one file that needs nothing else, in light and dark, on a desk or a phone."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from rmsnorm_deploy.benchmark.result import MODEL_GROUP, NORM_GROUP, BenchmarkReport, Timing, milliseconds
from rmsnorm_deploy.bundle import MANIFEST, replace_sealed
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.result import ParityReport
from rmsnorm_deploy.report import view
from rmsnorm_deploy.report.engines import engine_rows
from rmsnorm_deploy.report.plots import WIDTHS, depth_plot, error_plot, speed_plot

_EVIDENCE = ("parity.json", "benchmark.json")
MAX_ROWS = 500  # of a table: the manifest has them all


def write_html(bundle: BundleLike, parity: view.Parity, benchmark: view.Benchmark, path: Path) -> None:
    """Write the report of ``bundle`` to ``path``. ``parity`` and ``benchmark`` are reports, their JSON, or None.

    Raises:
        InputError: ``path`` cannot be written.
    """
    text = render(bundle, view.as_parity(parity), view.as_benchmark(benchmark))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def rewrite_html(bundle: BundleLike) -> None:
    """Write a bundle's report.html anew from the evidence that lies beside it, as after engines were built.

    Raises:
        InputError: evidence of another version of this package, a report that cannot be written, or one of them altered
            since the export.
    """
    parity, benchmark = (_evidence(bundle.path / name) for name in _EVIDENCE)
    replace_sealed(
        bundle.path, "report.html", lambda path: write_html(bundle, parity, benchmark, path), (MANIFEST, *_EVIDENCE)
    )


def _evidence(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error


def render(bundle: BundleLike, parity: ParityReport | None, benchmark: BenchmarkReport | None) -> str:
    """The page's text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ulps"] = view.ulps
    environment.filters["milliseconds"] = milliseconds
    manifest = bundle.manifest
    norms, left = list(manifest["norms"]), list(manifest["left"])
    return environment.get_template("template.html").render(
        style=_resource("style.css"),
        name=bundle.path.name,
        manifest=manifest,
        verdict=view.verdict(parity, len(norms)),
        parity=parity,
        benchmark=benchmark,
        groups=view.norm_groups(norms),
        norms=norms[:MAX_ROWS],
        norms_hidden=max(len(norms) - MAX_ROWS, 0),
        left=left[:MAX_ROWS],
        left_hidden=max(len(left) - MAX_ROWS, 0),
        view=view,
        error_plots=_error_plots(parity),
        depth_plots=_depth_plots(parity),
        depth_alt=view.depth_text(parity) if parity is not None else "",
        speed=_speed(benchmark),
        engines=engine_rows(bundle),
    )


def _resource(name: str) -> str:
    return resources.files("rmsnorm_deploy.report").joinpath(name).read_text(encoding="utf-8")


def _error_plots(parity: ParityReport | None) -> dict[str, str]:
    """The plot in each width; empty when no backend has a figure (integer outputs, or nothing ran)."""
    ran = view.judged(parity) if parity is not None else []
    if parity is None or not any(backend.error and any(backend.error.histogram) for backend in ran):
        return {}
    budgets = [budget.max for budget in parity.budgets.values()]
    budget = budgets[0] if len(budgets) == 1 else None
    return {width: error_plot(ran, budget, width) for width in WIDTHS}


def _depth_plots(parity: ParityReport | None) -> dict[str, str]:
    """The plot in each width; empty for a model of fewer than three norms, which has no depth to speak of."""
    sites = view.sites_by_backend(parity) if parity is not None else {}
    if max((len(each) for each in sites.values()), default=0) < 3:
        return {}
    return {width: depth_plot(sites, width) for width in WIDTHS}


def _speed(benchmark: BenchmarkReport | None) -> list[dict[str, Any]]:
    """A section each for the whole model and the single norm: plots and rows."""
    if benchmark is None:
        return []
    titles = {MODEL_GROUP: "The whole model", NORM_GROUP: _norm_title(benchmark)}
    sections = []
    for group, title in titles.items():
        timings = [timing for timing in benchmark.timings if timing.group == group]
        ran = [timing for timing in timings if timing.milliseconds]
        if timings:
            plots = {width: speed_plot(ran, width, group) for width in WIDTHS} if ran else {}
            sections.append({"title": title, "timings": timings, "plots": plots, "alt": _alt(ran)})
    return sections


def _norm_title(benchmark: BenchmarkReport) -> str:
    if benchmark.norm is None:
        return "One norm"
    row = " x ".join(str(size) for size in benchmark.norm["row"])
    return f"One norm of the model's own width: {benchmark.norm['rows']} rows of {row}, {benchmark.norm['dtype']}"


def _alt(timings: list[Timing]) -> str:
    return "; ".join(f"{timing.title} {milliseconds(timing.median)}" for timing in timings)
