"""What the compiler made of the CUDA kernels: no spills, no local memory, 16-byte accesses, few enough registers."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parent.parent / "plugins" / "kernels" / "cuda"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
SMS = (75, 80, 86, 89, 90, 100, 120)
TYPES = ("f32", "f16", "bf16")
# Of each scale order and parameter type that the type has, with and without bias and skip: many for aligned rows, and
# thin, thick and long for these and for any. Twice a split, whose first kernel knows of the skip alone and whose second
# of all else.
KERNELS = {"f32": 7 * 4 + 2 * (2 + 2), "f16": 7 * 4 * 4 + 2 * (2 + 8), "bf16": 7 * 4 * 4 + 2 * (2 + 8)}
# Registers a thread. Blocks are of 512 threads at most, 128 where many rows share one and 256 where a row is split:
# these let a multiprocessor of 64 K registers hold at least the blocks named.
BOUNDS = {"many": 128, "thin": 64, "thick": 128, "long": 128, "split": 128}

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not on this machine")


@dataclass(frozen=True)
class Compiled:
    name: str
    stack: int
    spilled: int
    registers: int

    @property
    def layout(self) -> str:
        for layout, kernels in (("long", ["long_kernel"]), ("split", ["squares_kernel", "finish_kernel"])):
            if any(kernel in self.name for kernel in kernels):
                return layout
        n, rows = (int(v) for v in re.search(r"Li(\d+)ELi(\d+)ELb", self.name).groups())
        return "many" if rows > 1 else "thick" if n > 1 else "thin"


def compile_to(kind: str, dtype: str, sm: int, folder: Path) -> tuple[Path, list[Compiled]]:
    out = folder / f"{dtype}.{sm}.{kind}"
    command = [str(NVCC), "-std=c++17", f"-arch=sm_{sm}", "-Xptxas", "-v", f"-{kind}", "-o", str(out)]
    done = subprocess.run([*command, str(CUDA / f"kernels_{dtype}.cu")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    names = re.findall(r"Compiling entry function '(\w+)'", done.stderr)
    facts = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores.*\n.*Used (\d+) registers", done.stderr)
    return out, [Compiled(name, *(int(f) for f in fact)) for name, fact in zip(names, facts, strict=True)]


def cuobjdump() -> str | None:
    """The disassembler: of the toolkit, or of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."""
    found = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    spec = None if found else importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = found or next((str(p) for p in Path(folder).glob("*/bin/cuobjdump")), None)
    return found or os.environ.get("CUOBJDUMP")


def check_resources(dtype: str, sm: int, folder: Path) -> Path:
    cubin, kernels = compile_to("cubin", dtype, sm, folder)
    assert len(kernels) == KERNELS[dtype]
    for kernel in kernels:
        assert (kernel.stack, kernel.spilled) == (0, 0), f"sm_{sm}: {kernel} uses local memory"
        assert kernel.registers <= BOUNDS[kernel.layout], f"sm_{sm}: {kernel.layout} {kernel}"
    return cubin


def check_instructions(cubin: Path) -> None:
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = os.environ["PATH"] + os.pathsep + str(Path(tool).parent)
    sass = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert sass.returncode == 0, sass.stderr
    bodies = re.split(r"Function : ", sass.stdout)[1:]
    assert bodies
    for body in bodies:
        name = body.split("\n", 1)[0].strip()
        assert not re.search(r"\b(LDL|STL)\b", body), f"{name} uses local memory"
        assert not re.search(r"\bLD\.E", body), f"{name} does not know that it loads from global memory"
        assert re.search(r"LDG\.E\S*\.128", body), f"{name} loads less than 16 bytes at once"
        if re.search(r"squares_kernel\w+Lb0ELb", name):
            continue  # it stores its block's sum alone
        assert re.search(r"STG\.E\S*\.128", body), f"{name} stores less than 16 bytes at once"


@pytest.mark.parametrize("sm", [75, 90])
def test_float32_kernels_stay_in_registers_and_move_16_bytes(sm: int, tmp_path: Path) -> None:
    check_instructions(check_resources("f32", sm, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sm", SMS)
def test_kernels_stay_in_registers_and_move_16_bytes(sm: int, dtype: str, tmp_path: Path) -> None:
    check_instructions(check_resources(dtype, sm, tmp_path))


def test_ptx_has_clusters_and_early_starts(tmp_path: Path) -> None:
    ptx, _ = compile_to("ptx", "f32", 90, tmp_path)
    text = ptx.read_text()
    for instruction in ("barrier.cluster.arrive", "mapa.shared::cluster", "griddepcontrol.wait", "ld.global.v4"):
        assert instruction in text
    # The read-only path would not see what the previous kernel is still writing.
    assert "ld.global.nc" not in text
