"""What a graph's values *mean*, as products of powers, however they are spelled.

Every value gets a :class:`Meaning`: a product of constants and of *factors* (an :class:`Atom` seen through a layout)
raised to powers. Multiplying, dividing, powers, roots, casts, broadcasts and changes of layout are arithmetic on
meanings. What starts a new atom:

* ``Opaque``: any other value;
* ``MeanSquare``: the mean over some axes of the square of a meaning (its *root*);
* ``Shifted``: a power of a statistic plus a constant (an epsilon);
* ``Floored``: a power of a statistic, not less than a constant (a clamp);
* ``Absolute`` and ``Logarithm`` of a meaning, which end where it is squared or exponentiated.

Atoms are interned, so two spellings of the same computation give equal meanings. Sums, roots of sums, einsum, norms,
and the standard's own normalization ops all end in the same few atoms, and an RMSNorm is recognised by division:
``meaning / root`` must be the inverse root mean square, times a scale (see recognise.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

Layout = tuple[int, ...]
Dim = int | str | None
Shape = tuple[Dim, ...]
Kind = Literal["opaque", "mean", "shifted", "floored", "absolute", "logarithm"]

BROADCAST = -1  # in a layout: this axis of the value is not an axis of the atom
MAX_FACTORS = 12  # a longer product is not a norm, and would make deep multiplicative graphs quadratic


@dataclass(eq=False)
class Atom:
    """One indivisible quantity. Interned by :class:`Interner`: equal atoms are the same object."""

    number: int
    kind: Kind
    value: ir.Value | None = None  # opaque: where it is; mean: the value that was squared
    inner: Meaning | None = None  # mean: the root; absolute, logarithm: what is inside; opaque: what it is a view of
    base: Atom | None = None  # shifted, floored: the statistic
    power: float = 1.0  # shifted, floored: its power before the constant comes in
    amount: float = 0.0  # shifted: added; floored: the least value
    axes: tuple[int, ...] = ()  # mean: the reduced axes of the root
    width: int | None = None  # mean: the product of the reduced dimensions
    node: ir.Node | None = None  # mean: the node that reduces
    rounded: Meaning | None = None  # opaque: what it is a narrowing cast of

    @property
    def statistic(self) -> Atom | None:
        """The MeanSquare at the bottom of a statistic; None for other atoms."""
        atom: Atom | None = self
        while atom is not None and atom.kind in ("shifted", "floored"):
            atom = atom.base
        return atom if atom is not None and atom.kind == "mean" else None

    @property
    def non_negative(self) -> bool:
        """Whether no element can be negative."""
        return self.kind not in ("opaque", "logarithm")


Factor = tuple[Atom, Layout]


@dataclass(frozen=True)
class Meaning:
    """``sign * prod(constant ** power) * prod(factor ** power)``, as an array of ``shape``."""

    factors: Mapping[Factor, float] = field(default_factory=dict)
    constants: Mapping[float, float] = field(default_factory=dict)  # positive ones
    sign: int = 1
    shape: Shape | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal meanings; the shape is not part of it."""
        factors = sorted((atom.number, layout, power) for (atom, layout), power in self.factors.items())
        return self.sign, tuple(sorted(self.constants.items())), tuple(factors)

    @property
    def statistics(self) -> list[tuple[Atom, Layout, float]]:
        """Factors that are functions of a row's mean square."""
        return [(a, layout, p) for (a, layout), p in self.factors.items() if a.statistic is not None]

    def only_statistic(self) -> tuple[Atom, Layout, float] | None:
        """The single factor of a meaning that is a power of one statistic."""
        found = self.statistics
        return found[0] if len(found) == 1 and len(self.factors) == 1 else None

    def times(self, other: Meaning, power: float = 1.0) -> Meaning:
        """The product with ``other ** power``; the shape is kept."""
        factors, constants = dict(self.factors), dict(self.constants)
        for factor, exponent in other.factors.items():
            _add(factors, factor, exponent * power)
        for constant, exponent in other.constants.items():
            _add(constants, constant, exponent * power)
        return Meaning(factors, constants, self.sign * other.sign, self.shape)

    def raised(self, power: float) -> Meaning | None:
        """The meaning to a power; None where the result is no product (the root of a square is an absolute value)."""
        whole = float(power).is_integer()
        if not whole and self.sign < 0:
            return None
        factors: dict[Factor, float] = {}
        for (atom, layout), exponent in self.factors.items():
            result = exponent * power
            if not atom.non_negative and not whole and not (exponent % 2 == 0 and result % 2 == 0):
                return None
            if atom.kind == "absolute" and result % 2 == 0:
                assert atom.inner is not None
                for (inner, inner_layout), inner_power in atom.inner.factors.items():
                    seen = tuple(BROADCAST if a == BROADCAST else inner_layout[a] for a in layout)
                    _add(factors, (inner, seen), inner_power * result)
                continue
            _add(factors, (atom, layout), result)
        constants = {c: e * power for c, e in self.constants.items()}
        return Meaning(factors, constants, self.sign if power % 2 else 1, self.shape)

    def laid_out(self, axes: Iterable[int], shape: Shape | None) -> Meaning:
        """The same numbers with other axes: ``axes[i]`` is the axis that becomes axis ``i``, or ``BROADCAST``."""
        chosen = tuple(axes)
        factors: dict[Factor, float] = {}
        for (atom, layout), power in self.factors.items():
            _add(factors, (atom, tuple(BROADCAST if a == BROADCAST else layout[a] for a in chosen)), power)
        return Meaning(factors, self.constants, self.sign, shape)

    def unrounded(self) -> Meaning:
        """The same product with what was narrowed in place of those factors to odd powers that are narrowing casts."""
        for (atom, layout), power in self.factors.items():
            if atom.rounded is not None and power % 2:
                once = Meaning({(atom, layout): power}, shape=self.shape)
                inner = atom.rounded.laid_out(layout, self.shape).raised(power)
                return self if inner is None else self.times(once, -1.0).times(inner).unrounded()
        return self

    def without(self, axes: Iterable[int]) -> Meaning:
        """The same numbers without some axes of size one; the shape must be known."""
        assert self.shape is not None
        gone = set(axes)
        kept = [axis for axis in range(len(self.shape)) if axis not in gone]
        return self.laid_out(kept, tuple(self.shape[axis] for axis in kept))

    def of_rank(self, rank: int) -> Meaning:
        """Broadcast to a higher rank: new axes come first."""
        if self.shape is None or len(self.shape) == rank:
            return self
        missing = rank - len(self.shape)
        axes = [BROADCAST] * missing + list(range(len(self.shape)))
        return self.laid_out(axes, (1,) * missing + self.shape)


