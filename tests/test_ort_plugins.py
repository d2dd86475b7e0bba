"""Providers that ONNX Runtime loads from packages of their own, TensorRT-RTX's above all.

Its package, `onnxruntime-ep-nv-tensorrt-rtx`, can be installed and registered without a GPU, and finds no device then.
The rest of the way is run for real with a provider of the same kind that runs on the CPU, `onnxruntime-ggml`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tensorrt_support as support

from rmsnorm_deploy.bundle import open_bundle
from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.runtime import available, open_session, ort_plugins
from rmsnorm_deploy.runtime.cuda import no_gpu_reason
from rmsnorm_deploy.runtime.ort_plugins import TENSORRT_RTX, create_session
from rmsnorm_deploy.runtime.ort_providers import resolve_providers

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
MODULE = ort_plugins.PLUGINS[TENSORRT_RTX]


@pytest.fixture(autouse=True)
def _nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_plugins, "_REGISTERED", set())


@pytest.fixture
def bundle(tmp_path: Path) -> Any:
    return open_bundle(support.bundle_of(support.norm_model("RMSNorm", support.FLOAT, support.FLOAT), tmp_path / "b"))


def test_without_the_package_the_refusal_says_what_to_install(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    wanted = f"{MODULE} is not installed: pip install onnxruntime-ep-nv-tensorrt-rtx"
    with pytest.raises(BackendUnavailable, match=wanted):
        open_session(bundle, "onnxruntime", providers=[TENSORRT_RTX, "CPUExecutionProvider"])
    assert said_of_it() == (False, f"{MODULE} is not installed", "pip install onnxruntime-ep-nv-tensorrt-rtx")


def said_of_it() -> tuple[bool, str, str | None]:
    status = next(status for status in available() if status.name == f"onnxruntime {TENSORRT_RTX}")
    return status.available, status.detail, status.install


@pytest.mark.parametrize("written", [True, False])
def test_a_library_that_does_not_load_is_one_line(
    written: bool, bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libprovider.so"
    if written:
        library.write_text("no library")
    package = types.SimpleNamespace(get_library_path=lambda: str(library), __version__="0.5.0")
    monkeypatch.setitem(sys.modules, MODULE, package)
    with pytest.raises(
        BackendUnavailable, match=f"{TENSORRT_RTX} 0.5.0 is installed and cannot be registered"
    ) as caught:
        open_session(bundle, "onnxruntime", providers=[TENSORRT_RTX])
    assert str(library) in str(caught.value)
    assert "\n" not in str(caught.value)
    package.__spec__ = object()  # it is there, as far as the import system is asked
    assert said_of_it() == (False, str(caught.value), "an NVIDIA GPU and driver that it supports")


def test_an_onnxruntime_before_plugin_providers_says_so() -> None:
    old = types.SimpleNamespace(__version__="1.20.1", get_available_providers=lambda: ["CPUExecutionProvider"])
    with pytest.raises(BackendUnavailable, match=r"onnxruntime 1\.20\.1 has no plugin providers"):
        create_session(old, Path("m.onnx"), None, [(TENSORRT_RTX, {})])


def test_what_is_compiled_is_kept_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    asked = [TENSORRT_RTX, (TENSORRT_RTX, {"nv_runtime_cache_path": "elsewhere", "enable_cuda_graph": "1"})]
    default, chosen = resolve_providers([], asked, {}, tmp_path / "cache")
    assert default == (TENSORRT_RTX, {"nv_runtime_cache_path": str(tmp_path / "cache")})
    assert (tmp_path / "cache").is_dir()
    assert chosen == (TENSORRT_RTX, {"nv_runtime_cache_path": "elsewhere", "enable_cuda_graph": "1"})


# ---- the interface of ONNX Runtime 1.32, with two devices


class FakeOptions:
    def __init__(self) -> None:
        self.added: list[tuple[Any, dict[str, str]]] = []

    def has_providers(self) -> bool:
        return bool(self.added)

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        self.added.extend((device, options) for device in devices)


class FakeOrt:
    __version__ = "1.32.0"

    def __init__(self) -> None:
        self.devices: list[Any] = []
        self.registered: list[tuple[str, str]] = []
        self.sessions: list[dict[str, Any]] = []
        self.capi = types.SimpleNamespace(onnxruntime_pybind11_state=types.SimpleNamespace())

    def get_available_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def get_ep_devices(self) -> list[Any]:
        return self.devices

    def register_execution_provider_library(self, name: str, path: str) -> None:
        self.registered.append((name, path))
        self.devices = [types.SimpleNamespace(ep_name=name, number=number) for number in range(2)]

    def InferenceSession(self, *arguments: Any, **options: Any) -> None:  # noqa: N802
        self.sessions.append(options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeOrt:
    monkeypatch.setitem(sys.modules, MODULE, types.SimpleNamespace(get_library_path=lambda: "lib.so"))
    return FakeOrt()


def test_the_stand_in_has_no_method_that_onnxruntime_lacks() -> None:
    for fake_type, real in ((FakeOrt, ort), (FakeOptions, ort.SessionOptions)):
        assert [name for name in vars(fake_type) if not name.startswith("_") and not hasattr(real, name)] == []


def test_the_library_is_registered_once_and_the_first_device_taken(fake: FakeOrt) -> None:
    for _ in range(2):
        options = FakeOptions()
        create_session(
            fake, Path("m"), options, [(TENSORRT_RTX, {"enable_cuda_graph": 1}), ("CPUExecutionProvider", {})]
        )
        assert [(device.number, given) for device, given in options.added] == [(0, {"enable_cuda_graph": "1"})]
    assert fake.registered == [(TENSORRT_RTX, "lib.so")]
    assert fake.sessions == [{"enable_fallback": 0}] * 2


def test_device_id_chooses_the_device(fake: FakeOrt) -> None:
    options = FakeOptions()
    create_session(fake, Path("m"), options, [(TENSORRT_RTX, {"device_id": 1})])
    assert [(device.number, given) for device, given in options.added] == [(1, {})]
    for wrong in (2, -1, "one"):
        with pytest.raises(BackendUnavailable, match=f"no device_id '{wrong}' here: it has 0 to 1"):
            create_session(fake, Path("m"), FakeOptions(), [(TENSORRT_RTX, {"device_id": wrong})])


def test_options_that_have_the_device_already_are_left_and_others_refused(fake: FakeOrt) -> None:
    options = FakeOptions()
    for _ in range(2):
        create_session(fake, Path("m"), options, [(TENSORRT_RTX, {})])
    assert len(options.added) == 1
    with pytest.raises(InputError, match="session_options name other providers"):
        create_session(fake, Path("m"), options, [(TENSORRT_RTX, {"device_id": 1})])


def test_beside_a_provider_of_the_build_onnxruntime_finds_both_by_name(fake: FakeOrt) -> None:
    providers: list[tuple[str, dict[str, Any]]] = [(TENSORRT_RTX, {}), ("CUDAExecutionProvider", {})]
    create_session(fake, Path("m"), FakeOptions(), providers)
    assert fake.sessions == [{"providers": providers, "enable_fallback": 0}]


# ---- real packages, each in a process of its own: what is registered stays so until the process ends


def install(folder: Path, *packages: str) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{packages[0]} cannot be installed: {done.stderr.strip()[-200:]}")
    return folder


def run_with(packages: Path, script: str, *arguments: str, libraries: Path | None = None) -> str:
    paths = [str(packages), str(support.ROOT), str(support.ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


REFUSED = f"""
import sys
from rmsnorm_deploy.bundle import open_bundle
from rmsnorm_deploy.errors import BackendUnavailable
for _ in range(2):
    try:
        open_bundle(sys.argv[1]).session("onnxruntime", providers=["{TENSORRT_RTX}", "CPUExecutionProvider"])
    except BackendUnavailable as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(no_gpu_reason() is None, reason="says what happens without a GPU")
