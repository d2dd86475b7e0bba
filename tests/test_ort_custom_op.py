"""librmsnorm_deploy_ort.so inside ONNX Runtime: every name, dtype and refusal, and the versions it must run on."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from kernel_truth import DTYPE_PAIRS, NUMPY, Array, Case, rows, truth
from onnx import TensorProto, helper

from rmsnorm_deploy import native, opset
from rmsnorm_deploy.errors import BackendUnavailable
from rmsnorm_deploy.native_build import build

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
ELEMENT = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}
EPS = {"inside": 1e-5, "outside": 1e-3, "clamp": 0.5}


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    try:
        build(("cpu",), quiet=True)
    except BackendUnavailable as error:
        pytest.skip(f"the custom-op library cannot be built here: {error}")
    return Path(native.library_path())


def name_of(case: Case) -> str:
    """docs/op-spec.md, Names."""
    mode = "" if case.eps_mode == "inside" else f"_{case.eps_mode}"
    bias = "_bias" if case.bias else ""
    order = "_before_cast" if case.order == "before_cast" else ""
    return f"{'Skip' if case.skip else ''}RMSNorm{mode}{bias}{order}{'_double' if case.double else ''}"


def model(case: Case, shape: list[Any], scale: list[int] | None, **attributes: Any) -> onnx.ModelProto:
    """One op between Casts, so that inferred types matter. All tensors are inputs; bfloat16 goes through float32."""
    names = ["x", *(["skip"] if case.skip else []), *(["scale"] if scale else []), *(["bias"] if case.bias else [])]
    kind = {"x": case.x, "skip": case.x, "scale": case.param, "bias": case.param, "y": case.y, "total": case.x}
    if scale is None:
        kind["y"] = case.x
    given = {
        "axis": -1,
        "epsilon": float(np.float32(case.eps)),
        "epsilon_low": case.eps - float(np.float32(case.eps)),
        "epsilon_mode": case.eps_mode,
        "scale_order": case.order,
        "stash_type": 11 if case.double else 1,
        "plugin_namespace": "rmsnorm_deploy",
        "plugin_version": "1",
        **attributes,
    }
    outputs = ["y", "total"] if case.skip else ["y"]
    node = helper.make_node(name_of(case), [f"{name}_" for name in names], outputs, domain="rmsnorm_deploy", **given)
    shapes = {"scale": scale, "bias": scale}
    inputs, before, after, results = [], [], [], []
    for name in names:
        outside = TensorProto.FLOAT if kind[name] == "bfloat16" else ELEMENT[kind[name]]
        inputs.append(helper.make_tensor_value_info(name, outside, shapes.get(name, shape)))
        before.append(helper.make_node("Cast", [name], [f"{name}_"], to=ELEMENT[kind[name]]))
    for name in outputs:
        outside = TensorProto.FLOAT if kind[name] == "bfloat16" else ELEMENT[kind[name]]
        after.append(helper.make_node("Cast", [name], [f"{name}_out"], to=outside))
        results.append(helper.make_tensor_value_info(f"{name}_out", outside, None))
    graph = helper.make_graph([*before, node, *after], "g", inputs, results)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("rmsnorm_deploy", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def session(proto: onnx.ModelProto, threads: int = 1) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    native.register(options)
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_options_that_are_registered_twice_have_the_ops_once() -> None:
    case, options = Case("float32", "float32"), ort.SessionOptions()
    for _ in range(2):
        native.register(options)
    proto = model(case, ["n", 8], [8]).SerializeToString()
    opened = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    values = feeds(case, 8)
    check(case, values, opened.run(None, outside(values)))
    native.register(options)  # after a session was made of them, too
    ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def feeds(case: Case, width: int, count: int = 3) -> dict[str, Array]:
    rng = np.random.default_rng(width)
    made = {"x": rows(rng, count, width, case.x)}
    if case.skip:
        made["skip"] = rows(rng, count, width, case.x)
    made["scale"] = (1 + 0.5 * rng.standard_normal(width)).astype(NUMPY[case.param])
    if case.bias:
        made["bias"] = rng.standard_normal(width).astype(NUMPY[case.param])
    return made


def outside(values: dict[str, Array]) -> dict[str, Array]:
    return {
        name: value.astype(np.float32) if value.dtype == NUMPY["bfloat16"] else value for name, value in values.items()
    }


def check(case: Case, values: dict[str, Array], results: list[Array]) -> None:
    exact, _, bound, total = truth(case, values["x"], values.get("skip"), values["scale"], values.get("bias"))
    assert (np.abs(results[0].astype(np.float64) - exact) <= bound).all(), case
    if case.skip:
        np.testing.assert_array_equal(results[1].astype(np.float64), total)


ALL = [
    Case(x, param, mode, order, bias, skip, double, EPS[mode])
    for (x, param), mode, order, bias, skip, double in itertools.product(
        DTYPE_PAIRS, EPS, ("after_cast", "before_cast"), (False, True), (False, True), (False, True)
    )
    if not double or x == "float64"
]


def test_these_tests_use_every_name_that_a_model_may_have() -> None:
    assert {name_of(case) for case in ALL} == {variant.name for variant in opset.variants()}


@pytest.mark.parametrize(("x", "param"), DTYPE_PAIRS)
def test_every_name_and_dtype_matches_float64(x: str, param: str) -> None:
    for case in ALL:
        if (case.x, case.param) == (x, param):
            values = feeds(case, 77)
            check(case, values, session(model(case, ["n", 77], [77])).run(None, outside(values)))


def test_it_takes_precedence_over_the_body_in_the_model() -> None:
    case = Case("float32", "float32")
    proto = model(case, ["n", 8], [8])
    lie = helper.make_function(
        "rmsnorm_deploy",
        "RMSNorm",
        ["x", "scale"],
        ["y"],
        [helper.make_node("Sub", ["x", "x"], ["y"])],
        [helper.make_opsetid("", 17)],
    )
    proto.functions.append(lie)
    values = feeds(case, 8)
    check(case, values, session(proto).run(None, values))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("param", ["float16", "float32"])
def test_shapes_and_dtypes_are_inferred(skip: bool, param: str) -> None:
    opened = session(model(Case("float16", param, skip=skip), ["batch", 5, "width"], ["width"]))
    assert [item.shape for item in opened.get_outputs()] == [["batch", 5, "width"]] * (2 if skip else 1)


@pytest.mark.parametrize("unknown", ["rank", "dimension"])
def test_unknown_shapes_load_and_run(unknown: str) -> None:
    case = Case("float32", "float32", skip=True)
    proto = model(case, ["n", 8], [8])
    shape = proto.graph.input[0].type.tensor_type
    if unknown == "rank":
        shape.ClearField("shape")
    else:
        shape.shape.dim[0].ClearField("dim_param")
    values = feeds(case, 8)
    check(case, values, session(proto).run(None, values))


def test_without_a_scale_y_keeps_the_dtype_of_x() -> None:
    case = Case("float16", "float16")
    values = feeds(case, 33)
    y = session(model(case, ["n", 33], None)).run(None, {"x": values["x"]})[0]
    assert y.dtype == np.float16
    check(case, {**values, "scale": np.ones(33, np.float16)}, [y])


def test_a_constant_scale_and_one_element_scales() -> None:
    case = Case("float32", "float32", bias=True)
    proto = model(case, ["n", 40], [1])
    values = feeds(case, 40)
    values |= {"scale": values["scale"][:1], "bias": values["bias"][:1]}
    check(case, values, session(proto).run(None, values))
    proto.graph.input.pop(1)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(values["scale"], "scale"))
    check(case, values, session(proto).run(None, {"x": values["x"], "bias": values["bias"]}))


def test_rows_of_several_axes_and_no_rows_at_all() -> None:
    case = Case("float32", "float32")
    opened = session(model(case, ["a", "b", 4, 6], [4, 6], axis=-2))
    values = feeds(case, 24, count=6)
    y = opened.run(None, {"x": values["x"].reshape(2, 3, 4, 6), "scale": values["scale"].reshape(4, 6)})[0]
    check(case, values, [y.reshape(6, 24)])
    empty = opened.run(None, {"x": np.zeros((0, 3, 4, 6), np.float32), "scale": values["scale"].reshape(4, 6)})[0]
    assert empty.shape == (0, 3, 4, 6)


def test_threads_of_the_session_change_no_bit() -> None:
    case = Case("bfloat16", "bfloat16", skip=True)
    values = outside(feeds(case, 1000, count=700))
    proto = model(case, ["n", 1000], [1000])
    for one, two in zip(session(proto, 1).run(None, values), session(proto, 4).run(None, values), strict=True):
        np.testing.assert_array_equal(one, two)


def test_reused_memory_gives_the_same_values() -> None:
    """A chain in which ONNX Runtime may let each output take an input's place."""
    width, count = 64, 50
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((count, width)).astype(np.float32), np.ones(width, np.float32)
    nodes = [helper.make_node("Add", ["x", "x"], ["a0"]), helper.make_node("Neg", ["x"], ["b0"])]
    want_a, want_b = x + x, -x
    for i in range(4):
        inputs = [f"a{i}", f"b{i}", "scale"]
        nodes.append(helper.make_node("SkipRMSNorm", inputs, [f"b{i + 1}", f"a{i + 1}"], domain="rmsnorm_deploy"))
        case = Case("float32", "float32", skip=True)
        _, want_b, _, want_a = truth(case, want_a.astype(np.float32), want_b.astype(np.float32), scale, None)
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a4", "b4")],
        [onnx.numpy_helper.from_array(scale, "scale")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("rmsnorm_deploy", 1)]
    a, b = session(helper.make_model(graph, opset_imports=opsets, ir_version=8)).run(None, {"x": x})
    np.testing.assert_allclose(a, want_a, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(b, want_b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"axis": 0}, "axis must be negative"),
        ({"epsilon": -1.0}, "epsilon must not be negative"),
        ({"epsilon_mode": "sideways"}, "epsilon_mode must be"),
        ({"epsilon_mode": "x" * 100}, "epsilon_mode must be"),
        ({"scale_order": "later"}, "scale_order must be"),
        ({"stash_type": 11}, "stash_type must be"),
        ({"scale_order": "before_cast"}, "contradicts the op's name"),
    ],
)
def test_attributes_it_cannot_follow_are_refused_when_the_model_loads(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        session(model(Case("float16", "float32"), ["n", 8], [8], **attributes))


def test_dtypes_it_does_not_have_are_refused_when_the_model_loads() -> None:
    with pytest.raises(Exception, match="RMSNorm"):
        session(model(Case("float32", "float16"), ["n", 8], [8]))


def test_inputs_that_do_not_fit_are_refused_in_a_run() -> None:
    case = Case("float32", "float32", skip=True)
    opened = session(model(case, ["n", "d"], ["s"]))
    values = feeds(case, 8)
    with pytest.raises(Exception, match="same shape"):
        opened.run(None, {**values, "skip": values["skip"][:1]})
    with pytest.raises(Exception, match="one element, or one for each of a row"):
        opened.run(None, {**values, "scale": values["scale"][:3]})
    wide = session(model(Case("float32", "float32"), ["n", "d"], ["s"], axis=-3))
    with pytest.raises(Exception, match="no less than -axis"):
        wide.run(None, feeds(Case("float32", "float32"), 8))


def test_a_gap_or_a_missing_output_is_refused_and_does_not_crash() -> None:
    gap = model(Case("float32", "float32", bias=True), ["n", 8], [8])
    gap.graph.node[3].input[1] = ""
    with pytest.raises(Exception, match="empty string"):
        session(gap)
    short = model(Case("float32", "float32", skip=True), ["n", 8], [8])
    node = next(node for node in short.graph.node if node.domain)
    del node.output[1]
    del short.graph.node[-1], short.graph.output[-1]
    with pytest.raises(Exception, match="output"):
        session(short)


class FakeRuntime:
    """An OrtApiBase of another version, with nothing behind it but CreateStatus and what counts the ops."""

    def __init__(self, version: bytes, serves: int) -> None:
        self.message = b""
        self.asked: list[int] = []
        self.added = 0
        create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
        get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
        get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)
        self.text = ctypes.create_string_buffer(version)
        self.keep = [create(self._create), get_api(self._get_api), get_version(lambda: ctypes.addressof(self.text))]
        self.table = (ctypes.c_void_p * 500)(ctypes.cast(self.keep[0], ctypes.c_void_p).value)
        domain = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        for slot, called in ((26, lambda *_: None), (27, self._add), (28, lambda *_: None)):
            self.keep.append(domain(called))
            self.table[slot] = ctypes.cast(self.keep[-1], ctypes.c_void_p).value
        self.base = (ctypes.c_void_p * 2)(*(ctypes.cast(item, ctypes.c_void_p).value for item in self.keep[1:3]))
        self.serves = serves

    def _create(self, _code: int, message: bytes) -> int:
        self.message = message
        return 1

    def _add(self, _domain: int, _op: int) -> None:
        self.added += 1

    def _get_api(self, version: int) -> int:
        self.asked.append(version)
        return ctypes.addressof(self.table) if version <= self.serves else 0


