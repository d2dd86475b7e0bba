"""Gives every value of a graph its meaning, node by node in topological order.

One small method an op; whatever is not understood is an opaque atom. Casts are part of no meaning, except one that
narrows a value which holds no statistic: that value is a new atom, because a norm of it differs from a norm of its
source. A square that is narrowed on its way into a mean is a square all the same: it is not what is normalized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.einsum import einsum
from rmsnorm_deploy.fusion.evaluate import attribute, constant_value, is_whole_pool
from rmsnorm_deploy.fusion.guards import guarded
from rmsnorm_deploy.fusion.meaning import (
    BROADCAST,
    MAX_FACTORS,
    Atom,
    Interner,
    Meaning,
    Shape,
    broadcast,
    resolve,
)
from rmsnorm_deploy.fusion.numbering import Numbering
from rmsnorm_deploy.fusion.values import dtype_of, holds_only, is_float_value, shape_of, widest_source
from rmsnorm_deploy.fusion.views import view
from rmsnorm_deploy.opset import FLOAT_TYPES


class Interpreter:
    """Meanings of the values of a graph, of its subgraphs and of what they see from outside."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.reductions: list[tuple[ir.Node, Atom]] = []  # every node that reduces a square
        self.carriers: dict[tuple[object, ...], list[ir.Value]] = defaultdict(list)  # meaning -> values that hold it
        self.unshaped: dict[ir.Graph, list[ir.Node]] = defaultdict(list)  # reduces a square whose rank is not known
        self.lacks_shapes = False  # a statistic was met whose shape, or whose partner's, is not known
        self.numbering = Numbering()
        self._atoms = Interner()
        self._meanings: dict[ir.Value, Meaning] = {}
        self._order: dict[ir.Value, int] = {}

    def visit(self, node: ir.Node) -> None:
        """Work out what the node's outputs mean; its inputs have been visited."""
        self.numbering.visit(node)
        for output in node.outputs:
            self._order[output] = len(self._order)
            self.constants.lifted(output)  # here and not when needed: constants of deep graphs don't recurse then
            self.constants.is_constant(output)
        if not node.outputs or node.domain != "":
            return
        method = _METHODS.get(node.op_type)
        meaning = method(self, node) if method is not None else None
        if method is not None and node.inputs and node.outputs[0].dtype is None:
            _inherit_dtype(node)
        if meaning is not None and len(meaning.factors) <= MAX_FACTORS:
            self._set(node.outputs[0], meaning)

    def is_before(self, value: ir.Value, later: ir.Value) -> bool:
        """Whether ``value`` is there when ``later`` is computed; inputs and initializers always are."""
        return self._order.get(value, -1) < self._order[later]

    def of(self, value: ir.Value) -> Meaning:
        """The meaning of a value."""
        meaning = self._meanings.get(value)
        return self._set(value, self._leaf(value)) if meaning is None else meaning

    def known(self, value: ir.Value) -> Meaning | None:
        """The meaning of a value that has been visited or asked for."""
        return self._meanings.get(value)

    def _set(self, value: ir.Value, meaning: Meaning) -> Meaning:
        declared = shape_of(value)
        if declared is not None and (meaning.shape is None or len(meaning.shape) != len(declared)):
            self.lacks_shapes = (
                True  # a meaning without a shape has no layout: what is said of this value can't be used
            )
            meaning = self._leaf(value)
        shape = _best_known(declared, meaning.shape)
        meaning = Meaning(meaning.factors, meaning.constants, meaning.sign, shape)
        if value.shape is None and shape is not None:
            value.shape = ir.Shape(shape)
        self._meanings[value] = meaning
        self.carriers[meaning.key].append(value)
        return meaning

    def _leaf(self, value: ir.Value) -> Meaning:
        shape, array = shape_of(value), self.constants.lifted(value)
        if shape is None and array is not None:
            shape = array.shape
        number = self.constants.scalar(value)
        if number is not None and number != 0 and number == number and abs(number) != float("inf"):
            constants = {} if abs(number) == 1 else {abs(number): 1.0}
            return Meaning({}, constants, -1 if number < 0 else 1, shape)
        return self._opaque(("value", self.numbering.of(value)), value, shape)

    def _opaque(self, key: tuple[object, ...], value: ir.Value, shape: Shape | None) -> Meaning:
        atom = self._atoms.intern(key, kind="opaque", value=value)
        if shape is None:
            return Meaning({(atom, ()): 1.0}, shape=None)
        layout = tuple(BROADCAST if dim == 1 else axis for axis, dim in enumerate(shape))
        return Meaning({(atom, layout): 1.0}, shape=shape)

    def view_of(self, value: ir.Value, viewed: Meaning, shape: Shape) -> Meaning:
        """A value that holds what ``viewed`` does, in another shape."""
        meaning = self._opaque(("value", self.numbering.of(value)), value, shape)
        ((atom, _),) = meaning.factors
        atom.inner = viewed
        return meaning

    def rebuilt(self, atom: Atom, mean: Atom) -> Atom:
        """The function of a statistic that ``atom`` is, of the statistic ``mean``."""
        if atom.kind == "mean":
            return mean
        assert atom.base is not None
        base = self.rebuilt(atom.base, mean)
        key = (atom.kind, base.number, atom.power, atom.amount)
        return self._atoms.intern(key, kind=atom.kind, base=base, power=atom.power, amount=atom.amount)

    # -- products and powers

    def _mul(self, node: ir.Node) -> Meaning | None:
        return self._product(node, 1.0)

    def _div(self, node: ir.Node) -> Meaning | None:
        return self._product(node, -1.0)

    def _product(self, node: ir.Node, power: float) -> Meaning | None:
        a, b = (self.of(i) for i in node.inputs if i is not None)
        shape = broadcast(a.shape, b.shape)
        self.lacks_shapes |= shape is None and bool(a.statistics or b.statistics)
        if shape is None or not is_float_value(node.outputs[0], node.inputs[0]):
            return None
        rank = len(shape)
        product = a.of_rank(rank).times(b.of_rank(rank), power)
        return Meaning(product.factors, product.constants, product.sign, shape)

    def _pow(self, node: ir.Node) -> Meaning | None:
        exponent = self.constants.scalar(node.inputs[1])
        return None if exponent is None or exponent == 0 else self._raised(node, exponent)

    def _raised(self, node: ir.Node, exponent: float) -> Meaning | None:
        assert node.inputs[0] is not None
        return self.of(node.inputs[0]).raised(exponent)

    def _abs(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        inner = self.of(node.inputs[0])
        if inner.shape is None:
            return None
        if inner.sign > 0 and all(atom.non_negative for atom, _ in inner.factors):
            return inner
        atom = self._atoms.intern(("absolute", inner.key), kind="absolute", inner=inner)
        layout = tuple(BROADCAST if dim == 1 else axis for axis, dim in enumerate(inner.shape))
        return Meaning({(atom, layout): 1.0}, shape=inner.shape)

    def _log(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        inner = self.of(node.inputs[0])
        if inner.shape is None or inner.only_statistic() is None:
            return None
        atom = self._atoms.intern(("logarithm", inner.key), kind="logarithm", inner=inner)
        layout = tuple(BROADCAST if dim == 1 else axis for axis, dim in enumerate(inner.shape))
        return Meaning({(atom, layout): 1.0}, shape=inner.shape)

    def _exp(self, node: ir.Node) -> Meaning | None:
        """A power, spelled as the exponential of a multiple of a logarithm."""
        assert node.inputs[0] is not None
        m = self.of(node.inputs[0])
        (atom, layout), power = next(iter(m.factors.items()), ((None, ()), 0.0))
        if atom is None or atom.kind != "logarithm" or power != 1 or len(m.factors) != 1:
            return None
        assert atom.inner is not None
        exponent = m.sign * float(np.prod([constant**power for constant, power in m.constants.items()]))
        return atom.inner.laid_out(layout, m.shape).raised(exponent)

    def _neg(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        m = self.of(node.inputs[0])
        return Meaning(m.factors, m.constants, -m.sign, m.shape)

    # -- the constant that keeps a norm away from zero

    def _add(self, node: ir.Node) -> Meaning | None:
        return self._with_constant(node, self._shifted)

    def _sub(self, node: ir.Node) -> Meaning | None:
        amount = self.constants.scalar(node.inputs[1])
        return None if amount is None or node.inputs[0] is None else self._shifted(self.of(node.inputs[0]), -amount)

    def _max(self, node: ir.Node) -> Meaning | None:
        return self._with_constant(node, self.floored)

    def _min(self, node: ir.Node) -> Meaning | None:
        return self._with_constant(node, self._capped)

    def _clip(self, node: ir.Node) -> Meaning | None:
        low, high = (node.inputs[i] if len(node.inputs) > i else None for i in (1, 2))
        least, most = self.constants.scalar(low), self.constants.scalar(high)
        assert node.inputs[0] is not None
        if (low is not None and least is None) or (high is not None and most is None):
            return None
        m: Meaning | None = self.of(node.inputs[0])
        if most is not None:
            m = m and self._capped(m, most)
        return m if m is None or least is None else self.floored(m, least)

    def _with_constant(self, node: ir.Node, make: Callable[[Meaning, float], Meaning | None]) -> Meaning | None:
        if len(node.inputs) != 2:  # Max and Sum take any number
            return None
        for value, other in (node.inputs, node.inputs[::-1]):
            amount = self.amount(other)
            if amount is not None and value is not None and other is not None:
                made = make(self.of(value), amount)
                shape = broadcast(self.of(value).shape, self.of(other).shape)
                return made if made is None or shape is None else _with_shape(made.of_rank(len(shape)), shape)
        return None

    def amount(self, value: ir.Value | None) -> float | None:
        """The number that a value holds everywhere, be it a scalar or one that was spread over a shape."""
        number = self.constants.scalar(value)
        if number is not None or value is None:
            return number
        m = self._meanings.get(value)
        if m is None or m.factors or not is_float_value(value):
            return None
        return m.sign * float(np.prod([constant**power for constant, power in m.constants.items()]))

    def _shifted(self, m: Meaning, amount: float) -> Meaning | None:
        return m if amount == 0 else self._guarded(m, amount, "shifted")

    def floored(self, m: Meaning, amount: float) -> Meaning | None:
        """A power of a statistic, or ``amount`` where that is more."""
        statistic = m.only_statistic()
        if statistic is None or m.sign < 0:
            return None
        if amount <= 0 or _is_never_below(m, amount):
            return m
        if statistic[2] <= 0:
            return None
        half = m.raised(0.5 / statistic[2])  # a floor commutes with a power: keep it under the root mean square
        floored = self._guarded(half, amount ** (0.5 / statistic[2]), "floored") if half is not None else None
        return None if floored is None else floored.raised(2 * statistic[2])

    def _capped(self, m: Meaning, amount: float) -> Meaning | None:
        """The inverse of a statistic, or ``amount`` where that is less: one over what has a floor."""
        inverse = m.raised(-1) if amount > 0 else None
        floored = inverse and self.floored(inverse, 1 / amount)
        return floored and floored.raised(-1)

    def _guarded(self, m: Meaning, amount: float, kind: str) -> Meaning | None:
        statistic = m.only_statistic()
        if statistic is None or m.sign < 0 or amount < 0:
            return None
        base, layout, power = statistic
        assert base.statistic is not None
        rest, half_powers = resolve(m.constants, base.statistic.width)
        exact = half_powers == 0 and rest == 1
        width = base.statistic.width or 1
        coefficient = 1.0 if exact else rest * float(width) ** (half_powers / 2)
        amount = amount if exact else amount / coefficient
        atom = self._atoms.intern((kind, base.number, power, amount), kind=kind, base=base, power=power, amount=amount)
        return Meaning({(atom, layout): 1.0}, {} if exact else m.constants, 1, m.shape)

    # -- reductions

    def mean_square(
        self, node: ir.Node, square: Meaning, axes: tuple[int, ...], squared: ir.Value | None
    ) -> tuple[Atom, Meaning] | None:
        """The mean of ``square`` over ``axes``: its atom, and what it means with the axes kept.

        ``squared`` is the value that was squared, where the graph has one.
        """
        if square.shape is None or not square.factors or not axes:
            return None
        width = 1
        for axis in axes:
            dim = square.shape[axis]
            width = width * dim if isinstance(dim, int) and width else 0
        idle = tuple(axis for axis in axes if square.shape[axis] == 1)
        if idle and len(idle) < len(axes):  # a mean over one element: as if the axis were not there
            return self._mean_beside(node, square, axes, idle, squared)
        root = _root(square) or _root(square.unrounded())
        if root is None:
            return None
        key = ("mean", root.key, axes, len(square.shape))
        atom = self._atoms.intern(
            key, kind="mean", inner=root, axes=axes, width=width or None, value=squared, node=node
        )
        self.reductions.append((node, atom))
        layout = tuple(BROADCAST if axis in axes or dim == 1 else axis for axis, dim in enumerate(square.shape))
        shape = tuple(1 if axis in axes else dim for axis, dim in enumerate(square.shape))
        return atom, Meaning({(atom, layout): 1.0}, shape=shape)

    def _mean_beside(
        self, node: ir.Node, square: Meaning, axes: tuple[int, ...], idle: tuple[int, ...], squared: ir.Value | None
    ) -> tuple[Atom, Meaning] | None:
        """The mean of ``square`` over ``axes`` of which ``idle`` have one element."""
        assert square.shape is not None
        kept = [axis for axis in range(len(square.shape)) if axis not in idle]
        found = self.mean_square(node, square.without(idle), tuple(kept.index(a) for a in axes if a in kept), squared)
        if found is None:
            return None
        back = [kept.index(axis) if axis in kept else BROADCAST for axis in range(len(square.shape))]
        return found[0], _arranged(found[1], back)

    def _reducible(self, value: ir.Value) -> Meaning:
        """The meaning of something that is to be reduced, whose shape must be known."""
        meaning = self.of(value)
        self.lacks_shapes |= meaning.shape is None
        return meaning

    def _reduce(self, node: ir.Node, square: Meaning, squared: ir.Value | None, *, summed: bool) -> Meaning | None:
        axes = self.reduced_axes(node, square.shape)
        if square.shape is None and squared is not None and node.graph is not None:
            self.unshaped[node.graph].append(node)
        found = self.mean_square(node, square, axes, squared) if axes else None
        if found is None or axes is None:
            return None
        mean = self.sum_of(*found) if summed else found[1]
        return mean if mean is None or attribute(node, "keepdims", 1) else mean.without(axes)

    def sum_of(self, atom: Atom, mean: Meaning) -> Meaning | None:
        """The sum whose mean is ``mean``; None if its width is not known."""
        if atom.width is None:
            return None
        return mean.times(Meaning({}, {float(atom.width): 1.0} if atom.width != 1 else {}))

    def reduced_axes(self, node: ir.Node, shape: Shape | None) -> tuple[int, ...] | None:
        """The axes that a reduction of something of ``shape`` goes over; None if they, or the shape, are not known."""
        if shape is None:
            return None
        axes = attribute(node, "axes")
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            axes = self.constants.integers(node.inputs[1])
            if axes is None:
                return None
        if not axes:
            return None if attribute(node, "noop_with_empty_axes", 0) else tuple(range(len(shape)))
        return tuple(sorted(axis % len(shape) for axis in axes))

    def _reduce_mean(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        return self._reduce(node, self._reducible(node.inputs[0]), self._squared(node.inputs[0]), summed=False)

    def _reduce_sum(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        return self._reduce(node, self._reducible(node.inputs[0]), self._squared(node.inputs[0]), summed=True)

    def _reduce_sum_square(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        square = self._reducible(node.inputs[0]).raised(2)
        return square and self._reduce(node, square, widest_source(node.inputs[0]), summed=True)

    def _reduce_l2(self, node: ir.Node) -> Meaning | None:
        total = self._reduce_sum_square(node)
        return total and total.raised(0.5)

    def _global_average_pool(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        square = self._reducible(node.inputs[0])
        axes = tuple(range(2, len(square.shape or ())))
        found = self.mean_square(node, square, axes, self._squared(node.inputs[0]))
        return found[1] if found else None

    def _average_pool(self, node: ir.Node) -> Meaning | None:
        """A pool whose kernel is all there is."""
        assert node.inputs[0] is not None
        shape = self._reducible(node.inputs[0]).shape
        return self._global_average_pool(node) if shape is not None and is_whole_pool(node, shape) else None

    def _squared(self, value: ir.Value) -> ir.Value | None:
        """The value of which ``value`` is the square, before any widening cast."""
        node = widest_source(value).producer()
        if node is None:
            return None
        a = node.inputs[0] if node.inputs else None
        if a is None:
            return None
        if node.op_type == "Pow" and self.constants.scalar(node.inputs[1]) == 2:
            source = widest_source(a)
            inner = source.producer()
            return widest_source(inner.inputs[0] or a) if inner is not None and inner.op_type == "Abs" else source
        b = node.inputs[1] if node.op_type == "Mul" else None
        return widest_source(a) if b is not None and self.of(a).key == self.of(b).key else None

    def _matmul(self, node: ir.Node) -> Meaning | None:
        """A row times itself as a column: ``(..., 1, d) @ (..., d, 1)``."""
        if node.inputs[0] is None or node.inputs[1] is None:
            return None
        a, b = self.of(node.inputs[0]), self.of(node.inputs[1])
        weight = self.constants.uniform_column(node.inputs[1])
        if weight is not None:
            return self._column_sum(node, a, weight)
        if a.shape is None or b.shape is None or len(a.shape) < 2 or len(a.shape) != len(b.shape):
            return None
        lead = list(range(len(a.shape) - 2))
        if a.shape[-2] != 1 or b.shape[-1] != 1 or a.shape[-1] != b.shape[-2]:
            return None
        row = a.laid_out([*lead, len(lead) + 1], (*a.shape[:-2], a.shape[-1]))
        column = b.laid_out([*lead, len(lead)], (*b.shape[:-2], b.shape[-2]))
        square = row.raised(2) if row.key == column.key else None
        carrier = next(iter(self.carriers.get(row.key, [])), None)
        found = square and self.mean_square(node, square, (len(lead),), carrier and widest_source(carrier))
        total = found and self.sum_of(*found)
        return total and total.laid_out([*range(len(lead) + 1), BROADCAST], (*a.shape[:-2], 1, 1))

    def _column_sum(self, node: ir.Node, square: Meaning, weight: float) -> Meaning | None:
        """Squares times a column of equal constants: their sum times that constant."""
        assert node.inputs[0] is not None
        axes = (len(square.shape) - 1,) if square.shape else ()
        found = self.mean_square(node, square, axes, self._squared(node.inputs[0]))
        total = found and self.sum_of(*found)
        return total and total.times(Meaning({}, {weight: 1.0} if weight != 1 else {}))

    # -- ops that are norms

    def _lp_normalization(self, node: ir.Node) -> Meaning | None:
        x = node.inputs[0]
        assert x is not None
        m = self._reducible(x)
        if attribute(node, "p", 2) != 2 or m.shape is None:
            return None
        return self._normalized(node, x, (attribute(node, "axis", -1) % len(m.shape),), epsilon=0.0, length=True)

    def _rms_normalization(self, node: ir.Node) -> Meaning | None:
        x, scale = node.inputs[0], node.inputs[1]
        assert x is not None
        m = self._reducible(x)
        if m.shape is None:
            return None
        axes = tuple(range(attribute(node, "axis", -1) % len(m.shape), len(m.shape)))
        normalized = self._normalized(node, x, axes, epsilon=attribute(node, "epsilon", 1e-5), length=False)
        if normalized is None or scale is None:
            return normalized
        by = self.of(scale)
        if by.shape is None or len(by.shape) > len(m.shape):
            return None
        product = normalized.times(by.of_rank(len(m.shape)))
        return Meaning(product.factors, product.constants, product.sign, m.shape)

    def _normalized(
        self, node: ir.Node, x: ir.Value, axes: tuple[int, ...], *, epsilon: float, length: bool
    ) -> Meaning | None:
        m = self.of(x)
        square = m.raised(2)
        found = square and self.mean_square(node, square, axes, widest_source(x))
        if not found:
            return None
        mean = self.sum_of(*found) if length else found[1]
        guarded = mean and self._shifted(mean, epsilon)
        inverse = guarded and guarded.raised(-0.5)
        return inverse and m.times(inverse)

    # -- what leaves the numbers as they are

    def _same(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        return self.of(node.inputs[0])

    def _cast(self, node: ir.Node) -> Meaning | None:
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None
        target = ir.DataType(attribute(node, "to")) if node.op_type == "Cast" else dtype_of(node.inputs[1])
        if result.dtype is None and target != ir.DataType.UNDEFINED:
            result.dtype = target
        if source.dtype not in FLOAT_TYPES or target not in FLOAT_TYPES:
            return None
        meaning = self.of(source)
        if holds_only(source, target) or meaning.statistics or not meaning.factors:
            return meaning
        narrowed = self._opaque(("narrowed", meaning.key, int(target)), result, meaning.shape)
        ((atom, _),) = narrowed.factors
        atom.rounded = meaning
        return narrowed

    def _unsqueeze(self, node: ir.Node) -> Meaning | None:
        m, axes = self._with_axes(node)
        if m is None or m.shape is None or axes is None:
            return None
        rank = len(m.shape) + len(axes)
        new = {axis % rank for axis in axes}
        old = iter(range(len(m.shape)))
        return _arranged(m, [BROADCAST if axis in new else next(old) for axis in range(rank)])

    def _squeeze(self, node: ir.Node) -> Meaning | None:
        m, axes = self._with_axes(node)
        if m is None or not m.shape:
            return None if m is not None and m.shape is None and m.factors else m
        rank = len(m.shape)
        gone = {a % rank for a in axes} if axes is not None else {i for i, d in enumerate(m.shape) if d == 1}
        return _arranged(m, [axis for axis in range(rank) if axis not in gone])

    def _with_axes(self, node: ir.Node) -> tuple[Meaning | None, list[int] | None]:
        assert node.inputs[0] is not None
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            axes = self.constants.integers(node.inputs[1])
            return (None if axes is None else self.of(node.inputs[0])), axes
        return self.of(node.inputs[0]), attribute(node, "axes")

    def _reshape(self, node: ir.Node) -> Meaning | None:
        """A reshape that only adds or drops axes of size one, or a view of rows."""
        assert node.inputs[0] is not None
        m, target = self.of(node.inputs[0]), shape_of(node.outputs[0])
        if target is None:
            target = _known(self.constants.lifted(node.inputs[1]))  # what ONNX's own inference lacks before opset 14
            if target is not None:
                node.outputs[0].shape = ir.Shape(target)
            self.lacks_shapes |= (target is None or None in target) and bool(m.statistics)
        if m.shape is None or target is None:
            return None
        axes = _ones_moved(m.shape, target)
        return view(self, node, m, target) if axes is None else _arranged(m, axes)

    def _expand(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        m = self.of(node.inputs[0])
        asked = _known(self.constants.lifted(node.inputs[1]))  # a 1 leaves the axis as it is
        target = shape_of(node.outputs[0]) or broadcast(m.shape, asked)
        return None if m.shape is None or target is None else _with_shape(m.of_rank(len(target)), target)

    def _constant_of_shape(self, node: ir.Node) -> Meaning | None:
        """A number spread over a shape, such as the scale that PyTorch gives to a norm without one."""
        fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
        number = float(fill.reshape(-1)[0])
        node.outputs[0].dtype = ir.DataType.from_numpy(fill.dtype)
        shape = _known(self.constants.lifted(node.inputs[0]))
        if node.outputs[0].dtype not in FLOAT_TYPES or not np.isfinite(number) or number == 0 or shape is None:
            return None
        return Meaning({}, {} if abs(number) == 1 else {abs(number): 1.0}, -1 if number < 0 else 1, shape)

    def _transpose(self, node: ir.Node) -> Meaning | None:
        assert node.inputs[0] is not None
        m = self.of(node.inputs[0])
        if m.shape is None:
            return None
        perm = attribute(node, "perm") or list(reversed(range(len(m.shape))))
        return m.laid_out(perm, tuple(m.shape[axis] for axis in perm))

    def _constant(self, node: ir.Node) -> Meaning | None:
        output = node.outputs[0]
        if output.shape is None and self.constants.lifted(output) is None and "value" not in node.attributes:
            return None
        if output.shape is None:
            array = constant_value(node)
            output.shape, output.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        return self._leaf(output)


def _inherit_dtype(node: ir.Node) -> None:
    """Every op of the table but a cast keeps its input's dtype; exporters leave inner values untyped."""
    source = node.inputs[0]
    if source is not None and source.dtype is not None and node.op_type not in ("Cast", "CastLike"):
        node.outputs[0].dtype = source.dtype


def _best_known(declared: Shape | None, computed: Shape | None) -> Shape | None:
    """What a file says of a shape, filled up with what follows from the graph.

    Of two names the one that follows counts: exporters give the inputs of a loop's body other names than what is
    computed from them.
    """
    if declared is None or computed is None or len(declared) != len(computed):
        return computed if declared is None else declared
    return tuple(
        b if a is None or (isinstance(a, str) and isinstance(b, str)) else a
        for a, b in zip(declared, computed, strict=True)
    )


def _is_never_below(m: Meaning, amount: float) -> bool:
    """Whether a statistic that a positive constant was added to can't be less than ``amount``."""
    atom, _, power = m.only_statistic() or (None, (), 0.0)
    return (
        atom is not None and atom.kind == "shifted" and power > 0 and not m.constants and amount <= atom.amount**power
    )


def _root(square: Meaning) -> Meaning | None:
    """The root of a square, sign and absolute value aside: ``mean(x**2)`` has the root x."""
    powers = [power for (atom, _), power in square.factors.items() if atom.statistic is None]
    if square.sign < 0 or not powers or any(power % 2 for power in powers):
        return None
    factors = {factor: power / 2 for factor, power in square.factors.items()}
    return Meaning(factors, {c: p / 2 for c, p in square.constants.items()}, 1, square.shape)


def _ones_moved(shape: Shape, target: Shape) -> list[int] | None:
    """Which axis of ``shape`` each of ``target`` is, BROADCAST for a new one; None if more than ones were moved."""
    axes: list[int] = []
    old = [axis for axis, dim in enumerate(shape) if dim != 1]
    for dim in target:
        if dim == 1:
            axes.append(BROADCAST)
        elif old and dim is not None and shape[old[0]] == dim:
            axes.append(old.pop(0))
        else:
            return None
    return None if old else axes


def _arranged(meaning: Meaning, axes: list[int]) -> Meaning:
    shape = meaning.shape
    assert shape is not None
    return meaning.laid_out(axes, tuple(1 if axis == BROADCAST else shape[axis] for axis in axes))


def _with_shape(meaning: Meaning, shape: Shape) -> Meaning:
    return Meaning(meaning.factors, meaning.constants, meaning.sign, shape)


def _known(array: object) -> Shape | None:
    return None if array is None else tuple(int(d) if d > 0 else None for d in array)  # type: ignore[attr-defined]


_METHODS: dict[str, Callable[[Interpreter, ir.Node], Meaning | None]] = {
    "Mul": Interpreter._mul,
    "Div": Interpreter._div,
    "Pow": Interpreter._pow,
    "Sqrt": lambda self, node: self._raised(node, 0.5),
    "Reciprocal": lambda self, node: self._raised(node, -1.0),
    "Abs": Interpreter._abs,
    "Neg": Interpreter._neg,
    "Add": Interpreter._add,
    "Sum": Interpreter._add,
    "Sub": Interpreter._sub,
    "Max": Interpreter._max,
    "Min": Interpreter._min,
    "Where": guarded,
    "Log": Interpreter._log,
    "Exp": Interpreter._exp,
    "Clip": Interpreter._clip,
    "ReduceMean": Interpreter._reduce_mean,
    "ReduceSum": Interpreter._reduce_sum,
    "ReduceSumSquare": Interpreter._reduce_sum_square,
    "ReduceL2": Interpreter._reduce_l2,
    "GlobalAveragePool": Interpreter._global_average_pool,
    "AveragePool": Interpreter._average_pool,
    "Einsum": einsum,
    "MatMul": Interpreter._matmul,
    "LpNormalization": Interpreter._lp_normalization,
    "RMSNormalization": Interpreter._rms_normalization,
    "SimplifiedLayerNormalization": Interpreter._rms_normalization,
    "Identity": Interpreter._same,
    "Cast": Interpreter._cast,
    "CastLike": Interpreter._cast,
    "Unsqueeze": Interpreter._unsqueeze,
    "Squeeze": Interpreter._squeeze,
    "Reshape": Interpreter._reshape,
    "Expand": Interpreter._expand,
    "ConstantOfShape": Interpreter._constant_of_shape,
    "Transpose": Interpreter._transpose,
    "Constant": Interpreter._constant,
}
