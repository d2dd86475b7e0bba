"""bfloat16 where ONNX Runtime lacks kernels for it: each such op in float32 between casts, in a copy of the graph.

Every result is rounded to bfloat16 all the same, so the model computes what eager PyTorch does, an op at a time with
float32 sums inside. Ops that have a kernel stay: those of ONNX Runtime, and this package's where its library is
used. The file is left as it is, and its weights are mapped, not read.
"""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.fusion.imports import infer_shapes, inline_functions
from rmsnorm_deploy.runtime.ort_plugins import error_types

Array = np.ndarray[Any, Any]

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_INLINE_BYTES = 16384  # ONNX Runtime wants shapes and the like as constants in the graph
_HAVE_KERNELS = ("CPUExecutionProvider", "CUDAExecutionProvider")


@dataclass(frozen=True)
class Widened:
    """The copy: ``model`` serialized, ``weights`` that it has as external ones by name, and how often which op was
    widened."""

    model: bytes
    weights: Mapping[str, Array]
    ops: Mapping[str, int]


def widen_bfloat16(model: ir.Model, folder: Path, kernels: Kernels, own_library: bool) -> Widened | None:
    """The model with every bfloat16 op that is not among ``kernels`` in float32; None if there is none.

    model: is changed.
    folder: of its external weights.
    own_library: the norms of this package have kernels; else they are written out first.

    Raises:
        InputError: weights outside the folder.
    """
    if own_library:
        inline_functions(model)
    else:
        InlinePass()(model)
    infer_shapes(model)
    ops = _Widening(model, kernels).run()
    if not ops:
        return None
    weights = _weights(model, folder)
    return Widened(ir.to_proto(model).SerializeToString(), weights, ops)


def holds_bfloat16(path: Path) -> bool:
    """Whether the model at ``path`` says of a value that it is bfloat16."""
    model = ir.load(path)
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    return any(value.dtype == _NARROW for value in (*model.graph.inputs, *model.graph.initializers.values(), *made))


class Kernels:
    """What a session's execution providers have kernels for: ``ort``, the onnxruntime module, is given each op alone.

    Its own list of kernels won't do: a build for GPUs that lacks a library ends the process when it is asked for it.

    Raises:
        InputError: a provider that has no kernels, since it compiles the graph.
    """

    def __init__(self, ort: types.ModuleType, providers: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        for name, _ in providers:
            if name not in _HAVE_KERNELS:
                raise InputError(
                    f"widen_bfloat16 is for {' and '.join(_HAVE_KERNELS)}, and not for {name}: leave it out"
                )
        self._ort, self._providers = ort, list(providers)
        self._errors = error_types(ort)
        self._options = ort.SessionOptions()
        self._options.log_severity_level = 4  # what it logs as errors arrives as exceptions too
        self._options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._options.intra_op_num_threads = 1
        self._known: dict[tuple[Any, ...], bool] = {}
        self._schemas = defaultdict(list)
        for schema in ort.capi.onnxruntime_pybind11_state.get_all_operator_schema():
            self._schemas[schema.domain, schema.name].append(schema)

    def schema(self, node: ir.Node, opset: int) -> Any:
        """ONNX Runtime's schema of the node's op; None for an op of somebody else's."""
        known = [schema for schema in self._schemas[node.domain, node.op_type] if schema.since_version <= opset]
        return max(known, key=lambda schema: schema.since_version, default=None)

    def run(self, node: ir.Node, opset: int, narrow: Collection[ir.Value]) -> bool:
        """Whether the node, whose bfloat16 inputs and outputs are ``narrow``, runs as it is."""

        def dtypes(values: Sequence[ir.Value | None]) -> tuple[ir.DataType | None, ...]:
            return tuple(_NARROW if value in narrow else None if value is None else value.dtype for value in values)

        key = (node.domain, node.op_type, opset, dtypes(node.inputs), dtypes(node.outputs))
        if key not in self._known:
            self._known[key] = self._opens(_alone(node, opset, key[3]))
        return self._known[key]

    def _opens(self, model: ir.Model) -> bool:
        try:
            self._ort.InferenceSession(ir.to_proto(model).SerializeToString(), self._options, providers=self._providers)
        except self._errors:
            return False
        return True


def _alone(node: ir.Node, opset: int, dtypes: Sequence[ir.DataType | None]) -> ir.Model:
    """A model of the node alone, whose inputs have these dtypes and any shape."""
    inputs = [
        ir.Value(name=f"input{place}", type=None if dtype is None else ir.TensorType(dtype))
        if value is not None and value.name
        else None
        for place, (value, dtype) in enumerate(zip(node.inputs, dtypes, strict=True))
    ]
    outputs = [ir.Value(name=output.name and f"output{place}") for place, output in enumerate(node.outputs)]
    copy = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), outputs=outputs)
    graph = ir.Graph(
        [value for value in inputs if value is not None],
        [value for value in outputs if value.name],
        nodes=[copy],
        opset_imports={node.domain: opset},
        name="alone",
    )
    return ir.Model(graph, ir_version=8)


