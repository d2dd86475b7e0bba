"""The float64 oracle: no rounding of the model's own survives lifting. Truth here is numpy in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from parity_fakes import Block, make_bundle, onnx_only
from torch.utils.checkpoint import checkpoint

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import lift_onnx
from rmsnorm_deploy.parity.lift_onnx import OnnxProgram
from rmsnorm_deploy.parity.lift_torch import TorchProgram, _lacks_double
from rmsnorm_deploy.parity.oracle import open_oracle
from rmsnorm_deploy.runtime.tensors import to_numpy

Array = np.ndarray[Any, Any]
HALVES = [torch.float16, torch.bfloat16]


def lifted(model: torch.nn.Module, *args: Any, **kwargs: Any) -> list[Array]:
    program = torch.export.export(model.eval(), args, kwargs, strict=False)
    runner = TorchProgram(program)
    outputs = runner.run([leaf.value for leaf in runner.inputs], lift=True)
    assert all(out.dtype in (torch.float64, torch.int64, torch.bool, torch.complex128) for out in outputs)
    return [out.numpy() for out in outputs]


def wide(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy()


def rms(x: Array, scale: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def close(got: Array, want: Array) -> bool:
    return bool(np.allclose(got, want, rtol=1e-12, atol=1e-13))


class CastingNorm(torch.nn.Module):
    """Llama's norm: float32 statistics, cast back before the scale."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width).to(dtype) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_casts_to_half_and_single_are_lifted(dtype: torch.dtype) -> None:
    model, x = CastingNorm(24, dtype), torch.randn(5, 24).to(dtype)
    assert close(lifted(model, x)[0], rms(wide(x), wide(model.weight), 1e-6))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_an_epsilon_that_is_not_given_is_that_of_the_model_s_dtype(dtype: torch.dtype) -> None:
    model, x = torch.nn.RMSNorm(24).to(dtype), torch.randn(5, 24).to(dtype) * 1e-4
    eps = 2.0**-52 if dtype == torch.float64 else 2.0**-23  # PyTorch's, which accumulates halves in float32
    assert close(lifted(model, x)[0], rms(wide(x), np.ones(24), eps))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_infinities_are_replaced_by_the_limits_of_the_model_s_dtype(dtype: torch.dtype) -> None:
    class Finite(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat((x.nan_to_num(), x.nan_to_num(1.0, posinf=2.0)))

    x = torch.tensor([0.5, math.inf, -math.inf, math.nan]).to(dtype)
    most = torch.finfo(dtype).max
    assert lifted(Finite(), x)[0].tolist() == [0.5, most, -most, 0.0, 0.5, 2.0, -most, 1.0]


@pytest.mark.parametrize("dtype", HALVES)
def test_a_square_that_overflows_half_is_finite_in_the_truth(dtype: torch.dtype) -> None:
    class Naive(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-8)

    x = (torch.randn(3, 16) * 8e3 if dtype == torch.float16 else torch.randn(3, 16) * 1e30).to(dtype)
    assert close(lifted(Naive(), x)[0], rms(wide(x), np.ones(16), 1e-8))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_layer_norm_and_linear(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)).to(dtype)
    x = torch.randn(4, 16).to(dtype)
    norm, linear = model[0], model[1]
    rows = wide(x)
    centred = rows - rows.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps) * wide(norm.weight) + wide(norm.bias)
    assert close(lifted(model, x)[0], normal @ wide(linear.weight).T + wide(linear.bias))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_attention_under_a_mask_of_the_smallest_float(dtype: torch.dtype) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            length = q.shape[-2]
            mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
            scores = (q @ q.transpose(-1, -2)).float() / math.sqrt(q.shape[-1]) + mask
            mixed = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ q
            return mixed + torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(2, 3, 5, 8).to(dtype)
    rows = wide(q)
    scores = rows @ rows.swapaxes(-1, -2) / math.sqrt(8)
    scores = np.where(np.triu(np.ones((5, 5)), 1) > 0, -np.inf, scores)
    assert close(lifted(Attention(), q)[0], 2 * softmax(scores) @ rows)


