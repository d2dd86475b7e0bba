"""The CUDA kernels' own source, run on the host by the emulator, against float64."""

from __future__ import annotations

import itertools
import mmap
from dataclasses import replace

import cuda_emulator as emu
import numpy as np
import pytest
from cuda_emulator import SM75, SM80, SM90, Case, checked

PAIRS = [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]


@pytest.mark.parametrize(("x", "params"), PAIRS)
def test_every_variant_is_what_float64_says(x: str, params: str) -> None:
    options = itertools.product(
        [False, True], emu.EPS_MODES, ["full", "one", "none"], ["none", "full", "one"], [False, True]
    )
    widths = itertools.cycle([8, 24, 64, 200, 264, 520, 2048, 8192, 17, 33, 301, 5001])
    devices = itertools.cycle([SM90, SM80, SM75])
    for seed, (before, eps_mode, scale, bias, skip) in enumerate(options):
        if x == "f32" and before:
            continue
        for width, device in zip(itertools.islice(widths, 3), devices, strict=False):
            checked(Case(width, 3, x, params, before, eps_mode, 1e-3, scale, bias, skip, device=device, seed=seed))


@pytest.mark.parametrize(("x", "params"), PAIRS)
def test_every_width_to_1100(x: str, params: str) -> None:
    """With the variants and devices in turn: each meets every kind of width."""
    variants = list(
        itertools.product([False, True], emu.EPS_MODES, ["full", "one", "none"], ["none", "full", "one"], [False, True])
    )
    for width in range(1, 1101):
        before, mode, scale, bias, skip = variants[width % len(variants)]
        device = (SM75, SM80, SM90)[(width + width // len(variants)) % 3]
        before &= x != "f32"
        checked(Case(width, 3, x, params, before, mode, 1e-3, scale, bias, skip, device=device, seed=width))


@pytest.mark.parametrize("width", [4097, 8200, 16384, 16392, 32768, 65535, 65544, 131072, 131077])
@pytest.mark.parametrize("device", [SM80, SM90], ids=["sm80", "sm90"])
def test_long_rows(width: int, device: emu.Device) -> None:
    for x in ("f16", "f32"):
        checked(Case(width, 2, x, "f32", skip=width % 3 == 0, device=device))


@pytest.mark.parametrize("device", [SM75, SM90], ids=["sm75", "sm90"])
@pytest.mark.parametrize("sum_given", [True, False])
def test_rows_longer_than_the_chip_holds(device: emu.Device, sum_given: bool) -> None:
    small = emu.Device(device.compute, device.multiprocessors, 3 * 16 * 1024, 1)
    case = Case(300_000, 2, "bf16", "bf16", skip=True, sum_given=sum_given, device=small, workspace=False)
    for made in (case, replace(case, width=300_001), *(replace(case, misaligned=(late,)) for late in ("x", "sum"))):
        report = checked(made)
        if device is SM75:
            assert report.of("x_again").bytes > 0
            again = not sum_given or made.misaligned == ("sum",)
            assert (report.of("skip_again").bytes > 0) == again, "a sum in y's phase is what is read again"


@pytest.mark.parametrize("late", ["x", "skip", "y", "sum", "scale", "bias"])
def test_misaligned_pointers(late: str) -> None:
    for x, params in PAIRS:
        for width in (8, 64, 1024, 6144):
            checked(Case(width, 3, x, params, bias="full", skip=True, misaligned=(late,)))


@pytest.mark.parametrize(("x", "params"), PAIRS)
def test_every_tensor_in_a_phase_of_its_own(x: str, params: str) -> None:
    """Wherever each tensor begins, and whatever lies between its rows."""
    random = np.random.default_rng(len(x + params))
    small = emu.Device(80, 4, 3 * 16 * 1024, 1)
    split = emu.Device(SM80.compute, SM80.multiprocessors, SM80.shared_bytes, 5)
    devices = {
        9: SM90,
        40: SM80,
        130: SM75,
        600: SM90,
        1023: SM80,
        4500: SM90,
        9001: SM80,
        20_000: split,
        33_000: small,
    }
    for width, device in devices.items():
        for turn in range(6):
            names = [name for name in ("x", "skip", "scale", "bias", "y", "sum") for _ in range(random.integers(0, 9))]
            bias, skip, sum_given = ("full", "none")[turn % 2], turn % 3 != 0, turn % 4 != 1
            case = Case(width + turn, 5, x, params, turn == 4 and x != "f32", bias=bias, skip=skip, sum_given=sum_given)
            checked(replace(case, misaligned=tuple(names), pad=int(random.integers(0, 9)), device=device))


@pytest.mark.parametrize("pad", [1, 8, 24])
def test_strided_rows(pad: int) -> None:
    for width in (5, 64, 72, 1000, 6000):
        for x in ("f32", "f16"):
            checked(Case(width, 7, x, x, skip=True, pad=pad))


def test_one_row_repeated() -> None:
    for width in (8, 513, 4096):
        checked(Case(width, 4, "f16", "f16", skip=True, repeat_x=True))


@pytest.mark.parametrize("in_place", ["y=x", "sum=x", "sum=skip", "y=skip"])
@pytest.mark.parametrize("width", [64, 4096, 40_000, 40_001])
def test_in_place(in_place: str, width: int) -> None:
    skip = in_place != "y=x"
    for device in (SM75, SM90):
        checked(Case(width, 3, "f16", "f16", skip=skip, in_place=in_place, device=device))


@pytest.mark.parametrize("in_place", ["y=x", "sum=x", "sum=skip"])
@pytest.mark.parametrize("late", ["x", "skip", "y", "sum"])
def test_in_place_of_a_tensor_in_another_phase(in_place: str, late: str) -> None:
    """No thread may read what another one stores, also where neither lies as the other tensors do."""
    small = emu.Device(80, 4, 3 * 16 * 1024, 1)
    for width, device in ((64, SM90), (1001, SM90), (5000, SM80), (40_001, small), (40_000, small)):
        checked(Case(width, 3, "f16", "f16", skip=True, in_place=in_place, misaligned=(late,), device=device))


@pytest.mark.parametrize("width", [16, 512, 2048, 40_000, 600_000, 33, 1001, 20_001])
def test_more_rows_than_blocks(width: int) -> None:
    rows = 300 if width < 1000 else 9 if width < 100_000 else 3
    for compute in (80, 90):
        tiny = emu.Device(compute, 1, 100 * 1024, 1)
        report = checked(Case(width, rows, "bf16", "bf16", device=tiny))
        assert report.blocks >= 1


@pytest.mark.parametrize("tactic", [1, 2, 3, 4, 5, 6])
def test_every_tactic_is_right(tactic: int) -> None:
    for width in (64, 67, 512, 1024, 1023, 4096, 4099, 16_384, 16_387, 65_536):
        for rows in (1, 40) if width % 2 == 0 else (3,):
            device = emu.Device(90, 16, 232448, tactic)
            checked(Case(width, rows, "f16", "f16", device=device))


def test_special_values() -> None:
    for width in (8, 100, 1024, 5000):
        values = np.ones((6, width))
        values[0] = 0
        values[1, width // 2] = np.nan
        values[2, 0] = np.inf
        values[3] = 1e-4
        values[4] = 6e4
        values[5] = np.where(np.arange(width) == 3, 100, 0)
        for eps_mode in emu.EPS_MODES:
            for eps in (0.0, 1e-12, 1e-6):
                for x in ("f32", "f16", "bf16"):
                    checked(Case(width, 6, x, x, eps_mode=eps_mode, eps=eps), values)


def test_a_subnormal_divisor_does_not_overflow() -> None:
    values = np.full((2, 64), 1e-30)
    values[1] = 0
    outcome = emu.run(Case(64, 2, eps=2e-40, eps_mode="clamp", scale="none"), values)
    assert outcome.report.fault == b""
    np.testing.assert_allclose(outcome.rows["y"][0], 1e-30 / float(np.float32(2e-40)), rtol=1e-6)
    assert (outcome.rows["y"][1] == 0).all()


def test_no_rows() -> None:
    args, arrays, _ = emu.make(Case(64, 1))
    args.rows = 0
    report = emu.emulate(args, SM90, [])
    assert report.blocks == 0
    assert np.isnan(arrays["y"]).all()


def test_offsets_beyond_2_to_the_31() -> None:
    stride = 2**31 + 8
    width = 512
    memory = mmap.mmap(-1, (stride + width) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # no reserve
    y = np.frombuffer(memory, dtype=np.float16)
    args, arrays, rows = emu.make(Case(width, 2, "f16", "f16"))
    args.y, args.y_stride = y.ctypes.data, stride
    buffers = [(a.ctypes.data, a.nbytes, False) for n, a in arrays.items() if n != "y"]
    report = emu.emulate(args, SM90, [*buffers, (y.ctypes.data, y.nbytes, True)])
    assert report.fault == b""
    expected = emu.truth(Case(width, 2, "f16", "f16"), rows["x"], None, arrays["scale"], None)
    error = np.abs(y[stride:].astype(np.float64) - expected.y[1])
    assert (error <= expected.slack[1]).all()


@pytest.mark.parametrize("x", ["f32", "f16", "bf16"])
def test_x_is_read_once_where_it_fits_on_the_chip(x: str) -> None:
    item = emu.DTYPES[x].itemsize
    for device in (SM75, SM80, SM90):
        room = (device.shared_bytes - 4096 * 2) * (8 if device.compute >= 90 else 1)
        for width in (1, 7, 64, 1000, 1001, 4096, 28_000, 32_001, 80_000):
            if width * item > room:
                continue
            # Rows that are split are read again, from the cache: test_cuda_split.py.
            report = checked(Case(width, 2, x, x, skip=width % 2 == 0, device=device, workspace=False))
            ideal = 2 * width * item
            assert report.of("x").bytes + report.of("x_again").bytes <= 1.02 * ideal
            assert report.of("skip_again").bytes == 0
            assert report.of("y").bytes == ideal


@pytest.mark.parametrize("x", ["f32", "f16"])
def test_aligned_rows_move_whole_sectors(x: str) -> None:
    for width in (64, 512, 1024, 4096, 16_384, 65_536):
        report = checked(Case(width, 4, x, x, skip=True, bias="full"))
        for site in emu.SITES[:6]:
            traffic = report.of(site)
            assert traffic.sectors <= traffic.least_sectors, (width, site)
            assert traffic.bytes / traffic.requests >= 128, (width, site)


def aligned_like(case: Case) -> Case:
    """The same work on aligned rows: a width of whole vectors, which are no fewer."""
    each = 16 // emu.DTYPES[case.x].itemsize
    return replace(case, width=-(-case.width // each) * each, misaligned=(), pad=0)


@pytest.mark.parametrize("width", [130, 1023, 4097, 131_077])
@pytest.mark.parametrize("x", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("device", [SM80, SM90], ids=["sm80", "sm90"])
def test_rows_of_any_width_move_as_aligned_ones_do(x: str, width: int, device: emu.Device) -> None:
    """In 16-byte vectors, with one more request a row, and a sector more for each 16 at most."""
    item = emu.DTYPES[x].itemsize
    case = Case(width, 8, x, x, skip=True, bias="full", device=device, workspace=False)
    report, aligned = checked(case), emu.run(aligned_like(case)).report
    ideal = case.rows * width * item
    ends = 4 * case.rows * 32  # head and tail: up to two sectors each that a vector's request touches too
    for site in ("x", "skip", "y", "sum"):
        traffic = report.of(site)
        assert traffic.bytes == ideal, site
        assert traffic.vector_requests <= aligned.of(site).vector_requests, site
        assert traffic.single_requests <= case.rows, site
        assert 32 * traffic.fetched_sectors <= 17 / 16 * ideal + ends, site
    for site in ("scale", "bias"):
        # In another phase with each row: two aligned words for each vector, of which the cache has the second.
        traffic = report.of(site)
        assert traffic.vector_requests <= 2 * report.of("x").vector_requests, site
        assert traffic.single_requests <= case.rows, site
        assert 32 * traffic.fetched_sectors <= 17 / 16 * ideal + ends, site


@pytest.mark.parametrize("x", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("late", [("x",), ("x", "skip", "y", "sum"), ("scale",)])
def test_a_pointer_one_element_late_costs_no_memory_traffic(x: str, late: tuple[str, ...]) -> None:
    item = emu.DTYPES[x].itemsize
    for width in (1024, 4096):
        case = Case(width, 4, x, x, skip=True, misaligned=late)
        report, aligned = checked(case), emu.run(aligned_like(case)).report
        ideal = case.rows * width * item
        for site in ("x", "skip", "scale", "y", "sum"):
            traffic = report.of(site)
            most = aligned.of(site).vector_requests
            in_phase = (site in late) == ("y" in late)
            assert traffic.vector_requests <= (1 if in_phase else 2) * most, site
            assert traffic.single_requests <= case.rows, site
            assert 32 * traffic.fetched_sectors <= 17 / 16 * ideal + 4 * case.rows * 32, site


def test_a_row_in_a_warp_needs_no_barrier_and_others_one() -> None:
    for width, most in ((64, 0), (65, 0), (256, 0), (1024, 0), (1023, 0), (4096, 1), (4097, 1), (16_384, 1)):
        rows = 2000 if width < 2000 else 200
        report = checked(Case(width, rows, "f16", "f16", device=emu.Device(90, 2, 232448, 1)))
        assert report.barriers <= most * rows


def test_the_emulator_sees_what_a_device_would_not_forgive() -> None:
    args, arrays, _ = emu.make(Case(512, 2, "f16", "f16"))
    whole = {name: (a.ctypes.data, a.nbytes, name == "y") for name, a in arrays.items()}
    assert emu.emulate(args, SM90, list(whole.values())).fault == b""
    for name, word in (("x", b"load from x: out of bounds"), ("y", b"store to y: out of bounds")):
        short = whole | {name: (whole[name][0], whole[name][1] - 16, name == "y")}
        assert word in emu.emulate(args, SM90, list(short.values())).fault
    read_only = whole | {"y": (*whole["y"][:2], False)}
    assert b"store to y" in emu.emulate(args, SM90, list(read_only.values())).fault


def test_launches_cover_the_row_and_fit_the_device() -> None:
    per_thread = {"many": 1, "thin": 1, "thick": 4}
    rows = (1, 2, 40, 132, 133, 5000, 10**7)
    widths = (1, 8, 9, 64, 128, 256, 257, 512, 1024, 4096, 4104, 8192, 16_384, 16_392, 50_257, 131_072, 2**20, 2**31)
    for device, count, width, x in itertools.product((SM75, SM80, SM90), rows, widths, ("f32", "f16")):
        report = emu.plan(Case(width, count, x, x, device=device))
        layout = emu.LAYOUTS[report.layout]
        vectors = width * emu.DTYPES[x].itemsize // 16
        assert report.reason
        assert 32 <= report.threads <= 512
        assert report.threads % 32 == 0
        assert report.threads % report.lanes == 0
        # A thread for each single element of an unaligned row.
        assert report.lanes >= 32 or width * emu.DTYPES[x].itemsize % 16 == 0
        assert report.cluster == 1 or device.compute >= 90
        assert report.cluster in (1, 2, 4, 8)
        assert report.blocks % report.cluster == 0
        assert 1 <= report.blocks < 2**31
        assert report.shared_bytes <= device.shared_bytes
        if layout in per_thread:
            assert report.lanes * report.cluster * per_thread[layout] >= vectors
            assert report.lanes <= 32 or report.lanes == report.threads


def test_few_long_rows_take_many_multiprocessors() -> None:
    assert emu.plan(Case(65_536, 1, "f16", "f16")).blocks == 8
    assert emu.plan(Case(65_536, 1, "f16", "f16", device=SM80)).blocks == 32
    assert emu.plan(Case(65_536, 1, "f16", "f16", device=SM80, workspace=False)).blocks == 1
    assert emu.plan(replace(Case(4096, 1, "f16", "f16"))).threads == 512
    assert emu.plan(Case(4096, 4096, "f16", "f16")).threads == 128
