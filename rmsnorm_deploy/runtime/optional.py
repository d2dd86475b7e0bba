"""Parts that may be absent: optional packages and compiled libraries."""

from __future__ import annotations

import importlib
import types
from pathlib import Path

from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.spoken import spoken


def load_module(name: str, install: str) -> types.ModuleType:
    """Import an optional package.

    Raises:
        BackendUnavailable: it is not installed, or a library it needs does not load; says what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise BackendUnavailable(f"{name} is not installed: {install}") from error
        raise BackendUnavailable(f"{name} is installed but does not load ({one_line(error)}): {install}") from error
    except OSError as error:  # a shared library of the package
        raise BackendUnavailable(f"{name} is installed but does not load ({one_line(error)}): {install}") from error


def native_library(kind: str) -> Path | None:
    """The compiled library of that kind ("ort", "tensorrt", "tensorrt-ort"), or None where it is not built."""
    from rmsnorm_deploy import native

    return native.find_library(kind)


def one_line(error: BaseException) -> str:
    """The text of an error of somebody else's, on one line and of bounded length."""
    text = " ".join(spoken(str(error)).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."
