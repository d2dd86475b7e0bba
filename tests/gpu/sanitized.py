"""Launches of every layout and variant, for compute-sanitizer: python tests/gpu/sanitized.py."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (0, 1, 2)]

import cuda_emulator as emu  # noqa: E402
import cuda_kernel  # noqa: E402
import torch  # noqa: E402

PAIRS = [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]
# Of every layout on cards with clusters and without, aligned and not: rows of lanes, a warp, a block, a cluster, in
# shared memory, split.
WIDTHS = (5, 64, 512, 1001, 1024, 4096, 4097, 16_384, 65_536, 100_000, 131_077, 160_000, 300_000, 300_001)

for width, (x, params), skip in itertools.product(WIDTHS, PAIRS, (False, True)):
    for before, bias in ((False, "none"), (True, "full")) if width < 100_000 else ((False, "full"),):
        made = cuda_kernel.norm(emu.Case(width, 3, x, params, before and x != "f32", skip=skip, bias=bias))
        made.launch()
    torch.cuda.synchronize()
for width, late in itertools.product((64, 1001, 4096, 131_077), ("x", "y", "sum", "skip")):  # in a phase of its own
    cuda_kernel.norm(emu.Case(width, 5, "f16", "f32", skip=True, misaligned=(late,))).launch()
torch.cuda.synchronize()
for width in (64, 4096):  # more rows than lanes, blocks or multiprocessors
    cuda_kernel.norm(emu.Case(width, 700, "f16", "f16")).launch()
cuda_kernel.norm(emu.Case(300_000, 2, "f16", "f16", workspace=False)).launch()
torch.cuda.synchronize()
print("launched every case")
