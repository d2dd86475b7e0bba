"""The TensorRT session. Everything but the GPU itself is tested against a stand-in that computes on the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.runtime import open_session, trust
from rmsnorm_deploy.runtime.cuda import no_gpu_reason
from rmsnorm_deploy.runtime.engines import (
    EngineRecord,
    as_metadata,
    check_dtypes,
    check_tensors,
    choose_engine,
    mismatch,
    model_identity,
    read_engines,
)
from rmsnorm_deploy.runtime.lru import LRU
from rmsnorm_deploy.runtime.profiles import ShapeRange, choose_profile, parse_profiles
from rmsnorm_deploy.runtime.signature import Signature
from rmsnorm_deploy.runtime.tensorrt_session import TensorRTSession

SMALL = {"x": {"min": [1, 4], "opt": [2, 4], "max": [8, 4]}}
LARGE = {"x": {"min": [4, 4], "opt": [16, 4], "max": [32, 4]}}


def tensor(name: str, dtype: str = "float32") -> dict[str, Any]:
    return {"name": name, "path": name, "dtype": dtype, "shape": ["batch", 4]}


def manifest(dtype: str = "float32") -> dict[str, Any]:
    signature = {"parameters": [], "inputs": [tensor("x", dtype)], "constants": [], "outputs": [tensor("y", dtype)]}
    files = {name: {"sha256": name} for name in ("model.onnx", "model.onnx.data", "program.pt2")}
    return {"format": 1, "signature": signature, "dims": {}, "files": files}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record(folder: Path = Path("engines"), name: str = "e", **changes: Any) -> EngineRecord:
    fields: dict[str, Any] = dict(  # noqa: C408
        name=name, path=folder / f"{name}.engine", sha256=sha(b"engine"), model_sha256=model_identity(manifest()),
        runtime="tensorrt", runtime_version="10.14.1.48",
        version_compatible=False, sm=(89,), precision="fp32", plugin=None, profiles=parse_profiles([SMALL, LARGE]),
        inputs={"x": "float32"}, outputs={"y": "float32"}, milliseconds=None,
    )  # fmt: skip
    return EngineRecord(**{**fields, **changes})


def write_engine(bundle: Path, name: str = "e", **changes: Any) -> EngineRecord:
    folder = bundle / "engines"
    folder.mkdir(exist_ok=True)
    written = record(folder, name, **changes)
    written.path.write_bytes(b"engine")
    (folder / f"{name}.json").write_text(json.dumps(as_metadata(written)), encoding="utf-8")
    return written


def fake_bundle(path: Path, described: dict[str, Any] | None = None) -> Any:
    return types.SimpleNamespace(
        path=path, manifest=described or manifest(), model_path=path / "model.onnx", eager=None, program=lambda: None
    )


# --- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "profile"), [(1, 0), (2, 0), (5, 0), (6, 1), (8, 1), (9, 1), (32, 1)])
def test_the_profile_tuned_for_the_nearest_shape_is_chosen(batch, profile):
    assert choose_profile(parse_profiles([SMALL, LARGE]), {"x": (batch, 4)}, "e") == profile


@pytest.mark.parametrize("shape", [(33, 4), (0, 4), (2, 5), (2,)])
def test_a_shape_outside_every_profile_names_input_shape_and_profiles(shape):
    with pytest.raises(InputError) as caught:
        choose_profile(parse_profiles([SMALL, LARGE]), {"x": shape}, "engine e")
    given = "x".join(map(str, shape))
    assert f"no profile of engine e takes these shapes: profile 0 takes 'x' from 1x4 to 8x4, not {given}; " in str(
        caught.value
    )
    assert "profile 1 takes 'x' from 4x4 to 32x4" in str(caught.value)


def test_inputs_that_no_profile_names_are_static_and_fit():
    assert choose_profile([], {"x": (2, 4)}, "e") == 0
    assert choose_profile(parse_profiles([SMALL]), {"x": (2, 4), "mask": (1, 1)}, "e") == 0


def test_a_profile_that_starts_at_zero_rows_takes_zero_rows():
    assert ShapeRange((0, 4), (0, 4), (8, 4)).holds((0, 4))
    assert ShapeRange((0, 4), (0, 4), (8, 4)).distance((0, 4)) == 0


# --- cache -----------------------------------------------------------------------------------------------------------


def test_the_cache_forgets_what_was_used_longest_ago_before_it_makes_more():
    alive: set[str] = set()
    most = 0

    def make(key: str) -> str:
        nonlocal most
        alive.add(key)
        most = max(most, len(alive))
        return key

    cache: LRU[str, str] = LRU(2, alive.discard)
    for key in "abacb":
        cache.get(key, lambda key=key: make(key))
    assert most == 2
    assert "a" not in cache
    assert "c" in cache
    assert len(cache) == 2


def test_a_value_that_cannot_be_made_is_not_kept():
    cache: LRU[str, str] = LRU(2)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: str(1 / 0))
    assert len(cache) == 0


# --- metadata --------------------------------------------------------------------------------------------------------


def test_engine_metadata_survive_writing_and_reading(tmp_path):
    written = write_engine(tmp_path, version_compatible=True, sm=None, plugin="embedded", milliseconds=0.25)
    assert read_engines(tmp_path / "engines") == [written]


def test_a_bundle_without_engines_says_which_command_builds_them(tmp_path):
    with pytest.raises(
        BackendUnavailable, match=r"has no tensorrt engine: python -m rmsnorm_deploy\.engine \S+ --runtime tensorrt"
    ):
        choose_engine(read_engines(tmp_path / "engines"), "tensorrt", "10.14.1.48", 89, tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:20], "is not engine metadata"),
        (lambda text: "[]", "is not engine metadata"),
        (lambda text: text.replace('"sm"', '"SM"'), r"is not engine metadata \(KeyError: 'sm'\)"),
        (lambda text: text.replace('"format": 2', '"format": 9'), "is of format 9, expected 2"),
        (lambda text: text.replace("e.engine", "../e.engine"), r"engine file '\.\./e\.engine' is not in"),
        (lambda text: text.replace("e.engine", "f.engine"), r"engine file 'f\.engine' is not in"),
        (lambda text: text.replace('"plugin": null', '"plugin": "mine"'), "is not engine metadata .*plugin is 'mine'"),
        (lambda text: text.replace('"sha256"', '"digest"'), r"is not engine metadata \(KeyError: 'sha256'\)"),
    ],
)
def test_damaged_metadata_are_refused_by_file(tmp_path, damage, message):
    write_engine(tmp_path)
    path = tmp_path / "engines" / "e.json"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_engines(tmp_path / "engines")
    assert "\n" not in str(caught.value)


def test_a_version_mismatch_names_both_versions():
    assert mismatch(record(), "10.14.1.48", 89) is None
    assert mismatch(record(), "10.14.1.99", 89) is None
    assert mismatch(record(), "10.13.0", 89) == "e was built by tensorrt 10.14.1.48, and 10.13.0 is installed"
    assert mismatch(record(version_compatible=True), "10.13.0", 89) is None
    assert mismatch(record(version_compatible=True), "11.0.0", 89) is not None


def test_a_gpu_mismatch_names_both_gpus():
    assert mismatch(record(sm=(80, 86)), "10.14.1", 89) == "e was built for SM 80, SM 86, and this GPU is SM 89"
    assert mismatch(record(sm=None), "10.14.1", 75) is None


def test_the_refusal_of_every_engine_says_why_for_each(tmp_path):
    engines = [record(name="a", sm=(80,)), record(name="b", runtime_version="10.1.0")]
    with pytest.raises(BackendUnavailable, match="a was built for SM 80, and this GPU is SM 89; b was built by"):
        choose_engine(engines, "tensorrt", "10.14.1.48", 89, tmp_path)


def test_the_fastest_engine_is_run_and_the_plugins_where_none_was_timed(tmp_path):
    native, plugin = record(name="native", milliseconds=2.0), record(name="plugin", plugin="embedded", milliseconds=3.0)
    untimed, untimed_plugin = record(name="u"), record(name="up", plugin="embedded")
    for engines, best in (
        ([plugin, native], "native"),
        ([untimed, untimed_plugin], "up"),
        ([untimed_plugin, plugin], "plugin"),
    ):
        assert choose_engine(engines, "tensorrt", "10.14.1.48", 89, tmp_path).name == best
    assert choose_engine([plugin, native], "tensorrt", "10.14.1.48", 89, tmp_path, "plugin").name == "plugin"
    with pytest.raises(InputError, match="has no tensorrt engine 'q': it has plugin, native"):
        choose_engine([plugin, native], "tensorrt", "10.14.1.48", 89, tmp_path, "q")


def test_engines_of_the_other_runtime_are_not_run(tmp_path):
    with pytest.raises(BackendUnavailable, match="has no tensorrt-rtx engine"):
        choose_engine([record()], "tensorrt-rtx", "10.14.1.48", 89, tmp_path)


def test_float64_is_refused_by_name():
    with pytest.raises(InputError, match="'x' is float64, which tensorrt has not: export with --precision"):
        check_dtypes(Signature.from_manifest(manifest("float64")), "tensorrt")


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"x": "float16"}, {"y": "float32"}, "input 'x' is float16 in engine e and float32 in the bundle"),
        ({"x": "float32"}, {}, "engine e has no output 'y'"),
        ({"x": "float32", "z": "int64"}, {"y": "float32"}, "engine e has input 'z' and the bundle has not"),
    ],
)
def test_an_engine_of_another_model_is_refused_by_tensor(inputs, outputs, message):
    with pytest.raises(InputError, match=message):
        check_tensors(record(), Signature.from_manifest(manifest()), inputs, outputs)


# --- the session, on a stand-in --------------------------------------------------------------------------------------


class FakeStream:
    cuda_stream = 7

    def synchronize(self) -> None:
        pass


class FakeDevice:
    """The CPU in the GPU's place."""

    device = torch.device("cpu")
    sm = 89

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def upload(self, name: str, array: Any) -> torch.Tensor:
        return torch.as_tensor(array).contiguous()

    def download(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def new_stream(self) -> FakeStream:
        return FakeStream()

    @contextmanager
    def on(self, stream: FakeStream, tensors: list[torch.Tensor]):
        yield stream.cuda_stream

    def hand_over(self, tensors: list[torch.Tensor]) -> None:
        pass

    def capture(self, stream: FakeStream, enqueue: Any) -> Any:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            enqueue(stream.cuda_stream)

        return replay


class FakeContext:
    """y = 2 x, from one address to another."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.profile, self.shapes, self.addresses, self.allocator = engine, -1, {}, {}, None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == FakeStream.cuda_stream
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return self.engine.accepts

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 4) if self.engine.data_dependent else self.shapes["x"]

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address != 0
        self.addresses[name] = address

    def set_output_allocator(self, name: str, allocator: Any) -> None:
        self.allocator = allocator

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == FakeStream.cuda_stream
        self.engine.used.append(self.profile)
        count = int(np.prod(self.shapes["x"]))
        if self.allocator is not None:
            self.addresses["y"] = self.allocator.reallocate_output_async("y", 0, count * 4, 256, stream)
            self.allocator.notify_shape("y", self.shapes["x"])
        source, target = ((ctypes.c_float * count).from_address(self.addresses[name]) for name in "xy")
        for index in range(count):
            target[index] = 2 * source[index]
        return self.engine.runs


class FakeEngine:
    num_io_tensors = 2

    def __init__(self) -> None:
        self.contexts, self.used, self.accepts, self.runs, self.data_dependent = 0, [], True, True, False
        self.kind = "FLOAT"

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> str:
        return "IN" if name == "x" else "OUT"

    def get_tensor_dtype(self, name: str) -> Any:
        return types.SimpleNamespace(name=self.kind)

    def create_execution_context(self) -> FakeContext:
        self.contexts += 1
        return FakeContext(self)


class FakeRuntime:
    made: list[FakeRuntime] = []  # noqa: RUF012

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.engine_host_code_allowed = False
        self.loaded: list[bytes] = []
        FakeRuntime.made.append(self)

    def deserialize_cuda_engine(self, data: bytes) -> FakeEngine | None:
        self.loaded.append(data)
        if self.logger.reason:
            self.logger.log("E", self.logger.reason)
        return self.logger.engine


def fake_tensorrt(given: FakeEngine | None, why: str = "") -> Any:
    class Logger:
        Severity = types.SimpleNamespace(ERROR="E", INTERNAL_ERROR="I")
        engine, reason = given, why

    return types.SimpleNamespace(
        __version__="10.14.1.48", ILogger=Logger, Runtime=FakeRuntime, IOutputAllocator=object,
        TensorIOMode=types.SimpleNamespace(INPUT="IN"),
    )  # fmt: skip


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def open_fake(
    path: Path, engine: FakeEngine | None, device: FakeDevice, reason: str = "", **options: Any
) -> TensorRTSession:
    if not (path / "engines").exists():
        write_engine(path)
    return TensorRTSession(fake_bundle(path), fake_tensorrt(engine, reason), device, "tensorrt", **options)  # type: ignore[arg-type]


def test_each_call_runs_in_the_profile_of_its_shape(tmp_path, engine, device):
    session = open_fake(tmp_path, engine, device)
    for batch in (1, 20, 2, 32):
        x = torch.rand(batch, 4)
        torch.testing.assert_close(session(x)[0], 2 * x)
    assert engine.used == [0, 1, 0, 1]
    assert engine.contexts == 2


def test_numpy_feeds_give_numpy_outputs_of_the_models_dtype(tmp_path, engine, device):
    y = open_fake(tmp_path, engine, device).run({"x": np.ones((2, 4), np.float32)})["y"]
    assert isinstance(y, np.ndarray)
    assert y.dtype == np.float32
    assert y.sum() == 16


def test_an_output_whose_shape_the_data_decide_is_allocated_during_the_run(tmp_path, engine, device):
    engine.data_dependent = True
    x = torch.rand(3, 4)
    torch.testing.assert_close(open_fake(tmp_path, engine, device)(x)[0], 2 * x)
    with pytest.raises(InputError, match="an output's shape depends on the data"):
        open_fake(tmp_path, engine, device, graph_cache=2)(x)


def test_tensors_without_elements_have_an_address(tmp_path, engine, device):
    write_engine(tmp_path, profiles=parse_profiles([{"x": {"min": [0, 4], "opt": [2, 4], "max": [8, 4]}}]))
    assert open_fake(tmp_path, engine, device)(torch.empty(0, 4))[0].shape == (0, 4)


def test_every_thread_has_contexts_of_its_own(tmp_path, engine, device):
    session = open_fake(tmp_path, engine, device)
    workers = [threading.Thread(target=lambda: session(torch.ones(1, 4))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert engine.contexts == 3


def test_graphs_are_kept_for_a_bounded_number_of_shapes_and_never_share_a_context(tmp_path, engine, device):
    session = open_fake(tmp_path, engine, device, graph_cache=2)
    for batch in (1, 2, 1, 2, 3, 1):  # 3 pushes 1 out, which is captured anew
        x = torch.rand(batch, 4)
        torch.testing.assert_close(session(x)[0], 2 * x)
    assert device.captures == 4
    assert engine.contexts == 4
    assert device.replays == 6


def test_the_outputs_of_a_graph_are_not_overwritten_by_its_next_replay(tmp_path, engine, device):
    session = open_fake(tmp_path, engine, device, graph_cache=2)
    (first,) = session(torch.ones(1, 4))
    session(torch.zeros(1, 4))
    assert first.sum() == 8


def test_an_engine_that_does_not_load_says_why(tmp_path, device):
    with pytest.raises(
        InputError, match=r"tensorrt cannot load .*e\.engine: magic tag does not match: build the engine again"
    ):
        open_fake(tmp_path, None, device, reason="magic tag\ndoes not match")


def test_an_engine_with_other_dtypes_than_the_bundle_names_both(tmp_path, engine, device):
    engine.kind = "HALF"
    with pytest.raises(InputError, match="'x' is float16 in engine e and float32 in the bundle"):
        open_fake(tmp_path, engine, device)


def test_an_engine_that_was_damaged_or_swapped_is_refused_by_file(tmp_path, engine, device):
    written = write_engine(tmp_path, plugin="embedded")
    written.path.write_bytes(b"another")
    with pytest.raises(InputError) as caught:
        open_fake(tmp_path, engine, device, allow_host_code=True)
    assert str(caught.value).startswith(f"{written.path} is damaged, or not the engine that e.json describes")
    assert FakeRuntime.made[-1].engine_host_code_allowed is False
    assert FakeRuntime.made[-1].loaded == []


def test_an_engine_of_another_bundle_is_refused_though_its_own_metadata_came_along(tmp_path, engine, device):
    other = manifest()
    other["files"]["model.onnx.data"]["sha256"] = "other weights"
    written = write_engine(tmp_path, plugin="embedded", model_sha256=model_identity(other))
    with pytest.raises(InputError, match=f"{written.path} was built from another model than this bundle's"):
        open_fake(tmp_path, engine, device, allow_host_code=True)
    assert FakeRuntime.made[-1].engine_host_code_allowed is False


def test_a_models_identity_is_its_graph_and_its_weights_and_nothing_else():
    same = manifest() | {"created": "later"}
    same["files"]["program.pt2"]["sha256"] = "traced by another torch"
    assert model_identity(same) == model_identity(manifest())
    for name in ("model.onnx", "model.onnx.data"):
        other = manifest()
        other["files"][name]["sha256"] = "other"
        assert model_identity(other) != model_identity(manifest())


@pytest.mark.parametrize(("runtime", "plugin", "needed"), [
    ("tensorrt-rtx", "embedded", 1), ("tensorrt-rtx", None, 0), ("tensorrt", "embedded", 0),
])  # fmt: skip
def test_tensorrt_rtx_gets_the_library_that_it_opens_for_plugins(
    tmp_path, engine, device, monkeypatch, runtime, plugin, needed
):
    made: list[int] = []
    monkeypatch.setattr("rmsnorm_deploy.runtime.tensorrt_session.ensure_rtx_library", lambda: made.append(1))
    write_engine(tmp_path, runtime=runtime, plugin=plugin)
    TensorRTSession(fake_bundle(tmp_path), fake_tensorrt(engine), device, runtime, allow_host_code=True)
    assert len(made) == needed


@pytest.mark.parametrize("allowed", [False, True])
def test_code_in_an_engine_that_should_have_none_is_never_allowed(tmp_path, engine, device, allowed):
    write_engine(tmp_path, plugin=None)
    assert open_fake(tmp_path, engine, device, allow_host_code=allowed)._runtime.engine_host_code_allowed is False


@pytest.mark.parametrize(
    ("allowed", "own", "refusal"),
    [
        (None, False, "machine code, and was not built here: pass allow_host_code=True"),
        (None, True, None),
        (False, True, "machine code, and allow_host_code is False: build one with --plugin never"),
        (True, False, None),
    ],
)
def test_machine_code_in_an_engine_runs_only_when_it_is_ones_own_or_allowed(
    tmp_path, engine, device, monkeypatch, allowed, own, refusal
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_engine(tmp_path, plugin="embedded")
    if own:
        trust.remember(sha(b"engine"))
    if refusal is None:
        session = open_fake(tmp_path, engine, device, allow_host_code=allowed)
        assert session._runtime.engine_host_code_allowed is True
        assert session._runtime.loaded == [b"engine"]
        return
    with pytest.raises(BackendUnavailable, match=refusal):
        open_fake(tmp_path, engine, device, allow_host_code=allowed)
    assert FakeRuntime.made[-1].engine_host_code_allowed is False
    assert FakeRuntime.made[-1].loaded == []


def test_only_the_users_own_mark_says_that_an_engine_was_built_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "rmsnorm_deploy" / "engines-built-here"
    assert not trust.built_here("a")
    trust.remember("a")
    trust.remember("a")
    assert trust.built_here("a")
    assert folder.stat().st_mode & 0o077 == 0
    (folder / "b").symlink_to(folder / "a")
    assert not trust.built_here("b")
    monkeypatch.setattr("os.getuid", lambda: 4242)
    assert not trust.built_here("a")


def test_a_run_that_fails_is_no_silent_garbage(tmp_path, engine, device):
    session = open_fake(tmp_path, engine, device)
    engine.runs = False
    with pytest.raises(DeployError, match="tensorrt failed to run engine e: no reason given"):
        session(torch.ones(1, 4))
    engine.accepts = False
    with pytest.raises(InputError, match=r"refuses shape \(1, 4\) of input 'x'"):
        session(torch.ones(1, 4))


# --- without and with the real thing ---------------------------------------------------------------------------------


@pytest.mark.skipif(no_gpu_reason() is None, reason="says what happens without a GPU")
def test_without_a_gpu_the_refusal_says_so(tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    with pytest.raises(BackendUnavailable, match=r"torch .* needs an NVIDIA GPU"):
        open_session(fake_bundle(tmp_path), "tensorrt-rtx")


def test_without_the_package_the_refusal_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(BackendUnavailable, match="tensorrt is not installed: pip install tensorrt"):
        open_session(fake_bundle(tmp_path), "tensorrt")


def test_the_stand_in_has_no_method_that_the_real_library_lacks():
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    for fake, real in ((FakeContext, trt.IExecutionContext), (FakeEngine, trt.ICudaEngine)):
        assert [name for name in vars(fake) if not name.startswith("_") and not hasattr(real, name)] == []
    for name in ("deserialize_cuda_engine", "engine_host_code_allowed"):
        assert hasattr(trt.Runtime, name)
    assert {
        name
        for name in ("FLOAT", "HALF", "BF16", "INT64", "INT32", "INT8", "UINT8", "BOOL")
        if hasattr(trt.DataType, name)
    }
    assert trt.TensorIOMode.INPUT.name == "INPUT"


@pytest.mark.skipif(no_gpu_reason() is None, reason="says what happens without a GPU")
def test_the_real_librarys_logger_and_allocator_can_be_derived_from():
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    from rmsnorm_deploy.runtime.tensorrt_session import make_allocator, make_logger

    logger = make_logger(trt)
    logger.log(trt.ILogger.Severity.ERROR, "broken")
    logger.log(trt.ILogger.Severity.INFO, "fine")
    assert logger.last_error == "broken"
    allocator = make_allocator(trt, torch.device("cpu"))
    assert allocator.reallocate_output_async("y", 0, 32, 256, 0) == allocator.memory.data_ptr()
    allocator.notify_shape("y", (2, 4))
    assert allocator.tensor("y", torch.float32).shape == (2, 4)


def build_doubling_engine(trt: Any) -> bytes:
    """y = x + x for the profiles SMALL and LARGE, for the GPU at hand."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    x = network.add_input("x", trt.float32, (-1, 4))
    y = network.add_elementwise(x, x, trt.ElementWiseOperation.SUM).get_output(0)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    for shapes in (SMALL, LARGE):
        profile = builder.create_optimization_profile()
        profile.set_shape("x", *(tuple(shapes["x"][key]) for key in ("min", "opt", "max")))
        config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))


