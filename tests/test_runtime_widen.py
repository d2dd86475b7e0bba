"""bfloat16 on ONNX Runtime, whose CPU provider has few kernels for it: what `widen_bfloat16` must not break."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.parser import parse_model

from rmsnorm_deploy import native, register
from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.runtime.tensors import DTYPES

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from rmsnorm_deploy.runtime.widen import Kernels, Widened, widen_bfloat16  # noqa: E402

CPU = [("CPUExecutionProvider", {})]
LEVELS = ["all", "extended", "basic", "disabled"]
NAMES = {code: name for name, (_, _, code) in DTYPES.items()}


def bundle_of(
    folder: Path,
    text: str,
    opset: int = 18,
    weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
    edit: Callable[[onnx.ModelProto], None] | None = None,
) -> Bundle:
    """A bundle of the model in ONNX's own notation; ``weights`` go to a file of their own."""
    model = parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> {text}')
    if edit is not None:
        edit(model)
    for name, array in (weights or {}).items():
        tensor = onnx.TensorProto(name=name, data_type=16, dims=array.shape, raw_data=array.tobytes())
        model.graph.initializer.append(tensor)
    if weights:
        onnx.save_model(
            model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=16
        )
    else:
        onnx.save_model(model, folder / "model.onnx")
    return Bundle(folder, {"signature": signature_of(model.graph), "dims": {}, "norms": [], "left": []})


def signature_of(graph: onnx.GraphProto) -> dict[str, Any]:
    def spec(value: onnx.ValueInfoProto) -> dict[str, Any]:
        kind = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in kind.shape.dim]
        return {"name": value.name, "dtype": NAMES[kind.elem_type], "shape": shape}

    return {"parameters": [], "inputs": [spec(v) for v in graph.input], "outputs": [spec(v) for v in graph.output]}


def opened(bundle: Bundle, **options: Any) -> Any:
    return bundle.session("onnxruntime", **{"custom_ops": False, "widen_bfloat16": True, **options})


def copy_of(bundle: Bundle, kernels: Kernels, own_library: bool = False) -> Widened | None:
    return widen_bfloat16(ir.load(bundle.model_path), bundle.path, kernels, own_library)


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# --- rounding --------------------------------------------------------------------------------------------------------

CHAIN = """g (bfloat16[n] x, bfloat16[n] y) => (bfloat16[n] out) {
    sum = Add(x, y)
    same = Reshape(sum, shape)
    square = Mul(same, same)
    out = Sub(square, x)
}"""


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = x + y
    return total * total - x


@pytest.mark.parametrize("optimization", LEVELS)
def test_each_result_is_rounded_to_bfloat16_whatever_the_optimizer_does(tmp_path, optimization):
    text = CHAIN.replace("{", "<int64[1] shape = {-1}> {", 1)
    x, y = some(4000), some(4000, seed=1)
    (got,) = opened(bundle_of(tmp_path, text), optimization=optimization)(x, y)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, chain(x, y))
    unrounded = chain(x.float(), y.float()).bfloat16()
    assert (got != unrounded).sum() > 1000  # so that a runtime which drops the casts between two ops is seen


@pytest.mark.parametrize("optimization", LEVELS)
def test_a_product_is_summed_in_float32_and_rounded_once(tmp_path, optimization):
    text = "g (bfloat16[n, 256] x, bfloat16[256, 8] w) => (bfloat16[n, 8] y) { y = MatMul(x, w) }"
    generator = torch.Generator().manual_seed(0)
    # small integers: float32 has their sums exactly, in any order, and bfloat16 has not
    x, w = (torch.randint(-9, 10, shape, generator=generator).bfloat16() for shape in ((5, 256), (256, 8)))
    (got,) = opened(bundle_of(tmp_path, text), optimization=optimization)(x, w)
    assert torch.equal(got, (x.double() @ w.double()).bfloat16())


