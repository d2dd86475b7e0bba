"""Finds and loads the compiled libraries that ``plugins/`` yields; `native_build` makes them.

    python -m rmsnorm_deploy.native build [--cpu] [--cuda] [--tensorrt] [--sm 80 90 ...] [--force]
    python -m rmsnorm_deploy.native status

A library comes from one of two places: ``rmsnorm_deploy/lib`` of an installed wheel, or a folder of the user's cache
that ``build`` fills, named after the hash of the sources and the options. Either is used only where it was built from
the sources that are there now (a wheel without sources: for this version of the package). Without any, models run on
the function bodies in their files.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import json
import os
import platform
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rmsnorm_deploy
from rmsnorm_deploy.cli import Parser, run_command
from rmsnorm_deploy.errors import EXIT_BACKEND, EXIT_OK, BackendUnavailable, InputError

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
STAMP = "build.json"
_MACHINE = f"{sys.platform}-{platform.machine()}"
_SOURCES = {".txt", ".cmake", ".h", ".cpp", ".cu", ".cuh", ".map"}


_REGISTERED: weakref.WeakSet[Any] = weakref.WeakSet()  # session options: ONNX Runtime takes a domain only once


@dataclass(frozen=True)
class Group:
    """Libraries that are built together.

    libraries: from a kind, as `find_library` takes it, to a file name without its suffix. sources: folders or files
    under plugins/. options: for CMake.
    """

    libraries: dict[str, str]
    sources: tuple[str, ...]
    options: tuple[str, ...]


_COMMON = ("CMakeLists.txt", "kernels/rms_norm.h", "kernels/cpu/check.cpp")
GROUPS = {
    "cpu": Group(
        {"cpu": "librmsnorm_deploy_cpu", "ort": "librmsnorm_deploy_ort"},
        (*_COMMON, "kernels/cpu", "onnxruntime"),
        ("-DRMSNORM_CPU=ON", "-DRMSNORM_CUDA=OFF"),
    ),
    "cuda": Group(
        {"cuda": "librmsnorm_deploy_cuda"},
        (*_COMMON, "kernels/cuda"),
        ("-DRMSNORM_CPU=OFF", "-DRMSNORM_CUDA=ON"),
    ),
    "tensorrt": Group(
        {"tensorrt": "librmsnorm_deploy_tensorrt", "tensorrt-ort": "librmsnorm_deploy_tensorrt_ort"},
        (*_COMMON, "kernels/cuda", "tensorrt"),
        ("-DRMSNORM_CPU=OFF", "-DRMSNORM_CUDA=ON", "-DRMSNORM_TENSORRT=ON"),
    ),
}
KINDS = tuple(kind for group in GROUPS.values() for kind in group.libraries)


@dataclass(frozen=True)
class LibraryStatus:
    """One library: where it is, or why it is not there and what to run."""

    kind: str
    path: Path | None
    detail: str
    build: dict[str, Any] = field(default_factory=dict)


def find_library(kind: str) -> Path | None:
    """The library of that kind, built from these very sources, or None.

    Kinds: "cpu" (plain C), "ort" (ONNX Runtime's custom ops), "cuda" (plain C), "tensorrt", "tensorrt-ort".

    Raises:
        InputError: there is no such kind.
    """
    found = _find(kind)
    return found[0] if found else None


def library_path() -> str:
    """The ONNX Runtime custom-op library, for ``session_options.register_custom_ops_library``.

    Raises:
        BackendUnavailable: it is not built.
    """
    library = find_library("ort")
    if library is None:
        raise BackendUnavailable("the ONNX Runtime custom ops are not built: run python -m rmsnorm_deploy.native build")
    return str(library)


def register(session_options: Any) -> None:
    """Add the custom ops to an ``onnxruntime.SessionOptions``; they then take precedence over the bodies in the model.

    Options that were given here before are left as they are. Those that ``register_custom_ops_library`` was called on
    can't be told: with both, ONNX Runtime says "Domain already set in registry" when the session is made. On an ONNX
    Runtime older than 1.17 its own exception says so.

    Raises:
        BackendUnavailable: the library is not built.
    """
    add_ops(session_options, library_path())


def add_ops(session_options: Any, library: str) -> None:
    """Add the custom ops of ``library`` as `register` does."""
    if session_options not in _REGISTERED:
        session_options.register_custom_ops_library(library)
        _REGISTERED.add(session_options)


def registered(session_options: Any) -> bool:
    """Whether these options have the custom ops by `register` or `add_ops`."""
    return session_options in _REGISTERED


@functools.cache
def load(kind: str) -> ctypes.CDLL | None:
    """The library of that kind loaded into this process, or None where it is not built or does not load here."""
    path = find_library(kind)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def status() -> list[LibraryStatus]:
    """What is built and what is not, for `python -m rmsnorm_deploy.doctor`."""
    return [_status(kind) for kind in KINDS]


# ---- finding


def plugins_folder() -> Path | None:
    """The C++ sources: beside the package in a checkout or an editable installation; None in a wheel."""
    folder = Path(__file__).resolve().parent.parent / "plugins"
    return folder if (folder / "CMakeLists.txt").is_file() else None


def cache_folder() -> Path:
    """Where `build` puts its libraries: ``$XDG_CACHE_HOME/rmsnorm_deploy``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "rmsnorm_deploy"


def wheel_folder() -> Path:
    """Where a wheel carries its libraries."""
    return Path(__file__).resolve().parent / "lib"


def _find(kind: str) -> tuple[Path, dict[str, Any]] | None:
    if kind not in KINDS:
        raise InputError(f"there is no library {kind!r}: use one of {', '.join(KINDS)}")
    name = next(name for name, group in GROUPS.items() if kind in group.libraries)
    file = GROUPS[name].libraries[kind] + SUFFIX
    wanted = identity(name)
    for folder, stamp in _stamped():
        if stamp.get("group") == name and stamp.get("identity") == wanted and (folder / file).is_file():
            return folder / file, stamp
    return None


def _stamped() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders that `build` finished, the wheel's first, then the newest."""
    yield from ((wheel_folder(), stamp) for stamp in stamps(wheel_folder()))
    root = cache_folder()
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    built = [(path, stamp) for path in folders for stamp in stamps(path)]
    yield from sorted(built, key=lambda item: float(item[1].get("created", 0)), reverse=True)


def stamps(folder: Path) -> list[dict[str, Any]]:
    """What `build` wrote about the libraries in that folder; empty where it made none there."""
    try:
        value = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return []
    return [value] if isinstance(value, dict) else []


def identity(name: str) -> str:
    """What a library must have been built from to be used: the sources here, or else the package's version."""
    folder = plugins_folder()
    if folder is None:
        return wheel_identity(rmsnorm_deploy.__version__)
    return f"{_hash_sources(folder, name)} {_MACHINE}"


def wheel_identity(version: str) -> str:
    """The identity of libraries inside a wheel of that version, which has no sources beside it."""
    return f"version {version} {_MACHINE}"


def _hash_sources(folder: Path, name: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(_source_files(folder, name)):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _source_files(folder: Path, name: str) -> set[Path]:
    files: set[Path] = set()
    for source in GROUPS[name].sources:
        path = folder / source
        files |= {path} if path.is_file() else {file for file in path.rglob("*") if file.suffix in _SOURCES}
    return files


def _status(kind: str) -> LibraryStatus:
    found = _find(kind)
    if found:
        path, stamp = found
        size = path.stat().st_size / 1e6
        detail = f"{size:.1f} MB, built {_age(stamp)} with {stamp.get('compiler', 'an unknown compiler')}"
        return LibraryStatus(kind, path, detail, stamp)
    group = next(name for name, item in GROUPS.items() if kind in item.libraries)
    if plugins_folder() is None:
        return LibraryStatus(kind, None, "not in this wheel; build it from a checkout of the sources")
    return LibraryStatus(kind, None, f"not built: run python -m rmsnorm_deploy.native build --{group}")


def _age(stamp: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(float(stamp.get("created", 0))))


# ---- command line


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m rmsnorm_deploy.native``; returns the exit status."""
    return run_command(argv, _command)


def _command(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.command == "build":
        _build_command(arguments)
    else:
        _print_status()
    return EXIT_OK


def _build_command(arguments: argparse.Namespace) -> None:
    wanted = [name for name in GROUPS if getattr(arguments, name)] or ["cpu"]
    from rmsnorm_deploy.native_build import build

    build(wanted, sm=arguments.sm, force=arguments.force, definitions=[f"-D{item}" for item in arguments.define])


def _print_status() -> None:
    for item in status():
        print(f"{item.kind:13} {item.path or '-'}\n{'':13} {item.detail}")


def _parser() -> Parser:
    parser = Parser(
        "python -m rmsnorm_deploy.native",
        "Build the compiled kernels, or say which are built.",
        statuses={EXIT_BACKEND: "what the build needs is not there"},
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser("build", help="build libraries into the user's cache")
    command.add_argument("--cpu", action="store_true", help="CPU kernels and ONNX Runtime custom ops (the default)")
    command.add_argument("--cuda", action="store_true", help="CUDA kernels (needs nvcc)")
    command.add_argument("--tensorrt", action="store_true", help="the TensorRT plugin (also TensorRT's headers)")
    command.add_argument("--sm", type=int, nargs="+", default=[], metavar="N", help="CUDA architectures, such as 80 90")
    command.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="passed to CMake as -D")
    command.add_argument("--force", action="store_true", help="build again what is there")
    commands.add_parser("status", help="say which libraries are built")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
