"""The summary that a command ends with: what was found, whether it is right, how fast it is, where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rmsnorm_deploy.benchmark.result import MODEL_GROUP, BenchmarkReport, milliseconds
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.result import FAIL, ParityReport
from rmsnorm_deploy.report import view

_STYLES = {"pass": "bold green", "fail": "bold red", "unknown": "bold yellow"}
_MAX_LEFT = 5
_FILES = {
    "model.onnx": "the model with the fused ops; runs on any ONNX runtime",
    "model.onnx.data": "its weights, which reference.onnx and program.pt2 share",
    "reference.onnx": "the model before fusing: what the fused one is measured against",
    "program.pt2": "the traced PyTorch program: the source of the float64 truth",
    "manifest.json": "inputs, outputs, norms, look-alikes, versions",
    "parity.json": "the evidence that it is right, for machines",
    "benchmark.json": "the evidence that it is fast, for machines",
    "report.html": "the evidence for people; opens offline",
    "SHA256SUMS": "for sha256sum --check, and python -m rmsnorm_deploy.verify",
}


def print_summary(bundle: BundleLike, parity: view.Parity, benchmark: view.Benchmark, console: Console) -> None:
    """Print the summary of ``bundle``. ``parity`` and ``benchmark`` are reports, their JSON, or None."""
    judged, timed = view.as_parity(parity), view.as_benchmark(benchmark)
    verdict = view.verdict(judged, len(bundle.manifest["norms"]))
    symbol = {"pass": "✓", "fail": "✗", "unknown": "?"}[verdict.state]
    console.print()
    console.print(Text(f"{symbol} {verdict.headline}", _STYLES[verdict.state]))
    console.print(Text(f"  {verdict.detail}"))
    for title, body in _sections(bundle, judged, timed):
        console.print()
        console.print(Text(title, "bold"), soft_wrap=True)
        for part in body:
            console.print(Padding(part, (0, 0, 0, 2), expand=False))
    console.print()


def _sections(
    bundle: BundleLike, parity: ParityReport | None, benchmark: BenchmarkReport | None
) -> Iterator[tuple[str, list[Any]]]:
    yield "Norms", _norms(bundle)
    if parity is not None and parity.backends:
        yield "Parity (error against float64, in ULPs, on the worst input)", _parity(parity)
    if benchmark is not None:
        yield "Speed (median of a call)", _speed(benchmark)
    yield f"Files in {bundle.path}", [_files(bundle)]


def _table(*columns: str) -> Table:
    """Columns whose name begins with ">" are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if number else "left", no_wrap=number)
    return table


def _norms(bundle: BundleLike) -> list[Any]:
    groups = view.norm_groups(bundle.manifest["norms"])
    parts: list[Any] = []
    if groups:
        table = _table(">count", "op", ">row", "dtype", ">eps", "scale")
        for group in groups:
            cells = (str(group.count), group.op, group.row, group.dtype, group.epsilon, group.order)
            table.add_row(*(Text(cell) for cell in cells))
        parts.append(table)
    left = bundle.manifest["left"]
    for item in left[:_MAX_LEFT]:
        parts.append(Text(f"left {item['name'] or item['node']}: {item['reason']}", "yellow"))
    if len(left) > _MAX_LEFT:
        parts.append(Text(f"and {len(left) - _MAX_LEFT} more look-alikes were left; the report says why", "yellow"))
    return parts or [Text("no RMSNorm was found to fuse")]


def _parity(parity: ParityReport) -> list[Any]:
    before = view.before(parity)
    table = _table("backend", "verdict", ">largest", ">mean", *([f"median beside {before}"] if before else []))
    for backend in view.judged(parity):
        style = "red" if backend.verdict == FAIL else "green"
        error = backend.error
        table.add_row(
            Text(backend.title),
            Text(f"{view.SYMBOLS[backend.verdict]} {view.words(backend, parity)}", style),
            Text(view.ulps(error.max if error else None)),
            Text(view.ulps(error.mean if error else None)),
            *([Text(view.ratio_text(backend, parity))] if before else []),
        )
    parts: list[Any] = [table]
    if before:
        parts.append(Text(f"median beside {before}: of the mean errors' ratios, input by input", "dim"))
    parts += [Text(f"budget for {view.budget_text(budget)}", "dim") for budget in parity.budgets.values()]
    for backend in view.judged(parity):
        if backend.unfused is not None:
            parts.append(Text(f"{backend.title}: {view.unfused_text(backend)}", "dim"))
        if backend.verdict == FAIL:
            parts.append(Text(f"{backend.title}: {view.failure_text(backend)}", "red"))
    absent = view.not_run(parity)
    if absent:
        names = ", ".join(backend.title for backend in absent)
        parts.append(Text(f"not run here: {names}; the report says why", "dim"))
    return parts


def _speed(benchmark: BenchmarkReport) -> list[Any]:
    table = _table("", ">median", ">5th to 95th percentile")
    for timing in benchmark.timings:
        if timing.milliseconds and timing.group == MODEL_GROUP:
            spread = f"{milliseconds(timing.p5)} to {milliseconds(timing.p95)}"
            table.add_row(Text(timing.title), Text(milliseconds(timing.median)), Text(spread))
    parts: list[Any] = [table]
    gains = _table("times as fast", ">median", ">95%")
    for item in benchmark.comparisons:
        style = "" if item.clear else "dim"
        cells = (item.what, f"{item.ratio:.2f}", f"{item.low:.2f} to {item.high:.2f}")
        gains.add_row(*(Text(cell, style) for cell in cells))
    parts += [Text(""), gains] if benchmark.comparisons else []
    busy = benchmark.busy()
    return [*parts, Text(busy, "yellow")] if busy else parts


def _files(bundle: BundleLike) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, purpose in _FILES.items():
        if (bundle.path / name).is_file():
            table.add_row(Text(name), Text(purpose, "dim"))
    return table
