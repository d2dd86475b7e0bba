"""Sessions on ONNX Runtime: IO binding without copies, our custom ops where they are built."""

from __future__ import annotations

import ctypes
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir
import torch
import torch.utils.dlpack

from rmsnorm_deploy import native
from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.runtime.empties import dies_of_empty, is_empty, refusal
from rmsnorm_deploy.runtime.optional import load_module, native_library, one_line
from rmsnorm_deploy.runtime.ort_plugins import create_session, error_types
from rmsnorm_deploy.runtime.ort_providers import Provider, provider_names, resolve_providers
from rmsnorm_deploy.runtime.session import BundleLike, Session
from rmsnorm_deploy.runtime.tensors import DTYPES, NAME_OF_ONNX, Array, Buffer, buffer_of, ort_value, torch_dtype

if TYPE_CHECKING:
    from rmsnorm_deploy.runtime.widen import Widened

INSTALL = "pip install onnxruntime (or onnxruntime-gpu)"

# Options that have the weights of a widened model, and of which: they take each name once.
_WITH_WEIGHTS: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()

# What the names of the providers that run on NVIDIA's GPUs begin with.
_ON_CUDA = ("CUDA", "Tensorrt", "NvTensorRT")

OPTIMIZATION = {
    "all": "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "disabled": "ORT_DISABLE_ALL",
}


