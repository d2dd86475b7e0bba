"""Which GPUs a plugin library has code for: an engine that embeds it runs on no others."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

from rmsnorm_deploy.errors import InputError


def architectures(library: Path) -> list[str]:
    """The compute capabilities that the library was built for, such as ["80", "120"]; none where it doesn't say."""
    try:
        told = ctypes.CDLL(str(library)).rmsnorm_deploy_architectures
    except AttributeError:
        return []
    told.restype = ctypes.c_char_p
    return str(told().decode()).split(",")


def covers(built: Iterable[str], sm: int) -> bool:
    """Whether code built for these runs on compute capability ``sm``.

    Machine code runs on its own major version, from its minor version on; with a letter, as in 90a, on that one alone.
    Of the last there is PTX, from which the driver of any later card makes code.
    """
    listed = list(built)
    plain = [int(item) for item in listed if item.isdecimal()]
    if any(item // 10 == sm // 10 and item <= sm for item in plain):
        return True
    return f"{sm}a" in listed or any(item.isdecimal() and int(item) <= sm for item in listed[-1:])


def check_architectures(library: Path, sms: Iterable[int]) -> None:
    """Refuse to embed a library in engines for GPUs that it has no code for.

    Raises:
        InputError: names them, and the command that builds for all.
    """
    built = architectures(library)
    missing = [sm for sm in sms if built and not covers(built, sm)]
    if missing:
        every = " ".join(str(sm) for sm in sms)
        raise InputError(
            f"{library} has code for SM {', '.join(built)} and none for {', '.join(map(str, missing))}: "
            f"python -m rmsnorm_deploy.native build --tensorrt --sm {every}"
        )
