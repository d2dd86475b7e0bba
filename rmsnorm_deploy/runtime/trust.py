"""Which engines this user built on this machine: the code in them is the user's own, and may run without a word."""

from __future__ import annotations

import os
from pathlib import Path


def remember(sha256: str) -> None:
    """Note that the engine with this SHA-256 was built here.

    Raises:
        OSError: the user's cache folder cannot be written.
    """
    mark = _mark(sha256)
    mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark.touch(mode=0o600)


def built_here(sha256: str) -> bool:
    """Whether this user built the engine with this SHA-256 here; a mark that another user made does not count."""
    mark = _mark(sha256)
    return mark.is_file() and not mark.is_symlink() and mark.stat().st_uid == os.getuid()


def _mark(sha256: str) -> Path:
    from rmsnorm_deploy.native import cache_folder

    return cache_folder() / "engines-built-here" / sha256