def test_dtypes_that_come_from_defaults_are_lifted() -> None:
    class Positions(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(0, 8, 2).float() / 8
            third = torch.full((1,), 1.0) / torch.tensor(3.0)
            return ids[:, None] / 7 * (10000.0**-steps) + third + torch.ones(1).type_as(third) / 9

    ids = torch.arange(5)
    want = np.arange(5)[:, None] / 7 * 10000.0 ** -(np.arange(0, 8, 2) / 8) + 1 / 3 + 1 / 9
    assert close(lifted(Positions(), ids)[0], want)


def test_constants_keep_the_value_the_model_stores() -> None:
    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([0.1], dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table + torch.tensor(0.1, dtype=torch.float16)

    tenth = float(np.float16(0.1))
    assert close(lifted(Constant(), torch.ones(2, dtype=torch.float16))[0], np.full(2, 2 * tenth))


def test_regions_with_their_own_mode_are_lifted_too() -> None:
    class Regions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.linear(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = y @ y.transpose(-1, -2)
            return checkpoint(lambda z: z.half().pow(2).float(), y, use_reentrant=False)

    model, x = Regions(), torch.randn(4, 8)
    y = wide(x) @ wide(model.linear.weight).T + wide(model.linear.bias)
    assert close(lifted(model, x)[0], (y @ y.T) ** 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_is_lifted_and_taken_by_value(sign: int) -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda a: a.half().float() / 3, lambda a: a.half().float() / 7, (x,))

    x = sign * (torch.rand(4) + 0.1)
    assert close(lifted(Branch(), x)[0], wide(x) / (3 if sign > 0 else 7))


def test_a_loop_is_lifted() -> None:
    from torch._higher_order_ops.scan import scan

    class Scan(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return scan(lambda c, y: ((c * 0.3 + y).clone(), (c / 3).half()), x[0], x)

    x = torch.randn(4, 3)
    carry, steps = wide(x)[0], []
    for row in wide(x):
        steps.append(carry / 3)
        carry = carry * 0.3 + row
    final, stacked = lifted(Scan(), x)
    assert close(final, carry)
    assert close(stacked, np.stack(steps))


def test_a_bit_cast_reads_the_models_bits() -> None:
    class Bits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.view(torch.int32) & -65536).view(torch.float32) * 1.0

    x = torch.randn(6)
    bits = x.numpy().view(np.int32) & -65536
    assert close(lifted(Bits(), x)[0], bits.astype(np.int32).view(np.float32).astype(np.float64))


def test_a_buffer_the_model_writes_is_fresh_in_every_run() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    model = Counter()
    runner = TorchProgram(torch.export.export(model, (torch.zeros(2),), strict=False))
    for lift in (True, False, True):
        assert runner.run([torch.zeros(2)], lift=lift)[0].tolist() == [1.0, 1.0]
    assert model.count.tolist() == [0.0, 0.0]


def test_double_weights_and_inputs_are_not_written_to() -> None:
    class InPlace(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

    x = torch.ones(3, dtype=torch.float64)
    runner = TorchProgram(torch.export.export(InPlace(), (x.clone(),), strict=False))
    runner.run([x], lift=True)
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_nested_arguments_bind_by_path(tmp_path: Path) -> None:
    class Nested(torch.nn.Module):
        def forward(self, x: Any, pair: Any, factor: float = 0.5, *, extras: Any = None) -> Any:
            return {"sum": x + pair[0] * factor + pair[1], "b": extras["b"] / 3}

    args = (torch.ones(2).half(), [torch.ones(2).half(), 4])
    bundle = make_bundle(tmp_path, Nested(), args, {"extras": {"b": torch.ones(3)}})
    oracle = open_oracle(bundle)
    assert [item["path"] for item in bundle.manifest["signature"]["inputs"]] == ["x", "pair.0", "extras.b"]
    feeds = dict(zip([i["name"] for i in bundle.manifest["signature"]["inputs"]], range(3), strict=True))
    got = oracle({name: np.full(3 if k == 2 else 2, k + 1.0, np.float32) for name, k in feeds.items()})
    assert close(got[0], np.full(2, 1 + 2 * 0.5 + 4))
    assert close(got[1], np.full(3, 1.0))
    assert "float64" in oracle.description


def test_a_program_that_cannot_take_the_input_is_refused_in_one_line(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    oracle = open_oracle(bundle)
    with pytest.raises(InputError, match="does not run in float64") as caught:
        oracle({"input": np.ones((2, 5), np.float32)})
    assert "\n" not in str(caught.value)


def test_a_bundle_without_its_source_is_refused(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    bundle.torch_program = None
    with pytest.raises(InputError, match=r"neither program\.pt2 nor reference\.onnx"):
        open_oracle(bundle)


# --- ONNX files


def save(
    path: Path,
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[Any],
    weights: dict[str, Array],
    opset: int = 18,
    **extra: Any,
) -> Path:
    inits = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, inits)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **extra)
    onnx.save(model, path)
    return path


@pytest.fixture(params=["onnxruntime", "reference"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both engines must give the same truth."""
    if request.param == "reference":
        monkeypatch.setattr(lift_onnx, "_ort_session", lambda proto, arrays: None)
    return str(request.param)


@pytest.mark.parametrize("code", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT])
def test_onnx_casts_constants_and_stash_types_are_lifted(tmp_path: Path, engine: str, code: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(code)
    random = np.random.default_rng(0)
    x, scale = random.standard_normal((3, 16)).astype(dtype), random.standard_normal(16).astype(dtype)
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Constant", [], ["eps"], value=numpy_helper.from_array(np.float32([1e-6]))),
        helper.make_node("Pow", ["wide", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["mean"]),
        helper.make_node("Add", ["mean", "eps"], ["shifted"]),
        helper.make_node("Sqrt", ["shifted"], ["root"]),
        helper.make_node("Div", ["wide", "root"], ["normal"]),
        helper.make_node("CastLike", ["normal", "x"], ["narrow"]),
        helper.make_node("Mul", ["narrow", "scale"], ["scaled"]),
        helper.make_node("LayerNormalization", ["scaled", "scale", "scale"], ["y"], epsilon=1e-3),
    ]
    value = helper.make_tensor_value_info
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [value("x", code, ["rows", 16])],
        [value("y", code, ["rows", 16])],
        {"scale": scale, "axes": np.int64([-1])},
    )
    program = OnnxProgram(path)
    (got,) = program.run({"x": x})
    assert ("ONNX Runtime" in program.engine) == (engine == "onnxruntime")
    weight = scale.astype(np.float64)
    scaled = rms(x.astype(np.float64), weight, float(np.float32(1e-6)))
    centred = scaled - scaled.mean(-1, keepdims=True)
    eps = float(np.float32(1e-3))
    assert got.dtype == np.float64
    assert close(got, centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + weight)


def test_onnx_subgraphs_functions_and_large_weights_are_lifted(tmp_path: Path, engine: str) -> None:
    value = helper.make_tensor_value_info
    branches = {
        name: helper.make_graph(
            [
                helper.make_node("Cast", ["x"], [f"c_{name}"], to=TensorProto.FLOAT16),
                helper.make_node("Div", [f"c_{name}", f"k_{name}"], [f"o_{name}"]),
            ],
            name,
            [],
            [value(f"o_{name}", TensorProto.FLOAT16, ["n", 32])],
            [numpy_helper.from_array(np.float16(k), f"k_{name}")],
        )
        for name, k in (("yes", 3), ("no", 7))
    }
    third = helper.make_function(
        "local",
        "Third",
        ["a"],
        ["b"],
        [
            helper.make_node("Constant", [], ["three"], value_float=3.0),
            helper.make_node("Cast", ["a"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["f", "three"], ["b"]),
        ],
        [helper.make_opsetid("", 18)],
    )
    nodes = [
        helper.make_node("If", ["flag"], ["picked"], then_branch=branches["yes"], else_branch=branches["no"]),
        helper.make_node("Third", ["picked"], ["part"], domain="local"),
        helper.make_node("MatMul", ["part", "w"], ["y"]),
    ]
    w = np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32)
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [value("x", TensorProto.FLOAT, ["n", 32]), value("flag", TensorProto.BOOL, [])],
        [value("y", TensorProto.FLOAT, ["n", 32])],
        {"w": w},
        functions=[third],
    )
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=64)
    x = np.random.default_rng(2).standard_normal((3, 32)).astype(np.float32)
    program = OnnxProgram(path)
    for flag, divisor in ((True, 9), (False, 21)):
        (got,) = program.run({"x": x, "flag": np.asarray(flag)})
        assert close(got, x.astype(np.float64) / divisor @ w.astype(np.float64))


def test_onnx_operators_that_exist_in_float32_only_run_between_casts(tmp_path: Path, engine: str) -> None:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["d"]),
        helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=numpy_helper.from_array(np.float32([1 / 3]))),
        helper.make_node("Add", ["d", "ones"], ["y"]),
    ]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        [value("x", TensorProto.FLOAT, [4])],
        [value("d", TensorProto.FLOAT, [4]), value("y", TensorProto.FLOAT, [4])],
        {"step": np.float32(0.25), "zero": np.uint8(8), "shape": np.int64([1])},
        opset=21,
    )
    rounded, got = OnnxProgram(path).run({"x": np.float32([0.26, -0.49, 1.0, 0.1])})
    assert got.dtype == rounded.dtype == np.float64
    assert close(rounded, np.asarray([0.25, -0.5, 1.0, 0.0]))
    assert close(got, rounded + float(np.float32(1 / 3)))


def test_onnx_runtimes_own_norms_have_a_truth(tmp_path: Path, engine: str) -> None:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["a"], axis=-1, epsilon=1e-5, stash_type=1),
        helper.make_node(
            "SkipSimplifiedLayerNormalization",
            ["a", "x", "g"],
            ["y", "", "", "s"],
            domain="com.microsoft",
            epsilon=1e-5,
        ),
    ]
    random = np.random.default_rng(0)
    x, g = random.standard_normal((2, 3, 8)).astype(np.float32), random.standard_normal(8).astype(np.float32)
    shape = [2, 3, 8]
    outputs = [value("y", TensorProto.FLOAT, shape), value("s", TensorProto.FLOAT, shape)]
    path = save(tmp_path / "m.onnx", nodes, [value("x", TensorProto.FLOAT, shape)], outputs, {"g": g})
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, path)
    y, total = OnnxProgram(path).run({"x": x})
    rows, gain, eps = x.astype(np.float64), g.astype(np.float64), float(np.float32(1e-5))
    want = rms(rows, gain, eps) + rows
    assert close(total, want)
    assert close(y, rms(want, gain, eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_oracles_agree_on_an_exported_block(tmp_path: Path, engine: str, dtype: torch.dtype) -> None:
    bundle = make_bundle(tmp_path, Block().to(dtype), (torch.randn(2, 5, 32).to(dtype),))
    feeds = {"hidden": to_numpy(torch.randn(2, 5, 32).to(dtype))}
    (by_torch,), (by_onnx,) = open_oracle(bundle)(feeds), open_oracle(onnx_only(bundle))(feeds)
    # the exporter itself rounds attention's factor to the model's dtype
    unit = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    assert np.abs(by_torch - by_onnx).max() < 4 * unit


def test_a_broken_file_and_an_unknown_operator_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x0anot onnx")
    with pytest.raises(InputError, match="not a readable ONNX file"):
        OnnxProgram(tmp_path / "bad.onnx")
    with pytest.raises(InputError, match="no such file"):
        OnnxProgram(tmp_path / "none.onnx")
    value = helper.make_tensor_value_info
    node = helper.make_node("Mystery", ["x"], ["y"], domain="elsewhere")
    path = save(tmp_path / "m.onnx", [node], [value("x", 1, [2])], [value("y", 1, [2])], {})
    with pytest.raises(InputError, match=r"m.onnx has no float64 truth.*Mystery"):
        OnnxProgram(path)


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    node = helper.make_node("Neg", ["x"], ["y"])
    path = save(tmp_path / "m.onnx", [node], [value("x", 1, [2])], [value("y", 1, [2])], {})
    with pytest.raises(InputError, match="no array for input 'x'"):
        OnnxProgram(path).run({})


def test_bfloat16_feeds_widen_to_the_same_values() -> None:
    values = np.asarray([1.1, -3.3], ml_dtypes.bfloat16)
    assert lift_onnx._widen(values).tolist() == [float(values[0]), float(values[1])]


DOUBLE, SINGLE = torch.zeros(1, 1, 4, 4, dtype=torch.float64), torch.zeros(1, 1, 4, 4)
BYTES = torch.zeros(4, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("call", "lacks"),
    [
        (lambda: torch.quantize_per_tensor(DOUBLE, 0.1, 0, torch.quint8), True),
        (lambda: torch.ops.aten._weight_int8pack_mm(DOUBLE[0, 0], BYTES, DOUBLE[0, 0, 0]), True),
        (lambda: torch.bitwise_and(DOUBLE, DOUBLE), True),
        (lambda: DOUBLE[0, 0, 0] @ SINGLE[0, 0, 0], False),
        (lambda: torch.nn.functional.linear(DOUBLE, SINGLE[0, 0]), False),
        (lambda: torch.nn.functional.conv2d(DOUBLE, SINGLE), False),
        (lambda: torch.index_add(DOUBLE, 0, torch.tensor([0]), SINGLE), False),
        (lambda: DOUBLE @ DOUBLE[..., :3, :], False),
    ],
)  # fmt: skip
def test_an_operator_without_a_double_kernel_is_told_from_operands_that_do_not_fit(call: Any, lacks: bool) -> None:
    """The one may run in the model's own dtype; in the other lifting has gone wrong, and hiding it would be worse."""
    with pytest.raises(RuntimeError) as caught:
        call()
    assert _lacks_double(caught.value) == lacks
