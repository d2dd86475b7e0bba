"""Finds what is quantized in a module: weights packed for PyTorch's own kernels, or whole numbers in their place.

Only asked of a model that could not be exported: one whose weights become floats by plain arithmetic can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

CURE = "export the float model, or dequantize it first"

_PYTORCHS = re.compile(  # modules in place of those of torch.nn; a float model has functional_modules, too
    r"torch\.(ao\.)?nn\.(\w+\.)*(quantized|qat)\.(?!modules\.functional_modules)"
    r"|torch\.ao\.quantization\.(observer|fake_quantize)\."
)
_WEIGHT_NAMES = ("weight", "W_q")


def quantized_modules(model: nn.Module) -> str | None:
    """Which modules of ``model`` are quantized, and what to do, in words; None where none is."""
    found = dict(_outermost(model))
    if not found:
        return None
    name, module = next(iter(found.items()))
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    more = f", and so are {len(found) - 1} more" if len(found) > 1 else ""
    where = f"its module {name!r} is quantized" if name else "it is quantized"
    return f"{where} ({kind}){more}: {CURE}"


def is_quantized_class(name: str) -> bool:
    """Whether a class, by its full name, is one of PyTorch's quantized modules or what observes for them."""
    return _PYTORCHS.match(name) is not None


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name.startswith(inside) and _is_quantized(module):
            inside = (*inside, f"{name}." if name else "")
            yield name, module


def _is_quantized(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    if is_quantized_class(f"{type(module).__module__}.{type(module).__qualname__}"):
        return True
    if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()):
        return True
    parameters, buffers = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    weights = [*parameters, *((name, tensor) for name, tensor in buffers if any(k in name for k in _WEIGHT_NAMES))]
    return any(_holds_codes(tensor) for _, tensor in weights)


def _holds_codes(tensor: torch.Tensor) -> bool:
    """Whether a weight, or what a tensor of a class of its own is made of, are numbers that stand for others."""
    if tensor.is_quantized:
        return True
    if hasattr(tensor, "__tensor_flatten__"):
        return any(_holds_codes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    if tensor.is_floating_point():
        return tensor.itemsize == 1
    return tensor.dtype is not torch.bool and not tensor.is_complex()