def test_casting_like_another_value_is_onnx_runtimes_own_cast(tmp_path):
    like = "g (double[n] x, bfloat16[1] like) => (bfloat16[n] y) { y = CastLike(x, like) }"
    plain = "g (double[n] x, bfloat16[1] like) => (bfloat16[n] y) { y = Cast<to = 16>(x) }"
    (tmp_path / "plain").mkdir()
    x = torch.cat([torch.randn(500).double(), torch.tensor([1 + 2.0**-8 + 2.0**-40, 1e39, torch.inf, torch.nan])])
    (got,) = opened(bundle_of(tmp_path, like))(x, torch.ones(1).bfloat16())
    (want,) = opened(bundle_of(tmp_path / "plain", plain), widen_bfloat16=False)(x, torch.ones(1).bfloat16())
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_arrays_of_numpy_go_in_and_come_out_as_bfloat16(tmp_path):
    text = "g (bfloat16[n] x) => (bfloat16[n] x_again, bfloat16[n] y) { x_again = Identity(x) y = Exp(x) }"
    x = np.linspace(-2, 2, 33).astype(ml_dtypes.bfloat16)
    got = opened(bundle_of(tmp_path, text)).run({"x": x})
    assert got["y"].dtype == x.dtype
    assert np.array_equal(got["x_again"], x)
    assert np.array_equal(got["y"], np.exp(x.astype(np.float32)).astype(x.dtype))


# --- which ops -------------------------------------------------------------------------------------------------------


def test_only_ops_without_a_kernel_are_widened(tmp_path):
    text = """g (bfloat16[n, 4] x, int64[k] ids) => (bfloat16[k, 4] y, int64[k] next) {
        one = Constant<value = int64[1] {1}>()
        next = Add(ids, one)
        row = Gather(x, ids)
        turned = Transpose<perm = [1, 0]>(row)
        back = Transpose<perm = [1, 0]>(turned)
        y = Neg(back)
    }"""
    session = opened(bundle_of(tmp_path, text))
    assert dict(session.widened) == {"Neg": 1}
    x, ids = some(7, 4), torch.tensor([6, 0, 3])
    y, following = session(x, ids)
    assert torch.equal(y, -x[ids])
    assert following.tolist() == [7, 1, 4]


def test_a_model_without_bfloat16_is_opened_as_it_is(tmp_path):
    session = opened(bundle_of(tmp_path, "g (float[n] x) => (float[n] y) { y = Neg(x) }"))
    assert not session.widened
    assert session(torch.tensor([2.0]))[0].tolist() == [-2.0]


def test_inputs_that_are_left_out_stay_out_and_one_that_is_read_twice_is_cast_once(tmp_path):
    text = """g (bfloat16[n] x, bfloat16 high) => (bfloat16[n] y, bfloat16[n] z) {
        y = Clip(x, , high)
        z = Mul(x, x)
    }"""
    bundle = bundle_of(tmp_path, text)
    x = some(100)
    y, z = opened(bundle)(x, torch.tensor(0.5).bfloat16())
    assert torch.equal(y, x.clamp(max=0.5))
    assert torch.equal(z, x * x)
    copy = copy_of(bundle, Kernels(ort, CPU))
    assert copy is not None
    nodes = onnx.load_from_string(copy.model).graph.node
    assert [node.op_type for node in nodes if "x" in node.input] == ["Cast"]


def test_names_that_the_model_has_already_are_not_taken(tmp_path):
    text = """g (bfloat16[n] x) => (bfloat16[n] y) {
        "x/float32" = Exp(x)
        "y/float32" = Mul("x/float32", x)
        y = Add("y/float32", x)
    }"""
    x = some(100)
    assert torch.equal(opened(bundle_of(tmp_path, text))(x)[0], x.exp() * x + x)


