"""Which axes of a call are dynamic, and what they are called, from what ``export_model`` is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.errors import InputError

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


def name_keywords(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Give ``model.forward`` a parameter for each of ``kwargs`` that its ``**rest`` takes.

    torch.export fails where a tensor among ``**rest`` has a dynamic axis.
    """
    forward = model.forward
    plain = inspect.signature(forward)
    others = [name for name in kwargs if name not in plain.parameters]
    if _rest(model) is None or not others:
        return

    def named(*args: Any, **given: Any) -> Any:
        return forward(*args, **given)

    kept = [p for p in plain.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
    named.__signature__ = plain.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    model.forward = named


def keywords_beside(model: torch.nn.Module, shapes: Any) -> Any:
    """``dynamic_shapes`` with those of ``**rest`` beside the others, which torch.export has in a dict of that name."""
    rest = _rest(model)
    if rest is None or not isinstance(shapes, Mapping) or not isinstance(shapes.get(rest), Mapping):
        return shapes
    return {**{key: spec for key, spec in shapes.items() if key != rest}, **shapes[rest]}


def _rest(model: torch.nn.Module) -> str | None:
    """The name of forward's ``**rest``."""
    parameters = inspect.signature(model.forward).parameters.values()
    return next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def take_names(call: Mapping[str, Any], shapes: Any) -> tuple[Any, Dims]:
    """``shapes`` as torch.export takes them, and the names that they hold, by path of the tensor.

    A name is a text, as ``torch.onnx.export`` takes it, or that of a ``Dim``. A text stands for an axis that must be
    dynamic: PyTorch says so where the model fixes its size. An axis may be counted from the end.

    Raises InputError for an axis that a tensor does not have, or that is named twice.
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
        return _axes(path, value.ndim, spec, dims)
    if isinstance(value, Mapping) and isinstance(spec, Mapping):
        return {key: _walk(f"{path}.{key}", value.get(key), part, dims) for key, part in spec.items()}
    if type(value) in (tuple, list) and type(spec) in (tuple, list) and len(value) == len(spec):
        parts = zip(value, spec, strict=True)
        return type(spec)(_walk(f"{path}.{i}", item, part, dims) for i, (item, part) in enumerate(parts))
    return spec


def _axes(path: str, rank: int, spec: Any, dims: Dims) -> Any:
    """A tensor's axes: by number, or one entry each."""
    if isinstance(spec, Mapping):
        items = _from_the_front(path, rank, spec)
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


def _from_the_front(path: str, rank: int, spec: Mapping[int, Any]) -> dict[int, Any]:
    """Axes as torch.export counts them, which drops a negative one without a word."""
    found: dict[int, Any] = {}
    for axis, dim in spec.items():
        if not -rank <= axis < rank:
            raise InputError(f"dynamic_shapes: axis {axis} of '{path}', which has axes 0 to {rank - 1}")
        if axis % rank in found:
            raise InputError(f"dynamic_shapes: axis {axis % rank} of '{path}' is given twice")
        found[axis % rank] = dim
    return found


def usual_names(call: Mapping[str, Any]) -> Dims:
    """Names for every axis that may be a batch or a sequence, of the tensors among a call's arguments.

    For TorchScript, where a name makes an axis dynamic and nothing checks it: the last axis of a float gets one only if
    its size can't be a width. One name is one size.
    """
    tensors = {path: value for path, value in call.items() if isinstance(value, torch.Tensor)}
    widths = {value.shape[-1] for value in tensors.values() if value.is_floating_point() and value.ndim > 2}
    sizes: dict[str, int] = {}
    names: Dims = {}
    for path, value in tensors.items():
        lengths = _lengths(other for other in tensors.values() if other is not value) - widths
        for axis in free_axes(value, lengths):
            usual = ("batch", "seq")[axis] if axis < 2 else ""
            fits = usual and sizes.setdefault(usual, value.shape[axis]) == value.shape[axis]
            names.setdefault(path, {})[axis] = usual if fits else f"{path}_dim{axis}"
    return names


@dataclass(frozen=True)
class Image:
    """What a convolution takes: ``rank`` axes, of which the second are ``channels`` and those behind it lengths."""

    rank: int
    channels: int

    @classmethod
    def of(cls, shape: Sequence[int | str]) -> Image:
        """Of a convolution's input, as ("batch", 3, "height", "width")."""
        return cls(len(shape), int(shape[1]))

    def lengths(self, shape: Sequence[object]) -> range:
        """Axes that are lengths in an input of this shape; one channel may be left out, as of audio."""
        if len(shape) == self.rank and shape[1] == self.channels:
            return range(2, self.rank)
        return range(1, self.rank - 1) if len(shape) == self.rank - 1 and self.channels == 1 else range(0)


def guesses(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], image: Image | None
) -> Iterator[dict[str, Any]]:
    """``dynamic_shapes`` with all that may be a batch, a sequence or a length as ``Dim.AUTO``; the boldest first.

    Dim.AUTO becomes a number where the model needs one, and an axis has a symbol of its own: a guess too many costs
    nothing where the trace succeeds. It may make it fail, so the second guess leaves out the last axis of all but
    integers, which is the width most of the time. ``image``: what the model takes if convolutions come first.
    """
    call = {**by_parameter(model, args), **kwargs}
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]

    def bold(value: torch.Tensor) -> range:
        others = [other for other in tensors if other is not value]
        # among inputs of one rank it is their width, which a model may well compute with
        widths = {other.shape[-1] for other in others if other.ndim == value.ndim > 2 and other.is_floating_point()}
        every = value.ndim == 1 or (image is not None and len(image.lengths(value.shape)) > 0)
        return range(value.ndim) if every else free_axes(value, _lengths(others) - widths)

    def careful(value: torch.Tensor) -> range:
        indices = not value.is_floating_point() and value.dtype != torch.bool
        return range(value.ndim if indices else value.ndim - 1)

    def shapes(axes: Callable[[torch.Tensor], range]) -> dict[str, Any]:
        def auto(value: Any) -> Any:
            return dict.fromkeys(axes(value), torch.export.Dim.AUTO) if isinstance(value, torch.Tensor) else None

        return {name: pytree.tree_map(auto, value) for name, value in call.items()}

    first, second = shapes(bold), shapes(careful)
    yield from [first] if first == second else [first, second]