class _Widening:
    """One pass over a model, in which a value that several ops want in float32 is cast once."""

    def __init__(self, model: ir.Model, kernels: Kernels) -> None:
        self._model = model
        self._kernels = kernels
        self._wide: dict[ir.Value, ir.Value] = {}
        self._names = {value.name for graph in model.graphs() for value in _values(graph)}

    def run(self) -> Counter[str]:
        """How often which op was widened."""
        ops: Counter[str] = Counter()
        for node in list(self._model.graph.all_nodes()):
            arguments = self._narrow_arguments(node)
            if arguments:
                self._widen(node, arguments)
                ops[node.op_type] += 1
        return ops

    def _narrow_arguments(self, node: ir.Node) -> set[ir.Value]:
        """The bfloat16 inputs and outputs of a node without a kernel; constants and graphs in graphs need none."""
        opset = self._model.opset_imports.get(node.domain, 1)
        schema = self._kernels.schema(node, opset)
        kinds = {attribute.type for attribute in node.attributes.values()}
        if schema is None or node.op_type == "Constant" or kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
            return set()
        arguments = list(_arguments(node, schema))
        variables = {parameter.typeStr for parameter, value in arguments if value.dtype == _NARROW}
        narrow = {value for parameter, value in arguments if parameter.typeStr in variables}
        return set() if not narrow or self._kernels.run(node, opset, narrow) else narrow

    def _widen(self, node: ir.Node, narrow: set[ir.Value]) -> None:
        for position, value in enumerate(node.inputs):
            if value in narrow:
                node.replace_input_with(position, self._widened(value))
        _widen_attributes(node)
        for output in node.outputs:
            if output in narrow:
                self._round(node, output)

    def _widened(self, value: ir.Value) -> ir.Value:
        """The value in float32, cast where it comes into being, so that all its readers see it."""
        if value not in self._wide:
            cast = _cast(value, _WIDE)
            cast.outputs[0].name = self._unused(f"{value.name}/float32")
            producer, graph = value.producer(), value.graph
            assert graph is not None
            if producer is not None:
                graph.insert_after(producer, cast)
            else:
                graph.insert_before(graph[0], cast)
            self._wide[value] = cast.outputs[0]
        return self._wide[value]

    def _round(self, node: ir.Node, output: ir.Value) -> None:
        """Cast an output back; all that read it read the cast, which takes its name."""
        cast = _cast(output, _NARROW)
        rounded = cast.outputs[0]
        assert node.graph is not None
        node.graph.insert_after(node, cast)
        name = output.name
        output.replace_all_uses_with(rounded, replace_graph_outputs=True)
        cast.replace_input_with(0, output)
        output.type = ir.TensorType(_WIDE)
        output.name, rounded.name = self._unused(f"{name}/float32"), name

    def _unused(self, name: str) -> str:
        """A name for a value that no graph has, since a graph in a graph must not repeat one."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _arguments(node: ir.Node, schema: Any) -> Iterator[tuple[Any, ir.Value]]:
    """The inputs and outputs that a node has, each with its parameter in the schema; the last may be variadic."""
    for parameters, values in ((schema.inputs, node.inputs), (schema.outputs, node.outputs)):
        for position, value in enumerate(values):
            if value is not None and value.name:
                yield parameters[min(position, len(parameters) - 1)], value


def _widen_attributes(node: ir.Node) -> None:
    """What an attribute makes bfloat16 is float32 instead: a dtype, or the number to fill with."""
    for name, attribute in list(node.attributes.items()):
        if name in ("dtype", "output_dtype", "output_datatype") and attribute.value == int(_NARROW):
            node.attributes[name] = ir.AttrInt64(name, int(_WIDE))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _NARROW:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.as_tensor().numpy().astype(np.float32)))


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], attributes={"to": int(to)})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(to), value.shape
    return cast


def _weights(model: ir.Model, folder: Path) -> dict[str, Array]:
    """The external weights of the graph by name, mapped; small ones, and those of graphs in graphs, go inside.

    One whose file is not there stays as it is: session options may have it.
    """
    weights: dict[str, Array] = {}
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            file = (folder / tensor.location).resolve()
            if not file.is_relative_to(folder.resolve()):
                raise InputError(f"weight {name!r} is in {tensor.location}, outside {folder}: export the model again")
            if not file.is_file():
                continue
            if graph is model.graph and tensor.nbytes > _INLINE_BYTES:
                weights[name] = tensor.numpy()
            else:
                value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    return weights
