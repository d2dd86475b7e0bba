"""The function bodies: valid ONNX for every variant, dtype and opset, right by ONNX Runtime, and fused by it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort
import pytest

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.opset import (
    ATTRIBUTES,
    DOMAIN,
    MIN_OPSET,
    Signature,
    Variant,
    function_body,
    node_attributes,
    schemas,
    split_epsilon,
    variants,
)

WIDTH = 16
EPS = 0.25
NUMPY = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.DOUBLE: np.float64,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
}
NEWEST = onnx.defs.onnx_opset_version()
NEWEST_ORT = min(NEWEST, 23)  # ONNX Runtime refuses opsets newer than itself
F16, BF16, F32, F64 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE
TYPES = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), (F64, F64)]  # of X and of the scale


def _types_of(variant: Variant) -> list[tuple[ir.DataType, ir.DataType]]:
    if variant.double:
        return [(F64, F64)]
    halves = [(x, scale) for x, scale in TYPES if x in (F16, BF16)]
    return halves if variant.before_cast else [(F32, F32), *halves]


def _out_type(variant: Variant, x: ir.DataType, scale: ir.DataType) -> ir.DataType:
    return x if variant.before_cast or scale == x else scale


def _model(variant: Variant, x: ir.DataType, scale: ir.DataType, opset: int, axis: int = -1) -> onnx.ModelProto:
    def value(name: str, dtype: ir.DataType, shape: tuple[Any, ...]) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    rows, row = ("batch", 3, WIDTH), (3, WIDTH)[axis + 2 :] if axis < -1 else (WIDTH,)
    names = ["X", "skip", "scale", "bias"]
    inputs = [value(n, x, rows) if n in ("X", "skip") else value(n, scale, row) for n in names]
    taken = [v for v in inputs if (v.name != "skip" or variant.skip) and (v.name != "bias" or variant.bias)]
    high, low = split_epsilon(EPS)
    attributes = node_attributes(
        axis=axis,
        epsilon=high,
        epsilon_low=low,
        epsilon_mode=variant.mode,
        scale_order="before_cast" if variant.before_cast else "after_cast",
        stash_type=int(F64 if variant.double else F32),
    )
    node = ir.Node(DOMAIN, variant.name, taken, attributes, num_outputs=2 if variant.skip else 1)
    for output, name, dtype in zip(node.outputs, ("Y", "sum"), (_out_type(variant, x, scale), x), strict=False):
        output.name, output.dtype, output.shape = name, dtype, ir.Shape(rows)
    opsets = {"": opset, DOMAIN: 1}
    graph = ir.Graph(taken, list(node.outputs), nodes=[node], opset_imports=opsets, name="one_norm")
    body = function_body(variant, frozenset({Signature(x, scale, axis)}), opset)
    return ir.to_proto(ir.Model(graph, ir_version=8, functions=[body]))


def _session(model: onnx.ModelProto, optimized: bool, save: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED if optimized else levels.ORT_DISABLE_ALL
    if save is not None:
        options.optimized_model_filepath = str(save)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _inputs(model: onnx.ModelProto) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    feeds = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or 2 for dim in tensor.shape.dim]
        array = generator.standard_normal(shape) * np.exp(generator.uniform(-2, 2, [*shape[:-1], 1]))
        feeds[value.name] = array.astype(NUMPY[ir.DataType(tensor.elem_type)])
    return feeds


def _truth(variant: Variant, feeds: dict[str, Any], x_type: ir.DataType, axis: int = -1) -> tuple[Any, Any]:
    """Y before its last rounding, in float64 but for the roundings that docs/op-spec.md asks for; and the sum."""
    x = feeds["X"].astype(np.float64)
    if variant.skip:
        x = (x + feeds["skip"].astype(np.float64)).astype(NUMPY[x_type]).astype(np.float64)
    mean = np.mean(x * x, axis=tuple(range(axis, 0)), keepdims=True)
    root = {"inside": np.sqrt(mean + EPS), "outside": np.sqrt(mean) + EPS, "clamp": np.maximum(np.sqrt(mean), EPS)}
    y = x / root[variant.mode] * feeds["scale"].astype(np.float64)
    return (y + feeds["bias"].astype(np.float64) if variant.bias else y), x


def _ulp(dtype: ir.DataType) -> float:
    return float({F16: 2.0**-10, BF16: 2.0**-7, F32: 2.0**-23, F64: 2.0**-52}[dtype])


@pytest.mark.parametrize("variant", list(variants()), ids=lambda variant: variant.name)
def test_a_body_is_invalid_or_of_the_wrong_type(variant: Variant) -> None:
    for (x, scale), opset in product(_types_of(variant), (MIN_OPSET, 15, 17, 18, 21, 23, NEWEST)):
        if BF16 in (x, scale) and opset not in (18, NEWEST):
            continue  # the casts are those of float16
        model = _model(variant, x, scale, opset)
        onnx.checker.check_model(model, full_check=True)
        bare = onnx.ModelProto()
        bare.CopyFrom(model)
        for value in bare.graph.output:
            value.ClearField("type")
        inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True)
        types = [value.type.tensor_type for value in inferred.graph.output]
        assert types[0].elem_type == _out_type(variant, x, scale), (x, scale, opset)
        assert all(tensor.elem_type == x for tensor in types[1:])
        for tensor in types:
            shape = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
            assert shape == ["batch", 3, WIDTH], (opset, x, scale)


@pytest.mark.parametrize("variant", list(variants()), ids=lambda variant: variant.name)
def test_a_body_computes_something_else(variant: Variant) -> None:
    for (x, scale), opset, optimized in product(_types_of(variant), (MIN_OPSET, 18, NEWEST_ORT), (False, True)):
        if BF16 in (x, scale):
            continue  # ONNX Runtime's CPU provider has no bfloat16 for the ops of the body
        model = _model(variant, x, scale, opset)
        feeds = _inputs(model)
        truth, total = _truth(variant, feeds, x)
        outputs = _session(model, optimized).run(None, feeds)
        out = _out_type(variant, x, scale)
        assert outputs[0].dtype == NUMPY[out]
        # one rounding of T, and with "after_cast" that of the product, and that of the sum
        roundings = (1 if variant.before_cast else 3) * _ulp(x) + (0 if out == x else 2 * _ulp(out))
        slack = roundings + (8 * _ulp(F32) if out == F32 else 8 * _ulp(F64) if out == F64 else 0)
        size = np.abs(truth) + (np.abs(feeds["bias"].astype(np.float64)) * 2 if variant.bias else 0)
        error = np.abs(outputs[0].astype(np.float64) - truth) / size
        assert np.max(error) <= slack, (x, scale, opset, optimized)
        if variant.skip:
            np.testing.assert_array_equal(outputs[1].astype(np.float64), total)


@pytest.mark.parametrize("opset", [17, 18, NEWEST_ORT])
def test_a_body_over_two_axes(opset: int) -> None:
    model = _model(Variant(), F32, F32, opset, axis=-2)
    onnx.checker.check_model(model, full_check=True)
    feeds = _inputs(model)
    truth, _ = _truth(Variant(), feeds, F32, axis=-2)
    np.testing.assert_allclose(_session(model, True).run(None, feeds)[0], truth, rtol=1e-5)


@pytest.mark.parametrize(("skip", "opset"), [(False, 17), (False, 18), (True, 18), (False, NEWEST_ORT)])
@pytest.mark.parametrize(("x", "scale", "before"), [(F32, F32, False), (F16, F16, True)])
def test_stock_onnxruntime_no_longer_fuses_the_body(
    tmp_path: Path, skip: bool, opset: int, x: ir.DataType, scale: ir.DataType, before: bool
) -> None:
    model = _model(Variant(skip=skip, before_cast=before), x, scale, opset)
    weight = np.linspace(0.5, 2, WIDTH).astype(NUMPY[scale])  # a constant, as it is in real models
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "scale"))
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "scale"))
    _session(model, True, tmp_path / "optimized.onnx")
    ops = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    fused = {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
    assert fused & set(ops), ops
    assert "ReduceMean" not in ops


def test_stock_onnxruntime_learned_to_fuse_the_cast_inside_the_body(tmp_path: Path) -> None:
    """docs/op-spec.md says that its CPU provider runs "after_cast" in half types as loose ops; true as of 1.32."""
    _session(_model(Variant(), F16, F16, 18), True, tmp_path / "optimized.onnx")
    assert "ReduceMean" in [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]


def test_the_order_of_rounding_is_dropped_by_onnxruntime_by_more_than_one_ulp() -> None:
    """Its CPU provider removes float32 -> float16 -> float32: Y then has one rounding less, never more than one ULP."""
    model = _model(Variant(), F16, F16, 18)
    feeds = _inputs(model)
    x = feeds["X"].astype(np.float64)
    normalized = (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)).astype(np.float16)
    exact = (normalized.astype(np.float32) * feeds["scale"].astype(np.float32)).astype(np.float16)
    plain = _session(model, True).run(None, feeds)[0]
    steps = np.abs(plain.view(np.int16).astype(int) - exact.view(np.int16).astype(int))
    assert steps.max() <= 1


def test_a_special_value_is_lost() -> None:
    for mode, optimized in product(("inside", "outside", "clamp"), (False, True)):
        model = _model(Variant(mode=mode), F32, F32, 18)
        feeds = _inputs(model)
        feeds["X"][0, 0, 3], feeds["X"][0, 1, 3], feeds["X"][1, 0] = np.nan, np.inf, 0.0
        y = _session(model, optimized).run(None, feeds)[0]
        assert np.isnan(y[0, 0]).all()
        assert np.isnan(y[0, 1, 3])
        assert (y[1, 0] == 0).all()


def test_a_double_epsilon_loses_digits() -> None:
    for epsilon in (1e-6, 0.1, 1 / 3, 2.220446049250313e-16):
        high, low = split_epsilon(epsilon)
        assert (np.float32(high), np.float32(low)) == (high, low)
        assert abs(high + low - epsilon) <= epsilon * 2.0**-48


def test_names_and_schemas_of_all_variants() -> None:
    names = [variant.name for variant in variants()]
    assert len(set(names)) == 48
    assert [schema.name for schema in schemas()] == names
    assert Variant(True, "clamp", True, True, True).name == "SkipRMSNorm_clamp_bias_before_cast_double"
    assert all(set(schema.attributes) == set(ATTRIBUTES) for schema in schemas())


def test_a_body_takes_every_attribute_that_nodes_carry() -> None:
    for variant in variants():
        body = function_body(variant, frozenset({Signature(F32, F32, -1)}), 18)
        assert set(body.attributes) == set(ATTRIBUTES)
        assert (body.domain, body.name, body.opset_imports) == (DOMAIN, variant.name, {"": 18})


def test_an_opset_that_cannot_hold_the_body_is_taken() -> None:
    with pytest.raises(InputError, match="too old"):
        function_body(Variant(), frozenset({Signature(F32, F32, -1)}), 12)
    for other, opset in ((Signature(F32, F32, -2), 17), (Signature(F16, F16, -1), 14), (Signature(F32, F16, -1), 14)):
        with pytest.raises(InputError, match="one body"):
            function_body(Variant(), frozenset({Signature(F32, F32, -1), other}), opset)
