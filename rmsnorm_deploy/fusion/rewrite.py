"""Puts the op in place of proved regions, takes residual adds into it, and gives the model the function bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.fusion.bodies import signatures
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.evaluate import Array, CannotEvaluateError, is_float, numpy_dtype
from rmsnorm_deploy.fusion.meaning import BROADCAST, Shape
from rmsnorm_deploy.fusion.prove import Plan, spread
from rmsnorm_deploy.fusion.recognise import Candidate
from rmsnorm_deploy.fusion.values import dtype_of, shape_of
from rmsnorm_deploy.opset import (
    DOMAIN,
    VARIANT_BY_NAME,
    VERSION,
    Variant,
    function_body,
    is_fused_op,
    node_attributes,
    split_epsilon,
)

MIN_IR_VERSION = 8  # the first with model-local functions


@dataclass
class Rewriter:
    """Rewrites one model; keeps one copy of every constant that it makes."""

    model: ir.Model
    constants: Constants
    _made: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    _successors: dict[ir.Value, ir.Value] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for graph in self.model.graphs():
            self._names.update(graph.initializers)
            self._names.update(v.name or "" for v in graph.inputs)
            self._names.update(v.name or "" for node in graph for v in node.outputs)

    def replace(self, candidate: Candidate, plan: Plan, name: str) -> ir.Node:
        """Insert the op for a candidate and let every user of its output use the op's."""
        output = candidate.output
        end = output.producer()
        assert end is not None
        assert end.graph is not None
        nodes: list[ir.Node] = []
        scale, bias = self._scale(candidate, plan), self._bias(candidate, plan)
        if candidate.activation is not None:
            scale = self._chain(nodes, scale, plan.scale_type)
        x = self._chain(nodes, self._current(candidate.root), plan.x_type)
        rank = len(shape_of(x) or ())
        order = _axes_last(candidate.axes, rank)
        if order is not None:
            x = self._transpose(nodes, x, order)
        norm = _norm_node(candidate, plan, [x, scale] if bias is None else [x, scale, bias], name)
        norm.metadata_props.update(end.metadata_props)
        nodes.append(norm)
        result = norm.outputs[0]
        result.dtype, result.shape = plan.op_type, x.shape
        result.name = self._fresh(f"{name}_out")
        if order is not None:
            result = self._transpose(nodes, result, [order.index(axis) for axis in range(rank)])
        result = self._chain(nodes, result, plan.out_type)
        if candidate.behind is not None:
            result = self._product(nodes, result, self._chain(nodes, self._current(candidate.behind), plan.out_type))
        end.graph.insert_before(end, nodes)
        _take_place(output, result)
        self._successors[output] = result
        return norm

    def _current(self, value: ir.Value) -> ir.Value:
        """The value itself, or what an earlier rewrite put in its place."""
        return self._successors.get(value, value)

    def _scale(self, candidate: Candidate, plan: Plan) -> ir.Value:
        """The scale as a value: the activation, the weight as it is, or a constant that is folded here."""
        if candidate.activation is not None:
            return self._current(candidate.activation)
        row = candidate.row_shape or (1,) * len(candidate.axes)
        plain = self._plain_weight(candidate, plan)
        if plain is not None:
            return plain
        rank = len(row)
        scale = np.asarray(candidate.constant, np.float64)
        for factor in candidate.factors:
            array = self.constants.typed(factor.value).astype(np.float64)
            scale = scale * spread(array, factor.layout, tuple(range(rank)), rank) ** factor.power
        return self._constant("scale", np.broadcast_to(scale, row), plan.scale_type, candidate)

    def _plain_weight(self, candidate: Candidate, plan: Plan) -> ir.Value | None:
        """The weight's own initializer, when the op can take it unchanged: tied weights stay tied."""
        if len(candidate.factors) != 1 or candidate.constant != 1:
            return None
        factor = candidate.factors[0]
        shape = shape_of(factor.value)
        usable = factor.power == 1 and factor.value.is_initializer() and factor.value.dtype == plan.scale_type
        in_order = factor.layout == tuple(sorted(factor.layout)) and BROADCAST not in factor.layout
        return factor.value if usable and in_order and shape == candidate.row_shape else None

    def _bias(self, candidate: Candidate, plan: Plan) -> ir.Value | None:
        value = candidate.bias
        if value is None:
            return None
        if value.is_initializer() and value.dtype == plan.scale_type and shape_of(value) == candidate.row_shape:
            return value
        assert candidate.row_shape is not None
        array = self.constants.typed(value).astype(np.float64).reshape(candidate.row_shape)
        return self._constant("bias", array, plan.scale_type, candidate)

    def _constant(self, role: str, array: Array, dtype: ir.DataType, candidate: Candidate) -> ir.Value:
        typed = np.ascontiguousarray(array.astype(numpy_dtype(dtype)))
        key = (int(dtype), typed.shape, typed.tobytes())
        if key not in self._made:
            name = self._fresh(_constant_name(role, typed, candidate))
            value = ir.Value(name=name, shape=ir.Shape(typed.shape), type=ir.TensorType(dtype))
            value.const_value = ir.tensor(typed, dtype=dtype, name=name)
            self.model.graph.register_initializer(value)
            self._made[key] = value
        return self._made[key]

    def _chain(self, nodes: list[ir.Node], value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """``value`` as ``dtype``: itself, or behind a cast."""
        if value.dtype == dtype:
            return value
        return self._append(nodes, "Cast", value, dtype, shape_of(value), ir.AttrInt64("to", int(dtype)))

    def _transpose(self, nodes: list[ir.Node], value: ir.Value, order: list[int]) -> ir.Value:
        shape = shape_of(value)
        permuted = None if shape is None else tuple(shape[axis] for axis in order)
        assert value.dtype is not None
        return self._append(nodes, "Transpose", value, value.dtype, permuted, ir.AttrInt64s("perm", order))

    def _product(self, nodes: list[ir.Node], value: ir.Value, factor: ir.Value) -> ir.Value:
        """``value`` times a ``factor`` that is broadcast to its shape."""
        node = ir.Node("", "Mul", [value, factor])
        node.name = node.outputs[0].name = self._fresh(f"{value.name}_mul")
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        nodes.append(node)
        return node.outputs[0]

    def _append(
        self,
        nodes: list[ir.Node],
        op_type: str,
        value: ir.Value,
        dtype: ir.DataType,
        shape: Shape | None,
        attr: ir.Attr,
    ) -> ir.Value:
        node = ir.Node("", op_type, [value], [attr])
        output = node.outputs[0]
        node.name = output.name = self._fresh(f"{value.name}_{op_type.lower()}")
        output.dtype = dtype
        output.shape = None if shape is None else ir.Shape(shape)
        nodes.append(node)
        return output

    def _fresh(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self._names:
            number += 1
            candidate = f"{name}_{number}"
        self._names.add(candidate)
        return candidate


def variant_of(candidate: Candidate, plan: Plan) -> Variant:
    """The op that stands in for a candidate, before any residual add is taken into it."""
    return Variant(
        mode=candidate.epsilon_mode,
        bias=candidate.bias is not None,
        before_cast=plan.scale_order == "before_cast",
        double=plan.stash_type == ir.DataType.DOUBLE,
    )


def _norm_node(candidate: Candidate, plan: Plan, inputs: list[ir.Value], name: str) -> ir.Node:
    epsilon, low = split_epsilon(candidate.epsilon)
    attributes = node_attributes(
        axis=-len(candidate.axes),
        epsilon=epsilon,
        epsilon_low=low,
        epsilon_mode=candidate.epsilon_mode,
        scale_order=plan.scale_order,
        stash_type=int(plan.stash_type),
    )
    return ir.Node(DOMAIN, variant_of(candidate, plan).name, inputs, attributes, name=name)


def _constant_name(role: str, array: Array, candidate: Candidate) -> str:
    if role == "scale" and candidate.factors:
        return f"{candidate.factors[0].value.name}_scale"
    return f"ones_{'x'.join(map(str, array.shape))}" if np.all(array == 1) else role


def _axes_last(axes: tuple[int, ...], rank: int) -> list[int] | None:
    """The permutation that brings the normalized axes to the end; None if they are there."""
    if axes == tuple(range(rank - len(axes), rank)):
        return None
    return [axis for axis in range(rank) if axis not in axes] + list(axes)


def _take_place(old: ir.Value, new: ir.Value) -> None:
    """Let ``new`` be what ``old`` was: its users, its place among the outputs, its name."""
    new.shape = old.shape if old.shape is not None else new.shape
    new.metadata_props.update(old.metadata_props)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    node = old.producer()
    lives_on = node is not None and len(node.outputs) > 1  # for another output
    old.name, new.name = f"{old.name}_replaced" if lives_on else None, old.name


def take_residual_adds(model: ir.Model) -> None:
    """Turn ``RMSNorm(a + b)`` into SkipRMSNorm, whose second output stands for the sum wherever it is used."""
    for graph in list(model.graphs()):
        order = {node: number for number, node in enumerate(graph)}
        for norm in [node for node in order if _is_plain_norm(node)]:
            total = norm.inputs[0]
            add = total.producer() if total is not None else None
            if add is None or not _is_residual_add(add, norm):
                continue
            place = _place_of_both(add, norm, order)
            if place is not None:
                skip = _join(add, norm)
                graph.insert_before(place, [skip])
                order[skip] = order[place]
                for dead in (norm, add):
                    graph.remove(dead, safe=True)


def _is_plain_norm(node: ir.Node) -> bool:
    return is_fused_op(node) and not VARIANT_BY_NAME[node.op_type].skip


def _is_residual_add(add: ir.Node, norm: ir.Node) -> bool:
    """Whether an Add joins two tensors of the very shape and dtype of the sum."""
    if (add.domain, add.op_type) != ("", "Add") or add.graph is not norm.graph:
        return False
    a, b = add.inputs
    if a is None or b is None or a.is_initializer() or b.is_initializer():
        return False
    shape = shape_of(a)
    same = shape is not None and shape == shape_of(b) and None not in shape and len(shape) > 0
    return same and dtype_of(a) == dtype_of(b) == dtype_of(add.outputs[0])


def _place_of_both(add: ir.Node, norm: ir.Node, order: Mapping[ir.Node, int]) -> ir.Node | None:
    """The node of the two in whose place one op can do for both: what it needs is there, and nobody waits for it."""
    needed = [value.producer() for value in norm.inputs[1:] if value is not None]
    if all(node is None or order.get(node, -1) < order[add] for node in needed):
        return add
    users = [use.node for use in add.outputs[0].uses() if use.node is not norm]
    return norm if all(order.get(user, -1) > order[norm] for user in users) else None


def _join(add: ir.Node, norm: ir.Node) -> ir.Node:
    variant, total = VARIANT_BY_NAME[norm.op_type], add.outputs[0]
    skip = ir.Node(
        DOMAIN,
        replace(variant, skip=True).name,
        [*add.inputs, *norm.inputs[1:]],
        list(norm.attributes.values()),
        num_outputs=2,
        name=norm.name,
    )
    skip.metadata_props.update(norm.metadata_props)
    for old, new, name in ((norm.outputs[0], skip.outputs[0], "y"), (total, skip.outputs[1], "sum")):
        new.type, new.shape, new.name = old.type, old.shape, f"{norm.name}_{name}"
        _take_place(old, new)
    return skip


def attach_functions(model: ir.Model) -> None:
    """Give the model one body for each of the domain's ops that it uses, and drop those that it doesn't."""
    used = signatures(model)
    for key in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[key]
    opset = model.opset_imports.get("", 0)
    for op_type, given in sorted(used.items()):
        body = function_body(VARIANT_BY_NAME[op_type], frozenset(given), opset)
        model.functions[body.identifier()] = body
    if used:
        model.opset_imports[DOMAIN] = VERSION
        model.ir_version = max(model.ir_version, MIN_IR_VERSION)
    else:
        model.opset_imports.pop(DOMAIN, None)


def can_fold(candidate: Candidate, constants: Constants) -> bool:
    """Whether every constant of a candidate can be worked out here."""
    values = [factor.value for factor in candidate.factors] + ([candidate.bias] if candidate.bias else [])
    try:
        return all(is_float(constants.typed(value)) for value in values)
    except CannotEvaluateError:
        return False
