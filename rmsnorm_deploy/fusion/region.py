"""The part of a graph that computes one candidate, as something that can be run by itself on chosen rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.fusion.constants import LONGEST_COLUMN, is_fixed
from rmsnorm_deploy.fusion.evaluate import Array, CannotEvaluateError, evaluate, is_float, numpy_dtype
from rmsnorm_deploy.fusion.numbering import Numbering, attribute_key
from rmsnorm_deploy.fusion.recognise import Candidate
from rmsnorm_deploy.fusion.values import shape_of
from rmsnorm_deploy.opset import FLOAT_TYPES

MAX_NODES = 400
_SMALL_SIZES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


class CannotProveError(Exception):
    """The region can't be run by itself; the message is the reason given to the user."""


@dataclass
class Region:
    """Nodes from the root to the output, in order, with the values that enter."""

    candidate: Candidate
    nodes: list[ir.Node] = field(default_factory=list)
    roots: list[ir.Value] = field(default_factory=list)  # the root, and values that are the same computation
    leaves: list[ir.Value] = field(default_factory=list)  # initializers and activations

    def leaf_arrays(self, sizes: Sizes) -> dict[ir.Value, Array]:
        """Numbers for the leaves: scalars, integers and what multiplies a matrix as they are, anything else at random.

        A rewrite that holds for random weights holds for these; so norms that differ in their weights alone share a
        proof.
        """
        generator = np.random.default_rng(0)
        arrays: dict[ir.Value, Array] = {}
        for value in self.leaves:
            tensor = value.const_value
            if tensor is not None and _is_kept(value, tensor):
                arrays[value] = np.asarray(tensor.numpy())
                continue
            shape = sizes.of(value) if tensor is None or not is_fixed(value) else tuple(tensor.shape.numpy())
            signs = generator.choice([-1.0, 1.0], size=shape)
            array = generator.uniform(0.25, 2.0, size=shape) * signs
            arrays[value] = array.astype(numpy_dtype(value.dtype or ir.DataType.FLOAT))
        return arrays

    def run(
        self, rows: Array, leaves: Mapping[ir.Value, Array], sizes: Sizes, *, lifted: bool
    ) -> dict[ir.Value, Array]:
        """Every value of the region for one array of rows.

        Raises:
            CannotProveError: a node can't be run for these sizes.
        """
        values: dict[ir.Value, Array] = dict.fromkeys(self.roots, rows)
        for value, array in leaves.items():
            values[value] = array.astype(np.float64) if lifted and is_float(array) else array
        for node in self.nodes:
            inputs = [None if i is None else values.get(i) for i in node.inputs]
            if node.op_type == "Shape" and inputs[0] is None and node.inputs[0] is not None:
                inputs = [np.empty(sizes.of(node.inputs[0]), np.bool_)]
            try:
                values[node.outputs[0]] = evaluate(node, inputs, lifted=lifted)
            except (ValueError, IndexError, TypeError, CannotEvaluateError) as error:
                raise CannotProveError(f"{node.op_type} can't be run by itself: {error}") from error
        return values

    def fingerprint(self) -> str:
        """Equal for regions with the same ops, attributes, shapes, dtypes and scalar constants."""
        numbers: dict[ir.Value, int] = dict.fromkeys(self.roots, 0)
        text: list[Any] = [(shape_of(root), root.dtype) for root in self.roots]
        for value in self.leaves:
            numbers[value] = len(numbers)
            tensor = value.const_value
            known = tensor.tobytes() if tensor is not None and _is_kept(value, tensor) else is_fixed(value)
            text.append((shape_of(value), value.dtype, known))
        for node in self.nodes:
            attributes = [(name, attribute_key(attr)) for name, attr in sorted(node.attributes.items())]
            inputs = [numbers.get(i, shape_of(i)) if i is not None else None for i in node.inputs]
            text.append((node.domain, node.op_type, attributes, inputs, node.outputs[0].dtype))
            numbers[node.outputs[0]] = len(numbers)
        c = self.candidate
        factors = [(numbers.get(factor.value), factor.layout, factor.power) for factor in c.factors]
        text.append((c.axes, c.epsilon, c.epsilon_mode, c.constant, factors))
        others = [value and numbers.get(value) for value in (c.activation, c.bias, c.behind)]
        text.append((others, c.output.dtype))
        return hashlib.sha256(repr(text).encode()).hexdigest()


class Sizes:
    """Numbers for the dimensions of a region's values, all different, so that none is taken for another.

    What lies outside the row needs but a few elements for a proof: with ``small``, fixed dimensions shrink too.
    """

    def __init__(self, candidate: Candidate, *, small: bool) -> None:
        self._shape = shape_of(candidate.root) or ()
        self._small = small
        self._kept = {1, *(self._shape[axis] for axis in candidate.axes)}
        self._free = [size for size in _SMALL_SIZES if size not in self._kept]
        self._sizes: dict[object, int] = {}

    def root(self) -> tuple[int, ...]:
        """The shape of the rows."""
        return tuple(self._size((axis,) if dim is None else dim) for axis, dim in enumerate(self._shape))

    def of(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of another value that enters the region.

        Raises:
            CannotProveError: a dimension is not known at all.
        """
        shape = shape_of(value)
        if shape is None or None in shape:
            raise CannotProveError(f"the shape of '{value.name}' is not known")
        return tuple(self._size(dim) for dim in shape)

    def _size(self, dim: object) -> int:
        if isinstance(dim, int) and (dim in self._kept or not self._small):
            return dim
        return self._sizes.setdefault(dim, self._free[len(self._sizes) % len(self._free)])


def _is_kept(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    """Whether a constant takes part in a proof with its own numbers."""
    if not is_fixed(value):
        return False
    if tensor.size == 1 or (value.dtype or tensor.dtype) not in FLOAT_TYPES:
        return True
    is_column = len(tensor.shape) == 2 and tensor.shape[1] == 1 and tensor.size <= LONGEST_COLUMN
    return is_column and any(use.node.op_type == "MatMul" for use in value.uses())


def extract(candidate: Candidate, numbering: Numbering) -> Region:
    """The region behind a candidate.

    Raises:
        CannotProveError: the output depends on something besides the root, constants and the scale.
    """
    region = Region(candidate, roots=[candidate.root])
    root = numbering.of(candidate.root)
    finished: set[ir.Value] = {candidate.root}
    if candidate.activation is not None:
        finished.add(candidate.activation)
        region.leaves.append(candidate.activation)
    if candidate.behind is not None and candidate.behind not in finished:
        finished.add(candidate.behind)
        region.leaves.append(candidate.behind)
    stack = [(candidate.output, False), *((factor.value, False) for factor in candidate.factors)]
    while stack:
        value, expanded = stack.pop()
        node = value.producer()
        if value in finished:
            continue
        if expanded and node is not None:
            finished.add(value)
            region.nodes.append(node)
        elif numbering.of(value) == root:
            finished.add(value)
            region.roots.append(value)
        elif node is None and is_fixed(value):
            finished.add(value)
            region.leaves.append(value)
        elif node is None or value is not node.outputs[0] or len(region.nodes) > MAX_NODES:
            raise CannotProveError(f"it depends on '{value.name}' besides the row itself")
        else:
            stack.append((value, True))
            if node.op_type != "Shape":
                stack.extend((i, False) for i in node.inputs if i is not None)
    return region
