"""Few long rows split over independent blocks: two kernels and a workspace between them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import cuda_emulator as emu
import numpy as np
import pytest
from cuda_emulator import SM75, SM80, SM90, Case, checked

PAIRS = [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]
# The least width that has a workspace, which a tactic splits, and one whose rows are not aligned.
ALIGNED, ODD = 16_384, 16_385
SPLIT = emu.Device(SM80.compute, SM80.multiprocessors, SM80.shared_bytes, 5)


def split(case: Case, values: np.ndarray | None = None) -> emu.Report:
    """The case, checked against float64, and surely split."""
    report = checked(case, values)
    assert report.slices > 1, case
    assert report.blocks == case.rows * report.slices
    return report


@pytest.mark.parametrize(("x", "params"), PAIRS)
def test_every_variant_is_what_float64_says(x: str, params: str) -> None:
    modes = itertools.cycle(emu.EPS_MODES)
    options = itertools.product([False, True], ["full", "one", "none"], ["none", "full", "one"], [False, True])
    for before, scale, bias, skip in options:
        if x == "f32" and before:
            continue
        made = Case(ALIGNED, 2, x, params, before, next(modes), 1e-3, scale, bias, skip, device=SPLIT)
        split(made)
        if bias != "one":
            split(replace(made, width=ODD, rows=1))


@pytest.mark.parametrize("x", ["f32", "f16"])
@pytest.mark.parametrize("device", [SM75, SM80, SM90], ids=["sm75", "sm80", "sm90"])
def test_widths_that_the_table_splits(x: str, device: emu.Device) -> None:
    for width in (262_144, 262_149, 300_000) if device is SM90 else (65_536, 65_541, 131_072):
        report = split(Case(width, 1, x, x, skip=width % 8 != 0, device=device))
        assert emu.LAYOUTS[report.layout] == "split"


@pytest.mark.parametrize("late", ["x", "skip", "y", "sum", "scale", "bias"])
def test_misaligned_pointers_and_strided_rows(late: str) -> None:
    split(Case(ALIGNED, 2, "f16", "f16", bias="full", skip=True, misaligned=(late,), device=SPLIT))
    split(Case(ALIGNED, 3, "bf16", "f32", skip=True, pad=8, device=SPLIT))
    split(Case(ODD, 2, "bf16", "f32", skip=True, pad=3, device=SPLIT))


@pytest.mark.parametrize("in_place", ["y=x", "sum=x", "sum=skip", "y=skip"])
def test_in_place(in_place: str) -> None:
    for width in (ALIGNED, ODD):
        split(Case(width, 2, "f16", "f16", skip=in_place != "y=x", in_place=in_place, device=SPLIT))


def test_one_row_repeated() -> None:
    split(Case(ALIGNED, 3, "f16", "f16", skip=True, repeat_x=True, device=SPLIT))


def test_nan_and_infinity_reach_every_slice_of_their_row() -> None:
    values = np.ones((4, ALIGNED))
    values[0] = 0
    values[1, ALIGNED - 1] = np.nan
    values[2, 0] = np.inf
    values[3, 5] = 1e4
    split(Case(ALIGNED, 4, "f32", "f32", device=SPLIT), values)


@pytest.mark.parametrize("x", ["f32", "f16"])
def test_traffic_is_each_tensor_once_and_x_once_more_from_the_cache(x: str) -> None:
    item = emu.DTYPES[x].itemsize
    for width, rows, skip in itertools.product((ALIGNED, 65_536, ODD), (1, 3), (False, True)):
        report = split(Case(width, rows, x, x, skip=skip, bias="full", device=SPLIT))
        ideal = rows * width * item
        once = {"x": ideal, "y": ideal, "x_again": ideal, "skip_again": 0}
        once |= {"skip": ideal if skip else 0, "sum": ideal if skip else 0}
        assert {site: report.of(site).bytes for site in once} == once
        # A sum written by each block, and read by each block of its row.
        assert report.of("partials").bytes == 4 * report.blocks * (1 + report.slices)
        for site in ("x", "skip", "scale", "bias", "y", "sum", "x_again"):
            traffic = report.of(site)
            if width == ODD:
                assert 32 * traffic.fetched_sectors <= 17 / 16 * ideal + 4 * 32 * rows * report.slices, site
            else:
                assert traffic.sectors <= traffic.least_sectors, site
                assert traffic.bytes in (0, ideal), site


def test_the_same_call_gives_the_same_bits() -> None:
    """Whatever was in the workspace before."""
    case = Case(ALIGNED, 2, "f32", "f32", skip=True, device=SPLIT)
    results = []
    for fill in (0.0, np.nan, 1e30):
        args, arrays, rows = emu.make(case)
        arrays["workspace"][:] = fill
        assert emu.emulate(args, case.device, emu.buffers_of(arrays)).fault == b""
        results.append(rows["y"].copy())
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_a_workspace_that_is_absent_short_or_misaligned_is_done_without() -> None:
    case = Case(65_536, 1, "f16", "f16", device=SM80)
    assert checked(replace(case, workspace=False)).slices == 0
    for short, late in ((1, 0), (0, 1)):
        args, arrays, rows = emu.make(case)
        args.workspace_bytes -= short
        args.workspace += late
        report = emu.emulate(args, case.device, emu.buffers_of(arrays))
        assert (report.fault, report.slices) == (b"", 0)
        emu.compare(case, rows["y"].astype(np.float64), emu.truth(case, rows["x"], None, arrays["scale"], None))


def test_a_residual_whose_sum_nobody_wants_is_not_split() -> None:
    assert checked(Case(65_536, 1, "f16", "f16", skip=True, sum_given=False, device=SM80)).slices == 0


def test_only_few_rows_are_split() -> None:
    for device, width, most in ((SM80, 65_536, 27), (SM75, 65_536, 10), (SM90, 262_144, 8)):
        assert emu.plan(Case(width, most, "f16", "f16", device=device)).slices > 1
        assert emu.plan(Case(width, most + 1, "f16", "f16", device=device)).slices == 0
        assert emu.plan(Case(width // 2, 1, "f16", "f16", device=device)).slices == 0


def test_the_blocks_fill_the_card_and_the_workspace_has_a_sum_for_each() -> None:
    for device, x in itertools.product((SM75, SM80, SM90), ("f32", "f16")):
        for width, rows in itertools.product((262_144, 2**22, 2**31, 2**31 + 1), (1, 5, 8)):
            case = Case(width, rows, x, x, device=device)
            report = emu.plan(case)
            vectors = width * emu.DTYPES[x].itemsize // 16
            assert report.slices > 1
            assert report.blocks >= min(0.7 * device.multiprocessors, vectors // 256)
            assert 4 * report.blocks <= emu.workspace_bytes(emu.Args(width=width))


def test_the_workspace_is_none_for_rows_that_no_card_splits() -> None:
    assert emu.workspace_bytes(emu.Args(width=ALIGNED - 1)) == 0
    assert 0 < emu.workspace_bytes(emu.Args(width=ALIGNED)) <= 2**14
    assert emu.workspace_bytes(emu.Args(width=2**40)) == emu.workspace_bytes(emu.Args(width=ALIGNED))


def test_the_emulator_sees_a_short_workspace_and_threads_that_meet_in_global_memory() -> None:
    case = Case(ALIGNED, 1, "f32", "f32", device=SPLIT)
    args, arrays, _ = emu.make(case)
    whole = emu.buffers_of(arrays)
    at = arrays["workspace"].ctypes.data
    short = [(base, 8 if base == at else size, writable) for base, size, writable in whole]
    assert b"store to partial sums: out of bounds" in emu.emulate(args, case.device, short).fault
    both = [(base, size, True) for base, size, _ in whole]
    args.width = args.scale_count = ALIGNED - 32
    args.y = args.x + 16  # a thread reads what its neighbour writes
    assert b"race in global memory" in emu.emulate(args, case.device, both).fault