def test_outputs_that_are_left_out_stay_out(tmp_path):
    text = """g (bfloat16[n, 2, 3] x, bfloat16[1, 16, 3] w, bfloat16[1, 16, 4] r) => (bfloat16[1, 2, 4] last) {
        all, last = LSTM<hidden_size = 4>(x, w, r)
    }"""

    def leave_out(model: onnx.ModelProto) -> None:
        model.graph.node[0].output[0] = ""

    bundle = bundle_of(tmp_path, text, opset=22, edit=leave_out)
    x, w, r = some(5, 2, 3), some(1, 16, 3, seed=1), some(1, 16, 4, seed=2)
    copy = copy_of(bundle, Kernels(ort, CPU))
    assert copy is not None
    (node,) = (node for node in onnx.load_from_string(copy.model).graph.node if node.op_type == "LSTM")
    assert node.output[0] == ""
    (last,) = opened(bundle)(x, w, r)
    lstm = torch.nn.LSTM(3, 4, bias=False)
    order = [*range(4), *range(8, 12), *range(12, 16), *range(4, 8)]  # ONNX has i, o, f, c; PyTorch i, f, c, o
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(w[0, order])
        lstm.weight_hh_l0.copy_(r[0, order])
        want = lstm(x.float())[1][0]
    assert torch.allclose(last.float(), want, rtol=2.0**-8, atol=1e-6)


def test_a_value_that_is_an_output_and_read_inside_is_the_rounded_one(tmp_path):
    text = """g (bfloat16[n] x) => (bfloat16[n] y, bfloat16[n] z) { y = Exp(x) z = Log(y) }"""
    x = some(500)
    y, z = opened(bundle_of(tmp_path, text))(x)
    assert torch.equal(z, y.log())


def test_what_attributes_make_bfloat16_is_float32_until_it_is_rounded(tmp_path):
    text = """g (int64[2] shape, bfloat16[n, m] x) => (bfloat16[n, m] y, bfloat16[a, b] eye) {
        eye = EyeLike<dtype = 16>(x)
        fill = ConstantOfShape<value = float[1] {0.3}>(shape)
        y = Add(x, fill)
    }"""
    bundle = bundle_of(tmp_path, text, edit=fill_in_bfloat16)
    x, shape = some(3, 3), torch.tensor([3, 3])
    want = x + torch.tensor(0.3).bfloat16()
    for fewer in ([], ["ConstantOfShape"]):  # which has a kernel in newer versions
        copy = copy_of(bundle, MoreKernels(fewer=fewer))
        assert copy is not None
        assert fewer == [] or "ConstantOfShape" in copy.ops
        bundle.model_path.write_bytes(copy.model)
        y, eye = opened(bundle, widen_bfloat16=False)(shape, x)
        assert torch.equal(y, want)
        assert torch.equal(eye, torch.eye(3).bfloat16())
        bundle = bundle_of(tmp_path, text, edit=fill_in_bfloat16)


def fill_in_bfloat16(model: onnx.ModelProto) -> None:
    (node,) = (node for node in model.graph.node if node.op_type == "ConstantOfShape")
    array = onnx.numpy_helper.to_array(node.attribute[0].t).astype(ml_dtypes.bfloat16)
    node.attribute[0].t.CopyFrom(onnx.TensorProto(data_type=16, dims=array.shape, raw_data=array.tobytes()))


def test_comparisons_and_choices_keep_their_types(tmp_path):
    text = """g (bfloat16[n] x, bfloat16[n] y) => (bool[n] less, bfloat16[n] z, int64[1] at) {
        less = Less(x, y)
        z = Where(less, x, y)
        at = ArgMax<axis = 0>(x)
    }"""
    x, y = some(300), some(300, seed=1)
    less, z, at = opened(bundle_of(tmp_path, text))(x, y)
    assert torch.equal(less, x < y)
    assert torch.equal(z, torch.minimum(x, y))
    assert at.tolist() == [int(x.float().argmax())]


# --- graphs in graphs ------------------------------------------------------------------------------------------------


def test_the_branches_of_an_if_are_widened_and_see_values_outside(tmp_path):
    text = """g (bool c, bfloat16[n] x) => (bfloat16[n] y, bfloat16[n] z) {
        outer = Exp(x)
        y = If(c) <
            then_branch = yes () => (bfloat16[n] a) { a = Mul(outer, x) },
            else_branch = no () => (bfloat16[n] b) { b = Identity(outer) }
        >
        z = Add(y, outer)
    }"""
    session = opened(bundle_of(tmp_path, text))
    assert dict(session.widened) == {"Exp": 1, "Mul": 1, "Add": 1}
    x = some(300)
    for condition, want in ((True, x.exp() * x), (False, x.exp())):
        y, z = session(torch.tensor(condition), x)
        assert torch.equal(y, want)
        assert torch.equal(z, want + x.exp())


