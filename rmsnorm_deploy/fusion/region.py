"""The part of a graph that computes one candidate, as something that can be run by itself on chosen rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.fusion.evaluate import (
    Array,
    CannotEvaluateError,
    constant_value,
    evaluate,
    is_float,
    numpy_dtype,
)
from rmsnorm_deploy.fusion.interpret import shape_of
from rmsnorm_deploy.fusion.recognise import Candidate

MAX_NODES = 400
_LEAD_SIZES = (2, 3, 5, 7, 11, 13)  # for the named dimensions; all different, so that none is mistaken for another


class CannotProveError(Exception):
    """The region can't be run by itself; the message is the reason given to the user."""


@dataclass
class Region:
    """Nodes from the root to the output, in order, with the values that enter."""

    candidate: Candidate
    nodes: list[ir.Node] = field(default_factory=list)
    leaves: list[ir.Value] = field(default_factory=list)  # initializers and activations
    dims: dict[str, int] = field(default_factory=dict)

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """A value's shape with a number for every named dimension.

        Raises:
            CannotProveError: a dimension is not known at all.
        """
        shape = shape_of(value)
        if shape is None or any(dim is None for dim in shape):
            raise CannotProveError(f"the shape of '{value.name}' is not known")
        return tuple(dim if isinstance(dim, int) else self._size(str(dim)) for dim in shape)

    def _size(self, name: str) -> int:
        return self.dims.setdefault(name, _LEAD_SIZES[len(self.dims) % len(_LEAD_SIZES)])

    def leaf_arrays(self, seed: int = 0) -> dict[ir.Value, Array]:
        """Numbers for the leaves: constants of one element and integers as they are, anything else at random.

        A rewrite that holds for random weights holds for these; so norms that differ in their weights alone share a
        proof.
        """
        generator = np.random.default_rng(seed)
        arrays: dict[ir.Value, Array] = {}
        for value in self.leaves:
            tensor = value.const_value
            if tensor is not None and (tensor.size == 1 or not _is_float_type(value.dtype or tensor.dtype)):
                arrays[value] = np.asarray(tensor.numpy())
                continue
            shape = self.shape(value) if tensor is None else tuple(tensor.shape.numpy())
            signs = generator.choice([-1.0, 1.0], size=shape)
            array = generator.uniform(0.25, 2.0, size=shape) * signs
            arrays[value] = array.astype(numpy_dtype(value.dtype or ir.DataType.FLOAT))
        return arrays

    def run(self, root: Array, leaves: Mapping[ir.Value, Array], *, lifted: bool) -> dict[ir.Value, Array]:
        """Every value of the region for one array of rows."""
        values: dict[ir.Value, Array] = {self.candidate.root: root}
        for value, array in leaves.items():
            values[value] = array.astype(np.float64) if lifted and is_float(array) else array
        for node in self.nodes:
            if node.op_type == "Shape" and node.inputs[0] is not None:
                known = values.get(node.inputs[0])
                shape = self.shape(node.inputs[0]) if known is None else known.shape
                attributes = {name: attr.value for name, attr in node.attributes.items()}
                values[node.outputs[0]] = np.asarray(shape, np.int64)[attributes.get("start", 0) : attributes.get("end")]
                continue
            inputs = [None if i is None else values[i] for i in node.inputs]
            try:
                values[node.outputs[0]] = evaluate(node, inputs, lifted=lifted)
            except (ValueError, IndexError, TypeError, CannotEvaluateError) as error:
                raise CannotProveError(f"{node.op_type} can't be run by itself: {error}") from error
        return values

    def fingerprint(self) -> str:
        """Equal for regions with the same ops, attributes, shapes, dtypes and scalar constants."""
        numbers: dict[ir.Value, int] = {self.candidate.root: 0}
        text: list[Any] = [shape_of(self.candidate.root), self.candidate.root.dtype]
        for value in self.leaves:
            numbers[value] = len(numbers)
            tensor = value.const_value
            small = tensor is not None and (tensor.size == 1 or not _is_float_type(value.dtype or tensor.dtype))
            text.append((shape_of(value), value.dtype, tensor.tobytes() if small and tensor is not None else None))
        for node in self.nodes:
            attributes = [_attribute_text(node, name, attr) for name, attr in sorted(node.attributes.items())]
            inputs = [numbers.get(i, shape_of(i)) if i is not None else None for i in node.inputs]
            text.append((node.domain, node.op_type, attributes, inputs, node.outputs[0].dtype))
            numbers[node.outputs[0]] = len(numbers)
        c = self.candidate
        text.append((c.axes, c.epsilon, c.epsilon_mode, c.constant, [(numbers.get(f.value), f.layout, f.power) for f in c.factors]))
        text.append((c.activation and numbers.get(c.activation), c.bias and numbers.get(c.bias), c.output.dtype))
        return hashlib.sha256(repr(text).encode()).hexdigest()


def _attribute_text(node: ir.Node, name: str, attr: ir.Attr) -> tuple[str, object]:
    if node.op_type == "Constant":
        array = constant_value(node)
        return name, (array.dtype, array.shape, array.tobytes())
    return name, attr.value


def _is_float_type(dtype: ir.DataType) -> bool:
    return dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def extract(candidate: Candidate) -> Region:
    """The region behind a candidate.

    Raises:
        CannotProveError: the output depends on something besides the root, constants and the scale.
    """
    region = Region(candidate)
    stops = {candidate.root} | ({candidate.activation} if candidate.activation is not None else set())
    finished: set[ir.Value] = set(stops)
    stack: list[tuple[ir.Value, bool]] = [(candidate.output, False)]
    if candidate.activation is not None:
        region.leaves.append(candidate.activation)
    for factor in candidate.factors:
        stack.append((factor.value, False))
    while stack:
        value, expanded = stack.pop()
        node = value.producer()
        if expanded:
            assert node is not None
            if value not in finished:
                finished.add(value)
                region.nodes.append(node)
            continue
        if value in finished:
            continue
        if node is None:
            if value.const_value is None or value.is_graph_input():
                raise CannotProveError(f"it depends on '{value.name}' besides the row itself")
            finished.add(value)
            region.leaves.append(value)
            continue
        if len(region.nodes) > MAX_NODES or value is not node.outputs[0]:
            raise CannotProveError(f"it depends on '{value.name}' besides the row itself")
        stack.append((value, True))
        if node.op_type != "Shape":
            stack.extend((i, False) for i in node.inputs if i is not None)
    return region
