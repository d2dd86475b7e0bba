"""Complex numbers, as rotary embeddings are written with, in a program that PyTorch's exporter can write.

ONNX has no complex type, so the exporter writes pairs of real numbers, but knows only some operators on them. Those
that it lacks and that models use are spelled out on the pairs here: what moves numbers, scalars, exponentials, casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.export.quiet import silence

Tensor = torch.Tensor


def with_pairs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` itself where nothing is complex, else the same program with such operators spelled out."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    if not any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        return program
    with torch.no_grad(), silence():
        plain: torch.export.ExportedProgram = program.run_decompositions(dict(_table()))
    return plain


def _table() -> Mapping[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    moves: dict[Any, Callable[..., tuple[Any, ...]]] = {
        aten.detach.default: lambda x: (aten.detach.default,),
        aten.unsqueeze.default: lambda x, dim: (aten.unsqueeze.default, dim % (x.ndim + 1)),
        aten.expand.default: lambda x, size, **_: (aten.expand.default, [*size, 2]),
        aten.repeat.default: lambda x, times: (aten.repeat.default, [*times, 1]),
        aten.select.int: lambda x, dim, index: (aten.select.int, dim % x.ndim, index),
        aten.index.Tensor: lambda x, indices: (aten.index.Tensor, indices),
        aten.index_select.default: lambda x, dim, index: (aten.index_select.default, dim % x.ndim, index),
        aten.embedding.default: lambda x, index, *_: (aten.index.Tensor, [index]),
        aten.gather.default: lambda x, dim, index, **_: (
            *(aten.gather.default, dim % x.ndim),
            index.unsqueeze(-1).expand(*index.shape, 2),
        ),
        aten.constant_pad_nd.default: lambda x, pad, *value: (aten.constant_pad_nd.default, [0, 0, *pad], *value),
        aten.split.Tensor: lambda x, size, dim=0: (aten.split.Tensor, size, dim % x.ndim),
        aten.split_with_sizes.default: lambda x, sizes, dim=0: (aten.split_with_sizes.default, sizes, dim % x.ndim),
        aten.unbind.int: lambda x, dim=0: (aten.unbind.int, dim % x.ndim),
        aten.squeeze.default: lambda x: (aten.squeeze.default,),
        aten.squeeze.dims: lambda x, dims: (aten.squeeze.dims, [dim % x.ndim for dim in dims]),
    }
    composed = (
        *(aten.einsum.default, aten.broadcast_tensors.default, aten.pad.default, aten.tile.default),
        *(aten.repeat_interleave.self_int, aten.take_along_dim.default),
    )
    torchs = torch.export.default_decompositions()
    return {
        **{target: _moved(call) for target, call in moves.items()},
        **{target: _composed(torchs[target]) for target in composed},
        aten.where.self: _where,
        aten.mul.Scalar: _times,
        aten.mul.Tensor: _times,
        aten.exp.default: _exp,
        aten._to_copy.default: _to,
    }


def _moved(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on the pairs of its first argument; ``call`` says which, and with what arguments."""

    def spelled(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        target, *rest = call(x, *args, **kwargs)
        result = target(torch.view_as_real(x), *rest)
        return _complex(result) if isinstance(result, torch.Tensor) else [_complex(part) for part in result]

    return spelled


def _composed(decomposition: Any) -> Callable[..., Any]:
    """An operator that PyTorch itself makes of others, taken apart where it is complex."""

    def spelled(*args: Any, **kwargs: Any) -> Any:
        tensors = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in tensors):
            return NotImplemented
        return decomposition(*args, **kwargs)

    return spelled


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs)


def _parts(x: Tensor) -> Sequence[Tensor]:
    pairs = torch.view_as_real(x)
    return pairs.select(-1, 0), pairs.select(-1, 1)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if not (x.is_complex() and y.is_complex()):
        return NotImplemented
    return _complex(torch.where(condition.unsqueeze(-1), torch.view_as_real(x), torch.view_as_real(y)))


def _times(x: Tensor, factor: complex | Tensor) -> Any:
    if isinstance(factor, torch.Tensor) or not (x.is_complex() or isinstance(factor, complex)):
        return NotImplemented
    if not isinstance(factor, complex):
        return _complex(torch.view_as_real(x) * factor)
    if not x.is_complex():
        return _complex(torch.stack([x * factor.real, x * factor.imag], -1))
    real, imaginary = _parts(x)
    return _complex(
        torch.stack([real * factor.real - imaginary * factor.imag, real * factor.imag + imaginary * factor.real], -1)
    )


def _exp(x: Tensor) -> Any:
    if not x.is_complex():
        return NotImplemented
    real, angle = _parts(x)
    size = torch.exp(real)
    return _complex(torch.stack([size * torch.cos(angle), size * torch.sin(angle)], -1))


def _to(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or dtype == x.dtype or not (x.is_complex() or dtype.is_complex):
        return NotImplemented
    if not dtype.is_complex:
        return _parts(x)[0].to(dtype)
    real = dtype.to_real()
    if x.is_complex():
        return _complex(torch.view_as_real(x).to(real))
    return _complex(torch.stack([x.to(real), torch.zeros_like(x, dtype=real)], -1))
