"""The bundle's model timed on PyTorch and ONNX Runtime, fused and not, and with LayerNorm in place of each RMSNorm."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.benchmark.contestants import Threads, evaluating, onnxruntime_call, torch_call
from rmsnorm_deploy.benchmark.norm import NormCase, norm_calls, typical_norm
from rmsnorm_deploy.benchmark.result import MODEL_GROUP, NORM_GROUP, BenchmarkReport, Comparison, Timing
from rmsnorm_deploy.benchmark.timing import OPENINGS, Call, interleave, median_interval, quantile
from rmsnorm_deploy.benchmark.twin import onnx_twin, torch_twin
from rmsnorm_deploy.errors import DeployError, InputError
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.samples import Sample, make_samples
from rmsnorm_deploy.runtime.optional import native_library
from rmsnorm_deploy.runtime.tensors import to_torch

if TYPE_CHECKING:
    import torch

SECONDS = 10.0

_MODEL_SHARE = 0.7
_SAMPLE = 0.5  # seconds in which others' load is measured


@dataclass(frozen=True)
class Entry:
    """A contestant before it runs: ``make`` gives the call, or raises DeployError with the reason why there is none."""

    name: str
    title: str
    group: str
    backend: str
    make: Callable[[], Call]


# (source, contender, baseline, in words)
_COMPARISONS = (
    ("fusion", "onnxruntime", "onnxruntime-unfused", "Norms fused (model, ONNX Runtime)"),
    ("kernels", "onnxruntime-kernels", "onnxruntime", "Our kernels (model, ONNX Runtime)"),
    ("backend", "onnxruntime", "pytorch", "ONNX Runtime instead of PyTorch (model)"),
    ("norm", "onnxruntime", "onnxruntime-layernorm", "RMSNorm instead of LayerNorm (model, ONNX Runtime)"),
    ("norm", "pytorch", "pytorch-layernorm", "RMSNorm instead of LayerNorm (model, PyTorch)"),
    ("norm", "norm-onnxruntime", "norm-onnxruntime-layernorm", "RMSNorm instead of LayerNorm (alone, ONNX Runtime)"),
    ("norm", "norm-pytorch", "norm-pytorch-layernorm", "RMSNorm instead of LayerNorm (alone, PyTorch)"),
    ("kernels", "norm-onnxruntime-kernels", "norm-onnxruntime", "Our kernels (alone, ONNX Runtime)"),
)


def run_benchmark(
    bundle: BundleLike,
    *,
    threads: int | None = None,
    seconds: float = SECONDS,
    widen_bfloat16: bool = False,
    progress: Callable[[str], None] | None = None,
) -> BenchmarkReport:
    """Time ``bundle`` at its example's shape for about ``seconds``, all contestants in turn.

    ``threads`` is for PyTorch and ONNX Runtime alike; PyTorch's own choice for None. ``widen_bfloat16``: as a session's
    option of that name, for all contestants on ONNX Runtime, whose titles say so. ``progress`` is told each step.

    Raises:
        InputError: the bundle's model cannot be read.
    """
    start = time.perf_counter()
    load = _load()
    say = progress or (lambda step: None)
    sample = make_samples(bundle.manifest, adversarial=False)[0]
    exchanged: dict[str, int] = {}
    case = typical_norm(bundle.manifest, sample.dims)
    with ExitStack() as stack:
        count = stack.enter_context(Threads(threads)).count
        models = _model_entries(bundle, sample, count, exchanged, stack, widen_bfloat16)
        norms = norm_entries(case, count, widen_bfloat16) if case is not None else []
        if widen_bfloat16:
            models, norms = ([_widened(entry) for entry in entries] for entries in (models, norms))
        timings = _time(models, seconds * (_MODEL_SHARE if norms else 1.0), say)
        timings += _time(norms, seconds * (1.0 - _MODEL_SHARE), say)
    return BenchmarkReport(
        timings=timings,
        comparisons=compare(timings),
        threads=count,
        machine={**_machine(), "load": load},
        shapes={name: list(array.shape) for name, array in sample.feeds.items()},
        norm=case.to_json() if case is not None else None,
        exchanged=exchanged,
        seconds=time.perf_counter() - start,
    )


def compare(timings: Sequence[Timing]) -> list[Comparison]:
    """The comparisons whose both sides ran, round by round: what disturbs a round disturbs both sides of it."""
    ran = {timing.name: timing.milliseconds for timing in timings if timing.milliseconds}
    found = []
    for source, contender, baseline, what in _COMPARISONS:
        if contender in ran and baseline in ran:
            ratios = [slow / fast for slow, fast in zip(ran[baseline], ran[contender], strict=True)]
            low, high = median_interval(ratios)
            found.append(Comparison(source, what, contender, baseline, quantile(ratios, 0.5), low, high))
    return found


def _time(entries: Sequence[Entry], seconds: float, say: Callable[[str], None]) -> list[Timing]:
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    for number in range(OPENINGS):
        for entry in [*entries[number:], *entries[:number]]:
            if entry.name in reasons or (number and entry.backend != "onnxruntime"):
                continue
            say(f"preparing {entry.title}")
            calls.pop(entry.name, None)
            try:
                calls[entry.name] = entry.make()
            except DeployError as error:
                reasons[entry.name] = str(error)
        for name, values in (interleave(calls, seconds / OPENINGS, say) if calls else {}).items():
            times.setdefault(name, []).extend(values)
    return [
        Timing(entry.name, entry.title, entry.group, entry.backend, times.get(entry.name, []), reasons.get(entry.name))
        for entry in entries
    ]


def _widened(entry: Entry) -> Entry:
    return replace(entry, title=f"{entry.title}, bf16 widened") if entry.backend == "onnxruntime" else entry


def _model_entries(
    bundle: BundleLike, sample: Sample, threads: int, exchanged: dict[str, int], stack: ExitStack, widen: bool
) -> list[Entry]:
    call = _TorchModel(bundle, sample, stack, exchanged)
    folder, feeds = bundle.path, sample.feeds
    run = partial(onnxruntime_call, threads=threads, widen_bfloat16=widen)

    def onnx(path: Path, library: Path | None = None) -> Call:
        return run(path.read_bytes(), folder, feeds, library=library)

    def unfused() -> Call:
        if bundle.reference_path is None:
            raise InputError("the bundle holds no unfused model")
        return onnx(bundle.reference_path)

    def kernels() -> Call:
        return onnx(bundle.model_path, _library())

    def twin() -> Call:
        model, exchanged["onnxruntime"] = onnx_twin(bundle.model_path, bundle.manifest["norms"])
        return run(model, folder, feeds)

    ort = "onnxruntime"
    return [
        Entry("pytorch", "PyTorch", MODEL_GROUP, "pytorch", call.plain),
        Entry("pytorch-layernorm", "PyTorch with LayerNorm", MODEL_GROUP, "pytorch", call.twin),
        Entry("onnxruntime-unfused", "ONNX Runtime, norms not fused", MODEL_GROUP, ort, unfused),
        Entry("onnxruntime", "ONNX Runtime", MODEL_GROUP, ort, lambda: onnx(bundle.model_path)),
        Entry("onnxruntime-kernels", "ONNX Runtime with our kernels", MODEL_GROUP, ort, kernels),
        Entry("onnxruntime-layernorm", "ONNX Runtime with LayerNorm", MODEL_GROUP, ort, twin),
    ]


def norm_entries(case: NormCase, threads: int, widen_bfloat16: bool = False) -> list[Entry]:
    """A single norm at the model's own width."""
    makers = norm_calls(case, threads, _library, widen_bfloat16)
    titles = {
        "norm-copy": ("Copy of the same bytes", "pytorch"),
        "norm-pytorch": ("PyTorch rms_norm", "pytorch"),
        "norm-pytorch-layernorm": ("PyTorch layer_norm", "pytorch"),
        "norm-onnxruntime": ("ONNX Runtime RMSNorm", "onnxruntime"),
        "norm-onnxruntime-kernels": ("ONNX Runtime RMSNorm, our kernels", "onnxruntime"),
        "norm-onnxruntime-layernorm": ("ONNX Runtime LayerNormalization", "onnxruntime"),
    }
    return [Entry(name, title, NORM_GROUP, kind, makers[name]) for name, (title, kind) in titles.items()]


