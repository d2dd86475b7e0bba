"""Between one large model and the next: memory that nobody uses any more goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

LARGE = 1 << 27  # bytes of weights from which it is worth the while


def give_back_memory(folder: Path) -> None:
    """After work on the model in ``folder``, if it is large: let the C library hand back freed blocks of a weight's
    size, which it keeps. What is held in cycles is none of them: sessions and lifted programs are in no cycle."""
    if sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) < LARGE:
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return  # not glibc