@pytest.mark.parametrize(
    ("version", "serves"), [(b"1.16.3", 16), (b"1.9", 9), (b"nonsense", 1), (b"", 1), (b"1.40.0", 1)]
)
def test_a_runtime_it_cannot_serve_gets_a_status_with_words(library: Path, version: bytes, serves: int) -> None:
    register = ctypes.CDLL(str(library)).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    fake = FakeRuntime(version, serves)
    assert register(1, ctypes.addressof(fake.base)) == 1
    assert b"needs ONNX Runtime 1.17 or newer" in fake.message


def test_many_sessions_share_the_library() -> None:
    case = Case("float32", "float32")
    values = feeds(case, 16)
    for opened in [session(model(case, ["n", 16], [16])) for _ in range(20)]:
        check(case, values, opened.run(None, values))


CHILD = """
import sys, numpy as np, onnxruntime as ort
print(ort.__version__)
options = ort.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
for path in sys.argv[2:]:
    data = np.load(path + ".npz")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    values = {item.name: data[item.name] for item in session.get_inputs()}
    np.savez(path + ".out.npz", *session.run(None, values))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.17.3", "1.18.1", "1.20.1", "1.24.1", ""])
def test_one_binary_runs_on_every_version(library: Path, tmp_path: Path, version: str) -> None:
    if os.environ.get("RMSNORM_TEST_ORT_VERSIONS") != "1":
        pytest.skip("installs old versions of onnxruntime: set RMSNORM_TEST_ORT_VERSIONS=1 to run it")
    target = tmp_path / "packages"
    wanted = [f"onnxruntime=={version}", "numpy<2"] if version else ["onnxruntime"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), *wanted]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"onnxruntime {version} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    chosen = [*ALL[::29], Case("float16", "float32"), Case("bfloat16", "float32", bias=True, skip=True)]
    paths = []
    for number, case in enumerate(chosen):
        paths.append(str(tmp_path / f"{number}.onnx"))
        onnx.save(model(case, ["n", 77], [77]), paths[-1])
        np.savez(paths[-1] + ".npz", **outside(feeds(case, 77)))
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-c", CHILD, str(library), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(version)
    for case, path in zip(chosen, paths, strict=True):
        check(case, feeds(case, 77), list(np.load(path + ".out.npz").values()))


STUB = """
#include <stdint.h>
int rmsnorm_cuda(const void* args, void* stream) { return args == stream; }
int64_t rmsnorm_cuda_workspace_bytes(const void* args) { return args ? 64 : 0; }
"""


@pytest.fixture
def beside_cuda(library: Path, tmp_path: Path) -> Path:
    """The library with a stand-in for the CUDA kernels beside it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here for the stand-in")
    (tmp_path / "stub.c").write_text(STUB)
    stub = tmp_path / f"librmsnorm_deploy_cuda{native.SUFFIX}"
    subprocess.run([compiler, "-shared", "-fPIC", str(tmp_path / "stub.c"), "-o", str(stub)], check=True)
    return Path(shutil.copy2(library, tmp_path / library.name))