@pytest.fixture(params=["tensorrt", "tensorrt-rtx"])
def gpu_bundle(request, tmp_path):
    if no_gpu_reason() is not None:
        pytest.skip(no_gpu_reason())
    trt = pytest.importorskip(request.param.replace("-", "_"), reason=f"{request.param} is not installed")
    data = build_doubling_engine(trt)
    written = write_engine(tmp_path, runtime=request.param, runtime_version=trt.__version__, sm=None, sha256=sha(data))
    written.path.write_bytes(data)
    return request.param, fake_bundle(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_gpu_engines_run_in_every_profile_from_cuda_cpu_and_numpy(gpu_bundle, cuda_graph):
    backend, bundle = gpu_bundle
    session = open_session(bundle, backend, cuda_graph=cuda_graph)
    for batch in (1, 3, 8, 32, 3):
        x = torch.rand(batch, 4, device="cuda")
        (y,) = session(x)
        assert y.device == x.device
        torch.testing.assert_close(y, 2 * x, rtol=0, atol=0)
        torch.testing.assert_close(session(x.cpu())[0], 2 * x.cpu(), rtol=0, atol=0)
        np.testing.assert_array_equal(session.run({"x": x.cpu().numpy()})["y"], 2 * x.cpu().numpy())
    with pytest.raises(InputError, match="no profile of engine e takes these shapes"):
        session(torch.rand(33, 4, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_gpu_threads_share_a_session(gpu_bundle, cuda_graph):
    backend, bundle = gpu_bundle
    session = open_session(bundle, backend, cuda_graph=cuda_graph)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(50):
            x = torch.full((1 + seed, 4), float(seed), device="cuda")
            if not torch.equal(session(x)[0], 2 * x):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_over_many_runs(gpu_bundle):
    backend, bundle = gpu_bundle
    session = open_session(bundle, backend)
    x = torch.rand(8, 4, device="cuda")
    for _ in range(100):
        session(x)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(10_000):
        session(x)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 4 << 20
