"""A module in another dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.errors import InputError

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast_module(model: torch.nn.Module, precision: str) -> tuple[torch.nn.Module, list[str]]:
    """The module with its floating-point weights in another dtype, in place, and notes on buffers that became infinite.

    Rotary frequencies keep theirs: a half would round the angles. A buffer may become infinite: one that masks with the
    least number of its dtype means just that.

    Raises InputError for a finite weight that the dtype has no number for: it would become infinite.
    """
    dtype = PRECISIONS[precision]
    _check_range(model, precision)
    notes: list[str] = []
    done: dict[int, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                cast = done.setdefault(
                    id(parameter), torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                )
                module._parameters[name] = cast
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not name.endswith("inv_freq"):
                module._buffers[name] = buffer.to(dtype)
                if count := _lost(buffer, dtype):
                    where = f"{path}.{name}" if path else name
                    notes.append(
                        f"{count} of {buffer.numel()} numbers of the buffer {where} become infinite in {precision}"
                    )
    return model, notes


def _check_range(model: torch.nn.Module, precision: str) -> None:
    dtype = PRECISIONS[precision]
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    lost = {name: count for name, parameter in weights.items() if (count := _lost(parameter, dtype))}
    if not lost:
        return
    wider = [name for name in ("bf16", "fp32") if not any(_lost(weights[key], PRECISIONS[name]) for key in lost)]
    said = [f"{count} of {weights[name].numel()} in {name}" for name, count in list(lost.items())[:6]]
    more = f" and {len(lost) - 6} more weights" if len(lost) > 6 else ""
    raise InputError(
        f"--precision {precision}: numbers beyond {torch.finfo(dtype).max:g} would become infinite: "
        f"{', '.join(said)}{more}; use --precision {' or '.join([*wider, 'keep'])}"
    )


def _lost(value: torch.Tensor, dtype: torch.dtype) -> int:
    """How many finite numbers of a tensor are infinite in another dtype."""
    if not value.numel() or torch.finfo(dtype).max >= torch.finfo(value.dtype).max:
        return 0
    with torch.no_grad():
        value = value.detach().float() if value.element_size() == 1 else value.detach()  # torch compares no float8
        least, greatest = value.aminmax()
        if torch.isfinite(torch.stack([least, greatest]).to(dtype)).all():
            return 0
        return int((value.isfinite() & value.to(dtype).isinf()).sum())


def cast_floats(value: Any, precision: str) -> Any:
    """Floating-point tensors of example inputs in the dtype of ``precision``."""
    dtype = PRECISIONS[precision]

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, value)
