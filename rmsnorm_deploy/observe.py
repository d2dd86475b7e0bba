"""Counts the RMSNorms that a PyTorch model executes, by what its modules do to their inputs and not by their names.

A call of a module counts when its result is the formula, in float64, of what went in: y = n * scale with
n = x / sqrt(mean(x^2) + eps) and a scale that is the same in every row. Rows that happen to have the same size would
let many things pass (a module that does nothing, behind a norm), so the module is called once more with rows
rescaled, and must still fit. x may be the first argument, or its product with silu of a gate; or the gate comes behind
the norm. Calls of ``torch.nn.functional.rms_norm`` outside of such modules count as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_USUAL_EPSILONS = (
    0.0,
    1e-12,
    1e-8,
    1e-6,
    1e-5,
    *(torch.finfo(d).eps for d in (torch.float32, torch.float16, torch.bfloat16)),
)
_ULPS = (
    4.0  # root mean square of the misfit that roundings are allowed; an unscaled LayerNorm misfits by 1 / sqrt(width)
)
_GROUPS = (1, 2, 4, 8)
_FUNCTION = "torch.nn.functional.rms_norm"


def executed_norms(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> list[str]:
    """Run ``model`` once, and name what executed an RMSNorm, in order: a module's path for each of its calls.

    The model is left as it was. A norm inside of a module that counts already (a wrapper around one) counts once.
    """
    watch = _Watch()
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(watch.leaver(name), with_kwargs=True))
    try:
        with torch.no_grad(), _Functions(watch):
            model(*args, **dict(kwargs or {}))
    finally:
        for handle in handles:
            handle.remove()
    return watch.found


@dataclass
class _Watch:
    """Norms found so far, and for each module that is running the number found when it was entered."""

    found: list[str] = field(default_factory=list)
    _running: list[int] = field(default_factory=list)
    _probing: bool = False

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._probing:
            self._running.append(len(self.found))

    def leaver(self, name: str) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._probing:
                return
            inside = self.found[self._running.pop() :]
            modules = [item for item in inside if item != _FUNCTION]
            if modules or not isinstance(output, torch.Tensor):
                return
            self._probing = True
            try:
                if computes_rms_norm(module, args, kwargs, output):
                    del self.found[len(self.found) - len(inside) :]  # its own call of the function
                    self.found.append(name)
            finally:
                self._probing = False

        return leave

    def called(self) -> None:
        if not self._probing:
            self.found.append(_FUNCTION)


class _Functions(TorchFunctionMode):
    """Tells a watch of every call of the function."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.rms_norm, torch.rms_norm):
            self._watch.called()
        return func(*args, **(kwargs or {}))


def computes_rms_norm(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: torch.Tensor
) -> bool:
    """Whether a call of ``module`` that gave ``output`` computed an RMSNorm; calls it once more to be sure."""
    x, others = _operands(args, kwargs)
    if x is None or x.ndim < 2 or x.shape != output.shape or x.numel() == 0 or not output.is_floating_point():
        return False
    allowed = _ULPS * max(torch.finfo(t.dtype).eps for t in (x, output))
    epsilons = _epsilons(module)
    if not _fits(x, others, output, epsilons, allowed):
        return False
    factors = 2.0 ** torch.linspace(-3, 3, x[..., 0].numel())  # rising, so that batches differ too
    size = x.double().square().mean().sqrt().clamp(min=1e-30)  # a tiny row is all epsilon, and its norm a mere product
    probe = (x.double() / size * factors.view(*x.shape[:-1], 1)).to(x.dtype)
    again = module(*(probe if a is x else a for a in args), **{k: probe if v is x else v for k, v in kwargs.items()})
    return _fits(probe, others, again, epsilons, allowed)


def _operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The first floating-point tensor of a call, and the others of its shape."""
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if not tensors:
        return None, []
    return tensors[0], [t for t in tensors[1:] if t.shape == tensors[0].shape]


def _epsilons(module: nn.Module) -> list[float]:
    """The module's own small numbers, and the usual ones."""
    own = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    own = [v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1]
    return list(dict.fromkeys([*own, *_USUAL_EPSILONS]))


def _fits(x: torch.Tensor, others: list[torch.Tensor], y: torch.Tensor, epsilons: list[float], allowed: float) -> bool:
    """Whether y is the norm of x with some epsilon and some scale, in one of the places a gate may have."""
    readings = [(x.double(), y.double())]
    for gate in others:
        weight = F.silu(gate.double())
        readings += [(x.double() * weight, y.double()), (x.double(), y.double() / weight)]
    return any(
        _misfit(normalized, result) <= allowed for root, result in readings for normalized in _norms(root, epsilons)
    )


def _norms(x: torch.Tensor, epsilons: list[float]) -> Iterator[torch.Tensor]:
    """x normed over its last axis, over groups of it, and over its last two axes, with each epsilon."""
    width = x.shape[-1]
    shapes = [(*x.shape[:-1], groups, width // groups) for groups in _GROUPS if width % groups == 0 and width > groups]
    shapes += [(*x.shape[:-2], x.shape[-2] * width)] if x.ndim > 2 else []
    for shape in shapes:
        rows = x.reshape(shape)
        mean = rows.square().mean(-1, keepdim=True)
        for epsilon in epsilons:
            yield (rows * (mean + epsilon).rsqrt()).reshape(x.shape)


def _misfit(normalized: torch.Tensor, y: torch.Tensor) -> float:
    """Of y against the best scale: one for each place in a row, or also in one of the axes before it (heads)."""
    ndim, size = y.ndim, y.square().mean().sqrt()
    best = float("inf")
    for kept in {ndim - 1, max(ndim - 2, 1), max(ndim - 3, 1)}:
        axes = [axis for axis in range(ndim - 1) if axis != kept]
        if y[..., 0].numel() < 2 * (y.shape[kept] if kept < ndim - 1 else 1):
            continue  # with one row for each scale everything fits
        scale = (normalized * y).sum(axes, keepdim=True) / normalized.square().sum(axes, keepdim=True)
        best = min(best, float(((y - normalized * scale).square().mean().sqrt() / size).nan_to_num(torch.inf)))
    return best
