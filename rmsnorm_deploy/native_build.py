"""Builds the libraries of ``plugins/`` with CMake into the user's cache: ``python -m rmsnorm_deploy.native build``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.native import (
    GROUPS,
    STAMP,
    SUFFIX,
    cache_folder,
    find_library,
    identity,
    plugins_folder,
    stamps,
)


def build(
    groups: Sequence[str] = ("cpu",),
    *,
    sm: Sequence[int] = (),
    force: bool = False,
    definitions: Sequence[str] = (),
    quiet: bool = False,
) -> list[Path]:
    """Build these groups of libraries ("cpu", "cuda", "tensorrt") with CMake, unless they are in the cache already.

    Args:
        sm: the CUDA architectures, such as 90; the default is all that the kernels support.
        force: build again what is there.
        definitions: more ``-DNAME=VALUE`` for CMake.
        quiet: print nothing where it succeeds.

    Returns the folders, one a group.

    Raises:
        InputError: no such group, or this installation has no sources.
        BackendUnavailable: CMake or a compiler is missing.
        DeployError: the compiler failed; its output is shown.
    """
    return [_build_group(name, sm, force, definitions, quiet) for name in groups]


def _build_group(name: str, sm: Sequence[int], force: bool, definitions: Sequence[str], quiet: bool) -> Path:
    if name not in GROUPS:
        raise InputError(f"there is no group {name!r} to build: use one of {', '.join(GROUPS)}")
    sources = plugins_folder()
    if sources is None:
        raise InputError("this installation has no C++ sources: build in a checkout of the project")
    options = [*GROUPS[name].options, *definitions]
    options += [f"-DRMSNORM_SM={';'.join(str(item) for item in sm)}"] if sm else []
    options += [f"-DCMAKE_CUDA_COMPILER={nvcc}"] if name != "cpu" and (nvcc := find_nvcc()) else []
    wanted = identity(name)
    key = hashlib.sha256("\n".join([name, wanted, *options]).encode()).hexdigest()[:20]
    target = cache_folder() / f"{name}-{key}"
    if not force and any(stamp.get("identity") == wanted for stamp in stamps(target)):
        _say(quiet, f"{name}: already built in {target}")
        return target
    compile_into(target, name, sources, options, wanted, quiet=quiet)
    _link_siblings()
    return target


def compile_into(
    target: Path, name: str, sources: Path, options: Sequence[str], made_for: str, *, quiet: bool = False
) -> None:
    """Build one group and move its libraries to ``target`` in one step; nothing half-built is ever left there.

    made_for: the identity that `find_library` will ask for. Raises as `build` does.
    """
    compiler, cmake = check_tools(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        work, out = Path(scratch) / "work", Path(scratch) / "out"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        _say(quiet, f"{name}: building with {compiler}")
        _run([cmake, "-S", str(sources), "-B", str(work), "-DCMAKE_BUILD_TYPE=Release", *generator, *options], quiet)
        _run([cmake, "--build", str(work), "--parallel", str(os.cpu_count() or 1)], quiet)
        out.mkdir()
        for library in sorted((work / "lib").glob(f"*{SUFFIX}")):
            shutil.copy2(library, out / library.name)
        _check_complete(out, name)
        stamp = {
            "group": name,
            "identity": made_for,
            "options": list(options),
            "compiler": compiler,
            "created": time.time(),
            "seconds": round(time.time() - started, 1),
            "bytes": {path.name: path.stat().st_size for path in sorted(out.iterdir())},
        }
        (out / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
        if target.exists():
            target.rename(Path(scratch) / "replaced")
        out.rename(target)
    _say(quiet, f"{name}: built in {stamp['seconds']} s, in {target}")


def _check_complete(folder: Path, name: str) -> None:
    first = next(iter(GROUPS[name].libraries.values())) + SUFFIX
    if not (folder / first).is_file():
        raise InputError(f"these sources do not have the {name} libraries: nothing made {first}")


def _link_siblings() -> None:
    """Put a link to the CUDA kernels beside the custom-op library, which looks for them there."""
    ort, cuda = find_library("ort"), find_library("cuda")
    if ort is None or cuda is None or ort.parent == cuda.parent:
        return
    link = ort.parent / cuda.name
    spare = ort.parent / f".{cuda.name}.{os.getpid()}"
    spare.symlink_to(cuda)
    spare.replace(link)


def check_tools(name: str) -> tuple[str, str]:
    """What the compiler calls itself, and the path of CMake.

    Raises:
        BackendUnavailable: one of them, or nvcc where the group needs it, is not here, too old or does not run.
    """
    return _compiler(name), _cmake()


def find_nvcc() -> str | None:
    """The CUDA compiler: ``$CUDACXX``, on PATH, in ``$CUDA_HOME`` or where the toolkit's installer puts it."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [os.environ.get("CUDACXX"), "nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((found for found in map(shutil.which, filter(None, candidates)) if found), None)


def _cmake() -> str:
    needed = "CMake 3.20 or newer is needed to build the native libraries"
    path = shutil.which("cmake")
    if path is None:
        raise BackendUnavailable(f"{needed}, and there is none here: pip install cmake")
    said = _version_of(path)
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < (3, 20):
        raise BackendUnavailable(f"{needed}, and {path} is {said!r}: pip install cmake")
    return path


def _version_of(path: str) -> str:
    """The first line that a tool says of itself."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BackendUnavailable(f"{path} --version ends with status {done.returncode}: that tool is not in order")
    return (done.stdout.splitlines() or [path])[0]


def _compiler(name: str) -> str:
    """The first line that the compiler says of itself."""
    if name != "cpu" and find_nvcc() is None:
        raise BackendUnavailable(
            "nvcc is needed to build the CUDA kernels, and is not here: install the CUDA toolkit, and put its bin "
            "folder on PATH or set CUDACXX"
        )
    chosen = os.environ.get("CXX")
    candidates = [chosen] if chosen else ["c++", "g++", "clang++"]
    path = next((found for found in map(shutil.which, candidates) if found), None)
    if path is None:
        raise BackendUnavailable(
            f"no C++ compiler here ({' or '.join(candidates)}): install g++ 9 or clang 10 or newer; "
            "without one, models run on the function bodies in their files"
        )
    return _version_of(path)


def _run(command: list[str], quiet: bool) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return
    tail = "\n".join(done.stdout.splitlines()[-60:])
    if not quiet:
        print(tail, file=sys.stderr)
    raise DeployError(f"{' '.join(command[:3])} ... failed with status {done.returncode}: {_first_error(done.stdout)}")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if "error:" in line.lower() or "CMake Error" in line]
    return lines[0][:300] if lines else "no line of its output says why"


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, flush=True)
