"""Truth at the norms from the pass that gives the truth of the outputs.

The traced program has no names in common with the graph before fusing, which PyTorch decomposed it to. But what that
graph makes of an input in the model's own dtypes is, but for roundings, a value of the program in float64 on the same
input. The nearest is taken. Should that be the wrong one of two, it is nearer than the right one, and so off by no more
than twice the rounding errors of the graph before fusing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rmsnorm_deploy.parity.ulp import FORMATS, Array, Array64

_PLACES = 256  # at which two values are compared before all of them is


class Nearest:
    """Sees each value of a lifted run, and keeps the nearest to each of ``seen``, which are arrays by name.

    Called as the ``observe`` of `TorchProgram.run`.
    """

    def __init__(self, seen: Mapping[str, Array]) -> None:
        self._seen = seen
        self._found: dict[str, Array64] = {}
        # half of the digits agree at least; what is zero throughout is met by zero alone
        self._best = {name: _size(array) * _half_of_the_digits(array) + 5e-324 for name, array in seen.items()}
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, array in seen.items():
            by_shape.setdefault(array.shape, []).append(name)
        self._groups = {shape: _Group({n: seen[n] for n in names}, self._best) for shape, names in by_shape.items()}

    def __call__(self, node: Any, value: Any) -> None:
        """One value of the program; what is no float64 tensor is passed over."""
        group = self._groups.get(tuple(value.shape)) if isinstance(value, torch.Tensor) else None
        if group is None or value.dtype != torch.float64:
            return
        kept: Array64 | None = None
        for name in group.alike(value):
            distance = _distance(value.detach().numpy(), self._seen[name])
            if distance < self._best[name]:
                kept = value.detach().clone().numpy() if kept is None else kept  # the program may write on its own
                self._best[name], self._found[name] = distance, kept

    def found(self) -> dict[str, Array64] | None:
        """The float64 value of every name; None unless each has one."""
        return self._found if self._found.keys() == self._seen.keys() else None


class _Group:
    """Arrays of one shape at a few places."""

    def __init__(self, arrays: Mapping[str, Array], allowed: Mapping[str, float]) -> None:
        size = next(iter(arrays.values())).size
        self._names = list(arrays)
        self._places = np.random.default_rng(0).choice(size, min(_PLACES, size), replace=False)
        self._seen = np.stack([array.reshape(-1)[self._places] for array in arrays.values()]).astype(np.float64)
        self._limits = [2 * allowed[name] for name in arrays]  # a few places may be off by more than all

    def alike(self, value: torch.Tensor) -> list[str]:
        """Names of the arrays that ``value`` may stand for."""
        here = value.reshape(-1)[torch.from_numpy(self._places)].numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.sqrt(np.mean(np.square(self._seen - here), axis=1)) if here.size else np.zeros(len(self._names))
        return [self._names[number] for number in np.flatnonzero(off < self._limits)]


def _half_of_the_digits(array: Array) -> float:
    form = FORMATS.get(array.dtype.name)
    return 0.0 if form is None else float(2.0 ** (-form.precision / 2))


def _size(array: Array) -> float:
    """The root mean square of an array's elements."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0


def _distance(value: Array64, seen: Array) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return _size(value - seen.astype(np.float64))
