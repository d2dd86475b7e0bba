"""Optimization profiles of an engine: which of them takes the shapes of a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmsnorm_deploy.errors import InputError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeRange:
    """The smallest, the tuned-for and the largest shape of one input."""

    low: Shape
    best: Shape
    high: Shape

    def holds(self, shape: Shape) -> bool:
        return len(shape) == len(self.low) and all(
            low <= size <= high for low, size, high in zip(self.low, shape, self.high, strict=True)
        )

    def distance(self, shape: Shape) -> float:
        """How far ``shape`` is from the tuned-for one: the sum over axes of |log2(size / best)|."""
        return sum(abs(math.log2(max(size, 1) / max(best, 1))) for size, best in zip(shape, self.best, strict=True))

    def __str__(self) -> str:
        return f"{text(self.low)} to {text(self.high)}"


Profile = Mapping[str, ShapeRange]


def parse_profiles(items: Sequence[Mapping[str, Mapping[str, Sequence[int]]]]) -> tuple[Profile, ...]:
    """Profiles from metadata: [{"x": {"min": [1, 16], "opt": [4, 16], "max": [8, 16]}}]."""

    def shape_range(entry: Mapping[str, Sequence[int]]) -> ShapeRange:
        return ShapeRange(*(tuple(int(size) for size in entry[key]) for key in ("min", "opt", "max")))

    return tuple({name: shape_range(entry) for name, entry in item.items()} for item in items)


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Shape], engine: str) -> int:
    """The index of the profile that takes ``shapes`` and was tuned for the nearest ones.

    Inputs that a profile does not name are static, and fit.

    Raises:
        InputError: no profile takes the shapes; names the input, its shape and what every profile takes.
    """
    if not profiles:  # every input is static, and TensorRT has its one default profile
        return 0
    fitting = [index for index, profile in enumerate(profiles) if not misfits(profile, shapes)]
    if not fitting:
        raise InputError(_outside(profiles, shapes, engine))
    return min(fitting, key=lambda index: sum(entry.distance(shapes[name]) for name, entry in profiles[index].items()))


def misfits(profile: Profile, shapes: Mapping[str, Shape]) -> list[str]:
    """The inputs whose shape the profile does not take."""
    return [name for name, entry in profile.items() if not entry.holds(shapes[name])]


def _outside(profiles: Sequence[Profile], shapes: Mapping[str, Shape], engine: str) -> str:
    reasons = []
    for index, profile in enumerate(profiles):
        name = misfits(profile, shapes)[0]
        reasons.append(f"profile {index} takes {name!r} from {profile[name]}, not {text(shapes[name])}")
    return f"no profile of {engine} takes these shapes: {'; '.join(reasons)}: build an engine with a wider --profile"


def text(shape: Sequence[Any]) -> str:
    """ "2x16", as trtexec writes shapes."""
    return "x".join(str(size) for size in shape) or "scalar"
