"""The torch norm against torch.nn.RMSNorm, Hugging Face's classes and the numpy truth."""

from __future__ import annotations

import contextlib
import functools
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rmsnorm_deploy import ckernel, reference
from rmsnorm_deploy.eager_kernels import use_kernels
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.norm import RMSNorm, SkipRMSNorm, rms_norm, skip_rms_norm

MODES = reference.EPSILON_MODES
ORDERS = reference.SCALE_ORDERS
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32, torch.float64]
NUMPY = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def to_numpy(tensor):
    """The tensor's own values in the numpy dtype of the same bits."""
    return tensor.detach().to(torch.float64).numpy().astype(NUMPY[tensor.dtype])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ulps_off(got, truth):
    """The largest error of ``got`` against float64 ``truth``, in ULPs of the dtype of ``got``."""
    info = torch.finfo(got.dtype)
    truth = torch.from_numpy(np.asarray(truth))
    ulp = torch.clamp(
        2.0 ** torch.floor(torch.log2(truth.abs().clamp_min(info.tiny))) * info.eps, min=info.tiny * info.eps
    )
    return ((got.detach().double() - truth).abs() / ulp).max().item()


@pytest.fixture(params=[True, False], ids=["kernels", "plain"])
def kernels(request):
    """Whether the compiled kernels may run; where they are not built both are plain."""
    before = use_kernels(request.param)
    yield request.param and ckernel.cpu_library() is not None
    use_kernels(before)


@pytest.fixture
def plain():
    """PyTorch's own operations, which are those of torch.nn.RMSNorm to the bit."""
    before = use_kernels(False)
    yield
    use_kernels(before)


@contextlib.contextmanager
def torch_mixed_dtype_warning_ignored():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8), (2, 2, 1, 3, 8), (0, 3, 8)])
def test_every_rank_is_nn_rmsnorm(shape):
    x = normal(*shape)
    y = RMSNorm(8, 1e-5)(x)
    assert torch.equal(y, nn.RMSNorm(8, 1e-5)(x))
    np.testing.assert_allclose(y.detach(), reference.rms_norm(x, epsilon=1e-5), rtol=1e-6)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("eps", [None, 1e-6, 1e-12])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
def test_defaults_are_nn_rmsnorm_bit_for_bit(dtype, weight_dtype, eps):
    x = normal(64, 96, dtype=dtype) * torch.logspace(-4, 2, 64).unsqueeze(1).to(dtype)
    ours = RMSNorm(96, eps, weight_dtype is not None, dtype=weight_dtype)
    theirs = nn.RMSNorm(96, eps, weight_dtype is not None, dtype=weight_dtype)
    if weight_dtype is not None:
        theirs.weight.data.copy_(normal(96, seed=1))
    ours.load_state_dict(theirs.state_dict())
    with torch_mixed_dtype_warning_ignored():
        y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype == dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_none_is_that_of_the_computation_type(dtype):
    """Rows so small that each candidate (of half, single, double) gives another result, for torch and for us."""
    x = torch.full((1, 4), 1e-3).to(dtype)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for mode in MODES:
        y = rms_norm(x, 4, epsilon_mode=mode)
        truth = reference.rms_norm(to_numpy(x), epsilon=eps, epsilon_mode=mode)
        assert ulps_off(y, truth) <= 2
    assert ulps_off(F.rms_norm(x, [4]), reference.rms_norm(to_numpy(x), epsilon=eps)) <= 2


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (1, 6), (1, 1, 6)])
@pytest.mark.parametrize("mode", MODES)
def test_several_axes_are_one_row(shape, mode):
    x, weight, bias = normal(2, 3, *shape[-3:]), normal(*shape, seed=1), normal(*shape, seed=2)
    y = rms_norm(x, shape, weight, 1e-3, bias=bias, epsilon_mode=mode)
    truth = reference.rms_norm(x, weight, bias, axis=-len(shape), epsilon=1e-3, epsilon_mode=mode)
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("plain")
def test_a_multi_axis_module_is_nn_rmsnorm():
    x = normal(5, 3, 4)
    assert torch.equal(RMSNorm((3, 4), 1e-5)(x), nn.RMSNorm((3, 4), 1e-5)(x))
    assert torch.equal(RMSNorm([3, 4])(x), nn.RMSNorm([3, 4])(x))
    assert torch.equal(RMSNorm(x.shape[1:])(x), nn.RMSNorm(x.shape[1:])(x))
    assert torch.equal(RMSNorm(np.int64(4))(x), nn.RMSNorm(4)(x))


