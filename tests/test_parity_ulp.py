"""ULP error: the unit at every magnitude, rows that cancel, and NaN or infinity in the wrong place."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_deploy.parity.ulp import BIN_EDGES, FORMATS, ulp_error, ulp_size, worst_of

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_unit_is_the_dtypes_own_spacing(name: str) -> None:
    values = [1.0, 1.5, 2.0, 3.999, 1e-3, 1e3, 6e4, float(ml_dtypes.finfo(DTYPES[name]).smallest_normal)]
    for value in np.asarray(values).astype(DTYPES[name]):
        bits = np.asarray(value).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[value.itemsize])
        following = (bits + 1).astype(bits.dtype).view(DTYPES[name])
        spacing = float(following) - float(value)
        assert ulp_size(np.asarray(float(value)), name) == spacing, value


@pytest.mark.parametrize("name", FORMATS)
def test_subnormals_and_zero_use_the_smallest_spacing(name: str) -> None:
    smallest = float(ml_dtypes.finfo(DTYPES[name]).smallest_subnormal)
    assert ulp_size(np.asarray([0.0, smallest]), name).tolist() == [smallest, smallest]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_correct_rounding_costs_at_most_half_a_unit(name: str) -> None:
    truth = np.random.default_rng(0).standard_normal((64, 33)) * np.exp(np.linspace(-8, 8, 64))[:, None]
    error = ulp_error(truth.astype(DTYPES[name]), truth)
    assert 0.4 < error.max <= 0.5
    assert error.mismatched == 0
    assert sum(error.histogram) == truth.size


def test_one_last_bit_off_is_one_ulp() -> None:
    truth = np.full((2, 4), 1.25)
    got = truth.astype(np.float16)
    got[1, 2] = np.nextafter(got[1, 2], np.float16(2))
    error = ulp_error(got, truth)
    assert (error.max, error.worst) == (1.0, (1, 2))
    assert error.got == pytest.approx(1.25 + 2**-10)
    assert error.want == 1.25


def test_an_element_that_cancels_is_measured_against_its_row() -> None:
    truth = np.asarray([[1.0, -1.0, 1e-9, 1.0]])
    got = np.add(truth, [[0, 0, 2.0**-24, 0]]).astype(np.float32)
    assert ulp_error(got, truth).max < 2.0


def test_a_tiny_row_is_not_excused_by_a_big_neighbour() -> None:
    truth = np.asarray([[1.0, 1.0], [1e-3, 1e-3]])
    got = truth.astype(np.float32)
    got[1] *= 3
    assert ulp_error(got, truth).max > 1e6


def test_a_vector_is_measured_against_its_own_norm_and_a_scalar_against_itself() -> None:
    assert ulp_error(np.float32([1e-9, 1.0]), np.asarray([0.0, 1.0])).max < 0.02
    assert ulp_error(np.float32(1.0 + 2**-20), np.asarray(1.0)).max == 8.0


def test_overflow_to_infinity_is_right_where_the_truth_is_past_the_range() -> None:
    truth = np.asarray([[1e6, -7e4, 1.0]])
    error = ulp_error(np.float16([[np.inf, -np.inf, 1.0]]), truth)
    assert (error.max, error.mismatched) == (0.0, 0)


def test_overflow_where_the_truth_is_finite_costs_what_it_is_worth() -> None:
    near = ulp_error(np.float16([np.inf]), np.asarray([65519.0]))
    assert near.max == pytest.approx(17 / 32)
    far = ulp_error(np.float16([np.inf]), np.asarray([1000.0]))
    assert far.max > 1e5
    assert near.mismatched == far.mismatched == 0


@pytest.mark.parametrize(
    ("got", "truth"),
    [
        (np.nan, 1.0),
        (1.0, np.nan),
        (np.inf, np.nan),
        (np.nan, np.inf),
        (-np.inf, np.inf),
        (3.0, np.inf),
        (3.4e38, -np.inf),
    ],
)
def test_nan_and_infinity_in_the_wrong_place_are_mismatches(got: float, truth: float) -> None:
    error = ulp_error(np.float32([[got, 1.0]]), np.asarray([[truth, 1.0]]))
    assert error.mismatched == 1
    assert math.isinf(error.max)
    assert error.mean == 0.0


def test_the_same_nan_and_infinity_are_right() -> None:
    truth = np.asarray([np.nan, np.inf, -np.inf, 2.0])
    assert ulp_error(truth.astype(np.float32), truth).max == 0.0


def test_float64_infinity_for_a_finite_truth_is_a_mismatch() -> None:
    assert ulp_error(np.asarray([np.inf]), np.asarray([1e308])).mismatched == 1


def test_integers_and_booleans_must_be_equal() -> None:
    assert ulp_error(np.asarray([1, 2, 3]), np.asarray([1, 2, 3])).max == 0.0
    error = ulp_error(np.asarray([[1, 2], [3, 4]]), np.asarray([[1, 2], [3, 5]]))
    assert (error.max, error.mean, error.worst, error.exact_type) == (1.0, 0.25, (1, 1), True)
    assert ulp_error(np.asarray([True]), np.asarray([False])).max == 1.0


def test_complex_is_compared_part_by_part() -> None:
    truth = np.asarray([1.0 + 2.0j, 3.0 - 1.0j])
    assert ulp_error(truth.astype(np.complex64), truth).max == 0.0
    assert ulp_error((truth + 1e-3j).astype(np.complex64), truth).max > 1000


def test_nothing_is_no_error_and_a_wrong_shape_is_refused() -> None:
    assert ulp_error(np.zeros((0, 4), np.float16), np.zeros((0, 4))).elements == 0
    with pytest.raises(ValueError, match=r"shape \(2,\), expected \(3,\)"):
        ulp_error(np.zeros(2, np.float32), np.zeros(3))


def test_a_summary_keeps_the_largest_of_each_figure() -> None:
    truth = np.ones((2, 8))
    clean, off = ulp_error(np.float16(truth), truth), ulp_error(np.float16(truth * 1.01), truth)
    summary = worst_of([clean, off])
    assert (summary.max, summary.mean, summary.elements) == (off.max, off.mean, 32)
    assert sum(summary.histogram) == 32
    assert worst_of([]).max == 0.0


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=12),
    st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_rounding_any_truth_is_never_worse_than_half_a_unit(values: list[float], name: str) -> None:
    truth = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        error = ulp_error(truth.astype(DTYPES[name]), truth)
    assert error.mismatched == 0
    # ml_dtypes rounds float64 to bfloat16 by way of float32, which costs a little over half at a tie
    assert error.max <= 0.5 + 2.0**-15
    assert len(error.histogram) == len(BIN_EDGES) - 1
