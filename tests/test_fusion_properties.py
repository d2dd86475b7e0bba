"""Random graphs, and norms altered in one place: whatever is fused or left, no value changes.

``FUSION_EXAMPLES=5000 pytest tests/test_fusion_properties.py`` tries more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import pytest
from fusion_graphs import fused, run
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph

EXAMPLES = int(os.environ.get("FUSION_EXAMPLES", "150"))
WIDTH = 4
CONSTANTS = {"eps": 1e-3, "two": 2.0, "half": 0.5, "mhalf": -0.5, "one": 1.0, "d": float(WIDTH), "rd": np.sqrt(WIDTH)}


@dataclass
class Builder:
    """A graph in float64 that grows node by node, with the shape of every value."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (3, 2, WIDTH), "z": (3, 2, WIDTH)})
    arrays: dict[str, Any] = field(default_factory=dict)
    narrowed: bool = False

    def add(self, op_type: str, inputs: list[str], shape: tuple[int, ...], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        self.shapes[name] = shape
        return name

    def constant(self, array: Any) -> str:
        name = f"c{len(self.arrays)}"
        self.arrays[name] = np.asarray(array)
        return name

    def model(self, outputs: list[str]) -> onnx.ModelProto:
        arrays = {name: np.float64(value) for name, value in CONSTANTS.items()} | self.arrays
        double = TensorProto.DOUBLE
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(name, double, [3, 2, WIDTH]) for name in ("x", "z")],
            [helper.make_tensor_value_info(name, double, self.shapes[name]) for name in outputs],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(np.broadcast_shapes(a, b))
    except ValueError:
        return None


@st.composite
def graphs(draw: st.DrawFn) -> tuple[onnx.ModelProto, bool]:
    builder = Builder()
    steps = (_unary, _binary, _binary, _with_scalar, _square, _reduce, _layout, _weight, _norm, _norm, _cast)
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 3))):
            draw(st.sampled_from(steps))(draw, builder)
        _norm(draw, builder)
    values = [name for name in builder.shapes if name.startswith("v")]
    chosen = {values[-1], draw(st.sampled_from(values))} if values else set()
    return builder.model(sorted(chosen) or ["x"]), builder.narrowed


def _any_value(draw: st.DrawFn, builder: Builder) -> str:
    return draw(st.sampled_from(list(builder.shapes)[-8:]))


def _unary(draw: st.DrawFn, builder: Builder) -> None:
    value = _any_value(draw, builder)
    op_type = draw(st.sampled_from(["Neg", "Abs", "Sigmoid", "Identity", "Tanh"]))
    builder.add(op_type, [value], builder.shapes[value])


def _binary(draw: st.DrawFn, builder: Builder) -> None:
    a, b = _any_value(draw, builder), _any_value(draw, builder)
    shape = _broadcast(builder.shapes[a], builder.shapes[b])
    if shape is not None:
        builder.add(draw(st.sampled_from(["Mul", "Mul", "Add", "Div", "Max"])), [a, b], shape)


def _with_scalar(draw: st.DrawFn, builder: Builder) -> None:
    value = _any_value(draw, builder)
    op_type = draw(st.sampled_from(["Add", "Mul", "Div", "Max"]))
    pair = [value, draw(st.sampled_from(["eps", "two", "one", "d", "rd"]))]
    builder.add(op_type, pair[:: draw(st.sampled_from([1, -1]))], builder.shapes[value])


def _square(draw: st.DrawFn, builder: Builder) -> None:
    value = _any_value(draw, builder)
    shape = builder.shapes[value]
    kind = draw(st.sampled_from(["pow", "mul", "sqrt", "rsqrt"]))
    if kind == "mul":
        builder.add("Mul", [value, value], shape)
    elif kind == "pow":
        builder.add("Pow", [value, "two"], shape)
    else:
        builder.add("Pow", [builder.add("Abs", [value], shape), "half" if kind == "sqrt" else "mhalf"], shape)


