"""An ONNX file with every float lifted to float64, run on the CPU.

Lifted means: initializers, constants, inputs and outputs keep their values but are float64, and an attribute that
names a narrower
float dtype (a cast's target, a norm's or softmax's stash type, a fill's dtype) names float64. Integers, booleans and
the quantised
types stay; an operator that exists in float32 only (quantisation, non-maximum suppression) stands between casts.

ONNX Runtime runs the lifted model with its optimizer off when it has a float64 kernel for every operator; otherwise the
reference evaluator of the onnx package does (slower, and exact enough in float64: what it gets wrong is half
precision). An operator that neither has in float64 is run alone by ONNX Runtime, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.operators import OWN_OPERATORS
from rmsnorm_deploy.parity.ort_operator import DTYPE_ATTRIBUTES, stand_ins
from rmsnorm_deploy.parity.ort_options import options_with
from rmsnorm_deploy.parity.ulp import Array
from rmsnorm_deploy.runtime.empties import dies_of_empty, is_empty, refusal
from rmsnorm_deploy.runtime.optional import one_line

_NARROW = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_NARROW_CODES = {int(dtype) for dtype in _NARROW}
_DOUBLE = int(ir.DataType.DOUBLE)

# the attribute's default is FLOAT: it must be written out to become DOUBLE
_DEFAULTS_TO_FLOAT = {
    "LayerNormalization": "stash_type",
    "RMSNormalization": "stash_type",
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "SequenceEmpty": "dtype",
    "HannWindow": "output_datatype",
    "HammingWindow": "output_datatype",
    "BlackmanWindow": "output_datatype",
}

# operands and results that the schema wants in float32: they are cast down before the operator, and up after it
_FLOAT32_ONLY: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "QuantizeLinear": ((0, 1), ()),
    "DequantizeLinear": ((1,), (0,)),
    "DynamicQuantizeLinear": ((0,), (1,)),
    "NonMaxSuppression": ((0, 1, 3, 4), ()),
    "Resize": ((1, 2), ()),
    "Upsample": ((1,), ()),
}

# ONNX Runtime loads these in double precision, and has no code to run them
_NOT_RUN_IN_DOUBLE = {"GRU", "LSTM"}

# alpha and gamma, where a node does not say; both engines take one from an exponential, which leaves nothing at
# subnormal numbers
_EXPONENTIAL_UNITS = {"Elu": (1.0, 1.0), "Selu": (1.67326319217681884765625, 1.05070102214813232421875)}

_INLINE_BYTES = 16384  # smaller initializers travel inside the model: ONNX Runtime wants some as constants


class OnnxProgram:
    """The lifted model of one file, or ``model`` in its place, whose external data is in the same folder.

    Attributes:
        engine: what runs it, in words.
        inputs: names in the file's order; ``outputs`` likewise.
        narrowed: the operators that have no float64 definition.
    """

    def __init__(self, path: Path, proto: onnx.ModelProto | None = None) -> None:
        model = ir.from_proto(read_model(path) if proto is None else proto)
        # an attribute of a call may be a float32 constant of the body: only in place can it be lifted
        ir.passes.common.InlinePass()(model)
        ir.external_data.set_base_dir(model.graph, path.parent)
        # an input that is an initializer too has a default, which a call leaves in place
        self.inputs = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
        self.outputs = [str(value.name) for value in model.graph.outputs]
        arrays = lift(model)
        proto = ir.to_proto(model)
        session = _ort_session(proto, arrays)
        self._dies_of_empty = dies_of_empty(model) if session is not None else None
        if session is not None:
            self.engine = "ONNX Runtime's float64 kernels, optimizer off"
            self.narrowed: list[str] = []
            self._run = session.run
        else:
            self.engine = "the onnx package's reference evaluator in float64"
            substitutes = stand_ins(proto, OWN_OPERATORS)
            self.narrowed = [f"{item.op_domain}.{item.__name__}".lstrip(".") for item in substitutes]
            self._run = _evaluator(proto, arrays, path, [*OWN_OPERATORS, *substitutes]).run

    def run(self, feeds: dict[str, Array]) -> list[Array]:
        """Outputs in the file's order, floats in float64, from feeds of any float dtype."""
        missing = [name for name in self.inputs if name not in feeds]
        if missing:
            raise InputError(f"no array for input {missing[0]!r}; the model takes {', '.join(self.inputs)}")
        wide = {name: _widen(feeds[name]) for name in self.inputs}
        if self._dies_of_empty is not None and is_empty(array.shape for array in wide.values()):
            raise InputError(refusal(self._dies_of_empty))
        try:
            return list(self._run(None, wide))
        except _run_errors() as error:
            raise InputError(f"the model does not run in float64: {one_line(error)}") from error