@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not on this machine, and the stand-in driver needs it")
def test_the_real_package_without_a_driver_and_without_a_device(bundle: Any, tmp_path: Path) -> None:
    packages = install(tmp_path / "packages", "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0")
    folder = packages / MODULE
    said = run_with(packages, REFUSED, str(bundle.path)).splitlines()
    assert len(said) == 2
    assert all(f"{TENSORRT_RTX} 0.5.0 is installed and cannot be registered" in line for line in said)
    assert all("libcuda.so.1: cannot open shared object file" in line for line in said)
    libraries = driver_without_devices(folder, tmp_path / "driver")
    said = run_with(packages, REFUSED, str(bundle.path), libraries=libraries).splitlines()
    assert said == [f"{TENSORRT_RTX} is installed and registered, and finds no device here that it runs on"] * 2


def driver_without_devices(package: Path, folder: Path) -> Path:
    """Libraries of the driver's names whose functions all fail, so that the package's own library loads."""
    folder.mkdir()
    names: set[str] = set()
    for library in package.glob("*.so*"):
        done = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True)
        names |= {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}
    for soname, prefix in (("libcuda.so.1", "cu"), ("libnvidia-ml.so.1", "nvml")):
        functions = sorted(n for n in names if n.startswith(prefix) and n[len(prefix)].isupper())
        source = folder / f"{prefix}.c"
        source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in functions))
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(folder / soname), str(source)]
        subprocess.run(command, check=True)
    (folder / "libcudart.so.13").symlink_to(next(package.glob("libcudart.so.13.*")))
    return folder


