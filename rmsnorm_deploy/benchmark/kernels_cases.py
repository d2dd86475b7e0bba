"""What the CPU kernels are compared on: the cases, the bars that they must reach, and the tensors of a case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from onnx import TensorProto

OURS, BARE, COPY = "ours in onnxruntime", "ours, bare", "memcpy"
EPSILON = 1e-6
COLD_BYTES = 96 << 20
DTYPES = {
    "float32": (torch.float32, TensorProto.FLOAT),
    "float16": (torch.float16, TensorProto.FLOAT16),
    "bfloat16": (torch.bfloat16, TensorProto.BFLOAT16),
}


class Case(NamedTuple):
    """One comparison."""

    rows: int
    width: int
    dtype: str
    skip: bool
    threads: int
    cold: bool

    def __str__(self) -> str:
        op = "SkipRMSNorm" if self.skip else "RMSNorm"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{op} {self.rows}x{self.width} {self.dtype}, {threads}, {'cold' if self.cold else 'warm'}"

    @property
    def bytes_moved(self) -> int:
        """What the op must read and write; the scale is left out."""
        return self.rows * self.width * DTYPES[self.dtype][0].itemsize * (4 if self.skip else 2)


class Bar(NamedTuple):
    """What is asked of a case: the best of ``peers`` takes at least ``factor`` times as long as ``ours``."""

    rows: int
    width: int
    dtype: str
    skip: bool
    ours: str
    peers: tuple[str, ...]
    factor: float
    cold: bool
    threads: tuple[int, ...] = (1, 2)


_BEST_OWN = ("onnxruntime SimplifiedLayerNormalization", "onnxruntime RMSNormalization")
_BEST_SKIP = ("onnxruntime SkipSimplifiedLayerNormalization",)
# Up to 32 x 4096 a model's activations are still in a cache when a norm reads them; from 512 x 4096 on they are not.
BARS = (
    Bar(1, 64, "float32", False, OURS, _BEST_OWN, 1.0, cold=False),
    Bar(32, 4096, "float32", False, OURS, _BEST_OWN, 1.5, cold=False),
    Bar(512, 4096, "float32", False, OURS, _BEST_OWN, 1.0, cold=True),
    Bar(2048, 4096, "float32", False, OURS, _BEST_OWN, 1.3, cold=True),
    *(Bar(rows, 4096, "float16", False, OURS, _BEST_OWN, 1.5, cold=rows > 32) for rows in (32, 512, 2048)),
    *(Bar(rows, 4096, "bfloat16", False, OURS, _BEST_OWN, 8.0, cold=rows > 32) for rows in (32, 512, 2048)),
    Bar(512, 4096, "float32", True, OURS, _BEST_SKIP, 1.3, cold=True),
    Bar(2048, 4096, "float32", False, BARE, (COPY,), 0.85, cold=True, threads=(1,)),
    Bar(32, 4096, "float32", False, BARE, (COPY,), 0.60, cold=True, threads=(1,)),
)


def cases(dtypes: Sequence[str], threads: Sequence[int], caches: Sequence[str] = ()) -> list[Case]:
    """Every case with a bar, for these dtypes and numbers of threads; caches, "warm" or "cold", replace the bar's."""
    wanted = [bar for bar in BARS if bar.dtype in dtypes]
    found = {
        Case(bar.rows, bar.width, bar.dtype, bar.skip, count, cold)
        for bar in wanted
        for count in threads
        for cold in ([cache == "cold" for cache in caches] or [bar.cold])
    }
    return sorted(found, key=lambda case: (case.skip, case.dtype, case.cold, case.rows, case.threads))


@dataclass
class Buffers:
    """One set of tensors; y and total are written."""

    x: torch.Tensor
    skip: torch.Tensor
    y: torch.Tensor
    total: torch.Tensor


def make_buffers(case: Case) -> list[Buffers]:
    """Enough sets of tensors for the case's caches: one when warm."""
    dtype = DTYPES[case.dtype][0]
    size = case.rows * case.width * dtype.itemsize * (4 if case.skip else 2)
    count = max(2, -(-COLD_BYTES // size)) if case.cold else 1
    shape = (case.rows, case.width)
    x = torch.randn(shape).to(dtype)
    return [
        Buffers(x.clone(), x.clone(), torch.zeros_like(x), torch.zeros_like(x) if case.skip else x.new_empty(0))
        for _ in range(min(count, 512))
    ]
