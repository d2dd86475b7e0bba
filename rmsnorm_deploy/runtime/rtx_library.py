"""Makes TensorRT-RTX's package complete enough for plugins.

Its wheel has ``libtensorrt_rtx.so.1`` alone, and adding a plugin opens ``libtensorrt_rtx.so``: where that is missing
the process aborts. A library with that name which is already loaded is found by its soname, so one is made which only
needs the real one.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rmsnorm_deploy.errors import BackendUnavailable

NAME = "libtensorrt_rtx.so"


def ensure_rtx_library() -> None:
    """Load a ``libtensorrt_rtx.so`` into this process, unless the system's loader finds one.

    Raises:
        BackendUnavailable: there is none, and no C compiler to make one.
    """
    try:
        ctypes.CDLL(NAME, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        ctypes.CDLL(str(_made_for(_real_library())), mode=ctypes.RTLD_GLOBAL)


def _real_library() -> Path:
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        library = Path(folder) / f"{NAME}.1"
        if library.is_file():
            return library
    raise BackendUnavailable(
        f"{NAME} is not installed: pip install tensorrt-rtx-cu13, or put TensorRT-RTX on LD_LIBRARY_PATH"
    )


def _made_for(real: Path) -> Path:
    from rmsnorm_deploy.native import cache_folder

    folder = cache_folder() / f"rtx-{hashlib.sha256(str(real).encode()).hexdigest()[:16]}"
    if not (folder / NAME).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _link(real, folder / NAME)
    return folder / NAME


def _link(real: Path, target: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BackendUnavailable(
            f"{target.name} is missing and there is no C compiler to make it: "
            f"ln -s {real} {real.parent / NAME} and put {real.parent} on LD_LIBRARY_PATH"
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, "-shared", "-o", str(made), "-x", "c", os.devnull, f"-Wl,-soname,{target.name}"]
        command += ["-Wl,--no-as-needed", f"-L{real.parent}", f"-l:{real.name}", f"-Wl,-rpath,{real.parent}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BackendUnavailable(f"{target.name} could not be linked: {' '.join(done.stderr.split())[:300]}")
        made.replace(target)
