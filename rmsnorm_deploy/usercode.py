"""Runs Python files that the user named on purpose: recipes, and the files that define a pickled model's classes."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

from rmsnorm_deploy.errors import InputError


def import_file(path: str | Path, option: str = "--import") -> ModuleType:
    """Import one .py file; its folder is searched for what it imports in turn.

    The module is registered under the file's stem, as ``python FILE.py``'s neighbours would see it, or under a private
    name when that stem is taken. A file that is imported already is not run again. Raises InputError, ``option`` first
    ("" for a file that no option named), for a file that is missing, is no .py, or fails.
    """
    named = f"{option} {path}".lstrip()
    path = Path(path).resolve()
    if not path.is_file():
        raise InputError(f"{named}: no such file")
    if path.suffix != ".py":
        raise InputError(f"{named}: not a Python file (.py)")
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{named}: not a file Python can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _search(path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything, and a script may exit
        del sys.modules[name]
        text = str(error).splitlines()[0] if str(error) else ""
        raise InputError(f"{named}: importing it failed with {type(error).__name__}: {text}") from error
    return module


def _module_name(path: Path) -> str:
    """The stem if it is free or ours already, else a private name of its own."""
    stem = path.stem
    taken = sys.modules.get(stem)
    same = taken is not None and getattr(taken, "__file__", None) and Path(str(taken.__file__)).resolve() == path
    if stem.isidentifier() and (same or (taken is None and importlib.util.find_spec(stem) is None)):
        return stem
    return f"_rmsnorm_deploy_user_{zlib.crc32(str(path).encode()):08x}_{stem}"


def _search(folder: Path) -> None:
    """At the end of the path, so that a neighbour can never hide an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
