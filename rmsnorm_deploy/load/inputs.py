"""From specs of inputs to a call with example tensors, named dims and torch.export's dynamic shapes."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import Dim

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.specs import ConstantSpec, Ranges, Spec, TensorSpec

# Example sizes of named dims: distinct, above 1 (torch specialises on 0 and 1), in the order in which names appear.
_PREFERRED = {"batch": 2, "seq": 5, "length": 5, "height": 24, "width": 28}
_SIZES = (3, 7, 6, 9, 11, 13, 10, 14, 17, 19, 23)


@dataclass
class Call:
    """Example arguments and what is known of them; fields as in ``Source``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: dict[str, dict[int, str]] = field(default_factory=dict)
    high: dict[str, int] = field(default_factory=dict)


def signature(model: torch.nn.Module) -> inspect.Signature:
    """The signature of ``forward`` without self; a TorchScript's schema is read as one."""
    if isinstance(model, torch.jit.ScriptModule):
        schema: Any = model._c._get_method("forward").schema
        names = [a.name for a in schema.arguments[1:]]
        defaults = [a.has_default_value() for a in schema.arguments[1:]]
        empty, kind = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
        pairs = zip(names, defaults, strict=True)
        return inspect.Signature([inspect.Parameter(n, kind, default=None if d else empty) for n, d in pairs])
    return inspect.signature(model.forward)


