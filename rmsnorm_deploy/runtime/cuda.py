"""What the TensorRT session asks of a GPU; kept apart so that everything else can be tested without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.runtime.tensors import Array, plain_torch, to_torch


class CudaDevice:
    """The current CUDA device, through torch: memory, streams, graphs."""

    def __init__(self, index: int | None = None) -> None:
        reason = no_gpu_reason()
        if reason:
            raise BackendUnavailable(f"{reason}: needs {no_gpu_cure()}")
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    @property
    def sm(self) -> int:
        """Compute capability, 89 for 8.9."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return major * 10 + minor

    def upload(self, name: str, array: Array) -> torch.Tensor:
        """The array on the device: itself when it is there, else through pinned memory on the current stream."""
        tensor = plain_torch(name, to_torch(array))
        if tensor.device.type == "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def download(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in pinned CPU memory, complete when this returns."""
        pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for target, tensor in zip(pinned, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return pinned

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on(self, stream: Any, tensors: list[torch.Tensor]) -> Iterator[int]:
        """Work on ``stream`` after what the caller's stream has queued, and the caller's after it; gives its handle.

        TensorRT adds synchronisation of its own on the default stream, so it gets one to itself. ``tensors`` are the
        caller's, which the allocator must not reuse before the stream is done with them.
        """
        caller = torch.cuda.current_stream(self.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for tensor in tensors:
                tensor.record_stream(stream)
            yield int(stream.cuda_stream)
        caller.wait_stream(stream)

    def hand_over(self, tensors: list[torch.Tensor]) -> None:
        """Tell the allocator that the caller's stream uses tensors which were made on ours."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def capture(self, stream: Any, enqueue: Callable[[int], None]) -> Callable[[], None]:
        """Record ``enqueue(stream handle)`` into a CUDA graph; the result replays it on the current stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            enqueue(int(stream.cuda_stream))
        return graph.replay


def no_gpu_reason() -> str | None:
    """Why no CUDA GPU can be used here; None when one can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no NVIDIA GPU"
    return None


def no_gpu_cure() -> str:
    """What is needed where `no_gpu_reason` gives one."""
    if torch.version.cuda is None:
        return "an NVIDIA GPU and a CUDA build of torch (https://pytorch.org)"
    return f"an NVIDIA GPU with a driver for CUDA {torch.version.cuda}"