def test_a_loop_carries_bfloat16_from_turn_to_turn(tmp_path):
    text = """g (int64 turns, bfloat16[n] x) => (bfloat16[n] y) {
        on = Constant<value = bool {1}>()
        y = Loop(turns, on, x) <
            body = turn (int64 i, bool going, bfloat16[n] state) => (bool still, bfloat16[n] next) {
                still = Identity(going)
                grown = Mul(state, x)
                next = Add(grown, state)
            }
        >
    }"""
    x = some(300)
    (got,) = opened(bundle_of(tmp_path, text))(torch.tensor(5), x)
    want = x
    for _ in range(5):
        want = want * x + want
    assert torch.equal(got, want)


# --- weights ---------------------------------------------------------------------------------------------------------


def linear(folder: Path, rows: int = 64) -> tuple[Bundle, dict[str, np.ndarray[Any, Any]]]:
    text = f"""g (int64[k] ids) => (bfloat16[k, {rows}] y) {{
        row = Gather(table, ids)
        turned = Transpose<perm = [1, 0]>(table)
        scaled = Mul(row, scale)
        y = MatMul(scaled, turned)
    }}"""
    generator = np.random.default_rng(0)
    weights = {
        "table": generator.integers(-4, 5, (rows, 256)).astype(ml_dtypes.bfloat16),  # above what goes into the copy
        "scale": generator.integers(1, 3, 256).astype(ml_dtypes.bfloat16),
    }
    return bundle_of(folder, text, weights=weights), weights


def linear_truth(weights: Mapping[str, np.ndarray[Any, Any]], ids: list[int]) -> torch.Tensor:
    table, scale = (torch.from_numpy(weights[name].astype(np.float64)) for name in ("table", "scale"))
    return ((table[ids] * scale) @ table.T).bfloat16()


@pytest.mark.parametrize("optimization", LEVELS)
def test_weights_beside_the_model_are_used_and_nothing_on_disk_changes(tmp_path, optimization):
    bundle, weights = linear(tmp_path)
    before = digest(tmp_path)
    (got,) = opened(bundle, optimization=optimization)(torch.tensor([5, 9]))
    assert torch.equal(got, linear_truth(weights, [5, 9]))
    assert digest(tmp_path) == before


def test_the_copy_has_no_weights_of_any_size(tmp_path):
    bundle, weights = linear(tmp_path)
    copy = copy_of(bundle, Kernels(ort, CPU))
    assert copy is not None
    assert set(copy.weights) == {"table"}
    assert len(copy.model) < weights["table"].nbytes // 4


