"""Whether an argument is of the kind that the model was exported with: a tensor, a sequence, or a dict of such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.runtime.signature import Signature, quoted
from rmsnorm_deploy.runtime.tensors import describe, is_array


def check_kinds(signature: Signature, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a call by parameter. Caches and other classes of their own are left to their leaves.

    Raises:
        InputError: a container where a tensor is taken, or the other way round, or a container of another kind; the
            parameter is named with what is expected.
    """
    for name, value in arguments.items():
        _check(signature, name, value)


def _check(signature: Signature, path: str, value: Any) -> None:
    spec = next((spec for spec in signature.inputs if spec.path == path), None)
    if spec is not None:
        if type(value) in (tuple, list, dict):
            raise InputError(f"argument {path!r} must be a tensor {spec}; got {_kind(value)}{_hint(signature, value)}")
        return
    parts = _parts(signature, path)
    if not parts:
        return
    if not _fits(parts, value):
        raise InputError(f"argument {path!r} must be {_wanted(signature, path, parts)}; got {_kind(value)}")
    if type(value) is dict:
        for key, item in value.items():
            _check(signature, f"{path}.{key}", item)
    elif type(value) in (tuple, list):
        for index, item in enumerate(value):
            _check(signature, f"{path}.{index}", item)


def _parts(signature: Signature, path: str) -> list[str]:
    """The keys below a path that is a container, in order; none for a leaf."""
    paths = [*(spec.path for spec in signature.inputs), *signature.constants]
    return list(dict.fromkeys(p[len(path) + 1 :].split(".")[0] for p in paths if p.startswith(f"{path}.")))


def _fits(parts: list[str], value: Any) -> bool:
    numbered = all(part.isdecimal() for part in parts)
    if type(value) is dict:
        return not numbered or not value or any(str(key) in parts for key in value)
    if type(value) in (tuple, list):
        return numbered
    return value is None or not (is_array(value) or isinstance(value, str | int | float))


def _wanted(signature: Signature, path: str, parts: list[str]) -> str:
    tensors = {spec.path: str(spec) for spec in signature.inputs}
    inside = [f"{part}: {tensors[f'{path}.{part}']}" if f"{path}.{part}" in tensors else part for part in parts]
    if all(part.isdecimal() for part in parts):
        return f"a tuple or list of {len(parts)} ({', '.join(inside)})"
    return f"a dict of {len(parts)} ({', '.join(inside)})"


def _kind(value: Any) -> str:
    if is_array(value):
        return f"a tensor {describe(value)}"
    if type(value) is dict:
        return f"a dict with {quoted([str(key) for key in value])}"
    return f"a {type(value).__name__} of {len(value)}" if type(value) in (tuple, list) else f"a {type(value).__name__}"


def _hint(signature: Signature, value: Any) -> str:
    """What was meant, where that can be told."""
    if type(value) is dict and value and set(value) <= set(signature.parameters):
        return ": pass them by name, as session(**arguments)"
    if type(value) is dict:
        names = {spec.name for spec in signature.inputs}
        return ": session.run() takes inputs by name" if value and set(value) <= names else ": pass the tensor itself"
    if len(value) == 1 and is_array(value[0]):
        return ": pass the tensor itself"
    return ": pass one tensor" if value and is_array(value[0]) else ": make a tensor of it"
