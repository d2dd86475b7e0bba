"""Example inputs for tracing: an axis that shall be dynamic must not have size one, or torch.export freezes it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, islice
from typing import Any

import torch
import torch.utils._pytree as pytree


def grown(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, names: list[str], batch_only: bool = False
) -> tuple[Any, Any]:
    """The example call with every dynamic axis of size one repeated; ``names`` are those of the positional arguments.

    Not to a size that the example has: an axis that is there to be broadcast would be tied to one of that size.
    ``dynamic_shapes`` is as in ``torch.export.export``: by name, or in the order of the arguments. With ``batch_only``
    the first axes alone are repeated, since others may be there to be broadcast, as the second one of a mask is.
    """
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    if isinstance(dynamic_shapes, tuple | list):
        dynamic_shapes = dict(zip(call, dynamic_shapes, strict=False))
    if not isinstance(dynamic_shapes, Mapping):
        return args, dict(kwargs)
    sizes = _free_sizes(call)
    done = {name: _grow(value, dynamic_shapes.get(name), batch_only, sizes) for name, value in call.items()}
    named = min(len(args), len(names))
    return (*(done[name] for name in names[:named]), *args[named:]), {name: done[name] for name in kwargs}


def _free_sizes(call: Any) -> list[int]:
    """For each axis a size that no axis of the example has."""
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    taken = {size for tensor in tensors for size in tensor.shape}
    return [*islice((size for size in count(2) if size not in taken), max((t.ndim for t in tensors), default=0))]


def _grow(value: Any, spec: Any, batch_only: bool, sizes: list[int]) -> Any:
    if spec is None:
        return value
    if isinstance(value, torch.Tensor):
        axes = spec.items() if isinstance(spec, Mapping) else enumerate(spec) if isinstance(spec, tuple | list) else ()
        for axis, dim in axes:
            if value.shape[axis] == 1 and _is_dynamic(dim) and not (batch_only and axis % value.ndim):
                value = value.repeat_interleave(sizes[axis % value.ndim], dim=axis)
        return value
    if isinstance(value, Mapping) and isinstance(spec, Mapping):
        return {key: _grow(item, spec.get(key), batch_only, sizes) for key, item in value.items()}
    if isinstance(value, tuple | list) and isinstance(spec, tuple | list) and len(spec) == len(value):
        items = [_grow(item, part, batch_only, sizes) for item, part in zip(value, spec, strict=True)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _is_dynamic(dim: Any) -> bool:
    return dim is not None and not isinstance(dim, int) and dim is not torch.export.Dim.STATIC
