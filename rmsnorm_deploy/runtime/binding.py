"""From a call `session(*args, **kwargs)` to arrays by input name, as `forward(*args, **kwargs)` would bind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.runtime.kinds import check_kinds
from rmsnorm_deploy.runtime.signature import Signature, TensorSpec, quoted
from rmsnorm_deploy.runtime.tensors import Array, describe, is_array, torch_dtype


def bind_call(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Arrays by input name for a call as the model was called.

    Nested tuples, lists, dicts and registered pytree nodes are flattened to paths ("pair.0", "extras.b"). Leaves that
    were constants at export must still have the value they had; absent ones take it.

    Raises:
        InputError: a missing or unexpected argument, or a constant that differs, by name.
    """
    leaves = call_leaves(signature, args, kwargs)
    feeds = {spec.name: _tensor_leaf(spec, leaves.pop(spec.path)) for spec in signature.inputs if spec.path in leaves}
    _check_constants(signature, leaves)
    missing = [spec for spec in signature.inputs if spec.name not in feeds]
    if missing:
        described = ", ".join(f"{spec.path!r} ({spec})" for spec in missing)
        raise InputError(f"missing argument{'s' * (len(missing) > 1)} {described}: the model was exported with it")
    return feeds


def call_leaves(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a call, by path."""
    parameters = signature.parameters or [spec.path for spec in signature.inputs]
    arguments = bind_parameters(parameters, args, kwargs)
    check_kinds(signature, arguments)
    if not signature.parameters:
        return arguments
    leaves: dict[str, Any] = {}
    for path, value in arguments.items():
        leaves.update(flatten(path, value))
    return leaves


def bind_parameters(parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Values by root path: a parameter's name, or "rest.0" and "rest.key" for what "*rest" and "**rest" take.

    Raises:
        InputError: too many positional arguments, one given twice, or one that no parameter takes.
    """
    named = [name for name in parameters if not name.startswith("*")]
    bound = dict(zip(named, args, strict=False))
    surplus = args[len(named) :]
    rest = next((name[1:] for name in parameters if name.startswith("*") and not name.startswith("**")), None)
    if rest is not None:
        named_before = parameters.index(f"*{rest}")
        bound, surplus = dict(zip(named[:named_before], args, strict=False)), ()
        bound.update({f"{rest}.{index}": value for index, value in enumerate(args[named_before:])})
    if surplus:
        raise InputError(f"{len(args)} positional arguments given, and the model takes {len(named)}: {quoted(named)}")
    keywords = next((name[2:] for name in parameters if name.startswith("**")), None)
    for name, value in kwargs.items():
        if name in bound:
            raise InputError(f"argument {name!r} was given by position and by name: give it once")
        if name not in named and keywords is None:
            raise InputError(f"unexpected argument {name!r}: the model takes {quoted(named)}")
        bound[name if name in named else f"{keywords}.{name}"] = value
    return bound


def flatten(root: str, value: Any) -> dict[str, Any]:
    """Leaves of a nested value by path, dots between the keys; None is a leaf, an empty container has none."""
    leaves: dict[str, Any] = {}
    _flatten_into(leaves, root, value)
    return leaves


def _flatten_into(leaves: dict[str, Any], path: str, value: Any) -> None:
    kind = type(value)
    if value is None or isinstance(value, (torch.Tensor, np.ndarray)):
        leaves[path] = value
    elif kind is tuple or kind is list:
        for index, item in enumerate(value):
            _flatten_into(leaves, f"{path}.{index}", item)
    elif kind is dict:
        for key, item in value.items():
            _flatten_into(leaves, f"{path}.{key}", item)
    else:  # named tuples, registered classes such as caches, and every other leaf
        for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
            leaves[".".join([path, *(key_text(key) for key in keys)])] = leaf


def key_text(key: Any) -> str:
    """One step of a path: the index, key or attribute that a pytree key stands for."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _tensor_leaf(spec: TensorSpec, leaf: Any) -> Array:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return leaf
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if isinstance(leaf, (bool, int, float)) and not spec.shape:
        return torch.tensor(leaf, dtype=torch_dtype(spec.dtype))
    given = "None" if leaf is None else f"a {type(leaf).__name__}"
    raise InputError(f"argument {spec.path!r} was a tensor {spec} at export; got {given}: pass a tensor")


def _check_constants(signature: Signature, leaves: Mapping[str, Any]) -> None:
    """What is left after the tensors are taken out must be what was fixed at export."""
    for path, given in leaves.items():
        if path in signature.constants:
            fixed = signature.constants[path]
            if not _same(fixed, given):
                raise InputError(
                    f"{path} was fixed at {fixed!r} when the model was exported; got {_short(given)}: export again"
                )
        elif given is not None or path not in signature.parameters:
            # A parameter that was left out at export may still be given as None, which says the same.
            known = [spec.path for spec in signature.inputs] + list(signature.constants)
            raise InputError(
                f"unexpected argument {path!r}: it was not given when the model was exported, which had {quoted(known)}"
            )


def _same(fixed: Any, given: Any) -> bool:
    """Equality as a manifest can hold it: what JSON has no type for is there as its text."""
    if is_array(given) or isinstance(fixed, bool) != isinstance(given, bool):
        return False
    if isinstance(fixed, float) and isinstance(given, float) and fixed != fixed:
        return given != given
    return bool(fixed == given) or (isinstance(fixed, str) and not isinstance(given, str) and fixed == str(given))


def _short(value: Any) -> str:
    return f"a tensor {describe(value)}" if is_array(value) else repr(value)