def test_weights_outside_the_folder_are_refused(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    bundle, _ = linear(inside)
    (inside / "model.onnx.data").rename(tmp_path / "elsewhere.data")
    model = onnx.load(bundle.model_path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../elsewhere.data"
    bundle.model_path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=r"'(table|scale)' is in \.\./elsewhere\.data, outside"):
        opened(bundle)


def test_session_options_of_the_caller_take_the_weights_of_one_model(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (first, weights), (second, _) = linear(tmp_path / "a"), linear(tmp_path / "b", rows=65)
    options = ort.SessionOptions()
    sessions = [opened(first, session_options=options) for _ in range(2)]
    for session in sessions:
        assert torch.equal(session(torch.tensor([1]))[0], linear_truth(weights, [1]))
    with pytest.raises(InputError, match=r"session_options hold the weights of .*a/model\.onnx: give fresh ones"):
        opened(second, session_options=options)


# --- refusals and providers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("custom_ops", [False, "auto"])
def test_a_model_that_needs_the_option_is_refused_in_one_line_that_names_it(tmp_path, custom_ops):
    bundle = bundle_of(tmp_path, "g (bfloat16[n] x) => (bfloat16[n] y) { y = Exp(x) }")
    with pytest.raises(InputError) as refusal:
        bundle.session("onnxruntime", custom_ops=custom_ops)
    text = str(refusal.value)
    assert "Could not find an implementation for Exp(13)" in text
    assert text.endswith("; widen_bfloat16=True runs ops that have no bfloat16 kernel in float32")
    assert "\n" not in text


def test_a_runtime_that_is_too_old_is_refused(tmp_path, monkeypatch):
    bundle = bundle_of(tmp_path, "g (bfloat16[n] x) => (bfloat16[n] y) { y = Exp(x) }")
    monkeypatch.delattr(ort.OrtValue, "ortvalue_from_numpy_with_onnx_type")
    with pytest.raises(BackendUnavailable, match=r"needs onnxruntime 1\.20 or newer, and this is .*: upgrade it"):
        opened(bundle)


def test_a_model_that_the_option_does_not_help_is_not_told_of_it(tmp_path):
    bundle = bundle_of(tmp_path, "g (double[n] x) => (double[n] y) { y = Cosh(x) }")
    with pytest.raises(InputError, match=r"Cosh\(9\)") as refusal:
        bundle.session("onnxruntime", custom_ops=False)
    assert "widen_bfloat16" not in str(refusal.value)


class MoreKernels(Kernels):
    """Those of the CPU and of a provider that has bfloat16 for some ops, or has none for others."""

    def __init__(self, more: Collection[str] = (), fewer: Collection[str] = ()) -> None:
        super().__init__(ort, CPU)
        self.more, self.fewer = more, fewer

    def run(self, node: ir.Node, opset: int, narrow: Collection[ir.Value]) -> bool:
        return node.op_type in self.more or (node.op_type not in self.fewer and super().run(node, opset, narrow))


def test_what_a_gpu_has_a_kernel_for_stays_in_bfloat16(tmp_path):
    bundle = bundle_of(tmp_path, "g (bfloat16[n, n] x) => (bfloat16[n, n] y) { z = MatMul(x, x) y = Add(z, x) }")
    copy = copy_of(bundle, MoreKernels(more=["MatMul"]))
    assert copy is not None
    assert dict(copy.ops) == {"Add": 1}
    (product,) = (node for node in onnx.load_from_string(copy.model).graph.node if node.op_type == "MatMul")
    assert list(product.input) == ["x", "x"]
    assert copy_of(bundle, MoreKernels(more=["MatMul", "Add"])) is None


@pytest.mark.parametrize("name", ["TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"])
def test_a_provider_that_compiles_graphs_is_refused(name):
    with pytest.raises(InputError, match=f"not for {name}: leave it out"):
        Kernels(ort, [(name, {}), *CPU])


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[18, 23])
def llama(request, tmp_path_factory) -> Bundle:
    from rmsnorm_deploy import export_model

    recipe = Path(__file__).parent.parent / "export" / "llama_tiny.py"
    folder = tmp_path_factory.mktemp("llama") / "llama.bundle"
    return export_model(recipe, out_dir=folder, precision="bf16", opset=request.param, check=False, benchmark=False)


@pytest.mark.parametrize("backend", ["onnxruntime-widened", "onnxruntime-kernels-widened"])
def test_a_transformer_is_as_exact_as_pytorch_with_and_without_the_library(llama, backend):
    from rmsnorm_deploy.parity import run_parity

    if "kernels" in backend and native.find_library("ort") is None:
        pytest.skip("the custom ops are not built: python -m rmsnorm_deploy.native build")
    report = run_parity(llama, backends=["pytorch", backend])
    result = report.backend(backend)
    assert result.verdict in ("pass", "pass-better-than-eager"), result.reason
    assert result.versus_eager is not None
    assert result.versus_eager < 1.5
    assert {site.verdict for site in report.sites if site.backend == backend} == {"pass"}


def test_the_norms_of_the_library_are_left_to_it(llama):
    if native.find_library("ort") is None:
        pytest.skip("the custom ops are not built: python -m rmsnorm_deploy.native build")
    with_library, without = opened(llama, custom_ops=True), opened(llama)
    assert not any("RMSNorm" in op for op in with_library.widened)
    written_out = without.widened["Mul"] - with_library.widened["Mul"]
    assert written_out == len(llama.norms)  # each body ends in a product with its scale
    options = ort.SessionOptions()
    register(options)
    assert opened(llama, custom_ops="auto", session_options=options).widened == with_library.widened
