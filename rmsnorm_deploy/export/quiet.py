"""PyTorch's exporters, made to speak in one line: their noise held back, their errors cut to the cause."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from rmsnorm_deploy.spoken import spoken

_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STANDARD = str(Path(contextlib.__file__).parent)


def why_not_traced(error: BaseException) -> str:
    """The innermost cause and the line of the model's code that it comes from, in one line."""
    said, place = _fixed_axes(error) or reason(error), _line(error)
    if "data-dependent" in said or "data dependent" in said:
        said = f"it asks for the value of a tensor, which no graph has: torch.where or torch.cond are traced ({said})"
    return f"{place}: {said}" if place else said


_FIXED = re.compile(r"marked L((?:\[[^]]+\])+)\.size\(\)\[(\d+)\] as dynamic but .* to be a constant \((\d+)\)")


def _fixed_axes(error: BaseException) -> str:
    """The axes that were to be dynamic and that the model takes for fixed, as recurrent layers do; "" for none."""
    found = [
        f"axis {axis} of '{'.'.join(part.strip(chr(39)) for part in re.findall(r'[^][]+', path))}' is fixed at {size}"
        for path, axis, size in dict.fromkeys(_FIXED.findall(str(error)))
    ]
    many = len(found) > 1
    advice = f"the model needs the example's size{'s' * many}, so give {'numbers' if many else 'a number'} there"
    return f"{', '.join(found)}: {advice} in place of {'names' if many else 'a name'}" if found else ""


def _line(error: BaseException | None) -> str:
    """Where in the model's code an error was raised: FILE:LINE `code`; "" if nowhere in it."""
    place = ""
    while error is not None:
        for frame, number in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            if _is_a_models(file):
                place = f"{Path(file).name}:{number} `{linecache.getline(file, number).strip()[:100]}`"
        error = error.__cause__
    return place


def _is_a_models(file: str) -> bool:
    """Whether a file is not of torch, this package or Python, in whose folder other packages may lie."""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not standard and not file.startswith((*_PACKAGES, "<"))


def reason(error: BaseException) -> str:
    """The innermost cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in spoken(str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """PyTorch prints and logs whole programs while it tries; its errors arrive as exceptions anyway."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