def required(parameters: inspect.Signature) -> list[str]:
    """Names of the parameters a call must give."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters.parameters.values() if p.default is p.empty and p.kind not in variadic]


def make_call(specs: Sequence[Spec], parameters: inspect.Signature, ranges: Ranges, seed: int = 0) -> Call:
    """Example tensors for ``specs``, arranged as ``parameters`` wants them.

    Raises InputError for a name that ``forward`` does not have, one that it needs and does not get, and a range of a
    dim that no input uses.
    """
    _check_names(specs, parameters)
    tensors = [s for s in specs if isinstance(s, TensorSpec)]
    sizes = example_sizes(tensors, ranges)
    values: dict[str, Any] = {}
    for spec in specs:
        leaf = spec.value if isinstance(spec, ConstantSpec) else example_tensor(spec, sizes, seed)
        _place(values, spec.path.split("."), leaf)
    args, kwargs = _arrange({k: _listed(k, v) for k, v in values.items()}, parameters)
    dims = {s.path: {i: d for i, d in enumerate(s.shape) if isinstance(d, str)} for s in tensors}
    high = {s.path: s.high for s in tensors if s.high}
    return Call(args, kwargs, {p: d for p, d in dims.items() if d}, high)


def example_sizes(specs: Iterable[TensorSpec], ranges: Ranges) -> dict[str, int]:
    """A size for every named dim: inside its range, and no two alike, fixed sizes of the same inputs included."""
    taken = {d for s in specs for d in s.shape if isinstance(d, int)}
    sizes: dict[str, int] = {}
    for name in (d for s in specs for d in s.shape if isinstance(d, str)):
        if name not in sizes:
            sizes[name] = _pick(name, ranges.get(name, (1, None)), taken)
            taken.add(sizes[name])
    for name in ranges:
        if name not in sizes:
            raise InputError(
                f"--dim {name}: no input has a dim of that name" + (f"; there is {', '.join(sizes)}" if sizes else "")
            )
    return sizes


def example_tensor(spec: TensorSpec, sizes: Mapping[str, int], seed: int = 0) -> torch.Tensor:
    """Values for one spec: normal for floats, below ``high`` for integers (0 and 1 without one), mixed for bools.

    Raises InputError for a tensor that there is no memory for.
    """
    generator = torch.Generator().manual_seed(seed + zlib.crc32(spec.path.encode()))
    shape = [d if isinstance(d, int) else sizes[d] for d in spec.shape]
    try:
        return _values(spec, shape, generator)
    except RuntimeError as error:  # torch's word for too little memory, and for more bytes than can be counted
        raise InputError(
            f"input {spec.path}: no memory for an example of {shape}: give smaller sizes (of a --dim, the least one)"
        ) from error


def _values(spec: TensorSpec, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    if spec.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex64).to(spec.dtype)
    return torch.randint(0, spec.high or 2, shape, generator=generator).to(spec.dtype)


def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of an argument with their paths: tuples and lists by index, dicts by key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from walk(item, f"{path}.{i}")
    else:
        yield path, value


def bind(parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name (extra keywords by their own); InputError when ``forward`` cannot take them."""
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"forward{parameters} cannot be called with these inputs: {error}") from None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if parameters.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def tensors_of(
    parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Every tensor of the call by path, in order."""
    leaves = (leaf for n, v in bind(parameters, args, kwargs).items() for leaf in walk(v, n))
    return {path: value for path, value in leaves if isinstance(value, torch.Tensor)}


def dynamic_shapes(
    parameters: inspect.Signature, call: Call, ranges: Ranges, hint: Any = Dim.DYNAMIC
) -> dict[str, Any] | None:
    """torch.export's ``dynamic_shapes`` for the named dims of a call, or None without any.

    Every named axis is ``hint``: Dim.DYNAMIC fails loudly when the model fixes the size, Dim.AUTO gives way.
    """
    if not call.dims:
        return None

    def axis(name: str) -> Any:
        low, high = ranges.get(name, (None, None))
        return hint(min=low, max=high) if name in ranges else hint

    def leaf(path: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return {i: axis(n) for i, n in call.dims.get(path, {}).items()} or None

    return {n: _map(leaf, v, n) for n, v in bind(parameters, call.args, call.kwargs).items()}


def check_dims(tensors: Mapping[str, torch.Tensor], dims: Mapping[str, Mapping[int, str]], who: str) -> None:
    """Named dims must be axes of tensors that are there, and one name one size; ``who`` starts the refusal."""
    sizes: dict[str, int] = {}
    for path, axes in dims.items():
        if path not in tensors:
            raise InputError(
                f"{who}: dims name '{path}', which is no tensor of the inputs: {', '.join(tensors) or 'none'}"
            )
        for i, name in axes.items():
            rank = tensors[path].ndim
            if not isinstance(i, int) or not 0 <= i < rank:
                raise InputError(f"{who}: dims name axis {i} of '{path}', which has axes 0 to {rank - 1}")
            size = tensors[path].shape[i]
            if sizes.setdefault(name, size) != size:
                raise InputError(f"{who}: dim '{name}' is {sizes[name]} in one input and {size} in '{path}'")


def _pick(name: str, bounds: tuple[int, int | None], taken: set[int]) -> int:
    low, high = bounds
    inside = [n for n in (_PREFERRED.get(name, 0), *_SIZES) if n >= max(low, 2) and (high is None or n <= high)]
    inside += range(max(low, 2), min(high if high is not None else low + 64, low + 64) + 1)
    return next((n for n in inside if n not in taken), inside[0])


def _check_names(specs: Sequence[Spec], parameters: inspect.Signature) -> None:
    known = parameters.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for spec in specs:
            if spec.path.split(".")[0] not in known:
                there = ", ".join(known) or "nothing"
                raise InputError(f"--input {spec.path}: forward has no parameter of that name; it takes {there}")
    missing = [n for n in required(parameters) if n not in {s.path.split(".")[0] for s in specs}]
    if missing:
        options = " ".join(f"--input '{n}=DTYPE[DIM,...]'" for n in missing)
        raise InputError(f"forward{parameters} needs {', '.join(missing)} as well: give {options}")


def _place(values: dict[str, Any], keys: list[str], leaf: Any) -> None:
    for key in keys[:-1]:
        values = values.setdefault(key, {})
    values[keys[-1]] = leaf


def _listed(path: str, value: Any) -> Any:
    """Dicts whose keys count 0, 1, 2 become tuples."""
    if not isinstance(value, dict):
        return value
    items = {k: _listed(f"{path}.{k}", v) for k, v in value.items()}
    if not all(k.isdecimal() for k in items):
        return items
    order = sorted(items, key=int)
    if [int(k) for k in order] != list(range(len(order))):
        raise InputError(f"--input {path}: the parts must be numbered from 0 without gaps, there is {', '.join(order)}")
    return tuple(items[k] for k in order)


def _arrange(values: dict[str, Any], parameters: inspect.Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional as far as it goes without a gap, the rest by keyword."""
    args: list[Any] = []
    rest = dict(values)
    for p in parameters.parameters.values():
        if p.kind is p.VAR_POSITIONAL and p.name in rest and isinstance(rest[p.name], tuple):
            args.extend(rest.pop(p.name))
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) or p.name not in rest:
            break
        args.append(rest.pop(p.name))
    return tuple(args), rest


def _map(leaf: Callable[[str, Any], Any], value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {k: _map(leaf, v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_map(leaf, v, f"{path}.{i}") for i, v in enumerate(value))
    return leaf(path, value)
