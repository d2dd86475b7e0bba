"""One launch of each layout, for compute-sanitizer: python tests/gpu/sanitized.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (0, 1, 2)]

import cuda_emulator as emu  # noqa: E402
import cuda_kernel  # noqa: E402
import torch  # noqa: E402

for width in (5, 64, 512, 1024, 4096, 4097, 16_384, 65_536, 131_077, 300_000):
    for x, params in (("f32", "f32"), ("f16", "f32"), ("bf16", "bf16")):
        made = cuda_kernel.norm(emu.Case(width, 3, x, params, skip=True, bias="full"))
        made.launch()
        torch.cuda.synchronize()
