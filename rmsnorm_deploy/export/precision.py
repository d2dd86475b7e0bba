"""A module in another dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast_module(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    """The module's floating-point weights in another dtype, in place.

    Rotary frequencies keep theirs: a half would round the angles.
    """
    dtype = PRECISIONS[precision]
    done: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                cast = done.setdefault(
                    id(parameter), torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                )
                module._parameters[name] = cast
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not name.endswith("inv_freq"):
                module._buffers[name] = buffer.to(dtype)
    return model


def cast_floats(value: Any, precision: str) -> Any:
    """Floating-point tensors of example inputs in the dtype of ``precision``."""
    dtype = PRECISIONS[precision]

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, value)
