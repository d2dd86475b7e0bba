"""Parts of an ONNX graph: what lies between some values and others, and models that hold several such parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx.external_data_helper import load_external_data_for_tensor

MAX_NODES = 300  # a norm has a dozen; more is a part that does not end where it should


@dataclass(frozen=True)
class Part:
    """Nodes in their order, the constants they read, and what they read besides (``open``: inputs of the graph)."""

    nodes: tuple[onnx.NodeProto, ...]
    constants: tuple[str, ...]
    open: tuple[str, ...]

    @property
    def open_for_shape(self) -> bool:
        """Whether of everything in ``open`` the shape alone is read."""
        return all(node.op_type == "Shape" for node in self.nodes for name in node.input if name in self.open)


class Graph:
    """A model's main graph, indexed by the names of its values."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.inputs = {value.name: value for value in model.graph.input}
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._order = {name: number for number, node in enumerate(model.graph.node) for name in node.output if name}
        self.producers = {name: node for node in model.graph.node for name in node.output if name}
        self.nodes = {node.name: node for node in model.graph.node if node.name}
        typed = [*model.graph.value_info, *model.graph.input, *model.graph.output]
        self.dtypes = {value.name: value.type.tensor_type.elem_type for value in typed}
        self.dtypes |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in read_by(node):
                self.users.setdefault(name, []).append(node)

    def is_computed(self, name: str) -> bool:
        """Whether a value depends on the model's inputs, as far as its name tells: it is not a stored constant."""
        return name in self.producers or (name in self.inputs and name not in self.constants)

    def between(
        self, start: Iterable[str], end: Iterable[str], limit: int = MAX_NODES, *, shapes: bool = False
    ) -> Part:
        """What computes ``end`` from ``start``. Stops after ``limit`` nodes, with what is still wanted in ``open``.

        What is read for its type or shape alone is left out, unless ``shapes`` are wanted too.
        """
        known, wanted = set(start), list(end)
        nodes: dict[int, onnx.NodeProto] = {}
        constants: dict[str, None] = {}
        left: dict[str, None] = {}
        while wanted:
            name = wanted.pop()
            if not name or name in known:
                continue
            known.add(name)
            node = self.producers.get(name)
            if node is not None and len(nodes) < limit:
                nodes[self._order[name]] = node
                wanted.extend(read_by(node) if shapes else _needed(node))
            elif name in self.constants:
                constants[name] = None
            else:
                left[name] = None
        return Part(tuple(nodes[key] for key in sorted(nodes)), tuple(constants), tuple(left))

    def size_of(self, name: str) -> int:
        """Bytes of a constant."""
        tensor = self.constants[name]
        return int(math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)

    def array_of(self, name: str) -> onnx.TensorProto:
        """A constant with its bytes inside."""
        tensor = onnx.TensorProto()
        tensor.CopyFrom(self.constants[name])
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(self.folder))
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
        return tensor


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Names of the values that a node reads, those in its subgraphs too."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
            inner = {name for inside in graph.node for name in inside.output}
            inner |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            yield from (name for inside in graph.node for name in read_by(inside) if name not in inner)
            yield from (value.name for value in graph.output if value.name not in inner)


def _needed(node: onnx.NodeProto) -> Iterator[str]:
    """Names of the values whose numbers a node needs: a CastLike's second gives the type, an Expand's the shape, which
    in a norm is that of what comes next to it."""
    return iter(node.input[:1]) if node.op_type in ("CastLike", "Expand") else read_by(node)


@dataclass(frozen=True)
class Piece:
    """One part for `assemble`: its values are called ``prefix/name``; ``starts`` maps those it begins at to dtypes."""

    prefix: str
    part: Part
    starts: Mapping[str, int]
    ends: Sequence[str]


def assemble(graph: Graph, pieces: Sequence[Piece]) -> onnx.ModelProto:
    """A model with every piece side by side, its constants inside it, and the functions of ``graph``'s model."""
    model = onnx.ModelProto()
    model.ir_version = graph.model.ir_version
    model.opset_import.extend(graph.model.opset_import)
    model.functions.extend(graph.model.functions)
    model.graph.name = "parts"
    stored: set[str] = set()
    for piece in pieces:
        _add(model, graph, piece, stored)
    return model


def _add(model: onnx.ModelProto, graph: Graph, piece: Piece, stored: set[str]) -> None:
    inside = {name for node in piece.part.nodes for name in node.output if name} | set(piece.starts)
    for number, node in enumerate(piece.part.nodes):
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        copy.ClearField("metadata_props")
        copy.name = f"{piece.prefix}/{number}"
        if node.op_type == "CastLike" and node.input[1] not in inside | set(piece.part.constants):
            _settle_type(copy, graph.dtypes.get(node.input[1]))
        if node.op_type == "Expand" and node.input[1] not in inside | set(piece.part.constants):
            _settle_type(copy, None)
        for names in (copy.input, copy.output):
            renamed = [f"{piece.prefix}/{name}" if name in inside else name for name in names]
            del names[:]
            names.extend(renamed)
    for name in piece.part.constants:
        if name not in stored:
            stored.add(name)
            model.graph.initializer.append(graph.array_of(name))
    for name, dtype in piece.starts.items():
        model.graph.input.append(onnx.helper.make_tensor_value_info(f"{piece.prefix}/{name}", dtype, None))
    for name in piece.ends:
        model.graph.output.append(onnx.ValueInfoProto(name=f"{piece.prefix}/{name}"))


def _settle_type(node: onnx.NodeProto, dtype: int | None) -> None:
    """Drop the operand that stands for a type or a shape: a cast to the type if it is known, else no change."""
    del node.input[1]
    node.op_type = "Identity" if dtype is None else "Cast"
    if dtype is not None:
        node.attribute.append(onnx.helper.make_attribute("to", dtype))


def ending_at(graph: Graph, names: Iterable[str]) -> onnx.ModelProto:
    """A model that gives the values of those names alone, without the nodes and constants that none of them needs, and
    without what only readers need: types of values in between, and where nodes come from."""
    wanted = list(dict.fromkeys(names))
    part = graph.between((), wanted, len(graph.model.graph.node), shapes=True)
    constants = set(part.constants)
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    for field in (model.graph.node, model.graph.initializer, model.graph.output, model.graph.value_info):
        del field[:]
    model.graph.node.extend(part.nodes)
    model.graph.initializer.extend(tensor for name, tensor in graph.constants.items() if name in constants)
    for node in model.graph.node:
        del node.metadata_props[:]
    # an input that is given back keeps its type
    model.graph.output.extend(graph.inputs.get(name) or onnx.ValueInfoProto(name=name) for name in wanted)
    return model


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model that gives the values of those names too."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    there = {value.name for value in copy.graph.output}
    inputs = {value.name: value for value in copy.graph.input}  # one that is given back keeps its type
    for name in names:
        if name not in there:
            there.add(name)
            copy.graph.output.append(inputs.get(name) or onnx.ValueInfoProto(name=name))
    return copy
