"""Which names a pickle may use. A .pt file is a program: what is not on this page or allowed by the user never runs.

A pickle names classes and functions as "module.name". ``Trust.resolve`` gives the object for a name that is known to be
safe, or allowed; it never imports a module because a *file* asks for it.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import functools
import importlib
import importlib.util
import inspect
import pathlib
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.usercode import import_file


def words(text: str) -> frozenset[str]:
    """Names, written as a line of text."""
    return frozenset(text.split())


# Roots of modules whose functions reach the system or run code: refused whoever asks.
FORBIDDEN = words(
    "os posix nt posixpath sys subprocess shutil socket importlib runpy ctypes _ctypes cffi pty code codeop "
    "codecs marshal pickle _pickle cloudpickle dill joblib webbrowser tempfile io _io http urllib requests ftplib "
    "smtplib asyncio multiprocessing threading _thread signal gc inspect operator _operator builtins __builtin__ "
    "pip setuptools distutils pkgutil zipimport timeit cProfile profile trace pdb bdb glob fileinput linecache "
    "atexit site"
)
_FORBIDDEN_PACKAGES = words(
    "torch.fx torch.jit torch.hub torch.package torch._C torch.utils.cpp_extension torch.serialization "
    "torch.multiprocessing numpy.lib numpy.f2py numpy.testing"
)

_ACTIVATIONS = words(
    "relu relu6 elu selu celu gelu silu mish leaky_relu tanh sigmoid softmax log_softmax softmin softplus "
    "softsign hardswish hardsigmoid hardtanh glu logsigmoid tanhshrink softshrink hardshrink normalize rms_norm "
    "layer_norm dropout linear scaled_dot_product_attention"
)
_TORCH_FUNCTIONS = words(
    "relu tanh sigmoid softmax log_softmax sin cos exp square sqrt rsqrt abs erf selu celu rms_norm"
)
_TORCH_NN_HELPERS = ("torch.nn.utils.weight_norm.WeightNorm", "torch.nn.utils.spectral_norm.SpectralNorm")


class OptimizedModule(nn.Module):
    """Stands in for torch.compile's wrapper of that name in a pickle: keeps the module, drops the compiler."""

    def __init__(self, module: nn.Module, *_: Any) -> None:
        super().__init__()
        self._orig_mod = module

    def __setstate__(self, state: Any) -> None:
        """The wrapper's own state is the compiler's."""


class _Dropped:
    """Stands in for what a model does without, such as the parts of torch.compile, whatever it is called with."""

    def __new__(cls, *_: Any) -> _Dropped:
        return object.__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Nothing is kept."""

    def __setstate__(self, state: Any) -> None:
        """Nothing is kept."""


class _TorchFunctions:
    """Stands in for torch._C._VariableFunctionsClass, from which functions such as torch.tanh are fetched by name."""


def _getattr(owner: Any, name: str) -> Any:
    """``builtins.getattr`` for pickles: torch's own functions by name, and parts of what is dropped."""
    if owner is _TorchFunctions and name in _TORCH_FUNCTIONS:
        return getattr(torch, name)
    if owner is _Dropped or isinstance(owner, _Dropped):
        return _Dropped()
    raise pickle.UnpicklingError(f"the file asks for the attribute {name!r} of {owner!r}, which is not allowed")


