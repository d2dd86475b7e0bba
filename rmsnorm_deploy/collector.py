"""Python's collector of cycles, made rare while a model is traced or read."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_RARE = (100_000, 50, 100)  # objects before a collection, and how many of each before an older generation's


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely: tracing and reading make millions of objects that stay, and every collection walks them all.

    On SmolLM2 that is an eighth of the trace's time, half of the time to store the program, a third of that to read it.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
