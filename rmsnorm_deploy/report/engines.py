"""A bundle's TensorRT engines as the report shows them."""

from __future__ import annotations

from dataclasses import dataclass

from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.runtime.engines import EngineRecord, read_engines


@dataclass(frozen=True)
class EngineRow:
    """One engine: what it is, how long a run takes, and what became of it."""

    name: str
    runtime: str
    gpus: str
    milliseconds: float | None
    state: str


def engine_rows(bundle: BundleLike) -> list[EngineRow]:
    """The bundle's engines, each with those that it was timed against and that were removed as slower.

    Raises:
        InputError: an engine's metadata cannot be read.
    """
    return [row for record in read_engines(bundle.path / "engines") for row in _rows(record)]


def _rows(record: EngineRecord) -> list[EngineRow]:
    runtime = f"{record.runtime} {record.runtime_version}"
    gpus = "any" if record.sm is None else ", ".join(f"SM {sm}" for sm in record.sm)
    if record.milliseconds is None:
        return [EngineRow(record.name, runtime, gpus, None, "kept, untimed: it was built without such a GPU")]
    times = {record.name: record.milliseconds, **record.milliseconds_of_all}
    return [
        EngineRow(name, runtime, gpus, times[name], "kept" if name == record.name else "slower, and removed")
        for name in sorted(times, key=times.__getitem__)
    ]
