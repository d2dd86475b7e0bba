"""Faults inside a fused norm. Each function plants one and returns the names of the ops that are wrong after it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import onnx

from rmsnorm_deploy.parity.patient import (
    CannotPlantError,
    Nodes,
    Patient,
    before,
    constant_node,
    find,
    make,
    rolled,
)

Plant = Callable[[Patient], list[str]]
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _attribute(name: str, change: Callable[[float], float]) -> Plant:
    def plant(patient: Patient) -> list[str]:
        node = patient.norm()
        for attribute in node.attribute:
            if attribute.name == name:
                attribute.f = change(attribute.f)
        return [node.name]

    return plant


def _body(change: Callable[[Nodes], Nodes], residual: bool = False) -> Plant:
    def plant(patient: Patient) -> list[str]:
        node = patient.skip_norm() if residual else patient.norm()
        patient.break_body(node, change)
        return [node.name]

    return plant


def _scale(change: Callable[[np.ndarray[tuple[int, ...], np.dtype[np.float32]]], object]) -> Plant:
    def plant(patient: Patient) -> list[str]:
        node = patient.norm()
        patient.change_input(node, patient.scale_place(node), lambda array: np.asarray(change(array)))
        return [node.name]

    return plant


def _epsilon_outside(nodes: Nodes) -> Nodes:
    return _epsilon_after_root(nodes, "Add")


def _epsilon_clamp(nodes: Nodes) -> Nodes:
    return _epsilon_after_root(nodes, "Max")


def _epsilon_after_root(nodes: Nodes, op_type: str) -> Nodes:
    root = find(nodes, "Sqrt")
    add = next(node for node in nodes if root.input[0] in node.output)
    mean, epsilon = add.input[0], add.input[1]
    result = root.output[0]
    root.input[0], root.output[0] = mean, "planted_root"
    kept = [node for node in nodes if add.output[0] not in node.output]
    place = next(number for number, node in enumerate(kept) if "planted_root" in node.output)
    return [*kept[: place + 1], make(op_type, ["planted_root", epsilon], result), *kept[place + 1 :]]


def _statistics_in_half(nodes: Nodes) -> Nodes:
    """Squares in float16, which overflow from 256 on. The two nodes that change nothing keep the casts apart: ONNX
    Runtime drops one that is followed by its inverse."""
    mean = find(nodes, "ReduceMean")
    source = mean.input[0]
    mean.input[0] = "planted_squares"
    fresh = [
        constant_node("planted_0", np.array([0], np.int64)),
        make("Cast", [source], "planted_half", to=onnx.TensorProto.FLOAT16),
        make("Unsqueeze", ["planted_half", "planted_0"], "planted_more"),
        make("Squeeze", ["planted_more", "planted_0"], "planted_less"),
        make("Cast", ["planted_less"], "planted_squares", to=onnx.TensorProto.FLOAT),
    ]
    return before(nodes, mean, fresh)


def _last_column_left_out(nodes: Nodes) -> Nodes:
    mean = find(nodes, "ReduceMean")
    source = mean.input[0]
    mean.input[0] = "planted_most"
    return before(
        nodes,
        mean,
        [
            constant_node("planted_0", np.array([0], np.int64)),
            constant_node("planted_last", np.array([-1], np.int64)),
            make("Slice", [source, "planted_0", "planted_last", "planted_last"], "planted_most"),
        ],
    )


def _wrong_axis(nodes: Nodes) -> Nodes:
    mean = find(nodes, "ReduceMean")
    mean.input[1] = "planted_axes"
    return before(nodes, mean, [constant_node("planted_axes", np.array([-2], np.int64))])


def _rename(old: str, new: str) -> Callable[[Nodes], Nodes]:
    def change(nodes: Nodes) -> Nodes:
        find(nodes, old).op_type = new
        return nodes

    return change


def _mean_of_sizes(nodes: Nodes) -> Nodes:
    """mean(|x|) where the root mean square should be."""
    power, root = find(nodes, "Pow"), find(nodes, "Sqrt")
    power.op_type, root.op_type = "Abs", "Identity"
    del power.input[1:]
    return nodes


def _neighbours_row(nodes: Nodes) -> Nodes:
    result = nodes[-1].output[0]
    nodes[-1].output[0] = "planted_result"
    return [*nodes, *rolled("planted_result", result)]


def _stale_last_row(nodes: Nodes) -> Nodes:
    """The last row is never written: it holds what the first has."""
    result = nodes[-1].output[0]
    nodes[-1].output[0] = "planted_result"
    return [
        *nodes,
        constant_node("planted_0", np.array([0], np.int64)),
        constant_node("planted_1", np.array([1], np.int64)),
        constant_node("planted_last", np.array([-1], np.int64)),
        constant_node("planted_axis", np.array([-2], np.int64)),
        make("Slice", ["planted_result", "planted_0", "planted_last", "planted_axis"], "planted_most"),
        make("Slice", ["planted_result", "planted_0", "planted_1", "planted_axis"], "planted_first"),
        make("Concat", ["planted_most", "planted_first"], result, axis=-2),
    ]


def _normalized_twice(nodes: Nodes) -> Nodes:
    division = find(nodes, "Div")
    result, root = division.output[0], division.input[1]
    division.output[0] = "planted_once"
    place = next(number for number, node in enumerate(nodes) if "planted_once" in node.output)
    return [*nodes[: place + 1], make("Div", ["planted_once", root], result), *nodes[place + 1 :]]


def _residual(nodes: Nodes) -> onnx.NodeProto:
    return next(node for node in nodes if node.op_type == "Add" and list(node.input) == ["X", "skip"])


def _skip_left_out(nodes: Nodes) -> Nodes:
    add = _residual(nodes)
    add.op_type = "Identity"
    del add.input[1:]
    return nodes


def _norm_before_the_sum(nodes: Nodes) -> Nodes:
    """The norm sees X alone, and the sum goes on without it."""
    total = _residual(nodes).output[0]
    for node in nodes:
        for place, name in enumerate(node.input):
            if name == total:
                node.input[place] = "X"
    return nodes


def _sum_taken_after(nodes: Nodes) -> Nodes:
    """What goes on along the residual stream is the normalized value plus the skip."""
    total, result = _residual(nodes).output[0], nodes[-1].output[0]
    for node in nodes:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == total:
                    names[place] = "planted_total"
    return [*nodes, make("Add", [result, "skip"], total)]


def _sum_not_rounded(nodes: Nodes) -> Nodes:
    """The norm of a half model sees the sum in single precision."""
    add = _residual(nodes)
    total = add.output[0]
    cast = next((n for n in nodes if n.op_type == "Cast" and n.input[0] == total), None)
    if cast is None:
        raise CannotPlantError("the sum is in single precision")
    cast.op_type = "Add"
    del cast.attribute[:]
    del cast.input[:]
    cast.input.extend(["planted_X", "planted_skip"])
    return before(
        nodes,
        cast,
        [make("Cast", [name], f"planted_{name}", to=onnx.TensorProto.FLOAT) for name in ("X", "skip")],
    )


def _cast_removed(nodes: Nodes) -> Nodes:
    """Everything in the half type that the row has."""
    casts = [node for node in nodes if node.op_type == "Cast"]
    if not casts:
        raise CannotPlantError("the op has no cast")
    half = next((a.i for cast in casts for a in cast.attribute if a.name == "to" and a.i in _HALVES), None)
    for cast in casts:
        cast.op_type = "Identity"
        del cast.attribute[:]
    changed: Nodes = []
    for node in nodes:
        changed.append(node)
        if node.op_type == "Constant" and any(a.name in ("value", "value_float") for a in node.attribute):
            name = node.output[0]
            node.output[0] = f"planted_{name}"
            changed.append(make("Cast", [f"planted_{name}"], name, to=half or onnx.TensorProto.FLOAT16))
    return changed


def _scale_order(patient: Patient) -> list[str]:
    """Multiply in single precision and round once where the model rounds first, or the other way round."""
    node = patient.norm()

    def change(nodes: Nodes) -> Nodes:
        product = nodes[-1] if nodes[-1].op_type == "Mul" else None
        cast = next((n for n in nodes if product is not None and product.input[0] in n.output), None)
        if product is None or cast is None or cast.op_type not in ("Cast", "CastLike"):
            raise CannotPlantError("the op does not round before its scale")
        wide, result = cast.input[0], product.output[0]
        kept = [n for n in nodes if n.output[0] not in (result, cast.output[0])]
        target = next(attribute.i for attribute in cast.attribute if attribute.name == "to")
        return [
            *kept,
            make("Cast", [product.input[1]], "planted_scale", to=onnx.TensorProto.FLOAT),
            make("Mul", [wide, "planted_scale"], "planted_wide"),
            make("Cast", ["planted_wide"], result, to=target),
        ]

    patient.break_body(node, change)
    return [node.name]


def _one_element(factor: float) -> Plant:
    def change(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> object:
        flat = array.reshape(-1).copy()
        flat[flat.size // 3] *= factor
        return flat.reshape(array.shape)

    return _scale(change)


def _gamma_in_half(patient: Patient) -> list[str]:
    node = patient.norm()
    place = patient.scale_place(node)
    if patient.array(node.input[place]).dtype.itemsize == 2:
        raise CannotPlantError("the scale is in half precision")
    patient.change_input(node, place, lambda array: array.astype(np.float16))
    return [node.name]


def _exchanged(patient: Patient) -> list[str]:
    norms = [node for node in patient.norms if node.input[patient.scale_place(node)] in patient.graph.constants]
    names = [node.input[patient.scale_place(node)] for node in norms]
    shapes = [patient.graph.constants[name].dims for name in names]
    for first in range(len(norms)):
        for second in range(first + 1, len(norms)):
            if shapes[first] == shapes[second] and names[first] != names[second]:
                a, b = norms[first], norms[second]
                i, j = patient.scale_place(a), patient.scale_place(b)
                a.input[i], b.input[j] = b.input[j], a.input[i]
                return [a.name, b.name]
    raise CannotPlantError("no two scales of one width")


def _bias_added(nodes: Nodes) -> Nodes:
    product, result = nodes[-1], nodes[-1].output[0]
    product.output[0] = "planted_product"
    small = make("Constant", [], "planted_bias", value_float=0.01)
    like = make("CastLike", ["planted_bias", "planted_product"], "planted_cast")
    return [*nodes, small, like, make("Add", ["planted_product", "planted_cast"], result)]


def _bias_left_out(patient: Patient) -> list[str]:
    found = [node for node in patient.norms if "_bias" in node.op_type]
    if not found:
        raise CannotPlantError("no norm with a bias")
    patient.change_input(found[0], len(found[0].input) - 1, np.zeros_like)
    return [found[0].name]


def _norm_left_out(patient: Patient) -> list[str]:
    node = next((node for node in patient.norms if not node.op_type.startswith("Skip")), None)
    if node is None:
        raise CannotPlantError("every norm has a residual add")
    node.op_type, node.domain = "Identity", ""
    del node.input[1:]
    del node.attribute[:]
    return [node.name]


def _wrong_skip(patient: Patient) -> list[str]:
    """The residual add reads one of its operands twice."""
    node = patient.skip_norm()
    node.input[1] = node.input[0]
    return [node.name]


def _reads_the_one_before(patient: Patient) -> list[str]:
    """The stream of the norm before, from before its sum."""
    norms = [node for node in patient.norms if node.op_type.startswith("Skip")]
    for previous, node in pairwise(norms):
        if node.input[0] in previous.output or node.input[1] in previous.output:
            place = 0 if node.input[0] in previous.output else 1
            node.input[place] = previous.input[0]
            return [node.name]
    raise CannotPlantError("no two residual adds in a row")


NORM_FAULTS: dict[str, Plant] = {
    "epsilon x10": _attribute("epsilon", lambda epsilon: 10 * epsilon),
    "epsilon / 10": _attribute("epsilon", lambda epsilon: epsilon / 10),
    "epsilon zero": _attribute("epsilon", lambda epsilon: 0.0),
    "epsilon outside the root": _body(_epsilon_outside),
    "epsilon a clamp": _body(_epsilon_clamp),
    "statistics in float16": _body(_statistics_in_half),
    "last column left out of the mean": _body(_last_column_left_out),
    "mean over the wrong axis": _body(_wrong_axis),
    "sum in place of mean": _body(_rename("ReduceMean", "ReduceSum")),
    "root left out": _body(_rename("Sqrt", "Identity")),
    "mean of |x|": _body(_mean_of_sizes),
    "normalized twice": _body(_normalized_twice),
    "the neighbour's row": _body(_neighbours_row),
    "stale last row": _body(_stale_last_row),
    "one gamma off by 1%": _one_element(1.01),
    "one gamma's sign": _one_element(-1.0),
    "gamma moved by one": _scale(lambda array: np.roll(array, 1)),
    "gamma reversed": _scale(lambda array: array[..., ::-1]),
    "gamma in float16": _gamma_in_half,
    "gamma left out": _scale(np.ones_like),
    "w for 1 + w": _scale(lambda array: array - 1),
    "1 + w for w": _scale(lambda array: array + 1),
    "gammas exchanged": _exchanged,
    "a bias that is not the model's": _body(_bias_added),
    "bias left out": _bias_left_out,
    "norm left out": _norm_left_out,
    "skip left out": _body(_skip_left_out, residual=True),
    "norm before the sum": _body(_norm_before_the_sum, residual=True),
    "sum taken after the norm": _body(_sum_taken_after, residual=True),
    "residual adds one operand twice": _wrong_skip,
    "reads the stream before the last sum": _reads_the_one_before,
    "scale order swapped": _scale_order,
    "sum not rounded": _body(_sum_not_rounded, residual=True),
    "cast removed": _body(_cast_removed),
}
