"""The TensorRT plugin library: its symbols, the plugins without TensorRT, and in TensorRT-RTX, all without a GPU."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_support as support

from rmsnorm_deploy import opset

TENSORRT = support.ROOT / "plugins" / "tensorrt"
rtx = pytest.mark.skipif(not support.HAS_RTX, reason=support.NO_RTX)


@pytest.fixture(scope="module")
def library() -> Path:
    return support.plugin_library()


@pytest.fixture(scope="module")
def host_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that calls the library as TensorRT does."""
    if not support.HAS_NVCC:
        pytest.skip("nvcc is not on this machine, and the build of the host check needs it")
    folder = tmp_path_factory.mktemp("host_check")
    configure = ["cmake", "-S", str(TENSORRT), "-B", str(folder), "-DRMSNORM_SM=89"]
    build = ["cmake", "--build", str(folder), "--target", "rmsnorm_tensorrt_host_check", "rmsnorm_fake_nvinfer"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stderr + done.stdout
    return folder / "rmsnorm_tensorrt_host_check"


def symbols(library: Path, *options: str) -> list[str]:
    done = subprocess.run(["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True)
    return [line.split()[-1].split("@")[0] for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not on this machine")
def test_no_symbol_of_tensorrt_or_cuda_is_left_undefined(library: Path) -> None:
    undefined = symbols(library, "--undefined-only")
    foreign = [s for s in undefined if any(w in s.lower() for w in ("nvinfer", "plugin", "cuda", "tensorrt"))]
    assert foreign == []
    assert {"getCreators", "setLoggerFinder"} <= set(symbols(library, "--defined-only"))


def test_the_plugins_hold_without_tensorrt(library: Path, host_check: Path) -> None:
    done = subprocess.run([str(host_check), str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    named = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("creator ")]
    assert named == [variant.name for variant in opset.variants()]


def test_the_second_library_registers_all_plugins_while_it_loads(library: Path, host_check: Path) -> None:
    second = library.with_name("librmsnorm_deploy_tensorrt_ort.so")
    fake = next(host_check.parent.glob("libnvinfer.so.10"))
    load = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", load, str(fake), str(second)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"registered rmsnorm_deploy::{v.name}" for v in opset.variants()]
    alone = subprocess.run([sys.executable, "-c", load, str(second)], capture_output=True, text=True)
    assert alone.returncode == 0
    assert "which the process has not loaded" in alone.stderr


@rtx
def test_rtx_lists_all_creators(library: Path) -> None:
    expected = [f"rmsnorm_deploy::{variant.name}::1" for variant in opset.variants()]
    assert sorted(support.in_child("creators", str(library))) == sorted(expected)


def build(folder: Path, library: Path | None, models: dict[str, onnx.ModelProto]) -> dict[str, dict[str, Any]]:
    for name, model in models.items():
        onnx.save(model, folder / f"{name}.onnx")
    files = [str(folder / f"{name}.onnx") for name in models]
    answers = support.in_child("build", "-" if library is None else str(library), *files)
    return dict(zip(models, answers, strict=True))


@rtx
def test_every_variant_and_dtype_is_a_plugin_layer_and_builds(library: Path, tmp_path: Path) -> None:
    variants = [variant for variant in opset.variants() if not variant.double]
    models = {}
    for variant, (x, scale) in itertools.product(variants, support.PAIRS):
        if variant.before_cast and x == support.FLOAT:
            continue
        models[f"{variant.name}-{x.name}-{scale.name}"] = support.norm_model(variant.name, x, scale)
    for name, answer in build(tmp_path, library, models).items():
        op, x, scale = name.split("-")
        variant = opset.VARIANT_BY_NAME[op]
        assert (answer["plugins"], answer["built"], answer["errors"]) == (["norm"], True, []), (name, answer)
        y = x if variant.before_cast else scale
        types = {"FLOAT16": "HALF", "BFLOAT16": "BF16", "FLOAT": "FLOAT"}
        assert answer["outputs"]["y"] == [types[y], [-1, -1, 64]], name
        if variant.skip:
            assert answer["outputs"]["sum"] == [types[x], [-1, -1, 64]], name


@rtx
def test_without_the_plugin_the_function_bodies_build(tmp_path: Path) -> None:
    models = {v.name: support.norm_model(v.name) for v in opset.variants() if not v.double}
    for name, answer in build(tmp_path, None, models).items():
        assert answer["plugins"] == [], name
        assert (answer["layers"] > 3, answer["built"]) == (True, True), (name, answer)


@rtx
def test_ranks_axes_and_scale_shapes(library: Path, tmp_path: Path) -> None:
    axes = ("a", "b", "c", "d", "e", "f", "g", 64)
    shapes = {f"rank{n}": support.norm_model("RMSNorm", shape=axes[8 - n :]) for n in range(1, 9)}
    models = shapes | {
        "axes": support.norm_model("RMSNorm", shape=("a", 4, 16), axis=-2),
        "ones": support.norm_model("RMSNorm", shape=("a", 4, 16), axis=-2, scale_shape=(1, 4, 16)),
        "single": support.norm_model("RMSNorm", scale_shape=(1,)),
        "odd": support.norm_model("RMSNorm", shape=("a", 63)),
    }
    for name, answer in build(tmp_path, library, models).items():
        assert (answer["plugins"], answer["built"]) == (["norm"], True), (name, answer)


@rtx
def test_an_unknown_namespace_or_version_falls_back_to_the_body(library: Path, tmp_path: Path) -> None:
    models = {
        "namespace": support.norm_model("RMSNorm", plugin_namespace="elsewhere"),
        "version": support.norm_model("RMSNorm", plugin_version="2"),
    }
    for name, answer in build(tmp_path, library, models).items():
        assert (answer["plugins"], answer["built"]) == ([], True), name


@rtx
def test_what_the_plugin_cannot_do_is_refused(library: Path, tmp_path: Path) -> None:
    models = {
        "double": support.norm_model("RMSNorm_double", x=support.ir.DataType.DOUBLE, scale=support.ir.DataType.DOUBLE),
        "width": support.norm_model("RMSNorm", scale_shape=(32,)),
        "mode": support.norm_model("RMSNorm_clamp", epsilon_mode=None),
    }
    for name, answer in build(tmp_path, library, models).items():
        assert not answer["built"], name
        assert answer["errors"], name


@rtx
def test_without_body_and_plugin_the_model_is_refused(tmp_path: Path) -> None:
    answer = build(tmp_path, None, {"bare": support.norm_model("RMSNorm", with_function=False)})["bare"]
    assert not answer["parsed"]


@pytest.mark.slow
def test_the_registry_of_full_tensorrt_11_takes_the_library(library: Path, tmp_path: Path) -> None:
    packages = ["tensorrt-lean-cu13-libs==11.4.0.106", "tensorrt-lean-cu13-bindings==11.4.0.106"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), *packages]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"the lean runtime cannot be installed: {done.stderr.strip()[-200:]}")
    script = """
import ctypes, sys, numpy as np
sys.path.insert(0, sys.argv[1])
ctypes.CDLL(sys.argv[1] + "/tensorrt_lean_libs/libnvinfer_lean.so.11", mode=ctypes.RTLD_GLOBAL)
import tensorrt_lean_bindings.tensorrt_lean as trt
registry = trt.get_plugin_registry()
registry.load_library(sys.argv[2])
T = trt.PluginFieldType
for creator in registry.all_creators:
    if creator.plugin_namespace != "rmsnorm_deploy" or creator.name.endswith("_double"):
        continue
    mode = next((m for m in ("outside", "clamp") if "_" + m in creator.name), "inside")
    order = "before_cast" if creator.name.endswith("_before_cast") else "after_cast"
    fields = [
        ("axis", np.array([-1], np.int32), T.INT32),
        ("epsilon", np.array([1e-5], np.float32), T.FLOAT32),
        ("epsilon_low", np.array([0], np.float32), T.FLOAT32),
        ("epsilon_mode", mode.encode(), T.CHAR),
        ("scale_order", order.encode(), T.CHAR),
        ("stash_type", np.array([1], np.int32), T.INT32),
    ]
    made = [trt.PluginField(*field) for field in fields]
    assert creator.create_plugin("layer", trt.PluginFieldCollection(made), trt.TensorRTPhase.RUNTIME), creator.name
    for index in range(len(made)):
        some = made[:index] + made[index + 1:]
        assert not creator.create_plugin("layer", trt.PluginFieldCollection(some), trt.TensorRTPhase.RUNTIME)
    print(creator.name)
"""
    command = [sys.executable, "-c", script, str(tmp_path), str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 24
