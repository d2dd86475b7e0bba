"""The CUDA kernels on a GPU: against float64, in graphs, in chains, beyond 2^31 elements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import cuda_emulator as emu
import pytest
import torch

from . import cuda_kernel

PAIRS = [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")]
WIDTHS = [
    1,
    3,
    8,
    17,
    64,
    100,
    127,
    128,
    256,
    264,
    511,
    512,
    768,
    1000,
    1024,
    1100,
    2048,
    4096,
    4097,
    5120,
    8192,
    16_384,
]
WIDTHS += [16_392, 32_768, 50_257, 65_536, 131_072, 131_077, 262_144]


def run(case: emu.Case) -> None:
    made = cuda_kernel.norm(case)
    made.launch()
    torch.cuda.synchronize()
    cuda_kernel.check(made)


@pytest.mark.parametrize(("x", "params"), PAIRS)
def test_every_variant(x: str, params: str) -> None:
    options = itertools.product([False, True], emu.EPS_MODES, ["full", "one", "none"], ["none", "full"], [False, True])
    widths = itertools.cycle([8, 64, 200, 520, 2048, 8192, 17, 301, 5001])
    for before, mode, scale, bias, skip in options:
        run(emu.Case(next(widths), 7, x, params, before, mode, 1e-3, scale, bias, skip))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("x", "params"), PAIRS)
def test_widths(x: str, params: str, width: int) -> None:
    for rows in (1, 3, 257):
        if rows * width <= 2**24:
            run(emu.Case(width, rows, x, params, skip=width % 2 == 0))


@pytest.mark.parametrize("late", ["x", "skip", "y", "sum"])
def test_misaligned_and_strided(late: str) -> None:
    for width in (64, 1024, 1023, 8192, 70_001):
        run(emu.Case(width, 5, "f16", "f16", skip=True, misaligned=(late,)))
        run(emu.Case(width, 5, "f16", "f16", skip=True, misaligned=(late, late, late, "y")))
        run(emu.Case(width, 5, "bf16", "f32", skip=True, pad=3))


def test_more_than_2_to_the_31_elements() -> None:
    rows, width = 2**19 + 1, 4096
    x = torch.randn(1, width, device="cuda", dtype=torch.float16).expand(rows, width)
    y = torch.empty(rows, width, device="cuda", dtype=torch.float16)
    made = cuda_kernel.norm(emu.Case(width, 1, "f16", "f16", scale="none"))
    made.args.rows, made.args.x_stride, made.args.x, made.args.y = rows, 0, x.data_ptr(), y.data_ptr()
    made.launch()
    expected = torch.nn.functional.rms_norm(x[:1].float(), (width,), eps=1e-6)
    for at in (0, rows // 2, rows - 1):
        torch.testing.assert_close(y[at : at + 1].float(), expected, rtol=2e-3, atol=1e-4)
    assert torch.equal(y[0], y[rows - 1])


@pytest.mark.parametrize("width", [64, 4096, 65_536, 300_000])
def test_a_cuda_graph_replays_it(width: int) -> None:
    made = cuda_kernel.norm(emu.Case(width, 3, "bf16", "bf16", skip=True))
    made.launch()  # CUDA loads a kernel's code at its first launch, which a capture need not survive
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made.launch(stream)
        made.launch(stream)  # an early start must not overtake the one before
    for _ in range(3):
        made.x.copy_(torch.randn_like(made.x))
        graph.replay()
        torch.cuda.synchronize()
        cuda_kernel.check(made)


def test_chains_see_what_the_kernel_before_wrote() -> None:
    for width, rows in ((64, 512), (1024, 512), (4096, 512), (65_536, 512), (300_000, 2), (300_001, 2)):
        first = cuda_kernel.norm(emu.Case(width, rows, "f32", "f32"))
        second = cuda_kernel.norm(emu.Case(width, rows, "f32", "f32", scale="none"))
        if first.workspace.numel():  # of one stream, so of both
            second.args.workspace = first.args.workspace
        second.args.x = first.y.data_ptr()
        for _ in range(50):
            first.y.fill_(float("nan"))
            first.launch()
            second.launch()
        second.x.copy_(first.y)
        torch.cuda.synchronize()
        cuda_kernel.check(second)


def test_nothing_is_allocated_on_the_device() -> None:
    made = cuda_kernel.norm(emu.Case(4096, 64, "f16", "f16"))
    made.launch()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(10_000):
        made.launch()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == before


def test_in_place() -> None:
    for width in (64, 4096, 40_000):
        case = emu.Case(width, 9, "f16", "f16")
        made, apart = cuda_kernel.norm(case), cuda_kernel.norm(replace(case))
        apart.launch()
        made.args.y = made.x.data_ptr()
        made.launch()
        assert torch.equal(made.x, apart.y)


@pytest.mark.parametrize("width", [16_384, 65_536, 100_001, 300_000, 300_001, 2**22])
@pytest.mark.parametrize(("x", "params"), PAIRS)
def test_few_long_rows_with_a_workspace_and_without(x: str, params: str, width: int) -> None:
    for rows, skip, workspace in itertools.product((1, 5), (False, True), (False, True)):
        run(emu.Case(width, rows, x, params, bias="full", skip=skip, workspace=workspace))


def test_the_same_call_gives_the_same_bits() -> None:
    for width in (4096, 65_536, 300_000, 300_001, 2**22):
        made = cuda_kernel.norm(emu.Case(width, 1, "f32", "f32"))
        made.launch()
        first = made.y.clone()
        for fill in (0.0, 1e30):
            made.workspace.fill_(fill)
            made.launch()
            assert torch.equal(made.y, first)


def test_a_split_row_may_be_normalized_in_place() -> None:
    for width in (300_000, 300_001):
        case = emu.Case(width, 2, "f32", "f32")
        made, apart = cuda_kernel.norm(case), cuda_kernel.norm(replace(case))
        apart.launch()
        made.args.y = made.x.data_ptr()
        made.launch()
        assert torch.equal(made.x, apart.y)