def ops_registered(library: Path) -> int:
    register = ctypes.CDLL(str(library)).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    fake = FakeRuntime(b"1.40.0", 40)
    assert register(1, ctypes.addressof(fake.base)) is None
    KEPT.append(fake)  # the library remembers a runtime for ever
    return fake.added


KEPT: list[FakeRuntime] = []


def test_the_cuda_provider_gets_every_op_but_those_of_float64(library: Path, beside_cuda: Path) -> None:
    cpu = ops_registered(library)
    double = sum(case.x == "float64" for case in ALL)
    assert cpu == len(ALL)
    assert ops_registered(beside_cuda) == cpu + len(ALL) - double


def test_ops_for_the_cuda_provider_do_not_disturb_the_cpus(beside_cuda: Path, tmp_path: Path) -> None:
    """With CUDA kernels beside the library it registers each op twice."""
    case = Case("float16", "float32", bias=True, skip=True)
    onnx.save(model(case, ["n", 77], [77]), tmp_path / "a.onnx")
    np.savez(tmp_path / "a.onnx.npz", **feeds(case, 77))
    command = [sys.executable, "-c", CHILD, str(beside_cuda), str(tmp_path / "a.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(case, feeds(case, 77), list(np.load(tmp_path / "a.onnx.out.npz").values()))


WORKSPACE = """
#include <cstdio>
#include <cstdlib>
#include "workspace.h"

int held = 0, failing = 0, statuses = 0, released = 0;
ort::Status* allocate(ort::Allocator*, size_t bytes, void** out) {
  if (failing) return reinterpret_cast<ort::Status*>(&++statuses);
  ++held;
  *out = std::malloc(bytes);
  return nullptr;
}
ort::Status* give_back(ort::Allocator*, void* memory) { --held; std::free(memory); return nullptr; }
void release_status(ort::Status*) { --statuses; }
void release_allocator(ort::Allocator*) { ++released; }

int main() {
  const void* table[300] = {};
  table[75] = reinterpret_cast<const void*>(allocate);
  table[76] = reinterpret_cast<const void*>(give_back);
  table[93] = reinterpret_cast<const void*>(release_status);
  table[132] = reinterpret_cast<const void*>(release_allocator);
  const auto* api = reinterpret_cast<const ort::Api*>(table);
  int one = 0, two = 0;
  {
    rmsnorm_ort::Workspace w(api, reinterpret_cast<ort::Allocator*>(&one));
    void* first = w.on(&one, 64);
    const bool kept = first && w.on(&one, 64) == first && w.on(&one, 16) == first && held == 1;
    const bool apart = w.on(&two, 64) != first && held == 2 && w.on(&two, 0) == nullptr;
    failing = 1;
    const bool without = w.on(&one, 128) == nullptr && statuses == 0 && w.on(&one, 64) == first;
    if (!kept || !apart || !without) return std::printf("kept %d apart %d without %d", kept, apart, without);
  }
  rmsnorm_ort::Workspace none(api, nullptr);
  return held == 0 && released == 1 && none.on(&one, 64) == nullptr ? 0 : std::printf("held %d", held);
}
"""


def test_a_workspace_serves_one_stream_and_goes_back_with_its_node(tmp_path: Path) -> None:
    compiler, folder = shutil.which("c++"), native.plugins_folder()
    if compiler is None or folder is None:
        pytest.skip("no C++ compiler or no sources here")
    (tmp_path / "main.cpp").write_text(WORKSPACE)
    ours, program = folder / "onnxruntime", tmp_path / "main"
    command = [compiler, "-std=c++17", "-fsanitize=address", f"-I{ours}", "-o", str(program)]
    subprocess.run([*command, str(tmp_path / "main.cpp"), str(ours / "workspace.cpp"), "-pthread"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
