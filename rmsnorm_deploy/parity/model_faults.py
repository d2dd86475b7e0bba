"""Faults next to the norms. Each function plants one and returns a value of the graph that is wrong after it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from rmsnorm_deploy.parity.patient import CannotPlantError, Nodes, Patient, constant_node, make, rolled
from rmsnorm_deploy.parity.ulp import Array

Plant = Callable[[Patient], str]


def _weight(part: str, change: Callable[[Array], Array]) -> Plant:
    return lambda patient: patient.change_weight(patient.weight_of(part), change)


def _row_zeroed(array: Array) -> Array:
    array[array.shape[0] // 3] = 0
    return array


def _element_off(array: Array) -> Array:
    """The largest element of a row 1% too large."""
    row = array[array.shape[0] // 3]
    row[np.argmax(np.abs(row.astype(np.float32)))] *= 1.01
    return array


def _head_negated(array: Array) -> Array:
    array[:, : array.shape[1] // 4] *= -1
    return array


def _halves_exchanged(array: Array) -> Array:
    half = array.shape[0] // 2
    return np.concatenate([array[half:], array[:half]])


def _row_moved(array: Array) -> Array:
    return np.roll(array, 1, axis=0)


def _another(part: str, index: int, other: str, other_index: int) -> Plant:
    """One matrix in the place of another."""

    def plant(patient: Patient) -> str:
        target, source = patient.weight_of(part, index), patient.weight_of(other, other_index)
        if target == source:
            raise CannotPlantError("one layer only")
        array = patient.matrix(source)
        return patient.change_weight(target, lambda old: array.reshape(old.shape))

    return plant


def _times(op_type: str, factor: float) -> Plant:
    """What one node reads, times a factor."""

    def plant(patient: Patient) -> str:
        node = patient.first(op_type)
        half = patient.graph.dtypes.get(node.input[0]) == onnx.TensorProto.FLOAT16

        def build(source: str, target: str) -> Nodes:
            by = constant_node(f"{target}_by", np.array(factor, np.float16 if half else np.float32))
            return [by, make("Mul", [source, f"{target}_by"], target)]

        patient.wrap(node, 0, build)
        return str(node.output[0])

    return plant


def _mask_left_out(patient: Patient) -> str:
    softmax = patient.first("Softmax")
    add = patient.graph.producers.get(softmax.input[0])
    products = [name for name in add.input if _made_by(patient, name) == "MatMul"] if add is not None else []
    if add is None or add.op_type != "Add" or not products:
        raise CannotPlantError("no mask is added to the scores")
    softmax.input[0] = products[0]
    return str(softmax.output[0])


def _made_by(patient: Patient, name: str) -> str:
    node = patient.graph.producers.get(name)
    return node.op_type if node is not None else ""


def _softmax_axis(patient: Patient) -> str:
    softmax = patient.first("Softmax")
    del softmax.attribute[:]
    softmax.attribute.append(onnx.helper.make_attribute("axis", -2))
    return str(softmax.output[0])


def _rotary(op_type: str) -> Plant:
    """The rotary factor of what reads the table first, the queries, is that of the next position."""

    def plant(patient: Patient) -> str:
        name = str(patient.first(op_type).output[0])
        for _ in range(8):
            users = patient.graph.users.get(name, [])
            products = [node for node in users if node.op_type == "Mul" and _both_computed(patient, node)]
            if products:
                patient.wrap(products[0], list(products[0].input).index(name), rolled)
                return str(products[0].output[0])
            if not users:
                break
            name = str(users[0].output[0])
        raise CannotPlantError(f"no rotary embedding behind the {op_type}")

    return plant


def _both_computed(patient: Patient, node: onnx.NodeProto) -> bool:
    made = [patient.graph.producers.get(name) for name in node.input]
    return all(node is not None and node.op_type != "Constant" for node in made)


def _reads(part: str, build: Callable[[str, str], Nodes]) -> Plant:
    """What the product with one matrix reads goes through ``build`` first."""

    def plant(patient: Patient) -> str:
        node = patient.graph.users[patient.weight_of(part).tensor][0]
        while node.op_type not in ("MatMul", "Gemm"):
            node = patient.graph.users[node.output[0]][0]
        patient.wrap(node, 0, build)
        return str(node.output[0])

    return plant


def _frozen_batch(source: str, target: str) -> Nodes:
    """The example's batch of 2 for good."""
    return [
        make("Shape", [source], f"{target}_shape"),
        constant_node(f"{target}_last", np.array([-1], np.int64)),
        constant_node(f"{target}_end", np.array([3], np.int64)),
        constant_node(f"{target}_lead", np.array([2, -1], np.int64)),
        make("Slice", [f"{target}_shape", f"{target}_last", f"{target}_end"], f"{target}_width"),
        make("Concat", [f"{target}_lead", f"{target}_width"], f"{target}_fixed", axis=0),
        make("Reshape", [source, f"{target}_fixed"], target),
    ]


def _activation(patient: Patient) -> str:
    """tanh for the sigmoid of SiLU."""
    node = patient.first("Sigmoid")
    node.op_type = "Tanh"
    return str(node.output[0])


MODEL_FAULTS: dict[str, Plant] = {
    "softmax scale off by 1%": _times("Softmax", 1.01),
    "softmax over the wrong axis": _softmax_axis,
    "causal mask left out": _mask_left_out,
    "rotary cosine of the next position": _rotary("Cos"),
    "rotary sine of the next position": _rotary("Sin"),
    "rotary angles off by 1%": _times("Cos", 1.01),
    "sign of a head": _weight("o_proj", _head_negated),
    "heads exchanged": _weight("q_proj", _halves_exchanged),
    "k for v": _another("v_proj", 0, "k_proj", 0),
    "a row of a matrix zero": _weight("down_proj", _row_zeroed),
    "one weight off by 1%": _weight("gate_proj", _element_off),
    "a matrix in float16": _weight("up_proj", lambda array: array.astype(np.float16).astype(array.dtype)),
    "gate and up exchanged": _another("gate_proj", 0, "up_proj", 0),
    "a layer's matrix again": _another("down_proj", 1, "down_proj", 0),
    "head of the model moved by one row": _weight("lm_head", _row_moved),
    "tanh for the sigmoid": _activation,
    "the sigmoid's input off by 1%": _times("Sigmoid", 1.01),
    "rows of the attention moved by one": _reads("o_proj", rolled),
    "batch frozen": _reads("o_proj", _frozen_batch),
}
