"""PyTorch's exporters, made to speak in one line: their noise held back, their errors cut to the cause."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from rmsnorm_deploy.spoken import spoken


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
