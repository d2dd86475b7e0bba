"""Between one large model and the next: memory that nobody uses any more goes back to the system."""

from __future__ import annotations

import ctypes
import gc


def give_back_memory() -> None:
    """Free what is held in cycles, and let the C library hand back freed blocks of a weight's size, which it keeps."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return  # not glibc