def lift(model: ir.Model) -> dict[str, Array]:
    """Lift ``model`` in place; returns the large initializers by name, which the model has as external ones.

    They stay in the file's dtype, and are widened one at a time where they are read: all of them in float64 would be
    twice the model, or four times.
    """
    arrays: dict[str, Array] = {}
    for graph in _graphs(model):
        for value in graph.initializers.values():
            _lift_initializer(value, arrays if graph is model.graph else None)
    for graph in _graphs(model):
        for value in [*graph.inputs, *graph.outputs]:
            if value.dtype in _NARROW:
                value.type = ir.TensorType(ir.DataType.DOUBLE)
    for owner in _owners(model):
        for node in list(ir.traversal.RecursiveGraphIterator(owner)):
            _lift_node(node)
    kept = {id(value) for value in [*model.graph.inputs, *model.graph.outputs]}
    for owner in _owners(model):
        for node in ir.traversal.RecursiveGraphIterator(owner):
            _forget_types([value for value in node.outputs if id(value) not in kept])
    places = {id(node): number for number, node in enumerate(model.graph)}
    for name in arrays:
        _widen_at_use(model.graph, model.graph.initializers[name], places)
    return arrays


def _owners(model: ir.Model) -> list[ir.Graph | ir.Function]:
    return [model.graph, *model.functions.values()]


def _graphs(model: ir.Model) -> Iterable[ir.Graph]:
    yield model.graph
    for owner in _owners(model):
        for node in ir.traversal.RecursiveGraphIterator(owner):
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                    yield attribute.as_graph()
                elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
                    yield from attribute.as_graphs()


def _forget_types(values: Sequence[ir.Value]) -> None:
    for value in values:
        value.type = None
        value.shape = None


def _lift_initializer(value: ir.Value, arrays: dict[str, Array] | None) -> None:
    tensor = value.const_value
    if tensor is None:
        return
    name = str(value.name)
    if tensor.dtype not in _NARROW:
        value.const_value = ir.tensor(np.asarray(tensor.numpy(), order="C"), dtype=tensor.dtype, name=name)
        return
    alone = arrays is None or value.is_graph_input() or value.is_graph_output()
    if arrays is None or alone or tensor.nbytes <= _INLINE_BYTES:
        value.type = ir.TensorType(ir.DataType.DOUBLE)
        value.const_value = ir.tensor(_widen(tensor.numpy()), name=name)
        return
    arrays[name] = tensor.numpy()
    shape = ir.Shape(arrays[name].shape)
    value.const_value = ir.ExternalTensor("lifted", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)


def _widen_at_use(graph: ir.Graph, value: ir.Value, places: Mapping[int, int]) -> None:
    """Let a cast in front of the first node that reads ``value`` stand for it everywhere; ``places`` are the graph's
    nodes by id.

    A weight that is only read transposed is widened behind that: fewer bytes are moved, and by a faster kernel.
    """
    users = [use.node for use in value.uses()]
    if not users:
        return
    direct = [node for node in users if id(node) in places]
    if len(direct) == len(users) == 1 and _only_turns(direct[0], places):
        _widen_at_use(graph, direct[0].outputs[0], places)
        return
    first = min(direct, key=lambda node: places[id(node)]) if len(direct) == len(users) else graph[0]
    cast = ir.node("Cast", [value], attributes={"to": _DOUBLE})
    graph.insert_before(first, cast)
    value.replace_all_uses_with(cast.outputs[0])
    cast.replace_input_with(0, value)


def _only_turns(node: ir.Node, places: Mapping[int, int]) -> bool:
    """Whether a node transposes, and what reads the result is in the same graph."""
    result = node.outputs[0]
    users = [use.node for use in result.uses()]
    return node.op_type == "Transpose" and not result.is_graph_output() and all(id(user) in places for user in users)


def _lift_node(node: ir.Node) -> None:
    _lift_attributes(node)
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type == "Constant":
        _lift_constant(node)
    elif node.op_type == "ConstantOfShape":
        fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_widen(fill)))
    elif node.op_type in _EXPONENTIAL_UNITS:
        _spell_exponential_unit(node)
    elif node.op_type in _FLOAT32_ONLY:
        _isolate(node, *_FLOAT32_ONLY[node.op_type])
    default = _DEFAULTS_TO_FLOAT.get(node.op_type)
    if default and default not in node.attributes:
        node.attributes[default] = ir.AttrInt64(default, _DOUBLE)


def _lift_attributes(node: ir.Node) -> None:
    for name in DTYPE_ATTRIBUTES:
        attribute = node.attributes.get(name)
        if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.INT:
            continue
        if attribute.as_int() in _NARROW_CODES:
            node.attributes[name] = ir.AttrInt64(name, _DOUBLE)


