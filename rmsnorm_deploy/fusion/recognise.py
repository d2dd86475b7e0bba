"""Finds the values that are RMSNorms: those whose meaning, divided by a root, is the root's inverse root mean square.

With ``R`` the root of a mean square ``M``, a value v is a norm of R when

    v / R / core = scale,      core = (M + e)^-1/2 (inside), (M^1/2 + e)^-1 (outside) or max(M^1/2, e)^-1 (clamp)

and the scale varies along the normalized axes only. Of a chain of such values (times a weight, a cast, times another
weight) the last is taken whose predecessors serve nothing else; a constant bias added to it is taken along. An L2
normalization counts as a norm if something scales it, be it this scale or, later, one that the op can't hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import onnx_ir as ir

from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.interpret import Interpreter
from rmsnorm_deploy.fusion.meaning import BROADCAST, Atom, Factor, Layout, Meaning, Shape, resolve
from rmsnorm_deploy.fusion.values import dtype_of, is_wider, shape_of
from rmsnorm_deploy.opset import FLOAT_TYPES

OTHER_AXES = "the statistic lines up with other axes than those it was taken over"
OTHER_TENSOR = "its statistic multiplies a tensor other than the one that was squared"
LAYER_NORM = "the row's mean is subtracted first: this is LayerNorm"


Normalizer = tuple[Atom, str, float]  # a mean square, the epsilon mode and the epsilon: what rows are divided by


@dataclass(frozen=True)
class ScaleFactor:
    """One factor of a scale: ``value ** power``, where axis ``layout[i]`` of the value is normalized axis ``i``."""

    value: ir.Value
    layout: Layout
    power: float


@dataclass(eq=False)
class Candidate:
    """A value that is believed to be an RMSNorm; prove.py decides."""

    output: ir.Value
    root: ir.Value
    axes: tuple[int, ...]
    width: int | None
    row_shape: tuple[int, ...] | None
    epsilon: float
    epsilon_mode: str
    statistic: Atom
    constant: float  # what multiplies the scale
    factors: list[ScaleFactor]
    activation: ir.Value | None = None  # a scale that is no constant
    bias: ir.Value | None = None
    behind: ir.Value | None = None  # what a product with the op has to follow for, since it is no scale of the row


@dataclass
class Findings:
    """Candidates in graph order, and why other values that hold a statistic are none."""

    candidates: list[Candidate] = field(default_factory=list)
    reasons: dict[ir.Value, tuple[Atom, str]] = field(default_factory=dict)


def recognise(graph: ir.Graph, interpreter: Interpreter, visible: Set[ir.Graph]) -> Findings:
    """The norms of one graph; its nodes have been visited by ``interpreter``.

    ``visible`` are the graphs whose values its nodes may use: itself and those around it.
    """
    found, scaled = _look(graph, interpreter, visible, frozenset())
    return _look(graph, interpreter, visible, scaled)[0] if scaled else found


def _look(
    graph: ir.Graph, interpreter: Interpreter, visible: Set[ir.Graph], lengths: Set[Normalizer]
) -> tuple[Findings, set[Normalizer]]:
    """The norms, L2 normalizations by ``lengths`` among them; and by which lengths a scaled L2 normalization divides.

    Where what scales it can't be the op's scale, it is the L2 normalization that becomes the op.
    """
    scaled: set[Normalizer] = set()
    matches: dict[ir.Value, Candidate] = {}
    beyond: set[ir.Value] = set()  # values that go on from a norm: a statistic in them was told already
    findings = Findings()
    for node in graph:
        value = node.outputs[0] if node.outputs else None
        meaning = interpreter.known(value) if value is not None else None
        if value is None or meaning is None or not meaning.statistics:
            continue
        goes_on = any(i in matches or i in beyond for i in node.inputs)
        matcher = _Matcher(value, meaning, interpreter, visible, lengths, goes_on)
        found = matcher.match()
        if not goes_on:
            scaled |= matcher.scaled_lengths
        if isinstance(found, Candidate):
            matches[value] = found
        elif goes_on:
            beyond.add(value)
        if found is not None and (isinstance(found, Candidate) or not goes_on):
            _forget(findings.reasons, node)
        if isinstance(found, tuple) and not goes_on:
            findings.reasons[value] = found
    findings.candidates = _last_of_each_chain(matches, interpreter.constants)
    return findings, scaled


def _forget(reasons: dict[ir.Value, tuple[Atom, str]], node: ir.Node) -> None:
    """What was said of an input is said once, of the last value."""
    for value in node.inputs:
        if value is not None:
            reasons.pop(value, None)


@dataclass
class _Matcher:
    """Decides whether one value, whose meaning holds a statistic, is a norm."""

    value: ir.Value
    meaning: Meaning
    interpreter: Interpreter
    visible: Set[ir.Graph]
    lengths: Set[Normalizer]  # L2 normalizations that count as norms
    goes_on: bool  # from a norm that is taken without this
    scaled_lengths: set[Normalizer] = field(default_factory=set)  # of which this value is a multiple, but no norm

    def match(self) -> Candidate | tuple[Atom, str] | None:
        """A candidate; or the statistic and what is wrong with it; or None while it is still on its way to a norm."""
        reason: tuple[Atom, str] | None = None
        for atom, layout, power in self.meaning.statistics:
            statistic, guard = atom.statistic, _guard(atom, power)
            assert statistic is not None
            if guard is None:
                if power < 0:
                    reason = statistic, "its statistic enters as something else than one over a root mean square"
                continue
            found = self._norm_of(statistic, Meaning({(atom, layout): power}), layout, guard)
            if isinstance(found, Candidate):
                return found
            reason = reason or (statistic, found)
        return reason

    def _norm_of(self, statistic: Atom, core: Meaning, layout: Layout, guard: tuple[str, float]) -> Candidate | str:
        squared, shape = statistic.inner, self.meaning.shape
        assert squared is not None
        if squared.shape is None or shape is None:
            return "the shape of a value in it is not known"
        if self._is_layer_norm(statistic, squared):
            return LAYER_NORM
        frame = _frame(layout, squared.shape, statistic.axes)
        if frame is None or len(shape) != len(frame):
            return OTHER_AXES
        axes = tuple(axis for axis, entry in enumerate(frame) if entry in statistic.axes)
        root_meaning = squared.laid_out(frame, tuple(squared.shape[entry] for entry in frame))
        rest = self.meaning.times(root_meaning, -1.0).times(core, -1.0)
        root = self._root_value(statistic, root_meaning, shape)
        if root is None or any(f in rest.factors for f in root_meaning.factors if not self._is_constant(f[0])):
            return OTHER_TENSOR if frame == sorted(frame) else OTHER_AXES
        if rest.statistics:
            return "another statistic multiplies it"
        outside = {factor: p for factor, p in rest.factors.items() if _varies_outside(factor[1], axes)}
        if not outside:
            return self._with_scale(rest, root, axes, statistic, guard)
        if self._scales_more_than_a_length(rest, axes, statistic):
            self.scaled_lengths.add((statistic, *guard))
        behind = self._behind(outside, shape)
        found = self._with_scale(rest.times(Meaning(outside), -1.0), root, axes, statistic, guard)
        if behind is None or not isinstance(found, Candidate):
            return "what multiplies it varies over more than the normalized axes"
        found.behind = behind
        return found

    def _behind(self, outside: Mapping[Factor, float], shape: Shape) -> ir.Value | None:
        """The one value that was multiplied in before the statistic, and may as well follow: it lies as it is."""
        if self.goes_on or len(outside) != 1:
            return None
        (((atom, layout), power),) = outside.items()
        known = self.interpreter.known(atom.value) if atom.value is not None else None
        if atom.value is None or known is None or known.shape is None or len(known.shape) > len(shape) or power != 1:
            return None
        missing = len(shape) - len(known.shape)
        dims = [*(1,) * missing, *known.shape]
        in_place = all(e == axis - missing or (e == BROADCAST and dims[axis] == 1) for axis, e in enumerate(layout))
        return atom.value if in_place and dtype_of(atom.value) in FLOAT_TYPES and self._is_there(atom.value) else None

    def _scales_more_than_a_length(self, rest: Meaning, axes: tuple[int, ...], statistic: Atom) -> bool:
        """Whether a number other than one, or a weight along the row, is among what multiplies a row of length one."""
        inside = any(not _varies_outside(layout, axes) for _, layout in rest.factors)
        weighted = any(
            self._is_constant(atom) and any(layout[axis] != BROADCAST for axis in axes) for atom, layout in rest.factors
        )
        return inside or weighted or not _is_length(rest, statistic)

    def _root_value(self, statistic: Atom, root: Meaning, shape: Shape) -> ir.Value | None:
        """The value to normalize: the one that was squared, if it has the norm's own shape."""
        for value in self._carriers(statistic, root):
            known = self.interpreter.known(value)
            if known is None or known.shape is None or known.key != root.key:
                continue
            if _agree(known.shape, shape) and self._is_there(value):
                return value
        return None

    def _is_layer_norm(self, statistic: Atom, squared: Meaning) -> bool:
        """Whether a row's deviations from its mean were squared, and are what is divided, computed twice or not."""
        axes = statistic.axes
        if not any(_is_centred(value, self.interpreter, axes) for value in self._carriers(statistic, squared)):
            return False
        divided = [atom.value for atom, _ in self.meaning.factors if atom.value is not None]
        return any(_is_centred(value, self.interpreter, axes) for value in divided)

    def _carriers(self, statistic: Atom, meaning: Meaning) -> list[ir.Value]:
        """Values that mean what was squared, the one that was squared first."""
        squared: list[ir.Value] = [statistic.value] if statistic.value is not None else []
        return squared + self.interpreter.carriers.get(meaning.key, [])

    def _is_constant(self, atom: Atom) -> bool:
        return atom.kind == "opaque" and atom.value is not None and self.interpreter.constants.is_constant(atom.value)

    def _is_there(self, value: ir.Value) -> bool:
        """Whether a node in the place of this one may use ``value``."""
        seen = value.graph is None or value.graph in self.visible
        return seen and self.interpreter.is_before(value, self.value)

    def _with_scale(
        self, rest: Meaning, root: ir.Value, axes: tuple[int, ...], statistic: Atom, guard: tuple[str, float]
    ) -> Candidate | str:
        shape = self.interpreter.of(root).shape
        assert shape is not None
        number, half_powers = resolve(rest.constants, statistic.width)
        constant = rest.sign * number * float(statistic.width or 1) ** (half_powers / 2)
        if not rest.factors and _is_length(rest, statistic) and (statistic, *guard) not in self.lengths:
            return "L2 normalization: its rows have length 1, not sqrt(d)"
        factors = [
            ScaleFactor(atom.value, tuple(layout[axis] for axis in axes), power)
            for (atom, layout), power in rest.factors.items()
            if atom.value is not None
        ]
        if len(factors) != len(rest.factors):
            return "what multiplies it is an absolute value"
        activation = None
        if not all(self.interpreter.constants.is_constant(factor.value) for factor in factors):
            activation = self._activation(factors, constant, shape, axes)
            if activation is None:
                return "its scale is a product of activations: the norm in front of it is taken instead"
        row = [shape[axis] for axis in axes]
        row_shape = tuple(dim for dim in row if isinstance(dim, int))
        varies = any(entry != BROADCAST for factor in factors for entry in factor.layout)
        if activation is None and varies and len(row_shape) < len(row):
            return "its scale can't be spread over rows whose size is not known"
        return Candidate(
            output=self.value,
            root=root,
            axes=axes,
            width=statistic.width,
            row_shape=row_shape if len(row_shape) == len(row) else None,
            epsilon=guard[1],
            epsilon_mode=guard[0],
            statistic=statistic,
            constant=constant,
            factors=[] if activation is not None else factors,
            activation=activation,
        )

    def _activation(
        self, factors: list[ScaleFactor], constant: float, shape: Shape, axes: tuple[int, ...]
    ) -> ir.Value | None:
        """The graph value that is the whole scale: one element, or the normalized axes, last and nothing else."""
        rank = len(shape)
        if len(factors) != 1 or constant != 1 or factors[0].power != 1 or not _are_last(axes, rank):
            return None
        value = factors[0].value
        known = self.interpreter.of(value)
        if known.shape is None or len(known.shape) > rank or not self._is_there(value):
            return None
        missing = rank - len(known.shape)
        in_place = all(e in (BROADCAST, axis - missing) for axis, e in zip(axes, factors[0].layout, strict=True))
        spread = (1,) * missing + known.shape
        leading_ones = all(dim == 1 for dim in spread[: rank - len(axes)])
        row = spread[rank - len(axes) :]
        whole = all(dim == 1 for dim in row) or row == shape[rank - len(axes) :]
        return value if in_place and leading_ones and whole and dtype_of(value) in FLOAT_TYPES else None


def _is_length(rest: Meaning, statistic: Atom) -> bool:
    """Whether the constants make a division by the root mean square one by the row's length."""
    return resolve(rest.constants, statistic.width) == (1, -1)


def _guard(atom: Atom, power: float) -> tuple[str, float] | None:
    """``(epsilon_mode, epsilon)`` if the factor ``atom ** power`` is an inverse root mean square."""
    if atom.kind == "mean" and power == -0.5:
        return "inside", 0.0
    if atom.base is None or atom.base.kind != "mean":
        return None
    form = (atom.kind, atom.power, power)
    modes = {("shifted", 1.0, -0.5): "inside", ("shifted", 0.5, -1.0): "outside", ("floored", 0.5, -1.0): "clamp"}
    return (modes[form], atom.amount) if form in modes else None


def _frame(layout: Layout, shape: Shape, axes: tuple[int, ...]) -> list[int] | None:
    """Which axis of the squared tensor each axis of the norm is, by where its statistic lies; None if nowhere."""
    told = [axis for axis, dim in enumerate(shape) if axis not in axes and dim != 1]
    if sorted(entry for entry in layout if entry != BROADCAST) != told or len(layout) != len(shape):
        return None
    others = iter([axis for axis in range(len(shape)) if axis not in told])
    return [next(others) if entry == BROADCAST else entry for entry in layout]


def _varies_outside(layout: Layout, axes: tuple[int, ...]) -> bool:
    return any(entry != BROADCAST and axis not in axes for axis, entry in enumerate(layout))


def _are_last(axes: tuple[int, ...], rank: int) -> bool:
    return axes == tuple(range(rank - len(axes), rank))


def _agree(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) and all(x == y or x is None or y is None for x, y in zip(a, b, strict=True))


def _is_centred(root: ir.Value, interpreter: Interpreter, axes: tuple[int, ...]) -> bool:
    """Whether the root is ``x - mean(x)``, the mean being a row's: over the same axes as the squares."""
    node = _through(root, ("Cast", "CastLike", "Identity"))
    if node is None or node.op_type != "Sub" or node.inputs[0] is None or node.inputs[1] is None:
        return False
    mean = _through(node.inputs[1], ("Cast", "CastLike", "Identity", "Expand", "Unsqueeze", "Reshape"))
    if mean is None or mean.op_type != "ReduceMean" or mean.inputs[0] is None:
        return False
    averaged = interpreter.of(mean.inputs[0])
    over = interpreter.reduced_axes(mean, averaged.shape)
    return averaged.key == interpreter.of(node.inputs[0]).key and over in (None, axes)


def _through(value: ir.Value, op_types: tuple[str, ...]) -> ir.Node | None:
    """The node behind a value, looking through unary nodes of the given types."""
    node = value.producer()
    while node is not None and node.op_type in op_types:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def _last_of_each_chain(matches: dict[ir.Value, Candidate], constants: Constants) -> list[Candidate]:
    absorbed: dict[ir.Value, bool] = {}
    for value in reversed(list(matches)):
        absorbed[value] = _is_absorbed(value, matches, absorbed)
    chosen: list[Candidate] = []
    closed: set[ir.Value] = set()  # norms, and what only goes on from one
    for value, candidate in matches.items():
        node = value.producer()
        assert node is not None
        if any(i in closed and _same_norm(matches[i], candidate) for i in node.inputs if i is not None):
            closed.add(value)
        elif not absorbed[value]:
            closed.add(value)
            _take_bias(candidate, constants)
            chosen.append(candidate)
    return chosen


def _is_absorbed(value: ir.Value, matches: dict[ir.Value, Candidate], absorbed: dict[ir.Value, bool]) -> bool:
    """Whether every use goes on to a later value of the same norm that is worth ending at."""
    uses = value.uses()
    if not uses or value.is_graph_output():
        return False
    for node, _ in uses:
        later = node.outputs[0]
        if later not in matches or not _same_norm(matches[later], matches[value]):
            return False
        if _only_relabels(node, value) and not absorbed[later]:
            return False
    return True


def _same_norm(a: Candidate, b: Candidate) -> bool:
    return a.statistic is b.statistic and (a.epsilon, a.epsilon_mode) == (b.epsilon, b.epsilon_mode)


def _only_relabels(node: ir.Node, value: ir.Value) -> bool:
    """A cast that loses nothing, or an identity: no reason to move the end of a norm behind it."""
    if node.op_type in ("Cast", "CastLike"):
        target = dtype_of(node.outputs[0])
        return target == value.dtype or is_wider(target, dtype_of(value))
    return node.op_type in ("Identity", "Expand", "Reshape", "Unsqueeze", "Squeeze")


def _take_bias(candidate: Candidate, constants: Constants) -> None:
    """Move the end of a norm behind the constant bias that is all its value is used for, and behind a cast after it."""
    add = _only_user(candidate.output)
    root_shape, row_shape = shape_of(candidate.root), candidate.row_shape
    if add is None or (add.domain, add.op_type) != ("", "Add") or root_shape is None or row_shape is None:
        return
    if candidate.behind is not None:  # it would multiply the bias too
        return
    other = add.inputs[1] if add.inputs[0] is candidate.output else add.inputs[0]
    shape = shape_of(other) if other is not None and constants.is_constant(other) else None
    if shape is None or not _are_last(candidate.axes, len(root_shape)):
        return
    if _strip_ones(shape, len(row_shape)) != row_shape:
        return
    candidate.bias, candidate.output = other, add.outputs[0]
    cast = _only_user(candidate.output)
    if cast is not None and cast.op_type == "Cast" and is_wider(dtype_of(candidate.output), dtype_of(cast.outputs[0])):
        candidate.output = cast.outputs[0]


def _only_user(value: ir.Value) -> ir.Node | None:
    """The node of the same graph which alone, and once, uses a value."""
    uses = tuple(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.graph is not value.graph:
        return None
    return uses[0].node


def _strip_ones(shape: Shape, rank: int) -> Shape:
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return shape