ON_CPU = """
import sys, types
import numpy as np
import onnxruntime_ggml
from rmsnorm_deploy.bundle import open_bundle
from rmsnorm_deploy.runtime import ort_plugins
# Its package names the function library_path, and the provider "ggml".
sys.modules["adapted"] = types.SimpleNamespace(get_library_path=onnxruntime_ggml.library_path)
ort_plugins.PLUGINS["ggml"] = "adapted"
bundle = open_bundle(sys.argv[1])
x = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
expected = bundle.session("onnxruntime", custom_ops=False).run({"x": x})["y"]
import onnxruntime
options = onnxruntime.SessionOptions()
others = ["CPUExecutionProvider", "AzureExecutionProvider"]
for asked in (["ggml"], [("ggml", {"threads": 2})], ["ggml", others[0]], ["ggml", others[1]]):
    session = bundle.session("onnxruntime", providers=asked, custom_ops=False)
    np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-6)
    print(session.providers[0], session._session.get_provider_options()["ggml"])
for _ in range(2):
    session = bundle.session("onnxruntime", providers=["ggml"], session_options=options, custom_ops=False)
    print(session.providers[0])
"""


@pytest.mark.slow
def test_a_real_plugin_provider_runs_a_bundle(bundle: Any, tmp_path: Path) -> None:
    packages = install(tmp_path / "packages", "onnxruntime-ggml==0.2.0")
    said = [line for line in run_with(packages, ON_CPU, str(bundle.path)).splitlines() if line.startswith("ggml")]
    assert said == ["ggml {}", "ggml {'threads': '2'}", "ggml {}", "ggml {}", "ggml", "ggml"]


@pytest.mark.gpu
def test_gpu_tensorrt_rtx_runs_a_bundle_from_cpu_and_cuda_tensors(bundle: Any, tmp_path: Path) -> None:
    import torch

    if no_gpu_reason() is not None:
        pytest.skip(no_gpu_reason() or "")
    pytest.importorskip(MODULE, reason=f"{MODULE} is not installed: {ort_plugins.install(TENSORRT_RTX)}")
    session = open_session(
        bundle, "onnxruntime", providers=[TENSORRT_RTX, "CPUExecutionProvider"], engine_cache=tmp_path / "cache"
    )
    assert session.providers[0] == TENSORRT_RTX
    weight = torch.linspace(0.5, 1.5, 64, dtype=torch.float64)
    for shape in ((1, 1, 64), (3, 5, 64), (16, 16, 64)):
        x = torch.randn(shape)
        expected = torch.nn.functional.rms_norm(x.double(), (64,), weight, 1e-6).float()
        torch.testing.assert_close(session(x)[0], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(session(x.cuda())[0].cpu(), expected, rtol=1e-5, atol=1e-5)
    assert any((tmp_path / "cache").iterdir())
