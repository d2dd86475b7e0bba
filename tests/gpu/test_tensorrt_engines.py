"""Engines on a GPU: float64 parity of every variant and dtype, graphs, threads, memory, and both variants timed."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from pathlib import Path
from typing import Any

import cuda_emulator as emu
import numpy as np
import pytest
import tensorrt_support as support
import torch

from rmsnorm_deploy import opset
from rmsnorm_deploy.bundle import open_bundle
from rmsnorm_deploy.engine import EngineOptions, build_engines
from rmsnorm_deploy.export.pipeline import export_model
from rmsnorm_deploy.parity import run_parity
from rmsnorm_deploy.runtime import open_session
from rmsnorm_deploy.runtime.cuda import CudaDevice, no_gpu_reason
from rmsnorm_deploy.runtime.status import RTX_BUILDS_FOR

RUNTIME = "tensorrt" if importlib.util.find_spec("tensorrt") else "tensorrt-rtx"
SHORT = {support.FLOAT: "f32", support.HALF: "f16", support.BFLOAT: "bf16"}
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def why_not() -> str | None:
    """Why no engine can run here, apart from the GPU that the whole folder needs."""
    if RUNTIME == "tensorrt":
        return None
    if not support.HAS_RTX:
        return "neither tensorrt nor tensorrt_rtx is installed"
    here = CudaDevice().sm if no_gpu_reason() is None else None
    if here not in (None, *RTX_BUILDS_FOR):
        return f"tensorrt is not installed, and TensorRT-RTX has no engines for SM {here}"
    return None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def session(folder: Path, plugin: str = "always", model: Any = None, **options: Any) -> Any:
    if model is not None:
        support.bundle_of(model, folder)
        build_engines(folder, EngineOptions(RUNTIME, plugin=plugin, plugin_library=support.plugin_library()))
    return open_session(open_bundle(folder), RUNTIME, allow_host_code=True, **options)


def check(name: str, x: str, scale: str, feeds: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
    variant = opset.VARIANT_BY_NAME[name]
    width = feeds["x"].shape[-1]
    rows = feeds["x"].numel() // width
    case = emu.Case(width, rows, x, scale, variant.before_cast, variant.mode, skip=variant.skip)
    parameter = np.linspace(0.5, 1.5, width).astype(np.float32).astype(emu.DTYPES[scale])
    flat = {key: value.double().cpu().numpy().reshape(rows, width) for key, value in (feeds | out).items()}
    expected = emu.truth(case, flat["x"], flat.get("skip"), parameter, parameter if variant.bias else None)
    assert (np.abs(flat["y"] - expected.y) <= expected.slack).all(), name
    if variant.skip:
        np.testing.assert_array_equal(flat["sum"], expected.sum)


def feeds_of(variant: opset.Variant, x: str, batch: int, seq: int) -> dict[str, torch.Tensor]:
    names = ["x"] + (["skip"] if variant.skip else [])
    return {name: torch.randn(batch, seq, 64, device="cuda").to(TORCH[x]) for name in names}


@pytest.mark.parametrize("pair", support.PAIRS, ids=lambda pair: "-".join(SHORT[t] for t in pair))
def test_every_variant_against_float64_at_batch_1_3_and_most(pair: Any, tmp_path: Path) -> None:
    x, scale = (SHORT[dtype] for dtype in pair)
    for variant in opset.variants():
        if variant.double or (variant.before_cast and x == "f32"):
            continue
        opened = session(tmp_path / variant.name, model=support.norm_model(variant.name, *pair))
        for batch, seq in ((1, 1), (3, 5), (16, 16)):
            feeds = feeds_of(variant, x, batch, seq)
            check(variant.name, x, scale, feeds, opened.run(feeds))


def test_a_cuda_graph_gives_the_same(tmp_path: Path) -> None:
    variant = opset.VARIANT_BY_NAME["SkipRMSNorm"]
    opened = session(tmp_path / "b", model=support.norm_model(variant.name), cuda_graph=True)
    for batch, seq in itertools.product((1, 3, 16), (1, 16)):
        for _ in range(2):
            feeds = feeds_of(variant, "f16", batch, seq)
            check(variant.name, "f16", "f16", feeds, opened.run(feeds))


def test_threads_have_contexts_of_their_own(tmp_path: Path) -> None:
    variant = opset.VARIANT_BY_NAME["RMSNorm"]
    opened = session(tmp_path / "b", model=support.norm_model(variant.name))
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(50):
                feeds = feeds_of(variant, "f16", 1 + (seed + turn) % 16, 8)
                check(variant.name, "f16", "f16", feeds, opened.run(feeds))
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_memory_does_not_grow_over_10000_runs(tmp_path: Path) -> None:
    variant = opset.VARIANT_BY_NAME["SkipRMSNorm"]
    opened = session(tmp_path / "b", model=support.norm_model(variant.name))
    feeds = feeds_of(variant, "f16", 4, 16)
    for _ in range(100):
        opened.run(feeds)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(10_000):
        opened.run(feeds)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 2**21


def test_auto_times_both_variants_and_keeps_the_faster(tmp_path: Path) -> None:
    folder = support.bundle_of(support.norm_model("RMSNorm"), tmp_path / "b")
    said: list[str] = []
    kept = build_engines(folder, EngineOptions(RUNTIME, plugin_library=support.plugin_library()), said.append)
    assert len(kept) == 1
    assert kept[0].milliseconds is not None
    assert sum(line.endswith(" ms") for line in said) == 2
    assert [path.name for path in sorted((folder / "engines").glob("*.engine"))] == [kept[0].path.name]


@pytest.mark.parametrize("plugin", ["always", "never"])
def test_parity_judges_an_engine_of_a_whole_model(plugin: str, tmp_path: Path) -> None:
    recipe = support.ROOT / "export" / "transformer_block.py"
    bundle = export_model(recipe, out_dir=tmp_path / "b", check=False, benchmark=False)
    build_engines(bundle, EngineOptions(RUNTIME, plugin=plugin, plugin_library=support.plugin_library()))
    (judged,) = (b for b in run_parity(bundle, backends=[RUNTIME]).backends if b.name == RUNTIME)
    assert judged.verdict.startswith("pass"), judged