def _library() -> Path:
    library = native_library("ort")
    if library is None:
        raise InputError("the custom ops are not built: run python -m rmsnorm_deploy.native build")
    return library


class _TorchModel:
    """The bundle's PyTorch model and its twin, called with the sample."""

    def __init__(self, bundle: BundleLike, sample: Sample, stack: ExitStack, exchanged: dict[str, int]) -> None:
        self._bundle, self._sample, self._stack, self._exchanged = bundle, sample, stack, exchanged
        self._program = bundle.program()

    def plain(self) -> Call:
        if self._bundle.eager is not None:
            return self._call(self._bundle.eager)
        if self._program is None:
            raise InputError("the bundle was made from an ONNX file and has no PyTorch model")
        return self._call(self._program.module(check_guards=False))

    def twin(self) -> Call:
        if self._bundle.eager is None:
            raise InputError("the PyTorch module is at hand only in the process that exports it")
        twin, self._exchanged["pytorch"] = torch_twin(self._bundle.eager, self._bundle.manifest["norms"])
        return self._call(twin)

    def _call(self, module: torch.nn.Module) -> Call:
        self._stack.enter_context(evaluating(module))
        args, kwargs = self._arguments()
        return torch_call(module, args, kwargs)

    def _arguments(self) -> tuple[Any, Mapping[str, Any]]:
        from rmsnorm_deploy.runtime.pytorch_session import arguments_like, nest

        signature = self._bundle.manifest["signature"]
        leaves: dict[str, Any] = {item["path"]: item["value"] for item in signature["constants"]}
        for item in signature["inputs"]:
            leaves[item.get("path", item["name"])] = to_torch(self._sample.feeds[item["name"]])
        if self._program is None:
            return (), nest(leaves)
        return arguments_like(self._program, tuple(signature["parameters"]), leaves)


def _machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:  # not Linux
        pass
    return {"processor": processor, "cores": os.cpu_count(), "system": platform.system()}


def _load() -> float | None:
    """How many cores others keep busy while this process sleeps; None where the system does not say.

    Not the load average: that is of the minute before, in which this very export was at work.
    """
    before = _ticks()
    time.sleep(_SAMPLE)
    after = _ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    return round((after[0] - before[0]) / (after[1] - before[1]) * (os.cpu_count() or 1), 2)


def _ticks() -> tuple[int, int] | None:
    """All cores' ticks since the system started: those at work, and all."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:  # not Linux
        return None
    counts = [int(field) for field in fields]
    waiting = counts[3] + counts[4]  # idle, and idle until a disk answers
    return sum(counts) - waiting, sum(counts)