def _lift_constant(node: ir.Node) -> None:
    for name in ("value", "value_float", "value_floats"):
        attribute = node.attributes.get(name)
        if attribute is None or attribute.is_ref():
            continue
        array = attribute.as_tensor().numpy() if name == "value" else np.asarray(attribute.value, np.float64)
        node.attributes.pop(name)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_widen(array)))


def _spell_exponential_unit(node: ir.Node) -> None:
    """gamma * x above zero, gamma * alpha * (e^x - 1) below, with e^x - 1 = 2 t / (1 - t) for t = tanh(x / 2)."""
    x = node.inputs[0]
    assert node.graph is not None
    assert x is not None
    alpha, gamma = _EXPONENTIAL_UNITS[node.op_type]
    alpha, gamma = node.attributes.get_float("alpha", alpha), node.attributes.get_float("gamma", gamma)
    made: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value) -> ir.Value:
        made.append(ir.node(op_type, list(inputs)))
        return made[-1].outputs[0]

    def number(value: float) -> ir.Value:
        made.append(ir.node("Constant", [], {"value": ir.tensor(np.float64(value))}))
        return made[-1].outputs[0]

    zero = number(0.0)
    half = add("Tanh", add("Mul", add("Min", x, zero), number(0.5)))
    below = add("Div", add("Mul", half, number(2.0 * alpha)), add("Sub", number(1.0), half))
    unit = add("Where", add("Greater", x, zero), x, below)
    result = add("Mul", unit, number(gamma))
    node.graph.insert_before(node, made)
    _stand_for(node.outputs[0], result)
    node.graph.remove(node)


def _isolate(node: ir.Node, operands: Iterable[int], results: Iterable[int]) -> None:
    """Cast ``operands`` of ``node`` to float32, and ``results`` to float64."""
    assert node.graph is not None
    for position in operands:
        value = node.inputs[position] if position < len(node.inputs) else None
        if value is not None:
            cast = ir.node("Cast", [value], attributes={"to": int(ir.DataType.FLOAT)})
            node.graph.insert_before(node, cast)
            node.replace_input_with(position, cast.outputs[0])
    for position in results:
        output = node.outputs[position]
        cast = ir.node("Cast", [output], attributes={"to": _DOUBLE})
        node.graph.insert_after(node, cast)
        _take_over(output, cast)


def _take_over(narrow: ir.Value, cast: ir.Node) -> None:
    """Let every user of ``narrow`` read the cast of it instead."""
    _stand_for(narrow, cast.outputs[0])
    cast.replace_input_with(0, narrow)


def _stand_for(narrow: ir.Value, wide: ir.Value) -> None:
    """Let every user of ``narrow`` read ``wide`` instead; a graph's output passes on its name too."""
    if narrow.is_graph_output():
        wide.type, wide.shape = ir.TensorType(ir.DataType.DOUBLE), narrow.shape
        wide.name, narrow.name = narrow.name, f"{narrow.name}_narrow"
    narrow.replace_all_uses_with(wide, replace_graph_outputs=True)


def _widen(array: Any) -> Array:
    array = np.asarray(array)
    narrow = array.dtype in (np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
    return np.ascontiguousarray(array.astype(np.float64) if narrow else array).reshape(array.shape)


def _run_errors() -> tuple[type[Exception], ...]:
    """What an operator raises that cannot take its operands, in either engine (ONNX Runtime's have no common base)."""
    errors: list[type[Exception]] = [RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError]
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError:
        return tuple(errors)
    own = [item for item in vars(state).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*errors, *own)


def _ort_session(proto: onnx.ModelProto, arrays: dict[str, Array]) -> Any:
    """A session of ONNX Runtime's float64 kernels, or None where one is missing."""
    if any(node.op_type in _NOT_RUN_IN_DOUBLE for node in proto.graph.node):
        return None
    try:
        import onnxruntime as ort
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError:
        return None
    options = options_with(arrays)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except (state.NotImplemented, state.Fail, state.InvalidGraph, state.InvalidArgument):
        return None


def _evaluator(
    proto: onnx.ModelProto, arrays: dict[str, Array], path: Path, operators: list[type[OpRun]]
) -> ReferenceEvaluator:
    class Evaluator(ReferenceEvaluator):
        def retrieve_external_data(self, initializer: onnx.TensorProto) -> np.ndarray[Any, Any]:
            return arrays[initializer.name]

    try:
        return Evaluator(proto, new_ops=operators)
    except (FileNotFoundError, RuntimeError, TypeError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"{path.name} has no float64 truth: {problem} (--no-check exports it unproved)") from error
