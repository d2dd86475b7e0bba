"""The options that would allow what a pickle asks for: the files that define its classes, or the packages they are in.

Files are found by reading them, never by running or importing them.
"""

from __future__ import annotations

import ast
import importlib.util
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES = 200
_MOST_BYTES = 1 << 20
_MANY = 2  # of one module's classes named singly


@dataclass(frozen=True)
class _Name:
    """One "module.attribute" of a pickle."""

    module: str
    attribute: str

    @classmethod
    def of(cls, text: str) -> _Name:
        module, _, attribute = text.rpartition(".")
        return cls(module, attribute)

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


def advice(names: Iterable[str], model: Path, imported: Iterable[Path] = ()) -> str:
    """The options that together allow all of ``names``, which the pickle ``model`` asks for.

    Args:
        names: each "module.Class" or "module.function" that is not allowed yet.
        imported: files whose classes are allowed already.
    """
    places = list(dict.fromkeys([model.resolve().parent, Path.cwd()]))
    files: dict[str, None] = {}
    packaged: list[_Name] = []
    singly: list[_Name] = []
    unknown: list[_Name] = []
    given = [path.resolve() for path in imported]
    for name in map(_Name.of, sorted(names)):
        path = next((p for p in [*given, *_candidates(name, places)] if name.attribute in _definitions(p)), None)
        if path is not None:
            if path not in given:
                files[_shown(path)] = None
            if path in given or not _definitions(path)[name.attribute]:
                singly.append(name)
        elif name.module != "__main__" and _is_installed(name.module):
            packaged.append(name)
        else:
            unknown.append(name)
    options = [f"--import {shlex.quote(file)}" for file in files]
    options += [f"--import FILE.py (the file that defines {_listed(unknown)})"] if unknown else []
    options += [f"--allow-class {name}" for name in [*_summed(packaged), *map(str, singly)]]
    return " ".join(options)


def _candidates(name: _Name, places: Iterable[Path]) -> Iterator[Path]:
    """Files that may define a name: those of its module's name, or all beside a model that was saved by a script."""
    for place in places:
        if name.module == "__main__":
            yield from sorted(place.glob("*.py"))[:_MOST_FILES]
        else:
            parts = name.module.split(".")
            yield from dict.fromkeys([place.joinpath(*parts).with_suffix(".py"), place / f"{parts[-1]}.py"])


def _definitions(path: Path) -> dict[str, bool]:
    """The names that a file defines at its top level, and whether each is a class; {} for what is not to be read."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name: isinstance(node, ast.ClassDef) for node in body if isinstance(node, kinds)}


def _is_installed(module: str) -> bool:
    """Whether the module's package is there; it is looked up and not imported."""
    try:
        return importlib.util.find_spec(module.split(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _summed(names: Iterable[_Name]) -> list[str]:
    """``module.*`` for a module of which several classes are wanted."""
    modules: dict[str, list[_Name]] = {}
    for name in names:
        modules.setdefault(name.module, []).append(name)
    found: list[str] = []
    for module, inside in modules.items():
        classes = [name for name in inside if name.attribute[:1].isupper()]
        if len(classes) > _MANY:
            found.append(shlex.quote(f"{module}.*"))
            inside = [name for name in inside if name not in classes]
        found += map(str, inside)
    return found


def _listed(names: Iterable[_Name]) -> str:
    return ", ".join(dict.fromkeys(name.attribute for name in names))


def _shown(path: Path) -> str:
    """As the user would type it: from the current folder where it lies below that."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