@pytest.mark.parametrize("order", ORDERS)
def test_a_scale_of_one_element_or_with_leading_ones_fits(order):
    x, weight = normal(2, 3, 8), normal(8, seed=1)
    full = rms_norm(x, 8, weight, 1e-6, scale_order=order)
    assert torch.allclose(rms_norm(x, 8, weight.reshape(1, 1, 8), 1e-6, scale_order=order), full)
    one = rms_norm(x, 8, torch.tensor(3.0), 1e-6, scale_order=order)
    assert torch.allclose(one, rms_norm(x, 8, torch.full((8,), 3.0), 1e-6, scale_order=order))
    assert one.shape == x.shape


@functools.cache
def rows_with_an_exact_root(added):
    """256 rows of 16 small integers for which mean(x^2) + ``added`` is the square of a whole number of quarters.

    Sum, mean and root are then exact in every implementation (torch's CPU sqrt is not correctly rounded otherwise), so
    that nothing but the roundings of the spec is left to differ.
    """
    rows = np.random.default_rng(0).integers(-3, 4, size=(40000, 16)) * np.array([1, 2, 3, 5]).repeat(4)
    quarters = 4 * np.sqrt(np.mean(rows * rows, axis=1) + added)
    exact = rows[quarters == np.round(quarters)]
    assert len(exact) >= 256
    return torch.from_numpy(exact[:256])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_the_spec_s_where_statistics_are_exact(kernels, dtype, mode, order, has_bias):
    x = rows_with_an_exact_root(0.5 if mode == "inside" else 0.0).to(dtype)
    weight, bias = normal(16, seed=1, dtype=dtype), normal(16, seed=2, dtype=dtype) if has_bias else None
    got = rms_norm(x, 16, weight, 0.5, bias=bias, epsilon_mode=mode, scale_order=order)
    expected = reference.rms_norm_rounded(
        to_numpy(x),
        to_numpy(weight),
        None if bias is None else to_numpy(bias),
        scale_order=order,
        epsilon=0.5,
        epsilon_mode=mode,
    )
    assert NUMPY[got.dtype] == expected.dtype
    differing = np.mean(to_numpy(got) != expected)
    if dtype == torch.float32 if kernels else calls_torch(dtype, mode, order, has_bias):
        # Both multiply by a reciprocal root: one more rounding in the stash type, rarely seen through a half type.
        assert differing < (5e-3 if dtype in HALVES else 0.6)
        if bias is None:
            assert ulps_off(got, expected.astype(np.float64)) <= 2
        else:  # which may cancel the product
            terms = np.abs(expected) + 2 * np.abs(to_numpy(bias))
            assert (np.abs(to_numpy(got) - expected) <= 2 * torch.finfo(dtype).eps * terms).all()
    else:
        assert differing == 0


