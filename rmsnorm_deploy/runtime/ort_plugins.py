"""Execution providers that ONNX Runtime loads from packages of their own: plugin execution providers.

Such a package has a library and says where it is; ONNX Runtime registers it once a process and then lists the devices
that the provider runs on. A session is opened on one of these devices.
"""

from __future__ import annotations

import threading
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.runtime.optional import load_module, one_line

CPU = "CPUExecutionProvider"
TENSORRT_RTX = "NvTensorRTRTXExecutionProvider"

# The module of each provider's package; it has get_library_path().
PLUGINS: dict[str, str] = {TENSORRT_RTX: "onnxruntime_ep_nv_tensorrt_rtx"}

_LOCK = threading.Lock()
_REGISTERED: set[str] = set()

# What session options were given a device of: adding the same provider twice is an error of ONNX Runtime's.
_WITH_DEVICE: weakref.WeakKeyDictionary[Any, tuple[str, Mapping[str, str]]] = weakref.WeakKeyDictionary()


def install(name: str) -> str:
    """How to get the package of a plugin provider."""
    return f"pip install {PLUGINS[name].replace('_', '-')}"


def error_types(ort: types.ModuleType) -> tuple[type[Exception], ...]:
    """Every exception class that ONNX Runtime raises; its own have no common base."""
    state = ort.capi.onnxruntime_pybind11_state
    own = [item for item in vars(state).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, OSError)


def plugin_devices(ort: types.ModuleType, name: str) -> list[Any]:
    """The devices of a plugin provider, its library registered on the first call.

    Raises:
        BackendUnavailable: an onnxruntime without plugin providers, no such package, a library that does not load, or
            no device that it runs on.
    """
    if not hasattr(ort, "register_execution_provider_library"):
        raise BackendUnavailable(f"onnxruntime {ort.__version__} has no plugin providers such as {name}: upgrade it")
    with _LOCK:
        if not _devices(ort, name) and name not in _REGISTERED:
            _register(ort, name)
            _REGISTERED.add(name)
    found = _devices(ort, name)
    if not found:
        raise BackendUnavailable(f"{name} is installed and registered, and finds no device here that it runs on")
    return found


def _devices(ort: types.ModuleType, name: str) -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == name]


def _register(ort: types.ModuleType, name: str) -> None:
    package = load_module(PLUGINS[name], install(name))
    try:
        ort.register_execution_provider_library(name, package.get_library_path())
    except error_types(ort) as error:
        version = getattr(package, "__version__", "of unknown version")
        text = one_line(error)
        raise BackendUnavailable(f"{name} {version} is installed and cannot be registered: {text}") from error


def create_session(
    ort: types.ModuleType, model: str | bytes, options: Any, providers: Sequence[tuple[str, dict[str, Any]]]
) -> Any:
    """An `onnxruntime.InferenceSession` on these providers, in order; plugin providers are registered first.

    ``model`` is a path, or a model serialized.

    ``device_id`` among the options of a plugin provider says which of its devices, 0 being the first.

    Raises:
        BackendUnavailable: a plugin provider, or its device, is not there.
        InputError: the session options name providers already.
    """
    present = ort.get_available_providers()
    plugins = [name for name, _ in providers if name not in present]
    if not plugins:
        return ort.InferenceSession(model, options, providers=providers)
    devices = {name: plugin_devices(ort, name) for name in plugins}
    # Its fallback to the CPU would print to standard output and hide what went wrong.
    (first, settings), *rest = providers
    if first in devices and all(name == CPU for name, _ in rest):
        _add_device(options, first, settings, devices[first])
        return ort.InferenceSession(model, options, enable_fallback=0)
    with warnings.catch_warnings():  # it warns of names that are not built in, and goes on to find them
        warnings.simplefilter("ignore", UserWarning)
        return ort.InferenceSession(model, options, providers=providers, enable_fallback=0)


def _add_device(options: Any, name: str, settings: Mapping[str, Any], devices: Sequence[Any]) -> None:
    """Give session options the device; options that have it already, with the same settings, are left as they are."""
    given = {key: str(value) for key, value in settings.items() if key != "device_id"}
    number = str(settings.get("device_id", 0))
    if not number.isdecimal() or int(number) >= len(devices):
        raise BackendUnavailable(f"{name} has no device_id {number!r} here: it has 0 to {len(devices) - 1}")
    wanted = (name, {**given, "device_id": number})
    if not options.has_providers():
        options.add_provider_for_devices([devices[int(number)]], given)
        _WITH_DEVICE[options] = wanted
    elif _WITH_DEVICE.get(options) != wanted:
        raise InputError(f"session_options name other providers than {name}: give fresh ones, or no providers=")