def _fixed() -> dict[str, Any]:
    """Names that are safe in every file."""
    safe: dict[str, Any] = {
        "builtins.getattr": _getattr,
        "torch._C._VariableFunctionsClass": _TorchFunctions,
        "torch._dynamo.eval_frame.OptimizedModule": OptimizedModule,
        "torch._TorchCompileInductorWrapper": _Dropped,
        "contextlib.nullcontext": _Dropped,
        "_io.BytesIO": _Dropped,  # TransformerEngine keeps a module's extra state in one, which is no weight
        "argparse.Namespace": argparse.Namespace,
        "types.SimpleNamespace": types.SimpleNamespace,
        "collections.defaultdict": collections.defaultdict,
        "collections.deque": collections.deque,
        "functools.partial": functools.partial,
        "pathlib.PosixPath": pathlib.PurePosixPath,
        "pathlib.PurePosixPath": pathlib.PurePosixPath,
        "pathlib.WindowsPath": pathlib.PureWindowsPath,
        "pathlib.PureWindowsPath": pathlib.PureWindowsPath,
    }
    for name in words("frozenset list tuple dict int float bool str bytes slice range object"):
        safe[f"builtins.{name}"] = getattr(builtins, name)
    for owner in ("numpy._core.multiarray", "numpy.core.multiarray"):  # since numpy 2, and before
        safe[f"{owner}.scalar"] = np.float64(0).__reduce__()[0]
        safe[f"{owner}._reconstruct"] = np.zeros(0).__reduce__()[0]
    safe.update({"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype})
    for name in _ACTIVATIONS:
        for module, where in ((F, "torch.nn.functional"), (torch._C._nn, "torch._C._nn")):
            if hasattr(module, name):
                safe[f"{where}.{name}"] = getattr(module, name)
    return safe


# Classes of numpy's dtypes, whose state a pickle of a scalar or an array sets without naming them.
NUMPY_DTYPES = [found for found in vars(np.dtypes).values() if inspect.isclass(found) and issubclass(found, np.dtype)]


class Trust:
    """The names allowed in one load: the fixed ones, torch.nn's modules, this package's, and the user's."""

    def __init__(
        self, imports: Iterable[Any] = (), allow_classes: Iterable[str] = (), modules: Iterable[types.ModuleType] = ()
    ) -> None:
        """Import what the user named.

        ``imports``: .py files whose classes are allowed; ``allow_classes``: "mod.Class" or "mod.*"; ``modules``:
        imported already, and allowed as files are (a recipe).
        """
        self._names = _fixed()
        self._files = [*map(import_file, imports), *modules]
        for name in allow_classes:
            function = None if is_forbidden(name) else self._defined(name, inspect.isfunction)
            self._names.update({name: function} if function is not None else allowed_objects(name))

    @property
    def files(self) -> list[pathlib.Path]:
        """The files whose classes are allowed."""
        return [pathlib.Path(str(module.__file__)) for module in self._files]

    def resolve(self, name: str) -> Any | None:
        """The object for a name in a pickle, or None when it is not allowed."""
        if name in self._names:
            return self._names[name]
        if name.startswith(("torch._dynamo.", "torch._inductor.", "numpy.random.")):
            return _Dropped
        return _torch_module(name) or _own_class(name) or self._defined(name, inspect.isclass)

    def _defined(self, name: str, is_kind: Callable[[object], bool]) -> Any | None:
        """What a file defines itself: what it imports is somebody else's.

        A pickle that was saved by a script, or whose module has been renamed since, is served by the one file that
        defines the name.
        """
        owner, _, attribute = name.rpartition(".")
        found = {
            pathlib.Path(str(module.__file__)).stem: getattr(module, attribute)
            for module in self._files
            if is_kind(getattr(module, attribute, None)) and getattr(module, attribute).__module__ == module.__name__
        }
        namesake = found.get(owner.split(".")[-1])
        return namesake if namesake is not None else next(iter(found.values())) if len(found) == 1 else None


def allowed_objects(option: str) -> dict[str, Any]:
    """What ``--allow-class mod.Class`` or ``--allow-class mod.*`` allows: name -> class or function."""
    module_name, _, attribute = option.rpartition(".")
    if not module_name or not attribute:
        raise InputError(f"--allow-class {option}: must be MODULE.CLASS, or MODULE.* for every class of a module")
    if is_forbidden(option):
        raise InputError(f"--allow-class {option}: is never allowed: it can run commands or code")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing the user's module may raise anything
        text = str(error).splitlines()[0] if str(error) else ""
        raise InputError(
            f"--allow-class {option}: importing {module_name} failed with {type(error).__name__}: {text}"
        ) from error
    if attribute == "*":
        return {
            f"{module_name}.{n}": c
            for n, c in vars(module).items()
            if inspect.isclass(c) and c.__module__ == module_name
        }
    found = getattr(module, attribute, None)
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        raise InputError(f"--allow-class {option}: {module_name} has no class of the name {attribute}")
    if is_forbidden(f"{found.__module__}.{attribute}"):
        real = f"{found.__module__}.{attribute}"
        raise InputError(f"--allow-class {option}: is {real}, which is never allowed: it can run commands or code")
    return {option: found}


def is_forbidden(name: str) -> bool:
    """Whether a name reaches the system or runs code."""
    return name.split(".")[0] in FORBIDDEN or any(name.startswith(p + ".") for p in _FORBIDDEN_PACKAGES)


def _torch_module(name: str) -> Callable[..., Any] | None:
    """A class of torch.nn that is an nn.Module, found among what is imported."""
    module, _, attribute = name.rpartition(".")
    if not module.startswith("torch.nn.") or module not in sys.modules:
        return None
    found = getattr(sys.modules[module], attribute, None)
    is_module = inspect.isclass(found) and issubclass(found, nn.Module) and found.__module__ == module
    return found if is_module or name in _TORCH_NN_HELPERS else None


def _own_class(name: str) -> type | None:
    """This package's modules."""
    module, _, attribute = name.rpartition(".")
    if module != "rmsnorm_deploy.norm":
        return None
    found = getattr(importlib.import_module(module), attribute, None)
    return found if inspect.isclass(found) and issubclass(found, nn.Module) else None
