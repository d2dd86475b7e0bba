"""The tables of the command: norms, look-alikes, and the zoo, for a terminal of 100 columns or for docs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm_deploy.fusion.records import LeftRecord, NormRecord
from rmsnorm_deploy.inspect.explain import Inspection
from rmsnorm_deploy.zoo import Result


def print_inspection(found: Inspection, console: Console) -> None:
    """The norms and the look-alikes of one model."""
    residual = sum(norm.residual for norm in found.norms)
    behind = f", {residual} of them with the residual add in front" if residual else ""
    console.print(Text(f"{found.model}: {_count(len(found.norms), 'RMSNorm')}{behind}", "bold"))
    if found.norms:
        console.print(_norms(found.norms))
    if found.left:
        console.print(Text(f"\n{_count(len(found.left), 'look-alike')} left as they are", "bold"))
        console.print(_left(found.left))
    elif not found.norms:
        console.print(Text("no reduction in it looks like a norm"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(*columns: str) -> Table:
    """Columns whose name begins with ">" are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if number else "left", overflow="fold", no_wrap=number)
    return table


def _norms(norms: Iterable[NormRecord]) -> Table:
    table = _table("norm", "variant", "over", ">eps", "scale", "add", "proof")
    for norm in norms:
        table.add_row(
            _name(norm.name, norm.location),
            Text(variant(norm)),
            Text(over(norm)),
            Text(f"{norm.epsilon:.6g}"),
            Text(scale(norm)),
            Text("yes" if norm.residual else ""),
            Text(proof(norm), "green"),
        )
    return table


def _left(left: Iterable[LeftRecord]) -> Table:
    table = _table("look-alike", "why it was left")
    for item in left:
        table.add_row(_name(item.name or item.node, item.location), Text(item.reason))
    return table


def _name(name: str, location: str | None) -> Text:
    text = Text("\n".join(broken(name)))
    return text.append(f"\n{location}", "dim") if location else text


def broken(name: str, width: int = 36) -> list[str]:
    """A dotted name in lines of at most ``width``, as far as the dots allow."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("  ")
        lines[-1] += part
    return lines


def variant(norm: NormRecord) -> str:
    """Dtype, where the epsilon is and where the scale, as far as it isn't the usual place."""
    parts = [norm.dtype]
    if norm.epsilon_mode != "inside":
        parts.append({"outside": "eps outside", "clamp": "clamped"}.get(norm.epsilon_mode, norm.epsilon_mode))
    if norm.dtype in ("float16", "bfloat16"):
        parts.append("scale before cast" if norm.scale_order == "before_cast" else "scale after cast")
    if norm.bias:
        parts.append("bias")
    return "\n".join(parts)


def over(norm: NormRecord) -> str:
    """The normalized axes and their sizes."""
    sizes = [str(dim) for dim in norm.shape[norm.axis :]] if norm.shape else ["?"]
    axes = str(norm.axis) if norm.axis == -1 else f"{norm.axis}..-1"
    return f"{axes}: {'x'.join(sizes)}"


def scale(norm: NormRecord) -> str:
    """The scale's name without the module's, and its dtype where it is another than x's; "" for ones."""
    name = norm.scale or ""
    if name.startswith("ones_"):
        return "none"
    module = f"{norm.module}."
    short = name.removeprefix(module) if norm.module else name
    return short if norm.scale_dtype in ("", norm.dtype) else f"{short}\n{norm.scale_dtype}"


def proof(norm: NormRecord) -> str:
    """How far the op is from what it replaced: in float64, and how many results in the own dtype are the same bits."""
    if not norm.proof:
        return "as given"
    return f"{norm.proof['float64']:.0e}\n{100 * norm.proof['same_bits']:.0f}% same bits"


# -- the zoo

_ZOO = ("family", "dtype", ">fused", ">+add", ">left", "run by", ">max ULP", ">eager", ">float64", "verdict")


def zoo_table(results: Sequence[Result]) -> Table:
    """One row a family and dtype."""
    table = _table(*_ZOO)
    for result in results:
        style = "" if result.ok else "bold red"
        table.add_row(*(Text(cell, style) for cell in zoo_cells(result)))
    return table


def zoo_cells(result: Result) -> list[str]:
    """The cells of one row, without notes."""
    if result.problem is not None:
        return [result.family, result.dtype, *[""] * (len(_ZOO) - 3), "not exported"]
    return [
        result.family,
        result.dtype,
        f"{result.fused} of {result.executed}",
        str(result.residual),
        str(result.left),
        result.runtime,
        f"{result.max_ulp:.1f} of {result.budget:.1f}",
        f"{result.eager_ulp:.1f}",
        f"{result.graph_error:.0e}",
        _verdict(result),
    ]


def _verdict(result: Result) -> str:
    if result.verdict == "fail" or not result.ok:
        return "FAIL"
    return {"pass-better-than-eager": "like eager"}.get(result.verdict, result.verdict)


def zoo_notes(results: Iterable[Result]) -> list[str]:
    """What the rows can't say: the same text once, with the families it holds for."""
    notes: dict[str, list[str]] = {}
    for result in results:
        where = f"{result.family} {result.dtype}"
        if result.problem is not None:
            notes.setdefault(result.problem, []).append(where)
        if result.refused is not None:
            notes.setdefault(f"ONNX Runtime: {result.refused}", []).append(where)
        for fixed in result.fixed:
            notes.setdefault(f"{fixed} is fixed, for PyTorch unrolls a loop over it", []).append(where)
    return [f"{', '.join(places)}: {text}" for text, places in notes.items()]


def zoo_markdown(results: Sequence[Result]) -> str:
    """The table and its notes for docs/."""
    rows = [[name.lstrip(">") for name in _ZOO], ["---:" if name.startswith(">") else "---" for name in _ZOO]]
    rows += [zoo_cells(result) for result in results]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"- {note}" for note in zoo_notes(results))
    return f"{table}\n\n{notes}\n" if notes else f"{table}\n"
