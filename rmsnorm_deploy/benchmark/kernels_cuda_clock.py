"""The device that the CUDA kernels run on, and its clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rmsnorm_deploy.benchmark.timing import Call

_BUSY_CYCLES = 1_000_000  # the device sleeps for so long, while the host queues what is to be timed


class Clock(Protocol):
    """A device to run on, and its clock."""

    device: str

    def cache_bytes(self) -> int:
        """Of the second-level cache."""
        ...

    def free_bytes(self) -> int:
        """Device memory that can be had."""
        ...

    def prepare(self, calls: Sequence[Call], count: int) -> Call:
        """What queues ``count`` calls of these, in rotation, at once."""
        ...

    def seconds(self, prepared: Call) -> float:
        """How long the device takes for it."""
        ...


class GpuClock:
    """The current CUDA device: CUDA graphs, timed by events."""

    device = "cuda"

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def prepare(self, calls: Sequence[Call], count: int) -> Call:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, loads and allocates what a capture could not
            for call in (*calls[:3], *calls[:1]):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def seconds(self, prepared: Call) -> float:
        cuda: Any = torch.cuda  # its events have no types
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda._sleep(_BUSY_CYCLES)
        start.record()
        prepared()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
