"""Sessions on TensorRT and TensorRT-RTX: the engines that `python -m rmsnorm_deploy.engine` leaves in a bundle.

Both libraries have the same Python interface, so one class serves them; the GPU is behind `CudaDevice`.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.runtime.cuda import CudaDevice
from rmsnorm_deploy.runtime.engines import (
    EngineRecord,
    check_dtypes,
    check_tensors,
    checked_bytes,
    choose_engine,
    read_engines,
)
from rmsnorm_deploy.runtime.lru import LRU
from rmsnorm_deploy.runtime.optional import load_module, one_line
from rmsnorm_deploy.runtime.profiles import Shape, choose_profile
from rmsnorm_deploy.runtime.rtx_library import ensure_rtx_library
from rmsnorm_deploy.runtime.session import BundleLike, Session
from rmsnorm_deploy.runtime.tensors import Array, torch_dtype
from rmsnorm_deploy.runtime.trust import built_here

MODULES = {
    "tensorrt": ("tensorrt", "pip install tensorrt"),
    "tensorrt-rtx": ("tensorrt_rtx", "pip install tensorrt-rtx-cu13"),
}

DTYPE_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}


def open_tensorrt(
    bundle: BundleLike,
    *,
    backend: str = "tensorrt",
    engine: str | None = None,
    cuda_graph: bool = False,
    graph_cache: int = 8,
    device: int | None = None,
    allow_host_code: bool | None = None,
) -> TensorRTSession:
    """Open an engine of ``bundle`` on the current GPU.

    Options:
        engine: its name; None takes the fastest that runs here.
        cuda_graph: replay a CUDA graph for each set of input shapes.
        graph_cache: how many such graphs a thread keeps, each with an execution context of its own.
        device: index of the GPU; the current one when None.
        allow_host_code: an engine may embed our plugin library, which is machine code that runs with your rights. None
            allows it in engines that you built on this machine, True in all: pass it for a bundle whose origin you
            trust, since the checks of hashes find damage and mix-ups, not malice. False allows it in none. Engines
            without the library need no leave, and are given none.

    Raises:
        BackendUnavailable: the package, a GPU, or an engine for them is not there; names both sides of a mismatch. Or
            the code in the engine is not allowed.
        InputError: a model or engine that cannot be used, or no engine of that name.
    """
    module = load_module(*MODULES[backend])
    return TensorRTSession(
        bundle, module, CudaDevice(device), backend, engine, graph_cache if cuda_graph else 0, allow_host_code
    )


@dataclass
class _Graph:
    """A captured run: buffers it reads and writes, and the context it was captured from, which must not change."""

    inputs: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    replay: Callable[[], None]
    context: Any


class _PerThread(threading.local):
    """What each thread has to itself: a stream, an execution context a profile, graphs a set of shapes."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.contexts: dict[int, Any] = {}
        self.graphs: LRU[tuple[Any, ...], _Graph] | None = None


