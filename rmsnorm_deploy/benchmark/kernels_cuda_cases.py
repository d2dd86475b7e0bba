"""What the CUDA kernels are compared on: the cases, the tensors of a case, and the bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rmsnorm_deploy.benchmark.kernels_result import CaseResult, Verdict

OURS, COPY, EMPTY = "ours", "copy", "empty kernel"
NOT_PEERS = (OURS, COPY, EMPTY)
EPSILON = 1e-6
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 32_768)
WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# The bars: a share of the copy's bandwidth wherever this much moves, every peer, and the time of an empty kernel.
COPY_SHARE, COPY_BYTES = 0.92, 64 << 20
EMPTY_FACTOR, EMPTY_SHAPE = 1.3, (1, 4096)


class Case(NamedTuple):
    """One comparison."""

    rows: int
    width: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.rows}x{self.width} {self.dtype}"

    @property
    def bytes_moved(self) -> int:
        """What the op must read and write; the scale is left out."""
        return 2 * self.rows * self.width * DTYPES[self.dtype].itemsize


class Buffers(NamedTuple):
    """x, and a place for y: rows x width, of the case's dtype."""

    x: torch.Tensor
    y: torch.Tensor


def cases(
    dtypes: Sequence[str] = tuple(DTYPES), rows: Sequence[int] = ROWS, widths: Sequence[int] = WIDTHS
) -> list[Case]:
    """Every combination."""
    return [Case(count, width, dtype) for dtype in dtypes for width in widths for count in rows]


def judge(result: CaseResult[Case]) -> list[Verdict]:
    """The bars that this case has, each a ratio that must reach its bar."""
    case = result.case
    times = {timing.name: timing.median for timing in result.timings}
    if OURS not in times:
        return []
    verdicts = []
    if case.bytes_moved >= COPY_BYTES:
        verdicts.append(_verdict("share of the copy's bandwidth", times[COPY] / times[OURS], COPY_SHARE))
    peers = {name: time for name, time in times.items() if name not in NOT_PEERS}
    if peers:
        best = min(peers, key=lambda name: peers[name])
        verdicts.append(_verdict(f"against {best}", peers[best] / times[OURS], 1.0))
    if (case.rows, case.width) == EMPTY_SHAPE and EMPTY in times:
        what = f"{EMPTY_FACTOR} times an empty kernel's time, over ours"
        verdicts.append(_verdict(what, EMPTY_FACTOR * times[EMPTY] / times[OURS], 1.0))
    return verdicts


def _verdict(what: str, ratio: float, bar: float) -> Verdict:
    return Verdict(what, ratio, bar, ratio >= bar)
