"""plugins/kernels/cpu through its C interface, on every instruction set of this machine, against float64."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import platform
from collections.abc import Iterator

import numpy as np
import pytest
from kernel_truth import DTYPE_PAIRS, NUMPY, Array, Case, rows, truth

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.native_build import build

WIDTHS = [*range(1, 71), 96, 127, 128, 129, 255, 257, 300, 511, 513, 768, 1000, 1023, 1024, 1025, 1100]
ODD_WIDTHS = [4097, 8191, 8193, 20001, 131077]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    try:
        build(("cpu",), quiet=True)
    except BackendUnavailable as error:
        pytest.skip(f"the CPU kernels cannot be built here: {error}")
    library = ckernel.cpu_library()
    assert library is not None
    return library


ARM = platform.machine().lower() in ("aarch64", "arm64")


@pytest.fixture(params=["neon", "generic"] if ARM else ["avx512", "avx2", "generic"])
def isa(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[str]:
    if library.rmsnorm_cpu_set_isa(request.param.encode()) != ckernel.OK:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    library.rmsnorm_cpu_set_isa(b"")


def arguments(
    case: Case, x: Array, skip: Array | None, scale: Array | None, bias: Array | None, y: Array, total: Array | None
) -> ckernel.Args:
    def address(array: Array | None) -> int | None:
        return None if array is None else array.ctypes.data

    def stride(array: Array | None) -> int:
        return 0 if array is None else array.strides[0] // array.itemsize

    return ckernel.Args(
        x_dtype=ckernel.DTYPES[case.x],
        param_dtype=ckernel.DTYPES[case.param],
        y_dtype=ckernel.DTYPES[str(y.dtype)],
        eps_mode=ckernel.EPSILON_MODES[case.eps_mode],
        scale_order=ckernel.SCALE_ORDERS[case.order],
        stash=int(case.double),
        eps=case.eps,
        rows=x.shape[0],
        width=x.shape[1],
        scale_count=0 if scale is None else scale.size,
        bias_count=0 if bias is None else bias.size,
        x_stride=stride(x),
        skip_stride=stride(skip),
        y_stride=stride(y),
        sum_stride=stride(total),
        x=address(x),
        skip=address(skip),
        scale=address(scale),
        bias=address(bias),
        y=address(y),
        sum=address(total),
    )


def run(
    case: Case, x: Array, skip: Array | None, scale: Array | None, bias: Array | None, threads: int = 1
) -> tuple[Array, Array | None]:
    y = np.full(x.shape, 7, NUMPY[case.y if scale is not None or bias is not None else case.x])
    total = None if skip is None else np.full(x.shape, 7, x.dtype)
    assert ckernel.run_cpu(arguments(case, x, skip, scale, bias, y, total), threads)
    return y, total


def inputs(case: Case, width: int, count: int, one: bool, seed: int) -> tuple[Array, Array | None, Array, Array | None]:
    rng = np.random.default_rng(seed)
    x = rows(rng, count, width, case.x)
    skip = rows(rng, count, width, case.x) if case.skip else None
    scale = (1 + 0.5 * rng.standard_normal(1 if one else width)).astype(NUMPY[case.param])
    bias = rng.standard_normal(1 if one else width).astype(NUMPY[case.param]) if case.bias else None
    return x, skip, scale, bias


def check(case: Case, width: int, count: int = 3, one: bool = False, seed: int = 0) -> None:
    data = inputs(case, width, count, one, seed)
    y, total = run(case, *data)
    exact, stepped, bound, want_total = truth(case, *data)
    error = np.abs(y.astype(np.float64) - exact)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), f"{case} width {width}: {y[worst]} for {exact[worst]} at {worst}"
    # Rounding in another order or precision would change far more elements than the statistics' last bit does.
    if case.x in ("float16", "bfloat16") and y.size >= 200:
        assert (y.astype(np.float64) == stepped).mean() > 0.98, f"{case} width {width}"
    if total is not None:
        np.testing.assert_array_equal(total.astype(np.float64), want_total)


def variants(x: str, param: str) -> list[Case]:
    options = itertools.product(
        ("inside", "outside", "clamp"),
        ("after_cast", "before_cast"),
        (False, True),
        (False, True),
        (False, True) if x == "float64" else (False,),
    )
    eps = {"inside": 1e-5, "outside": 1e-3, "clamp": 0.5}
    return [Case(x, param, mode, order, bias, skip, double, eps[mode]) for mode, order, bias, skip, double in options]


@pytest.mark.parametrize(("x", "param"), DTYPE_PAIRS)
def test_every_variant_matches_float64(isa: str, x: str, param: str) -> None:
    for number, case in enumerate(variants(x, param)):
        for width in WIDTHS[number % 7 :: 7]:
            check(case, width, one=number % 3 == 0, seed=number)


@pytest.mark.parametrize(("x", "param"), DTYPE_PAIRS)
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_wide_odd_rows_match_float64(isa: str, x: str, param: str, width: int) -> None:
    check(Case(x, param, bias=True, skip=True, double=x == "float64"), width, count=1)


def test_sums_stay_accurate_over_a_million_elements(isa: str) -> None:
    x = np.full((1, 1_000_003), 0.1, np.float32)
    y, _ = run(Case("float32", "float32", eps=0.0), x, None, None, None)
    np.testing.assert_allclose(y, 1.0, rtol=6e-7)


@pytest.mark.parametrize(("x", "param"), DTYPE_PAIRS)
def test_without_parameters_y_is_the_normalized_row(isa: str, x: str, param: str) -> None:
    case = Case(x, x, eps=1e-5, double=x == "float64")
    data, *_ = inputs(case, 333, 3, False, 5)
    y, _ = run(case, data, None, None, None)
    y_ones, _ = run(case, data, None, np.ones(333, NUMPY[x]), np.zeros(1, NUMPY[x]))
    assert y.dtype == data.dtype
    np.testing.assert_array_equal(y, y_ones)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_nan_and_inf_spread_over_their_row_alone(isa: str, dtype: str) -> None:
    case = Case(dtype, dtype, double=dtype == "float64")
    x = np.ones((4, 77), NUMPY[dtype])
    x[1, 76], x[2, 3] = np.nan, np.inf
    y = run(case, x, None, np.ones(77, NUMPY[dtype]), None)[0].astype(np.float64)
    assert np.isfinite(y[[0, 3]]).all()
    assert np.isnan(y[1]).all()
    assert np.isnan(y[2, 3])
    assert (np.delete(y[2], 3) == 0).all()


@pytest.mark.parametrize("mode", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_rows_of_zeros_give_zeros_and_nan_only_without_eps(isa: str, dtype: str, mode: str) -> None:
    x, double = np.zeros((2, 19), NUMPY[dtype]), dtype == "float64"
    for eps in (1e-6, 1e-12, 1e-40):
        assert (run(Case(dtype, dtype, mode, double=double, eps=eps), x, None, None, None)[0] == 0).all(), eps
    assert np.isnan(run(Case(dtype, dtype, mode, double=double, eps=0.0), x, None, None, None)[0].astype(float)).all()


def test_a_nan_with_all_bits_set_stays_nan_in_bfloat16(isa: str) -> None:
    scale = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    x = np.ones((1, 3), NUMPY["bfloat16"])
    y, _ = run(Case("bfloat16", "float32", order="before_cast"), x, None, scale, None)
    assert np.isnan(y.astype(np.float32)).all()


def test_float16_subnormals_and_overflow_round_as_ieee_has_it(isa: str) -> None:
    scale = np.array([65519.0, 65520.0, -1e9, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 3.1e-8, -6e-8], np.float32)
    x = np.ones((1, scale.size), np.float16)
    y, _ = run(Case("float16", "float32", order="before_cast", eps=0.0), x, None, scale, None)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y[0], scale.astype(np.float16))


def test_every_float16_and_bfloat16_passes_through_unchanged(isa: str) -> None:
    for dtype in ("float16", "bfloat16"):
        values = np.arange(65536, dtype=np.uint16).view(NUMPY[dtype])
        finite = values[np.isfinite(values.astype(np.float32))]
        zeros = np.zeros((finite.size, 1), NUMPY[dtype])
        _, total = run(Case(dtype, dtype, skip=True), zeros, finite.reshape(-1, 1), None, None)
        assert total is not None
        np.testing.assert_array_equal(total[:, 0].astype(np.float32), finite.astype(np.float32))


class Guarded:
    """An array that ends right before a page which may not be touched, or begins right after one."""

    def __init__(self, value: Array, at_end: bool) -> None:
        page = mmap.PAGESIZE
        body = -(-value.nbytes // page) * page
        self.memory = mmap.mmap(-1, body + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (start, start + page + body):
            assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
        offset = page + (body - value.nbytes if at_end else 0)
        self.array: Array = np.frombuffer(self.memory, value.dtype, value.size, offset).reshape(value.shape)
        self.array[...] = value


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(("x", "param"), DTYPE_PAIRS)
def test_nothing_outside_the_arrays_is_touched(isa: str, x: str, param: str, at_end: bool) -> None:
    for width in (1, 2, 3, 5, 7, 8, 9, 13, 15, 17, 31, 33, 63, 65, 100):
        case = Case(x, param, bias=True, skip=True, double=x == "float64")
        fenced = [
            Guarded(array, at_end) for array in inputs(case, width, 2, width % 2 == 0, width) if array is not None
        ]
        y = Guarded(np.zeros((2, width), NUMPY[case.y]), at_end)
        total = Guarded(np.zeros((2, width), NUMPY[case.x]), at_end)
        data = [item.array for item in fenced]
        assert ckernel.run_cpu(arguments(case, *data, y.array, total.array), 1)
        np.testing.assert_array_equal(y.array, run(case, *data)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_apart_from_each_other_and_misaligned(isa: str, dtype: str) -> None:
    case = Case(dtype, dtype, skip=True)
    rng = np.random.default_rng(3)
    x = rows(rng, 5, 100, dtype)[:, 3:64]
    skip = np.broadcast_to(rows(rng, 1, 61, dtype), (5, 61))
    y, total = np.zeros((5, 90), NUMPY[dtype]), np.zeros((5, 77), NUMPY[dtype])
    assert ckernel.run_cpu(arguments(case, x, skip, None, None, y[:, 5:66], total[:, 1:62]), 1)
    want, want_total = run(case, np.ascontiguousarray(x), np.ascontiguousarray(skip), None, None)
    assert want_total is not None
    np.testing.assert_array_equal(y[:, 5:66], want)
    np.testing.assert_array_equal(total[:, 1:62], want_total)
    assert not y[:, :5].any()
    assert not y[:, 66:].any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_outputs_may_take_the_inputs_memory(isa: str, dtype: str) -> None:
    case = Case(dtype, dtype, skip=True, double=dtype == "float64")
    x, skip, scale, _ = inputs(case, 131, 4, False, 1)
    assert skip is not None
    want, want_total = run(case, x, skip, scale, None)
    assert ckernel.run_cpu(arguments(case, x, skip, scale, None, skip, x), 1)
    np.testing.assert_array_equal(skip, want)
    np.testing.assert_array_equal(x, want_total)


@pytest.mark.parametrize("mebibytes", [20, 144], ids=["where the output is in no cache", "always"])
@pytest.mark.parametrize("offset", [0, 1, 13])
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4096), ("float16", 8197), ("bfloat16", 8200)])
def test_streaming_stores_write_what_plain_ones_do(
    isa: str, dtype: str, width: int, offset: int, mebibytes: int
) -> None:
    count = (mebibytes << 20) // (width * np.dtype(NUMPY[dtype]).itemsize) // 4
    case = Case(dtype, dtype, skip=True)
    rng = np.random.default_rng(0)
    x = np.broadcast_to(rows(rng, 1, width, dtype), (count, width))
    big, big_total = (np.zeros(count * width + 16, NUMPY[dtype]) for _ in range(2))
    y, total = (part[offset : offset + count * width].reshape(count, width) for part in (big, big_total))
    threads = 1 if dtype == "float32" else 2  # one alone stores half types plainly
    assert ckernel.run_cpu(arguments(case, x, x, None, None, y, total), threads)
    want, want_total = run(case, x[:1], x[:1], None, None)
    assert (y.view(f"u{y.itemsize}") == want.view(f"u{y.itemsize}")).all()
    assert (total == want_total).all()
    assert not big[:offset].any()
    assert not big[offset + count * width :].any()


def test_rows_with_gaps_are_streamed_between_them(isa: str) -> None:
    case = Case("float32", "float32")
    x = rows(np.random.default_rng(1), 700, 1003, "float32")
    wide = np.zeros((700, 1500), np.float32)
    assert ckernel.run_cpu(arguments(case, x, None, None, None, wide[:, :1003], None), 1)
    for some in np.split(np.arange(700), 7):  # too few to be streamed
        want, _ = run(case, x[some], None, None, None)
        assert wide[some, :1003].tobytes() == want.tobytes()
    assert not wide[:, 1003:].any()


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize(
    "shape", [(1, 64), (7, 4096), (301, 257), (5000, 64), (3, 300_000), (1, 1_000_003), (2, 270_000)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_no_bit(library: ctypes.CDLL, dtype: str, threads: int, shape: tuple[int, int]) -> None:
    case = Case(dtype, dtype, skip=True)
    x, skip, scale, _ = inputs(case, shape[1], shape[0], False, 2)
    for _ in range(5):
        y, total = run(case, x, skip, scale, None, threads)
    want, want_total = run(case, x, skip, scale, None)
    assert want_total is not None
    assert total is not None
    assert y.tobytes() == want.tobytes()
    assert total.tobytes() == want_total.tobytes()


def test_a_row_of_millions_is_shared_as_well(library: ctypes.CDLL) -> None:
    """More spans than are added up at once, and parameters of one element."""
    x = np.full((1, 5_000_000), 3, np.float16)
    y, _ = run(Case("float16", "float16", eps=0.0), x, None, np.ones(1, np.float16), None, 4)
    assert (y == 1).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do_is_no_error(library: ctypes.CDLL, shape: tuple[int, int]) -> None:
    args = ckernel.Args(rows=shape[0], width=shape[1], eps=1e-6)
    assert library.rmsnorm_cpu(ctypes.byref(args), None) == ckernel.OK


BAD_ARGUMENT, BAD_DTYPE, ABI_MISMATCH = 1, 2, 5
REFUSALS = {
    "abi": ({"abi": 99}, ABI_MISMATCH),
    "negative rows": ({"rows": -1}, BAD_ARGUMENT),
    "negative width": ({"width": -1}, BAD_ARGUMENT),
    "negative eps": ({"eps": -1.0}, BAD_ARGUMENT),
    "nan eps": ({"eps": float("nan")}, BAD_ARGUMENT),
    "unknown dtype": ({"x_dtype": 9}, BAD_ARGUMENT),
    "unknown mode": ({"eps_mode": 3}, BAD_ARGUMENT),
    "no x": ({"x": None}, BAD_ARGUMENT),
    "no y": ({"y": None}, BAD_ARGUMENT),
    "overlapping rows": ({"x_stride": 3}, BAD_ARGUMENT),
    "y rows on each other": ({"y_stride": 0}, BAD_ARGUMENT),
    "size beyond 63 bits": ({"rows": 2**40, "x_stride": 2**40}, BAD_ARGUMENT),
    "short scale": ({"scale_count": 3}, BAD_ARGUMENT),
    "sum without skip": ({"sum": 4096}, BAD_ARGUMENT),
    "half scale for float x": ({"param_dtype": 1}, BAD_DTYPE),
    "y of another dtype": ({"y_dtype": 1}, BAD_DTYPE),
    "float64 statistics for float32": ({"stash": 1}, BAD_DTYPE),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_arguments_are_a_status_and_touch_nothing(library: ctypes.CDLL, name: str) -> None:
    changes, status = REFUSALS[name]
    case = Case("float32", "float32")
    x, _, scale, _ = inputs(case, 8, 2, False, 0)
    y = np.zeros_like(x)
    args = arguments(case, x, None, scale, None, y, None)
    for field, value in changes.items():
        setattr(args, field, value)
    assert library.rmsnorm_cpu(ctypes.byref(args), None) == status
    assert library.rmsnorm_check(ctypes.byref(args)) == status
    assert not y.any()
    assert library.rmsnorm_cpu(None, None) == BAD_ARGUMENT


def test_every_status_has_words(library: ctypes.CDLL) -> None:
    words = [library.rmsnorm_status_string(code).decode() for code in (*range(6), 77)]
    assert len(set(words)) == len(words)
    assert all(words)
    assert not any("\n" in text for text in words)


def test_an_unknown_instruction_set_is_refused(library: ctypes.CDLL) -> None:
    before = library.rmsnorm_cpu_isa()
    assert library.rmsnorm_cpu_set_isa(b"sse9") == ckernel.UNSUPPORTED
    assert library.rmsnorm_cpu_isa() == before