def _reduce(draw: st.DrawFn, builder: Builder) -> None:
    value = _any_value(draw, builder)
    shape = builder.shapes[value]
    if not shape:
        return
    axis, keep = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    op_type = draw(st.sampled_from(["ReduceMean", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceMax"]))
    reduced = (*shape[:axis], *((1,) if keep else ()), *shape[axis + 1 :])
    builder.add(op_type, [value, builder.constant(np.array([axis]))], reduced, keepdims=int(keep))


def _layout(draw: st.DrawFn, builder: Builder) -> None:
    value = _any_value(draw, builder)
    shape = builder.shapes[value]
    kind = draw(st.sampled_from(["transpose", "unsqueeze", "reshape", "expand"]))
    if kind == "transpose" and shape:
        perm = draw(st.permutations(range(len(shape))))
        builder.add("Transpose", [value], tuple(shape[i] for i in perm), perm=perm)
    elif kind == "unsqueeze" and len(shape) < 4:
        axis = draw(st.integers(0, len(shape)))
        new = (*shape[:axis], 1, *shape[axis:])
        builder.add("Unsqueeze", [value, builder.constant(np.array([axis]))], new)
    elif kind == "reshape":
        target = draw(st.sampled_from([(int(np.prod(shape)),), (*shape, 1), (1, *shape)]))
        builder.add("Reshape", [value, builder.constant(np.array(target))], target)
    elif kind == "expand" and len(shape) <= 3:
        target = _broadcast(shape, (3, 2, WIDTH))
        if target is not None:
            builder.add("Expand", [value, builder.constant(np.array(target))], target)


def _weight(draw: st.DrawFn, builder: Builder) -> None:
    value = _any_value(draw, builder)
    shape = draw(st.sampled_from([(WIDTH,), (1,), (2, WIDTH), (2, 1), (3, 1, 1)]))
    result = _broadcast(shape, builder.shapes[value])
    if result is not None:
        weight = builder.constant(np.linspace(0.5, 1.5, int(np.prod(shape))).reshape(shape))
        builder.add("Mul", [value, weight], result)


def _norm(draw: st.DrawFn, builder: Builder) -> None:
    """A norm over any axis of any value, or nearly one: another operand may be divided."""
    value = _any_value(draw, builder)
    shape = builder.shapes[value]
    if not shape:
        return
    axis = draw(st.integers(0, len(shape) - 1))
    small = (*shape[:axis], 1, *shape[axis + 1 :])
    square = builder.add("Mul", [value, value], shape)
    mean = builder.add("ReduceMean", [square, builder.constant(np.array([axis]))], small)
    mode = draw(st.sampled_from(["inside", "outside", "clamp"]))
    if mode == "inside":
        root = builder.add("Sqrt", [builder.add("Add", [mean, "eps"], small)], small)
    else:
        op_type = "Add" if mode == "outside" else "Max"
        root = builder.add(op_type, [builder.add("Sqrt", [mean], small), "eps"], small)
    other = draw(st.sampled_from([value, value, value, _any_value(draw, builder)]))
    result = _broadcast(builder.shapes[other], small)
    if result is not None:
        builder.add("Div", [other, root], result)


def _cast(draw: st.DrawFn, builder: Builder) -> None:
    value = _any_value(draw, builder)
    builder.narrowed = True
    narrow = builder.add("Cast", [value], builder.shapes[value], to=TensorProto.FLOAT)
    del builder.shapes[narrow]
    shape = builder.shapes[value]
    builder.add("Cast", [narrow], shape, to=TensorProto.DOUBLE)


def _feeds() -> dict[str, Any]:
    generator = np.random.default_rng(5)
    return {name: generator.standard_normal((3, 2, WIDTH)) * [[[1e-2], [1.0]]] for name in ("x", "z")}


def _assert_same(model: onnx.ModelProto, feeds: dict[str, Any], exact: float) -> int:
    truth = run(model, feeds, optimized=False)
    for value, expected in zip(model.graph.output, truth, strict=True):
        if not value.type.tensor_type.HasField("shape"):
            value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.DOUBLE, expected.shape))
    proto, result = fused(model)
    for actual, expected in zip(run(proto, feeds), truth, strict=True):
        size = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
        np.testing.assert_allclose(actual, expected, rtol=exact, atol=exact * float(size))
    return len(result.norms)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 200)
@given(graphs())
def test_a_random_graph_changes_its_value(drawn: tuple[onnx.ModelProto, bool]) -> None:
    model, narrowed = drawn
    norms = _assert_same(model, _feeds(), 1e-5 if narrowed else 1e-9)
    event(f"{min(norms, 3)} norms")


# -- a norm altered in one place


@dataclass(frozen=True)
class Line:
    """``out = op_type(inputs)`` with an axis and keepdims where it reduces."""

    out: str
    op_type: str
    inputs: tuple[str, ...]
    keepdims: int | None = None


