"""The numpy truth itself: against sums written out by hand, exact arithmetic, and numerical derivatives."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_deploy import reference
from rmsnorm_deploy.errors import InputError

MODES = reference.EPSILON_MODES
BF16 = np.dtype(ml_dtypes.bfloat16)


def by_hand(row, scale, bias, epsilon, mode):
    """One row in Python floats, with an exactly rounded sum."""
    mean_square = math.fsum(value * value for value in row) / len(row)
    r = {
        "inside": math.sqrt(mean_square + epsilon),
        "outside": math.sqrt(mean_square) + epsilon,
        "clamp": max(math.sqrt(mean_square), epsilon),
    }[mode]
    return [value / r * s + b for value, s, b in zip(row, scale, bias, strict=True)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 1e6])
def test_formula_is_the_one_of_its_epsilon_mode(mode, magnitude):
    rng = np.random.default_rng(0)
    x, scale, bias = rng.normal(size=(3, 5)) * magnitude, rng.normal(size=5), rng.normal(size=5)
    expected = [by_hand(row, scale, bias, 1e-3, mode) for row in x.tolist()]
    np.testing.assert_allclose(
        reference.rms_norm(x, scale, bias, epsilon=1e-3, epsilon_mode=mode), expected, rtol=1e-14, atol=1e-15
    )


def test_epsilon_modes_differ_on_small_rows():
    x = np.full((1, 4), 1e-3)
    results = [reference.rms_norm(x, epsilon=1e-3, epsilon_mode=mode)[0, 0] for mode in MODES]
    np.testing.assert_allclose(results, [1e-3 / math.sqrt(1e-6 + 1e-3), 0.5, 1.0], rtol=1e-14)


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_several_axes_are_one_row(axis):
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    scale = np.random.default_rng(2).normal(size=x.shape[axis:])
    width = math.prod(x.shape[axis:])
    flat = reference.rms_norm(x.reshape(-1, width), scale.reshape(width))
    np.testing.assert_allclose(reference.rms_norm(x, scale, axis=axis), flat.reshape(x.shape), rtol=1e-14)


def test_a_half_input_is_lifted_before_it_is_squared():
    x = np.full((1, 8), 60000.0, dtype=np.float16)
    np.testing.assert_allclose(reference.rms_norm(x, epsilon=0.0), np.ones((1, 8)), rtol=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_zero_row_without_epsilon_is_nan_and_with_it_zero(mode):
    zeros = np.zeros((1, 4))
    assert np.isnan(reference.rms_norm(zeros, epsilon=0.0, epsilon_mode=mode)).all()
    assert (reference.rms_norm(zeros, epsilon=1e-6, epsilon_mode=mode) == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_nan_and_infinity_stay_in_their_row(mode):
    x = np.array([[1.0, np.nan], [np.inf, 1.0], [3.0, 4.0]])
    y = reference.rms_norm(x, epsilon_mode=mode)
    assert np.isnan(y[0]).all()
    assert np.isnan(y[1, 0])
    assert y[1, 1] == 0
    assert np.isfinite(y[2]).all()


def test_leading_dimensions_may_be_empty():
    assert reference.rms_norm(np.zeros((0, 3, 4))).shape == (0, 3, 4)
    assert reference.rms_norm_rounded(np.zeros((2, 0, 4)), dtype="bfloat16").shape == (2, 0, 4)


def exact_sqrt_quotient(value: int, mean_square: Fraction) -> np.float64:
    """value / sqrt(mean_square) from integers alone, to 2^-100."""
    scaled = mean_square * (1 << 200)
    root = math.isqrt(scaled.numerator // scaled.denominator)
    return np.float64(Fraction(value << 100, root))


def test_float32_arithmetic_is_within_two_roundings_of_exact_integers():
    row = [3, -1, 4, 1, -5, 9, 2, 6]
    mean_square = Fraction(sum(value * value for value in row), len(row)) + Fraction(1, 2)
    exact = np.array([exact_sqrt_quotient(value, mean_square) for value in row])
    np.testing.assert_allclose(reference.rms_norm(row, epsilon=0.5), exact, rtol=4e-16)
    np.testing.assert_allclose(reference.rms_norm_rounded(row, dtype="float32", epsilon=0.5), exact, rtol=1.2e-7)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16])
def test_scale_orders_round_where_the_spec_says(dtype):
    x = np.random.default_rng(3).normal(size=(64, 128)).astype(dtype)
    scale = np.random.default_rng(4).uniform(0.5, 2, size=128).astype(dtype)
    normalized = reference.rms_norm(x)
    after = (normalized.astype(np.float32).astype(dtype).astype(np.float64) * scale.astype(np.float64)).astype(dtype)
    before = (normalized * scale.astype(np.float64)).astype(np.float32).astype(dtype)
    got_after = reference.rms_norm_rounded(x, scale, scale_order="after_cast")
    got_before = reference.rms_norm_rounded(x, scale, scale_order="before_cast")
    assert np.mean(got_after != after) < 2e-3
    assert np.mean(got_before != before) < 2e-3
    assert 0.05 < np.mean(got_after != got_before) < 0.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_output_dtype_is_the_wider_one_only_after_the_cast(dtype):
    x, scale = np.ones((2, 4)), np.ones(4)
    assert reference.rms_norm_rounded(x, scale, dtype=dtype, scale_dtype="float32").dtype == np.float32
    assert reference.rms_norm_rounded(x, None, dtype=dtype, scale_dtype="float32").dtype == np.dtype(dtype)
    before = reference.rms_norm_rounded(x, scale, dtype=dtype, scale_dtype="float32", scale_order="before_cast")
    assert before.dtype == np.dtype(dtype)


def test_two_different_half_types_are_refused():
    with pytest.raises(InputError, match="one half type"):
        reference.promote("float16", "bfloat16")


def test_epsilon_is_rounded_to_the_stash_type():
    x = np.zeros((1, 2)) + 1e-30
    y = reference.rms_norm_rounded(x, dtype="float32", epsilon=1e-3, epsilon_mode="outside")
    assert y[0, 0] == np.float32(1e-30) / np.float32(1e-3)
    wide = reference.rms_norm_rounded(x, dtype="float32", epsilon=1e-3, epsilon_mode="outside", stash_dtype="float64")
    assert wide[0, 0] == np.float32(np.float64(np.float32(1e-30)) / (np.float64(np.float32(1e-30)) + 1e-3))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16, np.dtype(np.float32)])
def test_skip_norm_sees_the_rounded_sum(dtype):
    rng = np.random.default_rng(5)
    x, skip = rng.normal(size=(4, 16)).astype(dtype), rng.normal(size=(4, 16)).astype(dtype)
    y, total = reference.skip_rms_norm(x, skip)
    assert total.dtype == dtype
    np.testing.assert_array_equal(total, (x.astype(np.float64) + skip.astype(np.float64)).astype(dtype))
    np.testing.assert_array_equal(y, reference.rms_norm(total))
    rounded, rounded_total = reference.skip_rms_norm_rounded(x, skip)
    np.testing.assert_array_equal(rounded_total, total)
    np.testing.assert_array_equal(rounded, reference.rms_norm_rounded(total))


def central_difference(x, scale, **options):
    columns = []
    for index in range(x.size):
        step = np.zeros(x.size)
        step[index] = 1e-6 * max(1.0, abs(x.flat[index]))
        step = step.reshape(x.shape)
        change = reference.rms_norm(x + step, scale, **options) - reference.rms_norm(x - step, scale, **options)
        columns.append(change.ravel() / (2 * step.max()))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("epsilon", [1e-3, 3.0])
def test_jacobian_is_the_derivative(mode, epsilon):
    x, scale = np.random.default_rng(6).normal(size=(2, 3)), np.random.default_rng(7).normal(size=(2, 3))
    options = {"axis": -2, "epsilon": epsilon, "epsilon_mode": mode}
    np.testing.assert_allclose(
        reference.jacobian(x, scale, **options), central_difference(x, scale, **options), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize(("mode", "expected"), [("inside", 10.0), ("outside", 100.0), ("clamp", 100.0)])
def test_jacobian_of_a_zero_row_is_one_over_r(mode, expected):
    np.testing.assert_allclose(
        reference.jacobian(np.zeros(3), epsilon=1e-2, epsilon_mode=mode), np.eye(3) * expected, rtol=1e-14
    )


def test_jacobian_without_epsilon_annihilates_the_row():
    """A norm that ignores the length of x has no derivative along x."""
    x = np.random.default_rng(8).normal(size=(4, 6))
    np.testing.assert_allclose(np.einsum("rij,rj->ri", reference.jacobian(x, epsilon=0.0), x), 0, atol=1e-14)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12),
    st.sampled_from(MODES),
    st.sampled_from([1e-12, 1e-6, 1e-2]),
)
def test_any_row_agrees_with_the_sum_by_hand(row, mode, epsilon):
    ones, zeros = [1.0] * len(row), [0.0] * len(row)
    np.testing.assert_allclose(
        reference.rms_norm(row, epsilon=epsilon, epsilon_mode=mode),
        by_hand(row, ones, zeros, epsilon, mode),
        rtol=1e-13,
        atol=1e-300,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": 1}, "axis is 1"),
        ({"axis": -3}, "axis is -3"),
        ({"epsilon": -1e-6}, "epsilon is -1e-06"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"epsilon_mode": "beside"}, "epsilon_mode is 'beside'"),
        ({"scale": np.ones(3)}, "scale has shape \\[3\\]"),
        ({"bias": np.ones((2, 4))}, "bias has shape \\[2, 4\\]"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=message) as caught:
        reference.rms_norm(np.ones((2, 4)), **options)
    assert "\n" not in str(caught.value)


def test_integers_are_no_storage_dtype():
    with pytest.raises(InputError, match="int64 is not one of"):
        reference.rms_norm_rounded(np.arange(4))


def test_the_truth_does_not_depend_on_torch():
    code = "import sys, rmsnorm_deploy.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
