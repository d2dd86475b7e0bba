"""What rounding alone may do to a model: its float64 graph with every operation's result moved at random.

Monte Carlo arithmetic (D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997): each result of an operation is
moved by up to what a rounding to its own dtype would move it, evenly, and the spread of the outputs is what a right
backend may make of its roundings. An output that cancels (a mean over all of a normalised tensor), or one that grows
small differences (an exponential), is as far off in any implementation. Eager's error is one draw of that, and of a
single number it may be a lucky one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_deploy.errors import DeployError
from rmsnorm_deploy.fusion.imports import infer_shapes
from rmsnorm_deploy.parity.judge import judge
from rmsnorm_deploy.parity.lift_onnx import OnnxProgram
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.result import FAIL, PASS_LIKE_EAGER, PASS_LIKE_ROUNDING, Budget, Measurement
from rmsnorm_deploy.parity.samples import Sample
from rmsnorm_deploy.parity.ulp import FORMATS, Array, UlpError, ulp_error, worst_of

_DRAWS = 8
_HOPELESS = 32  # an error so many times as large as two draws made is no rounding

# what only moves, picks or changes the sign of elements is exact
# fmt: off
_EXACT = {
    "Abs", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Constant", "ConstantOfShape", "DepthToSpace",
    "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Identity", "If", "Loop", "Max",
    "MaxPool", "Min", "Neg", "OneHot", "Pad", "Relu", "Reshape", "ReverseSequence", "Round", "Scan",
    "ScatterElements", "ScatterND", "Sign", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK", "Transpose",
    "Trilu", "Unsqueeze", "Where",
}
# fmt: on
_REDUCTIONS = {"ReduceMean", "ReduceSum"}
_AMOUNT = "rounding_amount"
_FLOATS = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def beside_rounding(
    bundle: BundleLike,
    measurements: Sequence[Measurement],
    cases: Mapping[str, Sample],
    limits: Mapping[str, Budget],
) -> list[Measurement]:
    """The measurements, those that fail judged beside draws of rounding errors as they were beside eager's one.

    ``cases`` has the samples by name. The largest error comes first, and nothing more is run once one is not
    explained, since the backend fails then whatever comes.
    """
    failing = [m for m in measurements if m.verdict == FAIL]
    failing.sort(key=lambda m: m.error.max if m.error else math.inf, reverse=True)
    if bundle.reference_path is None or not all(m.error and m.dtype in limits for m in failing) or not failing:
        return list(measurements)
    try:
        draws = _Draws(bundle.reference_path)
        explained = {}
        for measured in failing:
            if not draws.explain(measured, cases[measured.sample], limits[measured.dtype]):
                return list(measurements)
            explained[id(measured)] = replace(measured, verdict=PASS_LIKE_ROUNDING)
    except DeployError:  # it does not run in float64: nothing is known of its roundings
        return list(measurements)
    return [explained.get(id(m), m) for m in measurements]


class _Draws:
    """Outputs of the graph with roundings at random, and without any, made as they are asked for."""

    def __init__(self, path: Path) -> None:
        self._program = OnnxProgram(path, with_roundings(path))
        self._outputs: dict[str, list[dict[str, Array]]] = {}

    def explain(self, measured: Measurement, sample: Sample, budget: Budget) -> bool:
        """Whether a measurement would pass if eager were as far off as the worst of the draws."""
        exact = self._draw(sample, 0)[measured.output]
        errors: list[UlpError] = []
        assert measured.error is not None
        for number in range(1, _DRAWS + 1):
            errors.append(ulp_error(self._draw(sample, number)[measured.output], exact, measured.dtype))
            worst = worst_of(errors)
            if judge(measured.error, worst, budget) == PASS_LIKE_EAGER:
                return True
            if number > 1 and measured.error.mean > _HOPELESS * worst.mean:
                return False
        return False

    def _draw(self, sample: Sample, number: int) -> dict[str, Array]:
        """Draw ``number``; 0 is without roundings."""
        made = self._outputs.setdefault(sample.name, [])
        while len(made) <= number:
            feeds = {**sample.feeds, _AMOUNT: np.array(float(bool(made)))}
            made.append(dict(zip(self._program.outputs, self._program.run(feeds), strict=True)))
        return made[number]


def with_roundings(path: Path) -> onnx.ModelProto:
    """The file's graph with v + v * noise in place of every float v that an operation computes.

    ``noise`` is even in +-0.75 ULP(1) / 2, between the half ULPs of the two ends of a binade, new in each run, and
    multiplied by the input `rounding_amount`. In float32, whose sums are rounded at every term, the n terms of a
    reduction or a matrix product are moved as well, sqrt(n / 2) times as far: the
    partial sums of terms that cancel grow with the root of their number. Bodies of subgraphs are left.
    """
    model = ir.from_proto(read_model(path))
    ir.passes.common.InlinePass()(model)
    infer_shapes(model)
    amount = ir.Value(name=_AMOUNT, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.DOUBLE))
    model.graph.inputs.append(amount)
    for number, node in enumerate(list(model.graph)):
        if node.domain == "" and node.op_type in _EXACT:
            continue
        for value in node.outputs:
            if value.dtype in _FLOATS and value.name:
                made = _moved(value, amount, number)
                _stand_in(value, made)
                model.graph.insert_after(node, made)
        source = node.inputs[0] if node.domain == "" and node.inputs else None
        if source is not None and source.dtype == ir.DataType.FLOAT:
            terms = _root_of_terms(node, source)
            if terms:
                scale = ir.node("Mul", [terms[-1].outputs[0], amount])
                made = [*terms, scale, *_moved(source, scale.outputs[0], -number - 1)]
                model.graph.insert_before(node, made)
                node.replace_input_with(0, made[-1].outputs[0])
    return ir.to_proto(model)


def _root_of_terms(node: ir.Node, source: ir.Value) -> list[ir.Node]:
    """Nodes that compute sqrt(n / 2) for the n terms of each of a node's sums; none where it has no sums."""
    before: list[ir.Node] = []
    if node.op_type in ("MatMul", "Gemm"):
        before.append(_constant(np.array([-1])))
    elif node.op_type not in _REDUCTIONS:
        return []
    elif "axes" in node.attributes:
        before.append(_constant(np.array(node.attributes["axes"].as_ints())))
    axes = before[0].outputs[0] if before else (node.inputs[1] if len(node.inputs) > 1 else None)
    sizes = ir.node("Shape", [source])
    summed = ir.node("Gather", [sizes.outputs[0], axes]) if axes is not None else sizes
    count = ir.node("ReduceProd", [summed.outputs[0]], {"keepdims": 0})
    wide = ir.node("Cast", [count.outputs[0]], {"to": int(ir.DataType.DOUBLE)})
    half = _constant(np.array(0.5))
    halved = ir.node("Mul", [wide.outputs[0], half.outputs[0]])
    root = ir.node("Sqrt", [halved.outputs[0]])
    return [*before, sizes, *([summed] if summed is not sizes else []), count, wide, half, halved, root]