def free_axes(value: torch.Tensor, lengths: Collection[int] = ()) -> range:
    """Axes that may be a batch or a sequence: all of an integer or bool tensor; of a float, the last one, which is the
    width most of the time, only where its size is one of ``lengths``, as a mask's is."""
    last = not value.is_floating_point() or (value.ndim > 0 and value.shape[-1] in lengths)
    return range(value.ndim if last else value.ndim - 1)


def _lengths(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {value.shape[axis] for value in tensors for axis in free_axes(value)}


def fixed_axes(inputs: Sequence[ir.Value], asked: Dims | None, image: Image | None) -> list[str]:
    """A line for each axis of a graph's inputs that ended with a size though a batch, a sequence or a length was due.

    ``asked``: the axes that were asked for, by input; None for the usual ones. A size of one beside an axis that is
    free in another input is broadcast, and not told.
    """
    free = {axis for value in inputs for axis, dim in enumerate(value.shape or ()) if not isinstance(dim, int)}
    found = []
    for value in inputs:
        due = _due(value, image) if asked is None else set(asked.get(value.name or "", {}))
        for axis, dim in enumerate(value.shape or ()):
            if axis in due and isinstance(dim, int) and not (dim == 1 and axis in free):
                found.append(f"axis {axis} of '{value.name}' is fixed at {dim}: the model needs the example's size")
    return found


def _due(value: ir.Value, image: Image | None) -> set[int]:
    """Axes of an input whose size a caller expects to choose."""
    shape, indices = value.shape or (), value.dtype is not None and not value.dtype.is_floating_point()
    if len(shape) == 1 and not indices:
        return set()  # weights, or one entry a row of another input
    sequence = {1} if indices or len(shape) == 3 else set()
    spatial = set(image.lengths(tuple(shape))) if image is not None else set()
    return {0} | (spatial or sequence)