SPELLINGS = {
    "div": (Line("sq", "Pow", ("x", "two")), Line("ms", "ReduceMean", ("sq", "last"), 1),
        Line("me", "Add", ("ms", "eps")), Line("rt", "Sqrt", ("me",)), Line("n", "Div", ("x", "rt")),
        Line("y", "Mul", ("n", "w"))),
    "reciprocal": (Line("sq", "Mul", ("x", "x")), Line("ms", "ReduceMean", ("sq", "last"), 1),
        Line("me", "Add", ("eps", "ms")), Line("rt", "Sqrt", ("me",)), Line("r", "Reciprocal", ("rt",)),
        Line("n", "Mul", ("x", "r")), Line("y", "Mul", ("w", "n"))),
    "sum": (Line("t", "ReduceSumSquare", ("x", "last"), 1), Line("ms", "Div", ("t", "d")),
        Line("me", "Add", ("ms", "eps")), Line("r", "Pow", ("me", "mhalf")),
        Line("s", "Mul", ("r", "w")), Line("y", "Mul", ("x", "s"))),
    "outside": (Line("sq", "Mul", ("x", "x")), Line("ms", "ReduceMean", ("sq", "last"), 1), Line("rt", "Sqrt", ("ms",)),
        Line("re", "Add", ("rt", "eps")), Line("n", "Div", ("x", "re")), Line("y", "Mul", ("n", "w"))),
    "clamp": (Line("sq", "Mul", ("x", "x")), Line("ms", "ReduceMean", ("sq", "last"), 1),
        Line("mc", "Max", ("ms", "eps")), Line("rt", "Sqrt", ("mc",)), Line("n", "Div", ("x", "rt")),
        Line("m", "Mul", ("n", "w")), Line("y", "Add", ("m", "w"))),
}  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
UNARY = ("Sqrt", "Reciprocal", "Abs", "Neg", "Identity", "Exp")
REDUCE = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL1")
SQUARE_SIDE = 4


def _alterations(lines: tuple[Line, ...]) -> Iterator[tuple[Line, ...]]:
    for i, line in enumerate(lines):
        for changed in _altered(line, ["x", "z", *[earlier.out for earlier in lines[:i]]]):
            yield (*lines[:i], changed, *lines[i + 1 :])


def _altered(line: Line, values: list[str]) -> Iterator[Line]:
    family = next(names for names in (BINARY, UNARY, REDUCE) if line.op_type in names)
    yield from (replace(line, op_type=other) for other in family if other != line.op_type)
    if line.keepdims is not None:
        yield replace(line, keepdims=0)
        yield replace(line, inputs=(line.inputs[0], "first"))
        yield replace(line, inputs=(line.inputs[0], "both"))
    elif len(line.inputs) == 2:
        yield replace(line, inputs=line.inputs[::-1])
    constants = ["two", "three", "half", "one", "eps", "big", "w"] if line.keepdims is None else []
    for position in range(1 if line.keepdims is not None else len(line.inputs)):
        for other in (*values, *constants):
            if other != line.inputs[position]:
                yield replace(line, inputs=(*line.inputs[:position], other, *line.inputs[position + 1 :]))


def _model_of(lines: tuple[Line, ...]) -> onnx.ModelProto:
    nodes = [helper.make_node("Sigmoid", ["x"], ["z"])]
    for line in lines:
        extra = {} if line.keepdims is None else {"keepdims": line.keepdims}
        nodes.append(helper.make_node(line.op_type, list(line.inputs), [line.out], **extra))
    numbers = {"two": 2.0, "three": 3.0, "half": 0.5, "mhalf": -0.5, "one": 1.0, "eps": 0.01, "big": 5.0}
    arrays = {name: np.float64(value) for name, value in (numbers | {"d": float(SQUARE_SIDE)}).items()}
    arrays |= {
        "w": np.linspace(0.5, 1.5, SQUARE_SIDE),
        "last": np.array([-1]),
        "first": np.array([0]),
        "both": np.array([0, 1]),
    }
    info = [helper.make_tensor_value_info("x", TensorProto.DOUBLE, [SQUARE_SIDE, SQUARE_SIDE])]
    out = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)]
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", info, out, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_norm_that_is_altered_in_one_place_is_fused_to_another_value(name: str) -> None:
    generator = np.random.default_rng(2)
    x = generator.standard_normal((SQUARE_SIDE, SQUARE_SIDE)) * np.array([[1e-3], [0.05], [1.0], [10.0]])
    x[1, 2] = 0.0
    assert _assert_same(_model_of(SPELLINGS[name]), {"x": x}, 1e-12) == 1
    tried = fused_ones = 0
    for lines in _alterations(SPELLINGS[name]):
        try:
            run(_model_of(lines), {"x": x}, optimized=False)
        except (Fail, InvalidGraph):
            continue  # the altered graph is no valid one
        try:
            fused_ones += _assert_same(_model_of(lines), {"x": x}, 1e-12)
        except AssertionError as error:
            raise AssertionError(f"{lines}: {error}") from error
        tried += 1
    assert tried > 60
    assert fused_ones < tried / 2
