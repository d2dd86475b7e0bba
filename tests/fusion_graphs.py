"""Graphs for the fusion tests, written as text, and what they compute by ONNX Runtime with its optimizer off."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from rmsnorm_deploy.fusion import FusionResult, fuse

D = 12
TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16}
CONSTANTS = """float[12] w, float[12] w2, float[12] b, float eps = {1e-5}, float two = {2.0}, float three = {3.0},
float half = {0.5}, float mhalf = {-0.5}, float one = {1.0}, float d = {12.0}, float rd = {0.0833333358168602},
float sd = {3.4641016151377544}, float rsd = {0.28867513459481287}, int64[1] last = {-1}, int64[1] first = {0},
int64[1] middle = {1}, int64[2] both = {-2, -1}"""


def graph(
    body: str,
    *,
    inputs: str = "float[N, S, 12] x",
    outputs: str = "float[N, S, 12] y",
    dtype: str = "float",
    opset: int = 18,
    more: str = "",
    functions: str = "",
) -> onnx.ModelProto:
    """A model whose nodes are ``body``; ``float`` stands for ``dtype``, constants are those above and ``more``.

    Constants that the body does not name are left out; arrays without a value get random ones.
    """
    declared = [
        item.strip() for item in re.split(r",\s*(?=float|int64|bool)", CONSTANTS + (", " + more if more else ""))
    ]
    used = [item for item in declared if re.search(rf"\b{_name(item)}\b", body)]
    given = [item for item in used if "=" in item]
    text = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1, "local" : 1]>\n'
    text += f"g ({inputs}) => ({outputs}) <{', '.join(given)}> {{ {body} }}\n{functions}"
    model = onnx.parser.parse_model(_retyped(text, dtype) if dtype != "float" else text)
    generator = np.random.default_rng(3)
    for item in used:
        if "=" not in item:
            shape = [int(n) for n in re.findall(r"\[([\d,\s]*)\]", item)[0].split(",")]
            array = (generator.uniform(0.5, 2.0, shape) * generator.choice([-1, 1], shape)).astype(TYPES[dtype])
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, _name(item)))
    return model


def _name(item: str) -> str:
    return item.split("=")[0].split()[-1]


def _retyped(text: str, dtype: str) -> str:
    return re.sub(r"\bfloat\b(?=[\s\[])", dtype, text)


def run(model: onnx.ModelProto, feeds: Mapping[str, Any], *, optimized: bool = True) -> list[np.ndarray[Any, Any]]:
    """The outputs by ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def interpret(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
    """The outputs by onnx's own reference evaluator: for ops without a float64 kernel in ONNX Runtime."""
    return [np.asarray(array) for array in ReferenceEvaluator(model).run(None, dict(feeds))]


def feeds_of(model: onnx.ModelProto, seed: int = 0, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Random inputs; named dimensions are 2, 3, 4 in the order of their appearance."""
    sizes = dict(sizes or {})
    generator = np.random.default_rng(seed)
    feeds: dict[str, Any] = {}
    initializers = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in initializers:
            continue
        tensor = value.type.tensor_type
        shape = [
            dim.dim_value if dim.HasField("dim_value") else sizes.setdefault(dim.dim_param or str(i), 2 + len(sizes))
            for i, dim in enumerate(tensor.shape.dim)
        ]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype == np.bool_ or np.issubdtype(dtype, np.integer):
            feeds[value.name] = np.ones(shape, dtype)
        else:
            rows = np.asarray(generator.standard_normal(shape)) * np.exp(
                generator.uniform(-3, 3, [*shape[:-1], 1] if shape else [])
            )
            feeds[value.name] = np.asarray(rows, dtype)
    return feeds


def fused(model: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, FusionResult]:
    """A fused copy, checked by onnx, with what was found."""
    copy = ir.from_proto(model)
    result = fuse(copy, **options)
    proto = ir.to_proto(copy)
    onnx.checker.check_model(proto)
    return proto, result


def check(
    model: onnx.ModelProto,
    norms: int,
    *,
    left: Sequence[str] = (),
    exact: float = 1e-5,
    sizes: Mapping[str, int] | None = None,
    reference: bool = False,
    **options: Any,
) -> FusionResult:
    """Fuse, and compare all outputs with the unfused model's; each text of ``left`` is part of one reason."""
    proto, result = fused(model, **options)
    reasons = [record.reason for record in result.left]
    assert len(result.norms) == norms, f"{len(result.norms)} norms, not {norms}; left: {reasons}"
    assert len(reasons) == len(left), reasons
    for text in left:
        assert any(text in reason for reason in reasons), (text, reasons)
    feeds = feeds_of(model, sizes=sizes)
    truth = interpret(model, feeds) if reference else run(model, feeds, optimized=False)
    for optimized in (False, True):
        for actual, expected in zip(run(proto, feeds, optimized=optimized), truth, strict=True):
            assert actual.dtype == expected.dtype
            assert actual.shape == expected.shape
            wide = np.asarray(expected, np.float64)
            size = np.max(np.abs(wide), initial=0.0, where=np.isfinite(wide))
            np.testing.assert_allclose(np.asarray(actual, np.float64), wide, rtol=exact, atol=exact * float(size))
    return result


def op_types(model: onnx.ModelProto) -> list[str]:
    """The ops of the main graph, in order."""
    return [node.op_type for node in model.graph.node]
