"""The CPU kernels in other builds: under sanitizers, and for AArch64 on an emulated machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "plugins" / "kernels" / "cpu"
INCLUDE = ["-I", str(CPU.parent)]
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-ffp-contract=off", "-pthread", *INCLUDE]
AVX512 = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mfma",
    "-mf16c",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]


def need(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not here")


def run(*command: str | Path) -> str:
    done = subprocess.run([str(item) for item in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def compile_check(compiler: str, folder: Path, sources: dict[str, list[str]], *flags: str) -> Path:
    """tests/cpu_kernel_check.cpp with the kernels inside; sources: file -> its own flags."""
    objects = []
    for name, own in sources.items():
        objects.append(folder / f"{name}.o")
        run(compiler, *FLAGS, *flags, *own, "-c", CPU / name, "-o", objects[-1])
    program = folder / "check"
    run(compiler, *FLAGS, *flags, ROOT / "tests" / "cpu_kernel_check.cpp", *objects, "-o", program)
    return program


SHARED: dict[str, list[str]] = {
    name: [] for name in ("check.cpp", "dispatch.cpp", "pool.cpp", "rows_generic.cpp", "stores.cpp")
}


@pytest.mark.slow
def test_no_sanitizer_complains(tmp_path: Path) -> None:
    need("g++")
    if "x86_64" not in run("g++", "-dumpmachine"):
        pytest.skip("the sanitizer build is for x86-64")
    sources = {**SHARED, "rows_avx512.cpp": AVX512, "rows_avx2.cpp": AVX2}
    sanitize = ("-O1", "-g", "-DRMSNORM_CPU_X86=1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert "differ from generic" in run(compile_check("g++", tmp_path, sources, *sanitize))


@pytest.mark.slow
def test_neon_computes_what_plain_code_does(tmp_path: Path) -> None:
    need("aarch64-linux-gnu-g++", "qemu-aarch64")
    sources = {**SHARED, "rows_neon.cpp": []}
    program = compile_check("aarch64-linux-gnu-g++", tmp_path, sources, "-O2", "-DRMSNORM_CPU_NEON=1", "-static")
    assert run("qemu-aarch64", program).startswith("neon: ")


@pytest.mark.slow
def test_clang_has_no_warnings(tmp_path: Path) -> None:
    need("clang++")
    if "x86_64" not in run("clang++", "-dumpmachine"):
        pytest.skip("this build is for x86-64")
    avx512 = [flag for flag in AVX512 if not flag.startswith("-Wno-")]
    sources = {**SHARED, "rows_avx512.cpp": avx512, "rows_avx2.cpp": AVX2}
    assert "differ from generic" in run(compile_check("clang++", tmp_path, sources, "-O2", "-DRMSNORM_CPU_X86=1"))