def _constant(array: Array) -> ir.Node:
    return ir.node("Constant", [], {"value": ir.tensor(array)})


def _moved(value: ir.Value, amount: ir.Value, seed: int) -> list[ir.Node]:
    """Nodes of which the last has ``value`` moved by its noise times ``amount``."""
    assert value.dtype is not None
    half = 0.75 * 2.0 ** -FORMATS[_FLOATS[value.dtype]].precision
    noise = ir.node("RandomUniformLike", [value], {"low": -half, "high": half, "seed": float(seed)})
    scaled = ir.node("Mul", [noise.outputs[0], amount])
    change = ir.node("Mul", [value, scaled.outputs[0]])
    return [noise, scaled, change, ir.node("Add", [value, change.outputs[0]])]


def _stand_in(value: ir.Value, made: list[ir.Node]) -> None:
    """Let every user of ``value`` read the last of ``made`` instead, the graph's output too."""
    result = made[-1].outputs[0]
    result.type, result.shape = value.type, value.shape
    if value.is_graph_output():
        result.name, value.name = value.name, f"{value.name}_exact"
    own = {id(node) for node in made}
    for use in list(value.uses()):
        if id(use.node) not in own:
            use.node.replace_input_with(use.idx, result)
    graph = value.graph
    assert graph is not None
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = result