class TensorRTSession(Session):
    """An engine, run with `set_tensor_address` on CUDA tensors in place; CPU arrays go through pinned memory.

    Outputs are where the inputs are. Threads may share a session: each has execution contexts and a stream of its own.
    """

    def __init__(
        self,
        bundle: BundleLike,
        module: types.ModuleType,
        device: CudaDevice,
        backend: str,
        engine: str | None = None,
        graph_cache: int = 0,
        allow_host_code: bool | None = None,
    ) -> None:
        super().__init__(bundle)
        self.backend = backend
        check_dtypes(self.signature, backend)
        self._trt, self._device, self._graph_cache = module, device, graph_cache
        records = read_engines(bundle.path / "engines")
        self.record: EngineRecord = choose_engine(records, backend, module.__version__, device.sm, bundle.path, engine)
        self._logger = make_logger(module)
        self._runtime = module.Runtime(self._logger)
        self._engine = self._load(bundle.manifest, allow_host_code)
        check_tensors(self.record, self.signature, *engine_tensors(self._engine, module))
        self._local = _PerThread()

    def _load(self, manifest: Mapping[str, Any], allow_host_code: bool | None) -> Any:
        """The engine, deserialized; code in it may run only where it is ours, undamaged, and the caller allows it."""
        record = self.record
        data = checked_bytes(record, manifest)
        if record.plugin is not None:
            _check_trust(record, allow_host_code)
            if self.backend == "tensorrt-rtx":
                ensure_rtx_library()
            self._runtime.engine_host_code_allowed = True
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise InputError(f"{self.backend} cannot load {record.path}: {self._why()}: build the engine again")
        return engine

    def _why(self) -> str:
        return one_line(RuntimeError(self._logger.last_error or "no reason given"))

    def _execute(self, feeds: Mapping[str, Array]) -> list[torch.Tensor]:
        inputs = {spec.name: self._device.upload(spec.name, feeds[spec.name]) for spec in self.signature.inputs}
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        profile = choose_profile(self.record.profiles, shapes, f"engine {self.record.name}")
        if self._local.stream is None:
            self._local.stream = self._device.new_stream()
        with self._device.on(self._local.stream, list(inputs.values())) as stream:
            outputs = (self._replay if self._graph_cache else self._launch)(inputs, shapes, profile, stream)
        self._device.hand_over(outputs)
        on_gpu = any(isinstance(array, torch.Tensor) and array.device.type != "cpu" for array in feeds.values())
        return outputs if on_gpu else self._device.download(outputs)

    def _launch(
        self, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape], profile: int, stream: int
    ) -> list[torch.Tensor]:
        if profile not in self._local.contexts:
            self._local.contexts[profile] = self._new_context(profile, stream)
        context = self._local.contexts[profile]
        self._bind_inputs(context, inputs, shapes)
        outputs = [self._output(context, name) for name in self.output_names]
        self._enqueue(context, stream)
        return [output() for output in outputs]

    def _new_context(self, profile: int, stream: int) -> Any:
        context = self._engine.create_execution_context()
        if context is None:
            raise DeployError(f"{self.backend} cannot make an execution context: {self._why()}")
        if not context.set_optimization_profile_async(profile, stream):
            raise DeployError(f"{self.backend} cannot switch to profile {profile}: {self._why()}")
        return context

    def _bind_inputs(self, context: Any, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape]) -> None:
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, shapes[name]):
                raise InputError(f"{self.backend} refuses shape {shapes[name]} of input {name!r}: {self._why()}")
            context.set_tensor_address(name, self._address(tensor))

    def _output(self, context: Any, name: str) -> Callable[[], torch.Tensor]:
        """Bind memory for an output; the result gives its tensor once the run is queued."""
        dtype = self._dtype(name)
        shape = tuple(context.get_tensor_shape(name))
        if any(size < 0 for size in shape):  # the shape depends on the data: TensorRT asks for memory during the run
            allocator = make_allocator(self._trt, self._device.device)
            context.set_output_allocator(name, allocator)
            return lambda: allocator.tensor(name, dtype)
        tensor = torch.empty(shape, dtype=dtype, device=self._device.device)
        context.set_tensor_address(name, self._address(tensor))
        return lambda: tensor

    def _dtype(self, name: str) -> torch.dtype:
        return torch_dtype(next(spec.dtype for spec in self.signature.outputs if spec.name == name))

    def _address(self, tensor: torch.Tensor) -> int:
        """TensorRT takes no null addresses, which is what torch gives for tensors without elements."""
        if tensor.numel():
            return tensor.data_ptr()
        if not hasattr(self, "_nothing"):
            self._nothing = torch.empty(256, dtype=torch.uint8, device=self._device.device)
        return self._nothing.data_ptr()

    def _enqueue(self, context: Any, stream: int) -> None:
        if not context.execute_async_v3(stream):
            raise DeployError(f"{self.backend} failed to run engine {self.record.name}: {self._why()}")

    def _replay(
        self, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape], profile: int, stream: int
    ) -> list[torch.Tensor]:
        if self._local.graphs is None:
            # A context must not be destroyed while the GPU still runs what was captured from it.
            self._local.graphs = LRU(self._graph_cache, lambda _: self._local.stream.synchronize())
        key = (profile, *sorted(shapes.items()))
        graph = self._local.graphs.get(key, lambda: self._capture(inputs, shapes, profile, stream))
        for name, tensor in inputs.items():
            graph.inputs[name].copy_(tensor)
        graph.replay()
        return [output.clone() for output in graph.outputs]

    def _capture(
        self, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, Shape], profile: int, stream: int
    ) -> _Graph:
        """Capture one run. A graph is void once its context changes, so every graph has a context of its own."""
        context = self._new_context(profile, stream)
        fixed = {name: tensor.clone() for name, tensor in inputs.items()}
        self._bind_inputs(context, fixed, shapes)
        if any(size < 0 for name in self.output_names for size in context.get_tensor_shape(name)):
            raise InputError(
                "an output's shape depends on the data, which a CUDA graph cannot: open with cuda_graph=False"
            )
        outputs = [self._output(context, name)() for name in self.output_names]
        self._enqueue(context, stream)  # TensorRT finishes its set-up for new shapes in the first run
        replay = self._device.capture(self._local.stream, lambda handle: self._enqueue(context, handle))
        return _Graph(fixed, outputs, replay, context)


def _check_trust(record: EngineRecord, allowed: bool | None) -> None:
    """Raises BackendUnavailable where the code in the engine may not run."""
    code = f"engine {record.name} embeds the plugin library, which is machine code"
    if allowed is False:
        raise BackendUnavailable(f"{code}, and allow_host_code is False: build one with --plugin never")
    if allowed is None and not built_here(record.sha256):
        raise BackendUnavailable(
            f"{code}, and was not built here: pass allow_host_code=True if you trust where this bundle comes from, "
            "or build it here"
        )


def engine_tensors(engine: Any, module: Any) -> tuple[dict[str, str], dict[str, str]]:
    """(inputs, outputs) of an engine, name to dtype name."""
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        side = inputs if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT else outputs
        kind = engine.get_tensor_dtype(name).name
        side[name] = DTYPE_NAMES.get(kind, kind)
    return inputs, outputs


def make_logger(module: Any) -> Any:
    """A logger that keeps the library's last error, which is the only place where it says why something failed."""

    class Logger(module.ILogger):  # type: ignore[misc]
        last_error = ""

        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.Severity.ERROR, module.ILogger.Severity.INTERNAL_ERROR):
                self.last_error = message

    return Logger()


def make_allocator(module: Any, device: torch.device) -> Any:
    """Memory for an output whose shape only the run itself decides, from torch's allocator."""

    class Allocator(module.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IOutputAllocator.__init__(self)
            self.memory = torch.empty(0, dtype=torch.uint8, device=device)
            self.shape: tuple[int, ...] = ()

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            if size > self.memory.numel() or not self.memory.numel():
                self.memory = torch.empty(max(size, 256), dtype=torch.uint8, device=device)
            return self.memory.data_ptr()

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            return self.reallocate_output_async(name, memory, size, alignment, 0)

        def notify_shape(self, name: str, shape: Any) -> None:
            self.shape = tuple(shape)

        def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
            count = 1
            for size in self.shape:
                count *= size
            return self.memory[: count * dtype.itemsize].view(dtype).view(self.shape)

    return Allocator()
