"""Folders that are written before they have their name, and what to call them in anything that is said or recorded.

What a runtime says of a file names the folder in which it found it, and that may be gone before anybody reads it.
"""

from __future__ import annotations

from pathlib import Path

_NAMES: dict[str, str] = {}


def speak_of(folder: Path, name: str | Path) -> None:
    """Call ``folder``, whose own name nobody else has, ``name`` from now on."""
    _NAMES[str(folder)] = str(name)


def forget(folder: Path) -> None:
    """Nothing will speak of ``folder`` any more. Leave it out after an error, which outlives the folder."""
    _NAMES.pop(str(folder), None)


def spoken(text: str) -> str:
    """``text`` with such folders under the names that they are to be called."""
    for folder, name in list(_NAMES.items()):
        text = text.replace(folder, name)
    return text