def _add(powers: dict[Any, float], key: Any, power: float) -> None:
    total = powers.get(key, 0.0) + power
    if total:
        powers[key] = total
    else:
        powers.pop(key, None)


class Interner:
    """Makes atoms, one object for each distinct one."""

    def __init__(self) -> None:
        self._atoms: dict[tuple[object, ...], Atom] = {}

    def intern(self, key: tuple[object, ...], **fields: object) -> Atom:
        """The atom with this key, made from ``fields`` the first time."""
        atom = self._atoms.get(key)
        if atom is None:
            atom = self._atoms[key] = Atom(number=len(self._atoms), **fields)  # type: ignore[arg-type]
        return atom


def resolve(constants: Mapping[float, float], width: int | None) -> tuple[float, float]:
    """``(rest, half_powers)``: a product of constants as ``rest * sqrt(width) ** half_powers``.

    A constant that is width**(k/2) rounded to a floating-point type counts as exactly that, which is what makes a sum
    divided by d, or a length divided by sqrt(d), equal to a mean and a root mean square.
    """
    rest, half_powers = 1.0, 0.0
    for constant, power in constants.items():
        half_power = _half_power(constant, width)
        if half_power is None:
            rest *= constant**power
        else:
            half_powers += half_power * power
    return rest, half_powers


_ROUNDINGS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def _half_power(constant: float, width: int | None) -> int | None:
    if width is None or width <= 1:
        return None
    for half_power in (1, 2, -1, -2):
        exact = float(width) ** (half_power / 2)
        if abs(constant - exact) < 0.01 * exact and any(float(t(exact)) == constant for t in _ROUNDINGS):
            return half_power
    return None


def broadcast(a: Shape | None, b: Shape | None) -> Shape | None:
    """The shape of an elementwise result; unknown dimensions stay unknown."""
    if a is None or b is None:
        return None
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(y if x == 1 else x if y == 1 or x == y else _either(x, y) for x, y in zip(a, b, strict=True))


def _either(x: Dim, y: Dim) -> Dim:
    """Of two dimensions that must agree at run time, the one that is known as a number."""
    return x if isinstance(x, int) else y if isinstance(y, int) else None
