"""Half types are rounded where the specification rounds, as if all else were exact: to the bit, on every machine."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import pytest
from kernel_truth import NUMPY, Array, Case
from test_cpu_kernel import run

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.native_build import build

HALF_PAIRS = [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")]
# Where float64 itself cannot tell on which side of a tie a value is.
UNSURE = 2.0**-45


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        build(("cpu",), quiet=True)
    except BackendUnavailable as error:
        pytest.skip(f"the CPU kernels cannot be built here: {error}")
    library = ckernel.cpu_library()
    assert library is not None
    return library


def once(value: Array, dtype: str) -> Array:
    """float64 rounded to dtype in one step, as float64: by way of a float32 that keeps whether anything was cut off."""
    with np.errstate(over="ignore"):
        near = value.astype(np.float32)
        if dtype != "float32":
            back = near.astype(np.float64)
            step = np.where(back > value, np.float32(-np.inf), np.float32(np.inf))
            even = (near.view(np.uint32) & 1) == 0
            near = np.where((back != value) & even & np.isfinite(value), np.nextafter(near, step), near)
        return near.astype(NUMPY[dtype]).astype(np.float64)


class Answers(NamedTuple):
    """y, and y where the values in front of the first rounding are a little less, or more."""

    y: Array
    low: Array
    high: Array


def answers(case: Case, x: Array, skip: Array | None, scale: Array | None, bias: Array | None) -> Answers:
    v = x.astype(np.float64)
    if skip is not None:
        v = once(v + skip.astype(np.float64), case.x)
    mean = np.mean(v * v, axis=-1, keepdims=True)
    eps = float(np.float32(case.eps))
    root = {
        "inside": np.sqrt(mean + eps),
        "outside": np.sqrt(mean) + eps,
        "clamp": np.maximum(np.sqrt(mean), eps),
    }[case.eps_mode]
    s = np.float64(1) if scale is None else scale.astype(np.float64)
    b = np.float64(0) if bias is None else bias.astype(np.float64)
    y_type = case.x if scale is None and bias is None else case.y

    def finish(off: float) -> Array:
        with np.errstate(all="ignore"):
            if case.order == "before_cast":
                return once(v * s / root + b + off * (np.abs(v * s / root) + np.abs(b)), case.x)
            y = once(v / root * (1 + off), case.x) * s
            return once(once(y, y_type) + b, y_type) if bias is not None else once(y, y_type)

    return Answers(finish(0), finish(-UNSURE), finish(UNSURE))


def check(case: Case, x: Array, skip: Array | None, scale: Array | None, bias: Array | None) -> int:
    """How many elements were compared; each is one of the answers."""
    got = run(case, x, skip, scale, bias)[0].astype(np.float64)
    want = answers(case, x, skip, scale, bias)
    wrong = ~np.isclose(got, want.y, rtol=0, atol=0, equal_nan=True) & (got != want.low) & (got != want.high)
    where = np.argwhere(wrong)
    assert not len(where), f"{case}: {len(where)} of {got.size}, such as {got[tuple(where[0])]} at {where[0]}"
    return got.size


def cases(x: str, param: str) -> list[Case]:
    modes = [("inside", 1e-6), ("outside", 1e-3), ("clamp", 0.5), ("inside", 0.0)]
    return [
        Case(x, param, mode, order, bias, skip, eps=eps)
        for mode, eps in modes
        for order in ("after_cast", "before_cast")
        for bias in (False, True)
        for skip in (False, True)
    ]


def data(case: Case, count: int, width: int, seed: int) -> tuple[Array, Array | None, Array, Array | None]:
    """Rows from tiny to huge, with a spike in some, and scales with both signs, none of them one."""
    rng = np.random.default_rng(seed)
    most = 3.0 if case.x == "float16" else 14.0
    x = rng.standard_normal((count, width)) * 10.0 ** rng.uniform(-most, most, (count, 1))
    x[rng.random(x.shape) < 0.05] = 0
    x[::3, width // 2] *= 30
    skip = (x * rng.uniform(0.5, 2, x.shape)).astype(NUMPY[case.x]) if case.skip else None
    scale = rng.standard_normal(width) * 10.0 ** rng.uniform(-3, 1, width)
    bias = rng.standard_normal(width).astype(NUMPY[case.param]) if case.bias else None
    return x.astype(NUMPY[case.x]), skip, scale.astype(NUMPY[case.param]), bias


@pytest.mark.parametrize("isa", ["avx512", "avx2", "neon", "generic"])
@pytest.mark.parametrize(("x", "param"), HALF_PAIRS)
def test_every_half_variant_is_rounded_once(library: ctypes.CDLL, isa: str, x: str, param: str) -> None:
    if library.rmsnorm_cpu_set_isa(isa.encode()) != ckernel.OK:
        pytest.skip(f"this machine has no {isa}")
    try:
        for number, case in enumerate(cases(x, param)):
            for width in (1, 7, 16, 33, 100, 257, 1000, 4096, 4100, 8200):
                check(case, *data(case, 6, width, number))
    finally:
        library.rmsnorm_cpu_set_isa(b"")


@pytest.mark.parametrize("order", ["after_cast", "before_cast"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_million_elements_are_rounded_once(library: ctypes.CDLL, dtype: str, order: str) -> None:
    """Rounding by way of float32 gets one element in some ten thousand wrong."""
    rng = np.random.default_rng(4)
    case = Case(dtype, dtype, order=order)
    x = rng.standard_normal((4096, 256)).astype(NUMPY[dtype])
    scale = (rng.random(256) * 30 + 0.3).astype(NUMPY[dtype])
    assert check(case, x, None, scale, None) == 1 << 20
    assert check(case, x, None, None, None) == 1 << 20


def test_subnormal_float16_are_rounded_once(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    for order in ("after_cast", "before_cast"):
        x = rng.standard_normal((64, 1024)) * 10.0 ** rng.uniform(-7, 0, (64, 1024))
        scale = 10.0 ** rng.uniform(-6, 1, 1024)
        check(Case("float16", "float16", order=order), x.astype(np.float16), None, scale.astype(np.float16), None)


def test_ties_go_to_even(library: ctypes.CDLL) -> None:
    """A row whose 1 / r is a power of two has values exactly half-way, which every instruction set must see as such."""
    scale = (1 + np.arange(1024) / 1024).astype(np.float16)
    x = np.full((1, 1024), 1.5, np.float16)
    for isa in (b"avx512", b"avx2", b"neon", b"generic"):
        if library.rmsnorm_cpu_set_isa(isa) == ckernel.OK:
            for order in ("after_cast", "before_cast"):
                check(Case("float16", "float16", "clamp", order, eps=2.0), x, None, scale, None)
    library.rmsnorm_cpu_set_isa(b"")


@pytest.mark.parametrize(("x", "param"), HALF_PAIRS)
def test_instruction_sets_agree_to_the_bit(library: ctypes.CDLL, x: str, param: str) -> None:
    for number, case in enumerate(cases(x, param)):
        given = data(case, 5, (64, 333, 4097, 9000)[number % 4], number)
        seen = []
        for isa in (b"avx512", b"avx2", b"neon", b"generic"):
            if library.rmsnorm_cpu_set_isa(isa) == ckernel.OK:
                seen.append([None if part is None else part.tobytes() for part in run(case, *given)])
        library.rmsnorm_cpu_set_isa(b"")
        assert all(one == seen[0] for one in seen), case


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_number_is_lost_from_the_squares(library: ctypes.CDLL, dtype: str) -> None:
    """Whatever stands among normal numbers, in a whole block of them or behind the last: one row for each place."""
    rng = np.random.default_rng(6)
    tiny = 2.0**-24 if dtype == "float16" else 2.0**-120
    case = Case(dtype, dtype, eps=0.0)
    for number in (None, 0.0, -0.0, 3 * tiny, -1000 * tiny, np.inf, np.nan):
        for width in (64, 700, 1500):
            x = rng.uniform(1, 2, (width if number is not None else 8, width)) * (16 * tiny if number else 1)
            if number is not None:
                np.fill_diagonal(x, number)
            rows = x.astype(NUMPY[dtype])
            seen = []
            for isa in (b"avx512", b"avx2", b"neon", b"generic"):
                if library.rmsnorm_cpu_set_isa(isa) == ckernel.OK:
                    check(case, rows, None, None, None)
                    seen.append(run(case, rows, None, None, None)[0].tobytes())
            library.rmsnorm_cpu_set_isa(b"")
            assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "neon", "generic"])
@pytest.mark.parametrize(("x", "param"), HALF_PAIRS)
def test_a_bias_that_cancels_the_product_leaves_what_is_exact(
    library: ctypes.CDLL, isa: str, x: str, param: str
) -> None:
    """Down to nothing: what is left of an element is then the error of everything before."""
    if library.rmsnorm_cpu_set_isa(isa.encode()) != ckernel.OK:
        pytest.skip(f"this machine has no {isa}")
    try:
        for seed in range(30):
            rng = np.random.default_rng(seed)
            case = Case(x, param, order="before_cast", bias=True)
            row = (rng.standard_normal((1, 4096)) * 10.0 ** rng.uniform(-2, 2)).astype(NUMPY[x])
            scale = (rng.standard_normal(4096) * 10.0 ** rng.uniform(-2, 1)).astype(NUMPY[param])
            product = row[0].astype(np.float64) / np.sqrt(np.mean(row.astype(np.float64) ** 2) + 1e-6) * scale
            # Alike within 64 neighbours: a vector of which one element needs the slow way takes it as a whole.
            left = rng.choice([0, 0.5, 0.1, 2.0**-7, 2.0**-9, 2.0**-11, 2.0**-13, 2.0**-17, 2.0**-22], 64).repeat(64)
            bias = (-product * (1 + left * rng.choice([-1, 1], 4096))).astype(NUMPY[param])
            check(case, row, None, scale, bias)
    finally:
        library.rmsnorm_cpu_set_isa(b"")