class OnnxRuntimeSession(Session):
    """The bundle's model.onnx in an `onnxruntime.InferenceSession`, opened by path (external data may pass 2 GiB).

    Options:
        providers: execution providers, by name or (name, options), in order; the CPU's alone when None. Those that come
            in a package of their own, such as TensorRT-RTX's, are registered with ONNX Runtime.
        session_options: an `onnxruntime.SessionOptions` to start from.
        optimization: "all", "extended", "basic" or "disabled"; None is "all", or what ``session_options`` say.
        threads: threads within an op.
        custom_ops: "auto" registers our compiled ops where they are built and load; True insists; False does without.
            With ``session_options`` given, "auto" leaves them as they are: `rmsnorm_deploy.register` adds the ops. A
            session on a GPU needs our CUDA kernels too: each norm would be copied to the CPU and back without.
        engine_cache: folder in which the TensorRT and TensorRT-RTX providers keep what they build.
        widen_bfloat16: run each bfloat16 op that no provider has a kernel for in float32, its result rounded to
            bfloat16, in a copy of the graph: the CPU's provider has no bfloat16 products, for one. Nothing is widened
            unless asked for. The weights of such ops are in memory in float32.

    ``custom_ops`` afterwards is the library in use or None, and ``custom_ops_reason`` says why; ``widened`` is how
    often which op was widened.

    Contiguous tensors on the session's device are bound by address; strided ones are made contiguous first. CUDA
    tensors are taken by sessions with a CUDA or TensorRT provider, and the outputs are then on the same device.
    """

    backend = "onnxruntime"

    def __init__(
        self,
        bundle: BundleLike,
        *,
        providers: Sequence[str | Provider] | None = None,
        session_options: Any = None,
        optimization: str | None = None,
        threads: int | None = None,
        custom_ops: bool | Literal["auto"] = "auto",
        engine_cache: str | Path | None = None,
        widen_bfloat16: bool = False,
    ) -> None:
        super().__init__(bundle)
        cache = None if engine_cache is None else Path(engine_cache)
        self._ort = load_module("onnxruntime", INSTALL)
        self._errors = error_types(self._ort)
        self._providers = resolve_providers(self._ort.get_available_providers(), providers, bundle.manifest, cache)
        self._user_options = session_options
        self._settings = (optimization, threads)
        self._widens = widen_bfloat16
        self._model_path = bundle.model_path
        self._dies_of_empty: str | None = None  # "" once it is known that nothing does
        self._weights: Mapping[str, np.ndarray[Any, Any]] = {}  # ONNX Runtime reads them as long as it lives
        self.widened: Mapping[str, int] = {}
        self.custom_ops, self.custom_ops_reason = _choose_library(
            custom_ops, session_options is not None, [name for name, _ in self._providers]
        )
        self._session = self._open(bundle.model_path, insist=custom_ops is True)
        self.providers: list[str] = self._session.get_providers()
        self._check_providers(providers)
        self._check_names(bundle.model_path)

    def _open(self, model: Path, insist: bool) -> Any:
        if not model.is_file():
            raise InputError(f"no model at {model}: export it again")
        if self.custom_ops is not None:
            try:
                return self._create(model, self.custom_ops)
            except self._errors as error:
                reason = f"{self.custom_ops.name} does not serve this model: {self._cause(error, model)}"
                if insist:
                    raise BackendUnavailable(f"custom ops were asked for, and {reason}") from error
                # The function bodies in the file compute the same, so a library that lacks an op is no obstacle.
                self.custom_ops, self.custom_ops_reason = None, reason
        try:
            return self._create(model, None)
        except self._errors as error:
            cause = self._cause(error, model)
            raise InputError(f"onnxruntime {self._ort.__version__} cannot load {model}: {cause}") from error

    def _cause(self, error: BaseException, model: Path) -> str:
        """What ONNX Runtime says, and the option that helps where it lacks a kernel for bfloat16."""
        from rmsnorm_deploy.runtime.widen import holds_bfloat16

        text = one_line(error)
        if "NOT_IMPLEMENTED" in text and not self._widens and holds_bfloat16(model):
            return f"{text}; widen_bfloat16=True runs ops that have no bfloat16 kernel in float32"
        return text

    def _create(self, model: Path, library: Path | None) -> Any:
        options = self._options()
        if library is not None:
            native.add_ops(options, str(library))
        copy = self._widen(model, native.registered(options)) if self._widens else None
        if copy is None:
            return create_session(self._ort, str(model), options, self._providers)
        self.widened, self._weights = copy.ops, copy.weights
        _hand_over(self._ort, options, copy.weights, model)
        return create_session(self._ort, copy.model, options, self._providers)

    def _widen(self, path: Path, own_library: bool) -> Widened | None:
        import onnx_ir as ir

        from rmsnorm_deploy.runtime.widen import Kernels, widen_bfloat16

        if not hasattr(self._ort.OrtValue, "ortvalue_from_numpy_with_onnx_type"):  # which also takes bfloat16 inputs
            raise BackendUnavailable(
                f"widen_bfloat16 needs onnxruntime 1.20 or newer, and this is {self._ort.__version__}: upgrade it"
            )
        return widen_bfloat16(ir.load(path), path.parent, Kernels(self._ort, self._providers), own_library)

    def _options(self) -> Any:
        ort, (optimization, threads) = self._ort, self._settings
        options = self._user_options
        if options is None:
            options = ort.SessionOptions()
            options.log_severity_level = 4  # what it logs as errors arrives as exceptions too
        if optimization is not None:
            if optimization not in OPTIMIZATION:
                raise InputError(f"optimization {optimization!r} is not one of {', '.join(OPTIMIZATION)}")
            options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, OPTIMIZATION[optimization])
        if threads is not None:
            options.intra_op_num_threads = threads
        return options

    def _check_providers(self, asked: Sequence[str | Provider] | None) -> None:
        """ONNX Runtime goes on without a provider whose libraries do not load; who asked for it by name is told."""
        lost = [name for name in provider_names(asked or ()) if name not in self.providers]
        if lost:
            raise BackendUnavailable(
                f"{lost[0]} is in this onnxruntime but did not start (its CUDA or TensorRT libraries are missing or do "
                f"not match); started: {', '.join(self.providers)}"
            )

    def _check_names(self, model: Path) -> None:
        """The file and the manifest must speak of the same tensors, and of tensors only."""
        inputs = {value.name for value in self._session.get_inputs()}
        outputs = {value.name: value.type for value in self._session.get_outputs()}
        known = set(self.input_names)
        self._bound_inputs = [spec for spec in self.signature.inputs if spec.name in inputs]
        for name in [*sorted(inputs - known), *sorted(set(self.output_names) - set(outputs))]:
            raise InputError(f"{model} and its manifest.json differ in {name!r}: export the model again")
        for name in self.output_names:
            if not outputs[name].startswith("tensor("):
                raise InputError(f"output {name!r} of {model} is {outputs[name]}, and only tensors can be returned")

    def _refuse_empty(self, feeds: Mapping[str, Array]) -> None:
        """The file is searched once, when the first empty input comes."""
        if not is_empty(tuple(array.shape) for array in feeds.values()):
            return
        if self._dies_of_empty is None:
            self._dies_of_empty = dies_of_empty(ir.load(self._model_path)) or ""
        if self._dies_of_empty:
            raise InputError(refusal(self._dies_of_empty))

    def _execute(self, feeds: Mapping[str, Array]) -> list[torch.Tensor]:
        self._refuse_empty(feeds)
        buffers = {spec.name: self._buffer(spec.name, feeds[spec.name]) for spec in self._bound_inputs}
        cuda = next((buffer for buffer in buffers.values() if buffer.device == "cuda"), None)
        binding = self._session.io_binding()
        try:
            for name, buffer in buffers.items():
                _bind_input(binding, name, buffer)
            names = list(dict.fromkeys(self.output_names))  # a value may be several outputs, and is bound once
            for name in names:
                binding.bind_output(name, *(("cpu", 0) if cuda is None else ("cuda", cuda.device_index)))
            if cuda is not None:
                torch.cuda.current_stream(cuda.device_index).synchronize()
            self._session.run_with_iobinding(binding)
            if cuda is not None:
                binding.synchronize_outputs()
            fed = {buffer.address for buffer in buffers.values()}
            values = dict(zip(names, (_as_torch(value, fed) for value in binding.get_outputs()), strict=True))
            return [values[name] for name in self.output_names]
        except self._errors as error:
            raise InputError(f"onnxruntime {self._ort.__version__} cannot run the model: {one_line(error)}") from error

    def _buffer(self, name: str, array: Array) -> Buffer:
        buffer = buffer_of(name, array)
        if buffer.device == "cpu" or (buffer.device == "cuda" and self._runs_on_cuda):
            return buffer
        raise InputError(
            f"input {name!r} is on {buffer.device}, and this session runs on {', '.join(self.providers)}: "
            "move it to the CPU, or open the session with a provider of that device"
        )

    @property
    def _runs_on_cuda(self) -> bool:
        return any(name.startswith(_ON_CUDA) for name in self.providers)


