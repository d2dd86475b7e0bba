"""A model in which one thing can be changed at a time: the tools with which faults are planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from rmsnorm_deploy.export.weights import described
from rmsnorm_deploy.opset import DOMAIN
from rmsnorm_deploy.parity.extract import Graph, read_by
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.ulp import Array

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Nodes = list[onnx.NodeProto]


class CannotPlantError(Exception):
    """The model has nothing that this fault could be planted in; the message says what it lacks."""


@dataclass(frozen=True)
class Matrix:
    """A weight, on its own or as columns of a stacked one."""

    name: str
    tensor: str  # the initializer that holds it
    column: int | None
    rows: int

    def of(self, array: Array) -> Array:
        """The part of the initializer's array that is this weight, as a view."""
        return array if self.column is None else array[:, self.column : self.column + self.rows].T


class Patient:
    """A copy of a bundle's model in memory, read from ``path``; external weights stay where they are."""

    def __init__(self, path: Path) -> None:
        self.model = read_model(path)
        self.graph = Graph(self.model, path.parent)

    @property
    def norms(self) -> Nodes:
        """The fused ops in order."""
        return [node for node in self.model.graph.node if node.domain == DOMAIN]

    def norm(self, index: int = 1) -> onnx.NodeProto:
        """One in the middle of the model, or the nearest to that place."""
        norms = self.norms
        return norms[min(index, len(norms) - 1)]

    def skip_norm(self) -> onnx.NodeProto:
        """One with a residual add."""
        found = [node for node in self.norms if node.op_type.startswith("Skip")]
        if not found:
            raise CannotPlantError("no norm with a residual add")
        return found[min(1, len(found) - 1)]

    def scale_place(self, node: onnx.NodeProto) -> int:
        """Where among a fused op's inputs the scale is."""
        return 2 if node.op_type.startswith("Skip") else 1

    def array(self, name: str) -> Array:
        """A stored constant."""
        return np.array(onnx.numpy_helper.to_array(self.graph.array_of(name)))

    def constant(self, name: str, array: Array) -> str:
        """Store a new constant under a name made from ``name``."""
        known = {tensor.name for tensor in self.model.graph.initializer}
        fresh = f"{name}_planted"
        while fresh in known:
            fresh += "_"
        self.model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), fresh))
        return fresh

    def change_input(self, node: onnx.NodeProto, place: int, change: Callable[[Array], Array]) -> None:
        """Let one node read a changed copy of a stored constant."""
        name = node.input[place]
        array = self.array(name)
        wide = array.astype(np.float32) if array.dtype in (np.float16, _BFLOAT16) else array
        node.input[place] = self.constant(name, _changed(name, array, change(wide).astype(array.dtype)))

    def weight_of(self, part: str, index: int = 0) -> Matrix:
        """A stored matrix whose name has ``part`` in it."""
        found = [m for m in self._matrices() if part in m.name]
        if not found:
            raise CannotPlantError(f"no matrix called ...{part}...")
        return found[min(index, len(found) - 1)]

    def _matrices(self) -> Iterator[Matrix]:
        for tensor in self.model.graph.initializer:
            metadata = {entry.key: entry.value for entry in tensor.metadata_props}
            parts = described(metadata)
            yield from (Matrix(part.name, tensor.name, part.column, part.rows) for part in parts)
            if not parts and len(tensor.dims) == 2:
                yield Matrix(tensor.name, tensor.name, None, 0)

    def matrix(self, matrix: Matrix) -> Array:
        """Its elements, in the shape that it had before it was stacked."""
        return matrix.of(self.array(matrix.tensor))

    def change_weight(self, matrix: Matrix, change: Callable[[Array], Array]) -> str:
        """Let every node read a changed copy of a stored matrix; returns a value that follows from it."""
        name, array = matrix.tensor, self.array(matrix.tensor)
        before = matrix.of(array)
        matrix.of(array)[...] = _changed(matrix.name, before.copy(), change(before.copy()))
        fresh = self.constant(name, array)
        reader = self.graph.users[name][0]
        for node in self.graph.users[name]:
            for place, read in enumerate(node.input):
                if read == name:
                    node.input[place] = fresh
        return str(reader.output[0])

    def first(self, op_type: str, index: int = 0) -> onnx.NodeProto:
        """A node by the name of its op."""
        found: Nodes = [node for node in self.model.graph.node if node.op_type == op_type]
        if not found:
            raise CannotPlantError(f"no {op_type}")
        return found[min(index, len(found) - 1)]

    def wrap(self, node: onnx.NodeProto, place: int, build: Callable[[str, str], Nodes]) -> None:
        """Let ``node`` read ``build(from, to)`` in the place of one of its inputs."""
        source = node.input[place]
        target = f"{source}_{node.name or node.output[0]}_planted"
        fresh = build(source, target)
        node.input[place] = target
        self.insert_before(node.output[0], fresh)

    def insert_before(self, output: str, fresh: Nodes) -> None:
        """Put nodes in front of the one that gives ``output``."""
        nodes = list(self.model.graph.node)
        place = next(number for number, node in enumerate(nodes) if output in node.output)
        copies = [_copy(node) for node in [*nodes[:place], *fresh, *nodes[place:]]]
        del self.model.graph.node[:]
        self.model.graph.node.extend(copies)

    def break_body(self, node: onnx.NodeProto, change: Callable[[Nodes], Nodes]) -> None:
        """Give one op a function body of its own, changed."""
        body = next(function for function in self.model.functions if function.name == node.op_type)
        broken = self.model.functions.add()
        broken.CopyFrom(body)
        broken.name = f"{body.name}_planted"
        nodes = [_copy(inner) for inner in broken.node]
        changed = change(nodes)
        del broken.node[:]
        broken.node.extend(changed)
        node.op_type = broken.name

    def bytes(self) -> bytes:
        """The model as a file has it, without constants that nothing reads any more."""
        read = {name for node in self.model.graph.node for name in read_by(node)}
        read |= {value.name for value in self.model.graph.output}
        kept = [tensor for tensor in self.model.graph.initializer if tensor.name in read]
        slim = onnx.ModelProto()
        slim.CopyFrom(self.model)
        del slim.graph.initializer[:]
        slim.graph.initializer.extend(kept)
        return bytes(slim.SerializeToString())


