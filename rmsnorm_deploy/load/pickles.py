"""Reads what ``torch.save`` wrote without running anything that is not trusted."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import safe_globals

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.advice import advice
from rmsnorm_deploy.load.quantized import CURE, is_quantized_class
from rmsnorm_deploy.load.trust import NUMPY_DTYPES, Trust, is_forbidden

_ALWAYS = torch._weights_only_unpickler._get_allowed_globals
# What a load may raise for a file that is damaged or whose classes have another shape than the ones at hand.
LOAD_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    AssertionError,
    OSError,
    ImportError,
    pickle.UnpicklingError,
    struct.error,
)


def load_checkpoint(path: Path, trust: Trust) -> Any:
    """The object in a ``torch.save`` file, tensors on the CPU.

    Raises InputError for a name that must never run, for names that nobody allowed (with the options that would), and
    for a damaged file.
    """
    names = used_names(path)
    allowed = allow(path, names, trust)
    try:
        with safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except LOAD_ERRORS as error:
        raise InputError(_reason(path, error)) from error


def allow(path: Path, names: set[str], trust: Trust) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """torch's list of safe globals for the names that a pickle uses; InputError when one of them is not allowed."""
    unknown = {name: trust.resolve(name) for name in sorted(names - set(_ALWAYS()))}
    missing = [name for name, found in unknown.items() if found is None]
    quantized = [name for name in missing if is_quantized_class(name)]
    if quantized:
        raise InputError(f"{path}: a quantized model, with {quantized[0]}: {CURE}")
    evil = [name for name in missing if is_forbidden(name)]
    if evil:
        raise InputError(
            f"{path}: refused: loading it would run {', '.join(evil)}, which can execute any command, and no option "
            f"allows that; get the model as a state dict, safetensors or .pt2"
        )
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise InputError(
            f"{path}: holds {', '.join(missing)}, not known to be safe to load; "
            f"if you trust {them} add {advice(missing, path, trust.files)}"
        )
    given = [(found, name) for name, found in unknown.items() if found is not None]
    return [*given, *(NUMPY_DTYPES if "numpy.dtype" in names else ())]


def used_names(path: Path) -> set[str]:
    """Every "module.name" that the pickles of a file mention, read without running them."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                inner = [n for n in archive.namelist() if n.split("/", 1)[-1] == "data.pkl"]
                return set().union(*(set(names_in(io.BytesIO(archive.read(n)))) for n in inner))
        with path.open("rb") as file:
            return set(_names_in_legacy(path, file))
    except InputError:
        raise
    except (ValueError, zipfile.BadZipFile, EOFError, IndexError, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: a damaged or cut-off file, or not one that torch.save wrote ({error}): copy or download it again"
        ) from None


def names_in(file: IO[bytes]) -> Iterator[str]:
    """Names in one pickle, which ends where it says; Python 2 names are given as torch reads them."""
    strings: list[str] = []
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("GLOBAL", "INST"):
            module, name = str(argument).split(" ", 1)
            yield _modern(module, name)
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(strings[-2:])
        elif isinstance(argument, str):
            strings.append(argument)


def _names_in_legacy(path: Path, file: IO[bytes]) -> Iterator[str]:
    """Before torch 1.6: five pickles in a row (magic, protocol, system, object, storage keys), then raw bytes."""
    magic = [a for o, a, _ in pickletools.genops(file) if o.name.startswith("LONG")]
    if magic != [torch.serialization.MAGIC_NUMBER]:
        raise InputError(f"{path}: a pickle that torch.save did not write: load it where it was made and torch.save it")
    for _ in range(4):
        yield from names_in(file)


def _modern(module: str, name: str) -> str:
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[(module, name)]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


def _reason(path: Path, error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "PytorchStreamReader" in text or isinstance(error, EOFError):
        return f"{path}: a damaged or cut-off file: copy or download it again"
    if "Unsupported operand" in text:
        return f"{path}: uses pickle opcodes that are not read safely: torch.save it again with the default protocol"
    if "Only persistent_load of storage" in text:
        return (
            f"{path}: a whole module in the format before torch 1.6: load it where it was made and torch.save it again"
        )
    text = text.split("WeightsUnpickler error:")[-1].split("Check the documentation")[0].strip()
    return f"{path}: cannot be loaded: {type(error).__name__}: {text[:200]}"
