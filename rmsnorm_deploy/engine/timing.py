"""Times whole engines on the GPU that is here, through the runtime's own session."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.runtime.engines import EngineRecord

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.bundle import Bundle

WARM_UPS = 20
ROUNDS = 100


def runs_here(records: Sequence[EngineRecord]) -> bool:
    """Whether there is a GPU that all of the engines were built for."""
    from rmsnorm_deploy.runtime.cuda import CudaDevice, no_gpu_reason

    if no_gpu_reason() is not None:
        return False
    here = CudaDevice().sm
    return all(record.sm is None or here in record.sm for record in records)


def time_engines(bundle: Bundle, records: Sequence[EngineRecord]) -> dict[str, float]:
    """Median milliseconds of one run at the first profile's usual shapes, the engines taking turns."""
    from rmsnorm_deploy.runtime import open_session

    inputs = random_inputs(bundle.manifest, records[0])
    sessions = {
        record.name: open_session(bundle, record.runtime, engine=record.name, cuda_graph=True, allow_host_code=True)
        for record in records
    }
    runs = {name: (lambda session=session: session.run(inputs)) for name, session in sessions.items()}
    return interleaved(runs, ROUNDS)


def interleaved(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median device time of each, in milliseconds; they take turns so that a drift of the clock meets all of them."""
    import torch

    for run in runs.values():
        for _ in range(WARM_UPS):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def random_inputs(manifest: Mapping[str, Any], record: EngineRecord) -> dict[str, torch.Tensor]:
    """Inputs on the GPU, at the usual shapes of the engine's first profile; integers below their bound."""
    import torch

    generator = torch.Generator().manual_seed(0)
    profile = record.profiles[0] if record.profiles else {}
    inputs = {}
    for item in manifest["signature"]["inputs"]:
        shape = profile[item["name"]].best if item["name"] in profile else tuple(item["shape"])
        dtype = getattr(torch, item["dtype"])
        if dtype.is_floating_point:
            tensor = torch.randn(shape, generator=generator).to(dtype)
        elif dtype == torch.bool:
            tensor = torch.ones(shape, dtype=dtype)
        else:
            tensor = torch.randint(0, int(item.get("high") or 2), shape, generator=generator).to(dtype)
        inputs[item["name"]] = tensor.cuda()
    return inputs