def calls_torch(dtype, mode, order, has_bias):
    return mode == "inside" and not has_bias and (order == "before_cast" or dtype not in HALVES)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_float32_scale_keeps_its_bits_and_widens_only_after_the_cast(dtype, order):
    x = rows_with_an_exact_root(0.5).to(dtype)
    weight, bias = normal(16, seed=1), normal(16, seed=2)
    got = rms_norm(x, 16, weight, 0.5, bias=bias, scale_order=order)
    expected = reference.rms_norm_rounded(
        to_numpy(x), to_numpy(weight), to_numpy(bias), scale_dtype="float32", scale_order=order, epsilon=0.5
    )
    assert got.dtype == (torch.float32 if order == "after_cast" else dtype)
    np.testing.assert_array_equal(to_numpy(got), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_two_scale_orders_differ_in_the_last_bit(dtype):
    x, weight = normal(64, 128, dtype=dtype), normal(128, seed=1, dtype=dtype)
    before = rms_norm(x, 128, weight, 1e-6)
    after = rms_norm(x, 128, weight, 1e-6, scale_order="after_cast")
    assert 0.05 < (before != after).double().mean() < 0.6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_size_are_right_to_two_ulps(kernels, dtype, mode):
    x = normal(8, 64, dtype=torch.float64) * torch.logspace(-6, 6, 8, dtype=torch.float64).unsqueeze(1)
    x = x.clamp(-6e4, 6e4).to(dtype)
    y = rms_norm(x, 64, eps=1e-6, epsilon_mode=mode)
    truth = reference.rms_norm(to_numpy(x), epsilon=1e-6, epsilon_mode=mode)
    assert ulps_off(y, truth) <= (1 if dtype in HALVES else 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_mixing_1e6_and_1e_6_keeps_both(mode):
    x = normal(4, 32, dtype=torch.float64)
    x[:, ::2] *= 1e6
    x[:, 1::2] *= 1e-6
    for dtype in (torch.float32, torch.float64):
        y = rms_norm(x.to(dtype), 32, eps=1e-6, epsilon_mode=mode)
        assert ulps_off(y, reference.rms_norm(to_numpy(x.to(dtype)), epsilon_mode=mode)) <= 3


@pytest.mark.parametrize("dtype", HALVES)
def test_half_rows_beyond_256_do_not_overflow(dtype):
    x = torch.full((2, 16), 60000.0, dtype=dtype)
    for mode in MODES:
        assert torch.equal(rms_norm(x, 16, eps=1e-6, epsilon_mode=mode), torch.ones_like(x))


@pytest.mark.parametrize("mode", MODES)
def test_a_normalized_row_has_length_sqrt_d(mode):
    y = rms_norm(normal(16, 100, dtype=torch.float64), 100, eps=0.0, epsilon_mode=mode)
    assert torch.allclose(y.norm(dim=-1), torch.full((16,), 10.0, dtype=torch.float64), rtol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_without_epsilon_a_row_s_length_does_not_matter(mode):
    x = normal(16, 64)
    y = rms_norm(x, 64, eps=0.0, epsilon_mode=mode)
    for factor in (2.0**-20, 2.0**20):
        assert torch.equal(rms_norm(x * factor, 64, eps=0.0, epsilon_mode=mode), y)
    assert torch.equal(rms_norm(-x, 64, eps=0.0, epsilon_mode=mode), -y)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_are_zero_with_an_epsilon_and_nan_without(dtype, mode, order):
    x = torch.zeros(2, 8, dtype=dtype)
    options = {"epsilon_mode": mode, "scale_order": order}
    assert (rms_norm(x, 8, eps=1e-12, **options) == 0).all()
    assert rms_norm(x, 8, eps=0.0, **options).isnan().all()


@pytest.mark.parametrize("mode", MODES)
def test_nan_and_infinity_stay_in_their_row(mode):
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [3.0, 4.0]])
    np.testing.assert_allclose(
        rms_norm(x, 2, eps=1e-6, epsilon_mode=mode), reference.rms_norm(x, epsilon_mode=mode), rtol=1e-6
    )


def test_float64_statistics_are_more_exact_than_float32_ones():
    x = normal(4, 1000) * 1e3
    truth = reference.rms_norm(x, epsilon=1e-6)
    assert ulps_off(rms_norm(x, 1000, eps=1e-6, stash_dtype=torch.float64), truth) <= 0.5001
    double = x.double()
    rounded = rms_norm(double, 1000, eps=1e-6, stash_dtype=torch.float32, bias=torch.zeros(1))
    assert rounded.dtype == torch.float64
    assert 1e-9 < np.abs(rounded.numpy() / truth - 1).max() < 1e-6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_every_variant_are_right_twice(kernels, mode, order):
    x = normal(2, 3, 4, dtype=torch.float64).requires_grad_()
    weight = normal(3, 4, seed=1, dtype=torch.float64).requires_grad_()
    bias = normal(3, 4, seed=2, dtype=torch.float64).requires_grad_()

    def variant(x, weight, bias):
        return rms_norm(x, (3, 4), weight, 1e-2, bias=bias, epsilon_mode=mode, scale_order=order, weight_offset=1.0)

    assert torch.autograd.gradcheck(variant, (x, weight, bias))
    assert torch.autograd.gradgradcheck(variant, (x, weight, bias))


@pytest.mark.parametrize("rows", ["random", "below epsilon", "zero"])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_closed_form_jacobian(kernels, mode, rows):
    """Zero rows included: padding must not turn a training step into NaN."""
    x = normal(6, dtype=torch.float64) * {"random": 1.0, "below epsilon": 1e-4, "zero": 0.0}[rows]
    weight = normal(6, seed=1, dtype=torch.float64)

    def variant(row):
        return rms_norm(row, 6, weight, 1e-2, epsilon_mode=mode)

    got = torch.autograd.functional.jacobian(variant, x)
    expected = reference.jacobian(x, weight, epsilon=1e-2, epsilon_mode=mode)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


def test_parameters_of_a_half_model_get_gradients_in_their_own_dtype():
    norm = RMSNorm.llama(8, bias=True, dtype=torch.float32)
    norm(normal(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert norm.weight.grad.dtype == norm.bias.grad.dtype == torch.float32
    assert torch.equal(norm.bias.grad, torch.full((8,), 2.0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_skip_norm_is_the_add_and_the_norm(kernels, dtype, order):
    x, skip, weight = normal(4, 16, dtype=dtype), normal(4, 16, seed=1, dtype=dtype), normal(16, seed=2, dtype=dtype)
    y, total = skip_rms_norm(x, skip, 16, weight, 1e-6, scale_order=order)
    assert torch.equal(total, x + skip)
    assert total.dtype == dtype
    assert torch.equal(y, rms_norm(x + skip, 16, weight, 1e-6, scale_order=order))
    module = SkipRMSNorm(16, 1e-6, scale_order=order, dtype=dtype)
    module.load_state_dict({"weight": weight})
    assert all(torch.equal(a, b) for a, b in zip(module(x, skip), (y, total), strict=True))


@pytest.mark.parametrize("skip", [torch.ones(8), torch.ones(2, 8, dtype=torch.float16)])
def test_skip_of_another_shape_or_dtype_is_refused(skip):
    with pytest.raises(InputError, match="two alike"):
        SkipRMSNorm(8)(torch.ones(2, 8), skip)


def test_state_dicts_are_nn_rmsnorm_s_both_ways():
    ours, theirs = RMSNorm((3, 4)), nn.RMSNorm((3, 4))
    theirs.weight.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    assert list(ours.state_dict()) == ["weight"]
    assert list(RMSNorm(4, bias=True).state_dict()) == ["weight", "bias"]
    assert list(RMSNorm(4, elementwise_affine=False).state_dict()) == []
    assert list(RMSNorm.gemma(4).state_dict()) == list(SkipRMSNorm.llama(4).state_dict()) == ["weight"]


@pytest.fixture(scope="module")
def hugging_face():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers (extra: hf)")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma", reason="needs transformers (extra: hf)")
    return {"llama": modeling.LlamaRMSNorm, "gemma": gemma.GemmaRMSNorm}


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_family_constructors_are_hugging_face_s_classes(kernels, hugging_face, family, dtype, weight_dtype):
    theirs = hugging_face[family](64, eps=1e-5).to(weight_dtype)
    ours = getattr(RMSNorm, family)(64, 1e-5, dtype=weight_dtype)
    assert torch.equal(ours.weight, theirs.weight)
    theirs.weight.data.add_(normal(64, seed=1, dtype=weight_dtype))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = normal(128, 64, dtype=dtype)
    y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype
    # They multiply by a reciprocal root: one rounding more in float32, rarely seen through a half type.
    assert (y != expected).double().mean() < (0.6 if dtype == torch.float32 else 2e-3)
    torch.testing.assert_close(y.float(), expected.float(), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_gemma_adds_its_one_before_anything_is_rounded():
    weight = torch.full((4,), 2.0**-10, dtype=torch.bfloat16)
    x = torch.tensor([[3.0, -1.0, 1.0, 1.0]], dtype=torch.bfloat16) * 85
    y = rms_norm(x, 4, weight, 0.0, weight_offset=1.0)
    truth = reference.rms_norm(to_numpy(x), 1 + to_numpy(weight).astype(np.float64), epsilon=0.0)
    assert ulps_off(y, truth) <= 0.5001


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (RMSNorm(8), "RMSNorm((8,), eps=None, elementwise_affine=True)"),
        (RMSNorm.llama(8, 1e-5), "RMSNorm((8,), eps=1e-05, elementwise_affine=True, scale_order=after_cast)"),
        (
            SkipRMSNorm((2, 4), 1e-3, bias=True, epsilon_mode="clamp", weight_offset=1.0, stash_dtype=torch.float64),
            "SkipRMSNorm((2, 4), eps=0.001, elementwise_affine=True, bias=True, epsilon_mode=clamp, weight_offset=1.0, "
            "stash_dtype=torch.float64)",
        ),
    ],
)
def test_repr_says_what_is_computed(module, text):
    assert repr(module) == text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 8), 4), r"x has shape \[2, 8\]: its last axes must be \[4\]"),
        (lambda: rms_norm(torch.ones(8), (2, 8)), r"x has shape \[8\]"),
        (lambda: rms_norm(torch.ones(8), ()), "normalized_shape is empty"),
        (lambda: rms_norm(torch.ones(2, 8), 8, torch.ones(4)), r"weight has shape \[4\]: it must be \[8\]"),
        (lambda: rms_norm(torch.ones(2, 8), 8, torch.ones(2, 8)), r"weight has shape \[2, 8\]"),
        (lambda: rms_norm(torch.ones(2, 8), 8, bias=torch.ones(7)), r"bias has shape \[7\]"),
        (lambda: rms_norm(torch.ones(8, dtype=torch.int32), 8), "x is torch.int32"),
        (lambda: rms_norm(torch.ones(8, dtype=torch.complex64), 8), "x is torch.complex64"),
        (lambda: rms_norm(torch.ones(8), 8, eps=-1.0), "epsilon is -1.0"),
        (lambda: rms_norm(torch.ones(8), 8, weight_offset=1.0), "no weight to add it to"),
        (lambda: RMSNorm(8, float("inf")), "epsilon is inf"),
        (lambda: RMSNorm(8, epsilon_mode="beside"), "epsilon_mode is 'beside'"),
        (lambda: RMSNorm(8, scale_order="never"), "scale_order is 'never'"),
        (lambda: RMSNorm(8, stash_dtype=torch.float16), "stash_dtype is torch.float16"),
        (lambda: RMSNorm(8, elementwise_affine=False, weight_offset=1.0), "no weight to add it to"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


class EveryVariant(nn.Module):
    """One norm of each kind after another, for the compiler and the exporter."""

    def __init__(self, width=8):
        super().__init__()
        self.norms = nn.ModuleList(
            [
                RMSNorm(width),
                RMSNorm.llama(width),
                RMSNorm.gemma(width),
                RMSNorm(width, 1e-3, epsilon_mode="outside", bias=True),
                RMSNorm(width, 1e-3, epsilon_mode="clamp", elementwise_affine=False),
                RMSNorm((2, width), 1e-3, scale_order="after_cast", bias=True),
            ]
        )
        self.skip = SkipRMSNorm.llama(width)

    def forward(self, x):
        hidden = x
        for norm in self.norms:
            hidden = hidden + norm(hidden)
        return self.skip(hidden, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_without_a_graph_break_and_trains(dtype):
    model = EveryVariant().to(dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = normal(3, 2, 8, dtype=dtype)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y, total = run(leaf)
        (y * 2 + total).sum().backward()
        gradients.append((y, total, leaf.grad, *(parameter.grad for parameter in model.parameters())))
    tolerance = 4 * torch.finfo(dtype).eps
    for eager, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(traced, eager, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.slow
def test_inductor_generates_the_same_numbers():
    model = EveryVariant()
    x = normal(3, 2, 8)
    for eager, compiled in zip(model(x), torch.compile(model, fullgraph=True)(x), strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_exports_to_plain_onnx_ops_that_compute_the_same():
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra: cpu)")
    model = EveryVariant().eval()
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.onnx.export(
        model, (normal(3, 2, 8),), dynamo=True, opset_version=18, dynamic_shapes=dynamic, optimize=False, verbose=False
    )
    assert {node.domain for node in program.model.graph} == {""}
    assert not {"Where", "Equal"} & {node.op_type for node in program.model.graph}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = normal(5, 2, 8, seed=9)
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for output, expected in zip(outputs, model(x), strict=True):
        np.testing.assert_allclose(output, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("plain")
def test_one_export_serves_any_batch_and_row_count():
    batch = torch.export.Dim("batch")
    program = torch.export.export(EveryVariant(), (normal(3, 2, 8),), dynamic_shapes=({0: batch},))
    model, x = EveryVariant(), normal(7, 2, 8)
    assert all(torch.equal(a, b) for a, b in zip(program.module()(x), model(x), strict=True))


@pytest.mark.usefixtures("plain")
def test_the_normalized_width_itself_may_be_dynamic():
    class OwnWidth(nn.Module):
        def forward(self, x):
            return rms_norm(x, x.shape[-1], eps=1e-3, epsilon_mode="outside"), rms_norm(x, x.shape[-1:], eps=1e-3)

    width = torch.export.Dim("width")
    program = torch.export.export(OwnWidth(), (normal(3, 8),), dynamic_shapes=({1: width},))
    x = normal(3, 12)
    assert all(torch.equal(a, b) for a, b in zip(program.module()(x), OwnWidth()(x), strict=True))


magnitudes = st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 1.0, 1e3])


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    rank=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(MODES),
    order=st.sampled_from(ORDERS),
    eps=st.sampled_from([1e-12, 1e-6, 1e-2, 1.0]),
    magnitude=magnitudes,
    has_weight=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_variant_on_any_input_is_within_ulps_of_the_truth(
    shape, rank, dtype, mode, order, eps, magnitude, has_weight, has_bias, seed
):
    axes = tuple(shape[-min(rank, len(shape)) :])
    x = (normal(*shape, seed=seed, dtype=torch.float64) * magnitude).to(dtype)
    weight = normal(*axes, seed=seed + 1, dtype=dtype) if has_weight else None
    bias = normal(*axes, seed=seed + 2, dtype=dtype) if has_bias else None
    y = rms_norm(x, axes, weight, eps, bias=bias, epsilon_mode=mode, scale_order=order)
    assert y.dtype == dtype
    assert y.shape == x.shape
    operands = [None if value is None else to_numpy(value) for value in (weight, bias)]
    options = {"axis": -len(axes), "epsilon": eps, "epsilon_mode": mode}
    truth = reference.rms_norm(to_numpy(x), *operands, **options)
    # Rounding errors are relative to the terms, which a bias may cancel.
    terms = np.abs(reference.rms_norm(to_numpy(x), operands[0], **options))
    terms = terms + (0 if bias is None else np.abs(operands[1].astype(np.float64)))
    tolerance = 4 * torch.finfo(dtype).eps * terms + 2 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if has_weight and order == "after_cast":
        # A normalized value below the normal range loses bits before the scale multiplies it.
        tolerance = tolerance + torch.finfo(dtype).tiny * torch.finfo(dtype).eps * weight.double().abs().numpy()
    assert (np.abs(y.double().numpy() - truth) <= tolerance).all()