def make(op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """A node of the standard domain with one output."""
    return onnx.helper.make_node(op_type, list(inputs), [output], name=f"{output}_node", **attributes)


def constant_node(output: str, array: Array) -> onnx.NodeProto:
    return make("Constant", [], output, value=onnx.numpy_helper.from_array(np.ascontiguousarray(array)))


def rolled(source: str, target: str, axis: int = -2) -> Nodes:
    """Everything moved by one along an axis, the first to the end."""
    return [
        constant_node(f"{target}_0", np.array([0], np.int64)),
        constant_node(f"{target}_1", np.array([1], np.int64)),
        constant_node(f"{target}_end", np.array([2**62], np.int64)),
        constant_node(f"{target}_axis", np.array([axis], np.int64)),
        make("Slice", [source, f"{target}_1", f"{target}_end", f"{target}_axis"], f"{target}_rest"),
        make("Slice", [source, f"{target}_0", f"{target}_1", f"{target}_axis"], f"{target}_first"),
        make("Concat", [f"{target}_rest", f"{target}_first"], target, axis=axis),
    ]


def find(nodes: Nodes, op_type: str) -> onnx.NodeProto:
    """The first node of that op in a body."""
    found = next((node for node in nodes if node.op_type == op_type), None)
    if found is None:
        raise CannotPlantError(f"no {op_type} in the op's body")
    return found


def before(nodes: Nodes, node: onnx.NodeProto, fresh: Nodes) -> Nodes:
    """The body with nodes put in front of one."""
    place = next(number for number, other in enumerate(nodes) if other.output[0] == node.output[0])
    return [*nodes[:place], *fresh, *nodes[place:]]


def _changed(name: str, array: Array, changed: Array) -> Array:
    if np.array_equal(array, changed):
        raise CannotPlantError(f"{name} stays as it is")
    return changed


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
