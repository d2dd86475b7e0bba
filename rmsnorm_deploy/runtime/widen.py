"""bfloat16 where ONNX Runtime lacks kernels for it: each such op in float32 between casts, in a copy of the graph.

Every result is rounded to bfloat16 all the same, so the model computes what eager PyTorch does, an op at a time with
float32 sums inside. Ops that have a kernel stay: those of ONNX Runtime, by its own list, and this package's where its
library is used. The file is left as it is, and its weights are mapped, not read.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.fusion.imports import infer_shapes, inline_functions

Array = np.ndarray[Any, Any]

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_ORT_NAMES = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
_INLINE_BYTES = 16384  # ONNX Runtime wants shapes and the like as constants in the graph
_NO_END = 2**31 - 1

_WITHOUT_LIBRARIES = {"CPUExecutionProvider", "AzureExecutionProvider"}  # providers that need no others
_LIST_KERNELS = """
import json
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

names = ("domain", "op_name", "provider", "version_range", "type_constraints")
print(json.dumps([{name: getattr(kernel, name) for name in names} for kernel in get_all_opkernel_def()]))
"""


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
    """What kernels some execution providers have, as ``ort``, the onnxruntime module, lists them.

    Raises:
        InputError: a provider that lists none, since it compiles the graph.
        BackendUnavailable: ONNX Runtime lists no kernels here.
    """

    def __init__(self, ort: types.ModuleType, providers: Sequence[str]) -> None:
        state = ort.capi.onnxruntime_pybind11_state
        self._schemas = defaultdict(list)
        for schema in state.get_all_operator_schema():
            self._schemas[schema.domain, schema.name].append(schema)
        self._kernels = defaultdict(list)
        listed = set()
        for kernel in _kernels(ort):
            if not kernel.op_name.startswith("Memcpy"):  # which those that compile graphs have too
                listed.add(kernel.provider)
            if kernel.provider in providers:
                self._kernels[kernel.domain, kernel.op_name].append(kernel)
        for name in providers:
            if name not in listed:
                raise InputError(
                    f"widen_bfloat16 asks providers which kernels they have, and {name} compiles graphs: leave it out"
                )

    def schema(self, node: ir.Node, opset: int) -> Any:
        """ONNX Runtime's schema of the node's op; None for an op of somebody else's."""
        known = [schema for schema in self._schemas[node.domain, node.op_type] if schema.since_version <= opset]
        return max(known, key=lambda schema: schema.since_version, default=None)

    def run(self, node: ir.Node, since: int, dtypes: Mapping[str, set[ir.DataType]]) -> bool:
        """Whether one has a kernel for these dtypes of the schema's parameters and type variables."""
        return any(
            _covers(kernel.version_range, since)
            and all(
                f"tensor({_ort_name(dtype)})" in allowed
                for name, allowed in kernel.type_constraints.items()
                for dtype in dtypes.get(name, ())
            )
            for kernel in self._kernels[node.domain, node.op_type]
        )


def _kernels(ort: types.ModuleType) -> Sequence[Any]:
    """Every kernel in this ONNX Runtime, of all its providers."""
    if set(ort.get_available_providers()) <= _WITHOUT_LIBRARIES:
        found: list[Any] = ort.capi.onnxruntime_pybind11_state.get_all_opkernel_def()
        return found
    return _kernels_from_child()


@functools.cache
def _kernels_from_child() -> Sequence[Any]:
    """The list made by a process of its own: a provider whose libraries do not load brings that process down."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    child = subprocess.run([sys.executable, "-c", _LIST_KERNELS], capture_output=True, env=environment, check=False)
    if child.returncode:
        raise BackendUnavailable(
            "widen_bfloat16 asks this onnxruntime which kernels it has, and it ends where the libraries of one of its "
            "providers (CUDA, TensorRT) are missing: pip install onnxruntime in its place, or those libraries"
        )
    return [types.SimpleNamespace(**kernel) for kernel in json.loads(child.stdout)]


def _covers(versions: tuple[int, int], since: int) -> bool:
    """Whether a kernel of these versions, first and last, runs an op that is unchanged since ``since``."""
    first, last = versions
    return first == since or (first < since <= last < _NO_END)


def _ort_name(dtype: ir.DataType) -> str:
    return _ORT_NAMES.get(dtype) or dtype.name.lower()


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
        opset = self._model.opset_imports.get(node.domain)
        schema = self._kernels.schema(node, opset) if opset is not None else None
        kinds = {attribute.type for attribute in node.attributes.values()}
        if schema is None or node.op_type == "Constant" or kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
            return set()
        arguments = list(_arguments(node, schema))
        dtypes: dict[str, set[ir.DataType]] = defaultdict(set)
        for parameter, value in arguments:
            if value.dtype is not None:
                dtypes[parameter.typeStr].add(value.dtype)
                dtypes[parameter.name].add(value.dtype)
        narrow = {value for parameter, value in arguments if _NARROW in dtypes[parameter.typeStr]}
        return set() if not narrow or self._kernels.run(node, schema.since_version, dtypes) else narrow

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
