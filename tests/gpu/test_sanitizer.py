"""Every layout and variant of the CUDA kernels under each of compute-sanitizer's tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import cuda_kernel

TOOLKIT = Path("/usr/local/cuda/bin/compute-sanitizer")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or (str(TOOLKIT) if TOOLKIT.exists() else None)
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on this machine: it comes with the CUDA toolkit")
    cuda_kernel.library()  # built here, not under the sanitizer
    script = Path(__file__).with_name("sanitized.py")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    # Memory as it was asked for, not carved out of larger blocks in which a stray access hits something valid.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "launched every case" in done.stdout
