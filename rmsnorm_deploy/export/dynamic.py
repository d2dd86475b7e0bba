"""Which axes of a call are dynamic, and what they are called, from what ``export_model`` is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

Dims = dict[str, dict[int, str]]


def by_parameter(model: torch.nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by the names of forward's parameters; those of ``*rest`` are one tuple."""
    named: dict[str, Any] = {}
    parameters = list(inspect.signature(model.forward).parameters.values())
    for i, parameter in enumerate(parameters[: len(args)]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            named[parameter.name] = tuple(args[i:])
            break
        named[parameter.name] = args[i]
    return named


def take_names(call: Mapping[str, Any], shapes: Any) -> tuple[Any, Dims]:
    """``shapes`` as torch.export takes them, and the names that they hold, by path of the tensor.

    A name is a text, as ``torch.onnx.export`` takes it, or that of a ``Dim``. A text stands for an axis that must be
    dynamic: PyTorch says so where the model fixes its size.
    """
    dims: Dims = {}
    if isinstance(shapes, Mapping):
        return {key: _walk(key, call.get(key), spec, dims) for key, spec in shapes.items()}, dims
    if isinstance(shapes, tuple | list):
        taken = [_walk(key, value, spec, dims) for (key, value), spec in zip(call.items(), shapes, strict=False)]
        return type(shapes)([*taken, *shapes[len(taken) :]]), dims
    return shapes, dims


def _walk(path: str, value: Any, spec: Any, dims: Dims) -> Any:
    """One argument's part of the shapes, whose nesting is the argument's own."""
    if isinstance(value, torch.Tensor):
        return _axes(path, spec, dims)
    if isinstance(value, Mapping) and isinstance(spec, Mapping):
        return {key: _walk(f"{path}.{key}", value.get(key), part, dims) for key, part in spec.items()}
    if type(value) in (tuple, list) and type(spec) in (tuple, list) and len(value) == len(spec):
        parts = zip(value, spec, strict=True)
        return type(spec)(_walk(f"{path}.{i}", item, part, dims) for i, (item, part) in enumerate(parts))
    return spec


def _axes(path: str, spec: Any, dims: Dims) -> Any:
    """A tensor's axes: by number, or one entry each."""
    if isinstance(spec, Mapping):
        items = dict(spec)
    elif isinstance(spec, tuple | list):
        items = dict(enumerate(spec))
    else:
        return spec
    names = {axis: dim if isinstance(dim, str) else getattr(dim, "__name__", None) for axis, dim in items.items()}
    found = {axis: name for axis, name in names.items() if name is not None}
    if found:
        dims[path] = found
    plain = {axis: torch.export.Dim.DYNAMIC if isinstance(dim, str) else dim for axis, dim in items.items()}
    return plain if isinstance(spec, Mapping) else type(spec)(plain.values())


def usual_names(call: Mapping[str, Any]) -> Dims:
    """Names for every axis that may be a batch or a sequence, of the tensors among a call's arguments."""
    return {
        path: {axis: ("batch", "seq")[axis] if axis < 2 else f"{path}_dim{axis}" for axis in free_axes(value)}
        for path, value in call.items()
        if isinstance(value, torch.Tensor) and free_axes(value)
    }


def free_axes(value: torch.Tensor) -> range:
    """Axes that may be a batch or a sequence: an integer tensor's, all but the last of others."""
    indices = not value.is_floating_point() and value.dtype != torch.bool
    return range(value.ndim if indices else value.ndim - 1)
