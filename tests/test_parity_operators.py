"""ONNX Runtime's own operators in the oracle: those with a definition are exact, the others are run by it alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import lift_onnx, run_parity
from rmsnorm_deploy.parity.lift_onnx import OnnxProgram

Array = np.ndarray[Any, Any]
CONTRIB = "com.microsoft"


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def info(name: str, array: Array | None = None) -> onnx.ValueInfoProto:
    shape = None if array is None else list(array.shape)
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def model_of(nodes: list[onnx.NodeProto], feeds: dict[str, Array], outputs: list[str], **weights: Array) -> Any:
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    inputs = [info(name, array) for name, array in feeds.items()]
    graph = helper.make_graph(nodes, "g", inputs, [info(name) for name in outputs], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def one(op: str, *operands: Array, outputs: int = 1, domain: str = CONTRIB, **attributes: Any) -> Any:
    feeds = {f"x{i}": array for i, array in enumerate(operands)}
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, list(feeds), names, domain=domain, **attributes)
    return model_of([node], feeds, names), feeds


def program(tmp_path: Path, model: Any) -> OnnxProgram:
    onnx.save(model, tmp_path / "m.onnx")
    return OnnxProgram(tmp_path / "m.onnx")


def in_runtime(model: Any, feeds: dict[str, Array]) -> list[Array]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lift_onnx, "_ort_session", lambda proto, arrays: None)


def each(function: Any, x: Array) -> Array:
    return np.vectorize(function)(x.astype(np.float64))


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def fast_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(0.7978845608028654 * x + 0.035677408136300125 * x**3))


X, ROW, X64 = draw(2, 3, 8), draw(8), draw(2, 3, 8).astype(np.float64)
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "gelu": ("Gelu", (X,), {}, each(gelu, X)),
    "gelu of a sum": ("BiasGelu", (X, ROW), {}, each(gelu, X64 + ROW)),
    "fast gelu": ("FastGelu", (X,), {}, each(fast_gelu, X)),
    "fast gelu of a sum": ("FastGelu", (X, ROW), {}, each(fast_gelu, X64 + ROW)),
    "quick gelu": ("QuickGelu", (X,), {"alpha": 0.5}, each(lambda x: x / (1 + math.exp(-0.5 * x)), X)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_the_optimizer_is_exact_in_float64(tmp_path: Path, evaluator: None, name: str) -> None:
    op, operands, attributes, want = ACTIVATIONS[name]
    model, feeds = one(op, *operands, **attributes)
    lifted = program(tmp_path, model)
    (got,) = lifted.run(feeds)
    assert np.allclose(got, want, rtol=1e-14, atol=1e-15)
    assert lifted.narrowed == []


@pytest.mark.parametrize("given", [2, 3, 4], ids=["a scale", "and a bias", "and a bias of the sum"])
def test_a_sum_and_its_layer_norm_are_exact_in_float64(tmp_path: Path, evaluator: None, given: int) -> None:
    skip, *rest = draw(2, 3, 8, seed=1), *(draw(8, seed=seed) for seed in (2, 3, 4))
    used = [skip, *rest][:given]
    model, feeds = one("SkipLayerNormalization", X, *used, outputs=4, epsilon=0.25)
    model.graph.node[0].output[1:3] = ["", ""]
    del model.graph.output[1:3]
    y, total = program(tmp_path, model).run(feeds)
    gamma, beta, bias = (array.astype(np.float64) for array in [*rest[: given - 1], *[0 * ROW] * 3][:3])
    rows = X64 + skip + bias
    centred = rows - rows.mean(-1, keepdims=True)
    assert np.allclose(total, rows, rtol=1e-14)
    assert np.allclose(y, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.25) * gamma + beta, rtol=1e-12)


FUSED: dict[str, tuple[Any, ...]] = {
    "product, transposed": ("FusedMatMul", (draw(2, 8, 3), draw(2, 5, 8)), {"transA": 1, "transB": 1, "alpha": 0.5}),
    "product, batch moved": ("FusedMatMul", (draw(3, 2, 8), draw(2, 8, 5)), {"transBatchA": 1}),
    "product, batch moved and transposed": (
        "FusedMatMul",
        (draw(8, 2, 3), draw(2, 8, 5)),
        {"transBatchA": 1, "transA": 1},
    ),
    "gemm": ("FusedGemm", (draw(3, 8), draw(5, 8), draw(5)), {"transB": 1, "alpha": 0.5, "activation": "Relu"}),
    "gemm, leaky": (
        "FusedGemm",
        (draw(3, 8), draw(8, 5), draw(5)),
        {"beta": 2.0, "activation": "LeakyRelu", "activation_alpha": 0.3},
    ),
    "conv": ("FusedConv", (draw(2, 3, 8, 8), draw(4, 3, 3, 3), draw(4)), {"activation": "Relu", "strides": [2, 2]}),
    "conv, summed": (
        "FusedConv",
        (draw(2, 3, 8, 8), draw(4, 3, 3, 3), draw(4), draw(2, 4, 8, 8)),
        {"activation": "Relu", "pads": [1, 1, 1, 1]},
    ),
    "conv, clipped": (
        "FusedConv",
        (draw(2, 4, 8), draw(4, 2, 3)),
        {"activation": "Clip", "activation_params": [-0.5, 0.75], "group": 2, "dilations": [2]},
    ),
    "conv, hard sigmoid": (
        "FusedConv",
        (draw(2, 4, 8), draw(4, 4, 3)),
        {"activation": "HardSigmoid", "activation_params": [0.2, 0.5]},
    ),
    "conv, tanh": ("FusedConv", (draw(2, 4, 8), draw(4, 4, 3)), {"activation": "Tanh"}),
    "conv, sigmoid": ("FusedConv", (draw(2, 4, 8), draw(4, 4, 3)), {"activation": "Sigmoid", "auto_pad": "SAME_UPPER"}),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_product_means_what_the_runtime_computes(tmp_path: Path, evaluator: None, name: str) -> None:
    op, operands, attributes = FUSED[name]
    model, feeds = one(op, *operands, **attributes)
    lifted = program(tmp_path, model)
    (got,), (want,) = lifted.run(feeds), in_runtime(model, feeds)
    assert got.dtype == np.float64
    assert lifted.narrowed == []
    assert got.shape == want.shape
    assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


def quantized() -> tuple[Any, dict[str, Array]]:
    """A third of x, before and behind an operator that is defined in four bits."""
    weights = np.random.default_rng(0).integers(0, 255, (8, 1, 8)).astype(np.uint8)
    nodes = [
        helper.make_node("Div", ["x", "three"], ["a"]),
        helper.make_node("MatMulNBits", ["a", "q", "s"], ["b"], domain=CONTRIB, K=8, N=8, bits=4, block_size=16),
        helper.make_node("Div", ["b", "three"], ["c"]),
    ]
    feeds = {"x": X}
    return model_of(nodes, feeds, ["a", "b", "c"], three=np.array(3, np.float32), q=weights, s=draw(8)), feeds


def looped(times: int) -> Any:
    """A norm run several times over, whose loop has no condition, and every step of it as a second output."""
    step = [helper.make_node("Mul", ["state", "state"], ["square"]), helper.make_node("Identity", ["go"], ["going"])]
    step += [helper.make_node("ReduceMean", ["square"], ["mean"], axes=[-1]), helper.make_node("Sqrt", ["mean"], ["r"])]
    step += [helper.make_node("Div", ["state", "r"], ["unit"]), helper.make_node("Add", ["unit", "one"], ["next"])]
    step += [helper.make_node("Identity", ["next"], ["row"])]
    inputs = [helper.make_tensor_value_info("i", TensorProto.INT64, [])]
    inputs += [helper.make_tensor_value_info("go", TensorProto.BOOL, []), info("state", np.zeros((2, 3)))]
    outputs = [helper.make_tensor_value_info("going", TensorProto.BOOL, []), *(info(n) for n in ("next", "row"))]
    body = helper.make_graph(step, "body", inputs, outputs)
    loop = helper.make_node("Loop", ["times", "", "x"], ["y", "rows"], body=body)
    weights = {"times": np.array(times), "one": np.float32([1])}
    return model_of([loop], {"x": np.zeros((2, 3), np.float32)}, ["y", "rows"], **weights)


@pytest.mark.parametrize("by_runtime", [True, False])
def test_a_loop_without_a_condition_is_left_out_of_the_truth(
    tmp_path: Path, request: pytest.FixtureRequest, by_runtime: bool
) -> None:
    if not by_runtime:
        request.getfixturevalue("evaluator")
    found = program(tmp_path, looped(3))
    assert found.engine.startswith("ONNX Runtime") == by_runtime
    x = draw(2, 3)
    state, rows = x.astype(np.float64), []
    for _ in range(3):
        state = state / np.sqrt(np.mean(state * state, -1, keepdims=True)) + 1
        rows.append(state)
    y, scanned = found.run({"x": x})
    np.testing.assert_allclose(y, state, rtol=1e-14)
    np.testing.assert_allclose(scanned, np.stack(rows), rtol=1e-14)


def test_a_loop_of_no_steps_gives_what_it_was_given(tmp_path: Path, evaluator: None) -> None:
    y, rows = program(tmp_path, looped(0)).run({"x": (x := draw(2, 3))})
    assert np.array_equal(y, x)
    assert rows.size == 0


def test_a_constant_of_no_axes_gets_one(tmp_path: Path, evaluator: None) -> None:
    """A scalar index takes an axis away, and the depth of OneHot is a number."""
    nodes = [helper.make_node("Gather", ["x", "at"], ["y"], axis=1), helper.make_node("Cast", ["y"], ["ids"], to=7)]
    nodes += [helper.make_node("OneHot", ["ids", "depth", "values"], ["hot"])]
    x = np.float32([[0.0, 2.0], [5.0, 1.0]])
    weights = {"at": np.array(1), "depth": np.array(3), "values": np.float32([-1, 1])}
    y, hot = program(tmp_path, model_of(nodes, {"x": x}, ["y", "hot"], **weights)).run({"x": x})
    assert np.array_equal(y, [2, 1])
    assert np.array_equal(hot, [[-1, -1, 1], [-1, 1, -1]])


def test_the_statistic_of_a_norm_that_the_optimizer_wrote_is_given_too(tmp_path: Path, evaluator: None) -> None:
    x, w = draw(2, 8), draw(8)
    model, feeds = one("SimplifiedLayerNormalization", x, w, outputs=2, domain="", epsilon=1e-5)
    y, inverse = program(tmp_path, model).run(feeds)
    wide = x.astype(np.float64)
    root = np.sqrt(np.mean(wide * wide, -1, keepdims=True) + np.float32(1e-5))
    np.testing.assert_allclose(inverse, 1 / root, rtol=1e-12)
    np.testing.assert_allclose(y, wide / root * w, rtol=1e-12)


def test_what_has_no_definition_is_run_by_the_runtime_and_all_else_in_float64(tmp_path: Path) -> None:
    model, feeds = quantized()
    lifted = program(tmp_path, model)
    a, b, c = lifted.run(feeds)
    assert lifted.narrowed == [f"{CONTRIB}.MatMulNBits"]
    assert np.array_equal(a, X64 / 3)
    assert np.array_equal(c, b / 3)
    assert np.array_equal(b, b.astype(np.float32))  # what float32 can hold
    assert np.allclose(b, in_runtime(model, feeds)[1], rtol=1e-5, atol=1e-5)


def norm_between(node: onnx.NodeProto, **weights: Array) -> Any:
    nodes = [helper.make_node("SimplifiedLayerNormalization", ["x", "w"], ["n"], axis=-1, epsilon=1e-5), node]
    return model_of(nodes, {"x": X}, ["y"], w=ROW, **weights)


def test_the_verdict_names_what_is_not_judged_in_float64(tmp_path: Path) -> None:
    node = helper.make_node("MultiHeadAttention", ["n", "n", "n"], ["y"], domain=CONTRIB, num_heads=2)
    bundle = export_model(norm_between(node), out_dir=tmp_path / "b")
    report = run_parity(bundle, backends=["onnxruntime"])
    assert report.ok
    assert len(bundle.norms) == 1
    assert report.narrowed == [f"{CONTRIB}.MultiHeadAttention"]
    assert report.headline().endswith(f"against float64, but for {CONTRIB}.MultiHeadAttention")


def test_a_wrong_norm_fails_beside_an_operator_that_is_not_in_float64(tmp_path: Path) -> None:
    node = helper.make_node("MultiHeadAttention", ["n", "n", "n"], ["y"], domain=CONTRIB, num_heads=2)
    bundle = export_model(norm_between(node), out_dir=tmp_path / "b")
    model = onnx.load(bundle.model_path)
    (epsilon,) = (a for n in model.graph.node if n.op_type == "RMSNorm" for a in n.attribute if a.name == "epsilon")
    epsilon.f = 1e-3
    onnx.save(model, bundle.model_path)
    report = run_parity(bundle, backends=["onnxruntime"])
    assert report.headline() == "Parity failed on ONNX Runtime"
    assert report.findings


def test_an_operator_without_a_kernel_here_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model, _ = one("GroupNorm", draw(1, 4, 4, 8), ROW, ROW, groups=2, activation=0, epsilon=1e-5)
    with pytest.raises(InputError, match=r"no float64 truth: .*GroupNorm.*--no-check"):
        program(tmp_path, model)


@pytest.mark.parametrize(
    ("op", "slope", "attributes"),
    [
        ("Elu", 1.0, {}),
        ("Celu", 1.0, {}),
        ("Elu", 0.5, {"alpha": 0.5}),
        ("Celu", 1.0, {"alpha": 0.5}),
        ("Selu", 1.6732632423543772 * 1.0507009873554805, {}),
    ],
)
def test_exponential_units_are_lines_at_tiny_numbers(
    tmp_path: Path, op: str, slope: float, attributes: dict[str, Any]
) -> None:
    x = -np.array([1e-38, 1e-30, 1e-12], np.float32)
    model, feeds = one(op, x, domain="", **attributes)
    (y,) = program(tmp_path, model).run(feeds)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, slope * x.astype(np.float64), rtol=1e-6)


def test_a_runtime_whose_elu_loses_small_numbers_is_as_exact_as_before_fusing(tmp_path: Path) -> None:
    class Gated(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.nn.functional.rms_norm(x, (16,), eps=1e-6), torch.nn.functional.elu(x)

    bundle = export_model(Gated(), (torch.randn(2, 16),), out_dir=tmp_path / "b")
    report = run_parity(bundle, backends=["onnxruntime", "onnx-reference"])
    assert {result.verdict for result in report.backends} == {"pass-as-exact-as-unfused", "pass"}
