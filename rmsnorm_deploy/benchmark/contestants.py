"""Calls to time: a model or a single norm, bound to its inputs once, with as little around it as the backend allows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.parity.ulp import Array
from rmsnorm_deploy.runtime.optional import load_module, one_line
from rmsnorm_deploy.runtime.tensors import DTYPES, dtype_name, ort_value, to_torch

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.runtime.widen import Widened

_FOLDER = "session.model_external_initializers_file_folder_path"


def onnxruntime_call(
    model: bytes,
    folder: Path,
    feeds: Mapping[str, Array],
    *,
    threads: int,
    library: Path | None = None,
    widen_bfloat16: bool = False,
) -> Call:
    """Runs serialized ``model``, whose external data are in ``folder``, on ``feeds``.

    ``widen_bfloat16``: as a session's option of that name.

    Threads spin while a run lasts, as they do for a user, but not after it: they would take time from whoever is
    measured next.

    Raises:
        BackendUnavailable: onnxruntime is not installed, or has no kernel for the model.
        InputError: the model does not load or run.
    """
    ort = load_module("onnxruntime", "pip install onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry(_FOLDER, str(folder))
    if library is not None:
        options.register_custom_ops_library(str(library))
    errors = _error_types(ort)
    copy = _widened(ort, model, folder, library is not None) if widen_bfloat16 else None
    if copy is not None:
        values = [ort_value(ort, array) for array in copy.weights.values()]
        options.add_external_initializers(list(copy.weights), values)
        model = copy.model
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        wanted = {value.name for value in session.get_inputs()}
        tensors = {name: to_torch(array).contiguous() for name, array in feeds.items() if name in wanted}
        for name, tensor in tensors.items():
            _, numpy_type, onnx_type = DTYPES[dtype_name(tensor)]
            element = onnx_type if tensor.dtype.is_floating_point and tensor.element_size() == 2 else numpy_type
            binding.bind_input(name, "cpu", 0, element, list(tensor.shape), tensor.data_ptr())
        for value in session.get_outputs():
            binding.bind_output(value.name, "cpu")
        session.run_with_iobinding(binding)
    except errors as error:
        kind = BackendUnavailable if "NOT_IMPLEMENTED" in str(error) else InputError
        raise kind(f"onnxruntime {ort.__version__}: {one_line(error)}") from error

    def call(keep_alive: Any = (tensors, copy)) -> None:
        session.run_with_iobinding(binding)

    return call


def _widened(ort: Any, model: bytes, folder: Path, own_library: bool) -> Widened | None:
    import onnx
    import onnx_ir as ir

    from rmsnorm_deploy.runtime.widen import Kernels, widen_bfloat16

    read = ir.from_proto(onnx.load_from_string(model))
    ir.external_data.set_base_dir(read.graph, folder)
    return widen_bfloat16(read, folder, Kernels(ort, [("CPUExecutionProvider", {})]), own_library)


def _error_types(ort: Any) -> tuple[type[Exception], ...]:
    state = ort.capi.onnxruntime_pybind11_state
    own = [item for item in vars(state).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*own, RuntimeError, ValueError, TypeError)


def torch_call(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Call:
    """Calls ``module`` without gradients, in evaluation mode when it has one.

    Raises:
        InputError: the module does not take the arguments.
    """
    import torch

    def call() -> None:
        with torch.no_grad():
            module(*args, **kwargs)

    try:
        call()
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, IndexError) as error:
        raise InputError(f"PyTorch cannot run it: {one_line(error)}") from error
    return call


class Threads:
    """Sets PyTorch's thread count for a while; None leaves it. ``count`` is what holds meanwhile."""

    def __init__(self, count: int | None) -> None:
        import torch

        self._before = torch.get_num_threads()
        self.count = count or self._before

    def __enter__(self) -> Threads:
        import torch

        torch.set_num_threads(self.count)
        return self

    def __exit__(self, *exception: Any) -> None:
        import torch

        torch.set_num_threads(self._before)


def evaluating(module: torch.nn.Module) -> Any:
    """A context in which ``module`` is in evaluation mode; its parts' own modes are restored."""
    import threading

    import torch

    if isinstance(module, torch.fx.GraphModule):
        return nullcontext()
    from rmsnorm_deploy.runtime.pytorch_session import evaluating as runtime_evaluating

    return runtime_evaluating(module, threading.Lock())