def _hand_over(ort: types.ModuleType, options: Any, weights: Mapping[str, np.ndarray[Any, Any]], model: Path) -> None:
    """Give session options the weights of ``model``, unless they have them.

    Raises:
        InputError: they have the weights of another model.
    """
    if not weights or _WITH_WEIGHTS.get(options) == model:
        return
    if options in _WITH_WEIGHTS:
        raise InputError(f"session_options hold the weights of {_WITH_WEIGHTS[options]}: give fresh ones")
    options.add_external_initializers(list(weights), [ort_value(ort, array) for array in weights.values()])
    _WITH_WEIGHTS[options] = model


def _choose_library(
    custom_ops: bool | str, user_options: bool, providers: Sequence[str] = ()
) -> tuple[Path | None, str]:
    """The library to register, or None, and why."""
    if custom_ops not in (True, False, "auto"):
        raise InputError(f"custom_ops {custom_ops!r} is not one of 'auto', True, False")
    if custom_ops is False:
        return None, "custom_ops=False"
    if custom_ops == "auto" and user_options:
        return None, "session_options were given: rmsnorm_deploy.register(session_options) adds the ops to them"
    library = native_library("ort")
    if library is None:
        reason = "the custom ops are not built"
        command = "python -m rmsnorm_deploy.native build"
    elif any(name.startswith(_ON_CUDA) for name in providers) and native_library("cuda") is None:
        reason = "the custom ops have no CUDA kernels here, and the session runs on a GPU"
        command = "python -m rmsnorm_deploy.native build --cpu --cuda"
    else:
        return library, f"registered {library.name}"
    if custom_ops is True:
        raise BackendUnavailable(f"{reason}: run {command}")
    return None, reason


def _bind_input(binding: Any, name: str, buffer: Buffer) -> None:
    _, numpy_type, onnx_type = DTYPES[buffer.dtype]
    # Numpy's types are what every version takes; a number stands for a type that numpy does not have itself.
    element = onnx_type if buffer.dtype == "bfloat16" else numpy_type
    binding.bind_input(name, buffer.device, buffer.device_index, element, list(buffer.shape), buffer.address)


def _as_torch(value: Any, fed: set[int]) -> torch.Tensor:
    """An OrtValue as a tensor over the same memory, except where that memory is the caller's own input."""
    dtype = torch_dtype(NAME_OF_ONNX[value.element_type()])
    if not hasattr(value, "__dlpack__"):
        return _copy_out(value, dtype)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
    if tensor.dtype != dtype:  # versions before DLPack had a bool give it as uint8
        tensor = tensor.view(dtype)
    # A model that passes an input through hands back the fed address, which nobody keeps alive.
    return tensor.clone() if tensor.data_ptr() in fed else tensor


def _copy_out(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """For versions of ONNX Runtime that export no DLPack: a copy of the OrtValue's CPU memory, of any dtype."""
    if value.device_name() != "cpu":
        raise DeployError("this onnxruntime has no DLPack to hand over CUDA outputs: upgrade it, or feed CPU tensors")
    shape = list(value.shape())
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        ctypes.memmove(tensor.data_ptr(), value.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor
