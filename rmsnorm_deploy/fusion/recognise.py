"""Finds the values that are RMSNorms: those whose meaning, divided by a root, is the root's inverse root mean square.

With ``R`` the root of a mean square ``M``, a value v is a norm of R when

    v / R / core = scale,      core = (M + e)^-1/2 (inside), (M^1/2 + e)^-1 (outside) or max(M^1/2, e)^-1 (clamp)

and the scale varies along the normalized axes only. Of a chain of such values (times a weight, a cast, times another
weight) the last is taken whose predecessors serve nothing else; a constant bias added to it is taken along.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import onnx_ir as ir

from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.interpret import Interpreter, dtype_of, is_wider, shape_of
from rmsnorm_deploy.fusion.meaning import BROADCAST, Atom, Layout, Meaning, Shape, resolve
from rmsnorm_deploy.opset import FLOAT_TYPES


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


@dataclass
class Findings:
    """Candidates in graph order, and why other values that hold a statistic are none."""

    candidates: list[Candidate] = field(default_factory=list)
    reasons: dict[ir.Value, tuple[Atom, str]] = field(default_factory=dict)


def recognise(graph: ir.Graph, interpreter: Interpreter, visible: Set[ir.Graph]) -> Findings:
    """The norms of one graph; its nodes have been visited by ``interpreter``.

    ``visible`` are the graphs whose values its nodes may use: itself and those around it.
    """
    matches: dict[ir.Value, Candidate] = {}
    beyond: set[ir.Value] = set()
    findings = Findings()
    for node in graph:
        value = node.outputs[0] if node.outputs else None
        meaning = interpreter.known(value) if value is not None else None
        if value is None or meaning is None or not meaning.statistics:
            continue
        found = _match(value, meaning, interpreter, visible)
        if isinstance(found, Candidate):
            _forget(findings.reasons, node)
            matches[value] = found
        elif found is not None and not _goes_on_from_a_norm(node, matches, beyond):
            _forget(findings.reasons, node)
            findings.reasons[value] = found
        if value not in matches and _goes_on_from_a_norm(node, matches, beyond):
            beyond.add(value)
    findings.candidates = _last_of_each_chain(matches, interpreter.constants)
    return findings


def _goes_on_from_a_norm(node: ir.Node, matches: dict[ir.Value, Candidate], beyond: set[ir.Value]) -> bool:
    return any(value in matches or value in beyond for value in node.inputs)


def _forget(reasons: dict[ir.Value, tuple[Atom, str]], node: ir.Node) -> None:
    """What was said of an input is said once, of the last value."""
    for value in node.inputs:
        if value is not None:
            reasons.pop(value, None)


def _match(
    value: ir.Value, meaning: Meaning, interpreter: Interpreter, visible: Set[ir.Graph]
) -> Candidate | tuple[Atom, str] | None:
    reason: tuple[Atom, str] | None = None
    for atom, layout, power in meaning.statistics:
        guard = _guard(atom, power)
        statistic = atom.statistic
        assert statistic is not None
        assert statistic.inner is not None
        if guard is None:
            if power < 0:
                reason = statistic, "its statistic enters as something else than one over a root mean square"
            continue
        found = _norm_of(value, meaning, atom, layout, power, guard, interpreter, visible)
        if isinstance(found, Candidate):
            return found
        reason = reason or (statistic, found)
    return reason


def _guard(atom: Atom, power: float) -> tuple[str, float] | None:
    """``(epsilon_mode, epsilon)`` if the factor ``atom ** power`` is an inverse root mean square."""
    if atom.kind == "mean" and power == -0.5:
        return "inside", 0.0
    if atom.base is None or atom.base.kind != "mean":
        return None
    if atom.kind == "shifted" and (atom.power, power) == (1.0, -0.5):
        return "inside", atom.amount
    if atom.kind == "shifted" and (atom.power, power) == (0.5, -1.0):
        return "outside", atom.amount
    if atom.kind == "floored" and (atom.power, power) == (0.5, -1.0):
        return "clamp", atom.amount
    return None


def _norm_of(
    value: ir.Value,
    meaning: Meaning,
    atom: Atom,
    layout: Layout,
    power: float,
    guard: tuple[str, float],
    interpreter: Interpreter,
    visible: Set[ir.Graph],
) -> Candidate | str:
    statistic = atom.statistic
    assert statistic is not None
    root_meaning = statistic.inner
    assert root_meaning is not None
    if root_meaning.shape is None or meaning.shape is None:
        return "the shape of a value in it is not known"
    rank = len(root_meaning.shape)
    axes = statistic.axes
    expected = tuple(BROADCAST if axis in axes or dim == 1 else axis for axis, dim in enumerate(root_meaning.shape))
    if len(meaning.shape) != rank or layout != expected:
        return "the statistic lines up with other axes than those it was taken over"
    rest = meaning.times(root_meaning, -1.0).times(Meaning({(atom, layout): power}), -1.0)
    root = _root_value(statistic, root_meaning, meaning.shape, interpreter, visible)
    if any(factor in rest.factors for factor in root_meaning.factors) or root is None:
        return "its statistic multiplies a tensor other than the one that was squared"
    if rest.statistics:
        return "another statistic multiplies it"
    if _is_centred(root, axes, interpreter):
        return "the row's mean is subtracted first: this is LayerNorm"
    if any(_varies_outside(layout, axes) for _, layout in rest.factors):
        return "what multiplies it varies over more than the normalized axes"
    return _with_scale(value, rest, root, statistic, guard, interpreter)


def _varies_outside(layout: Layout, axes: tuple[int, ...]) -> bool:
    return any(entry != BROADCAST and axis not in axes for axis, entry in enumerate(layout))


def _root_value(
    statistic: Atom, root: Meaning, shape: Shape, interpreter: Interpreter, visible: Set[ir.Graph]
) -> ir.Value | None:
    """The value to normalize: the one that was squared, if it has the norm's own shape."""
    carriers = interpreter.carriers.get(root.key, [])
    candidates = ([statistic.value] if statistic.value is not None else []) + carriers
    for value in candidates:
        known = interpreter.known(value)
        seen = value.graph is None or value.graph in visible
        if seen and known is not None and known.shape is not None and _agree(known.shape, shape):
            return value
    return None


def _agree(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) and all(x == y or x is None or y is None for x, y in zip(a, b, strict=True))


def _is_centred(root: ir.Value, axes: tuple[int, ...], interpreter: Interpreter) -> bool:
    """Whether the root is ``x - mean(x)`` over the very axes of the norm."""
    node = root.producer()
    while node is not None and node.op_type in ("Cast", "CastLike", "Identity"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "Sub" or node.inputs[0] is None or node.inputs[1] is None:
        return False
    x, mean = node.inputs[0], node.inputs[1].producer()
    while mean is not None and mean.op_type in ("Cast", "CastLike", "Identity", "Expand", "Unsqueeze", "Reshape"):
        mean = mean.inputs[0].producer() if mean.inputs[0] is not None else None
    if mean is None or mean.op_type != "ReduceMean" or mean.inputs[0] is None:
        return False
    return interpreter.of(mean.inputs[0]).key == interpreter.of(x).key


def _with_scale(
    value: ir.Value,
    rest: Meaning,
    root: ir.Value,
    statistic: Atom,
    guard: tuple[str, float],
    interpreter: Interpreter,
) -> Candidate | str:
    number, half_powers = resolve(rest.constants, statistic.width)
    constant = rest.sign * number * float(statistic.width or 1) ** (half_powers / 2)
    if not rest.factors and half_powers == -1 and number == 1:
        return "L2 normalization: its rows have length 1, not sqrt(d)"
    constants = interpreter.constants
    axes = statistic.axes
    factors = [
        ScaleFactor(atom.value, tuple(layout[axis] for axis in axes), power)
        for (atom, layout), power in rest.factors.items()
        if atom.value is not None
    ]
    if len(factors) != len(rest.factors):
        return "what multiplies it is an absolute value"
    shape = interpreter.of(root).shape
    assert shape is not None
    row = [shape[axis] for axis in axes]
    row_shape = tuple(dim for dim in row if isinstance(dim, int))
    activation = None
    if not all(constants.is_constant(factor.value) for factor in factors):
        activation = _activation(rest, factors, constant, len(shape), axes, interpreter)
        if activation is None:
            return "its scale is a product of activations: the norm in front of it is taken instead"
    return Candidate(
        output=value,
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
    rest: Meaning,
    factors: list[ScaleFactor],
    constant: float,
    rank: int,
    axes: tuple[int, ...],
    interpreter: Interpreter,
) -> ir.Value | None:
    """The graph value that is the whole scale, with the normalized axes last and nothing else."""
    if len(factors) != 1 or constant != 1 or factors[0].power != 1 or axes != tuple(range(rank - len(axes), rank)):
        return None
    value = factors[0].value
    known = interpreter.of(value)
    if known.shape is None or len(known.shape) > rank:
        return None
    in_place = all(
        entry in (BROADCAST, axis - (rank - len(known.shape))) for axis, entry in zip(axes, factors[0].layout, strict=True)
    )
    leading_ones = all(dim == 1 for dim in known.shape[: max(0, len(known.shape) - len(axes))])
    return value if in_place and leading_ones and dtype_of(value) in FLOAT_TYPES else None


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
    """Move the end of a norm behind the constant bias that is all its value is used for."""
    uses = tuple(candidate.output.uses())
    if len(uses) != 1 or candidate.output.is_graph_output():
        return
    node = uses[0].node
    if node.op_type != "Add" or node.domain != "" or candidate.row_shape is None:
        return
    other = node.inputs[1] if node.inputs[0] is candidate.output else node.inputs[0]
    root_shape = shape_of(candidate.root)
    if other is None or other is candidate.output or not constants.is_constant(other) or root_shape is None:
        return
    shape, rank = shape_of(other), len(root_shape)
    trailing = candidate.axes == tuple(range(rank - len(candidate.axes), rank))
    if shape is None or not trailing or _strip_ones(shape, len(candidate.row_shape)) != candidate.row_shape:
        return
    candidate.bias = other
    candidate.output = node.outputs[0]
    uses = tuple(candidate.output.uses())
    if len(uses) == 1 and not candidate.output.is_graph_output() and uses[0].node.op_type in ("Cast", "CastLike"):
        cast = uses[0].node
        if cast.inputs[0] is candidate.output and is_wider(dtype_of(candidate.output), dtype_of(cast.outputs[0])):
            candidate.output = cast.outputs[0]


def _strip_ones(shape: Shape, rank: int) -> Shape:
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return shape
