"""Engines of a bundle: profiles, the build in a child process, what is written, and refusals, all without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_support as support

from rmsnorm_deploy import errors
from rmsnorm_deploy.bundle import open_bundle, seal
from rmsnorm_deploy.engine import EngineOptions, build_engines, child, keep, timing
from rmsnorm_deploy.engine import build as engine_build
from rmsnorm_deploy.engine.architectures import check_architectures, covers
from rmsnorm_deploy.engine.cli import main
from rmsnorm_deploy.engine.dims import evaluate
from rmsnorm_deploy.engine.precision import check_precision
from rmsnorm_deploy.engine.profiles import default_profile, describe, limits, parse_profile
from rmsnorm_deploy.engine.request import BuildRequest, partial
from rmsnorm_deploy.engine.triton import TYPES, config
from rmsnorm_deploy.engine.triton import main as triton
from rmsnorm_deploy.report.engines import engine_rows
from rmsnorm_deploy.runtime.engines import (
    EngineRecord,
    as_metadata,
    checked_bytes,
    choose_engine,
    read_engines,
)
from rmsnorm_deploy.runtime.profiles import ShapeRange
from rmsnorm_deploy.runtime.tensors import DTYPES
from rmsnorm_deploy.runtime.trust import built_here

rtx = pytest.mark.skipif(not support.HAS_RTX, reason=support.NO_RTX)
RECIPES = ("rms_norm", "transformer_block", "llama_tiny", "qwen3_tiny", "gemma3_tiny", "t5_tiny")
MANIFEST: dict[str, Any] = {
    "signature": {
        "inputs": [
            {"name": "ids", "dtype": "int64", "shape": ["batch", "seq"]},
            {"name": "mask", "dtype": "bool", "shape": ["batch", 1, "seq + past", 8]},
            {"name": "fixed", "dtype": "float32", "shape": [4]},
        ]
    },
    "dims": {
        "batch": {"example": 2, "min": 0, "max": None},
        "seq": {"example": 5, "min": 2, "max": 64},
        "past": {"example": 3, "min": 1, "max": 4},
    },
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return support.bundle_of(support.norm_model("SkipRMSNorm_before_cast", scale=support.FLOAT), tmp_path / "b")


# ---- profiles


def test_the_default_profile_spans_the_dims_and_is_tuned_for_the_example() -> None:
    profile = default_profile(MANIFEST)
    assert profile["ids"] == ShapeRange((1, 2), (2, 5), (16, 64))
    assert profile["mask"] == ShapeRange((1, 1, 3, 8), (2, 1, 8, 8), (16, 1, 68, 8))
    assert "fixed" not in profile


def test_a_recipe_may_say_the_sizes() -> None:
    profile = default_profile(MANIFEST | {"engine_profile": {"batch": [1, 4, 8]}})
    assert profile["ids"] == ShapeRange((1, 2), (4, 5), (8, 64))


def test_other_inputs_follow_from_the_dims_that_a_profile_gives() -> None:
    manifest = {"signature": {"inputs": MANIFEST["signature"]["inputs"][:1]}, "dims": MANIFEST["dims"]}
    manifest["signature"]["inputs"].append({"name": "double", "dtype": "float32", "shape": ["2*seq", "batch"]})
    profile = parse_profile("ids=1x2:4x16:8x32", manifest)
    assert profile["double"] == ShapeRange((4, 1), (32, 4), (64, 8))
    assert describe(profile) == "ids=1x2:4x16:8x32,double=4x1:32x4:64x8"
    said = limits(profile)
    assert "refuses larger inputs than ids=8x32" in said
    assert "--profile ids=LEAST:USUAL:GREATEST" in said
    assert parse_profile("ids=3x7", manifest)["ids"] == ShapeRange((3, 7), (3, 7), (3, 7))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("other=1x2", "no input 'other'"),
        ("ids=1x2:3x4", "one shape or three"),
        ("ids=1xmany", "not a shape"),
        ("ids=1:2:3", "1 axes, it has 2"),
        ("ids=1x2:4x16:8x8", "must rise"),
        ("ids=1x2:4x16:8x32", "'seq + past'"),
        ("ids=1x2,mask=2x1x8x8", "does not allow"),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(text: str, word: str) -> None:
    with pytest.raises(errors.InputError) as caught:
        parse_profile(text, MANIFEST)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dims_are_arithmetic_and_nothing_else() -> None:
    assert evaluate("2*seq + past//2 - 1", {"seq": 4, "past": 7}) == 10
    assert evaluate(7, {}) == 7
    for text in ("seq", "abs(1)", "__import__('os')", "2**64", "1/0", "1//0", "("):
        assert evaluate(text, {}) is None


# ---- building


@rtx
def test_both_variants_are_built_for_all_cards_and_described(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = support.plugin_library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said: list[str] = []
    records = build_engines(bundle, EngineOptions("tensorrt-rtx", support.SMS, plugin_library=library), said.append)
    assert [record.name for record in records] == [f"tensorrt-rtx-sm80-86-89-120-{v}" for v in ("plugin", "native")]
    assert read_engines(bundle / "engines") == sorted(records, key=lambda record: record.name)
    plugin = json.loads((bundle / "engines" / f"{records[0].name}.json").read_text())
    assert plugin["variant"] == "plugin"
    assert plugin["variants_built"] == ["plugin", "native"]
    assert plugin["plugin_layers"] == 1
    assert plugin["plugin_sha256"] == hashlib.sha256(library.read_bytes()).hexdigest()
    assert plugin["sha256"] == hashlib.sha256(records[0].path.read_bytes()).hexdigest()
    assert plugin["milliseconds"] is None
    assert plugin["precision"] == "fp16"
    assert records[0].inputs == {"x": "float16", "skip": "float16"}
    assert records[0].outputs == {"y": "float16", "sum": "float16"}
    assert records[0].profiles[0]["x"] == ShapeRange((1, 1, 64), (4, 4, 64), (16, 16, 64))
    # The library travels in the engine; the other engine does without.
    assert records[0].path.stat().st_size > library.stat().st_size / 2 > records[1].path.stat().st_size
    assert records[1].plugin is None
    assert any("untimed" in line for line in said)
    assert all(built_here(record.sha256) for record in records)
    chosen = choose_engine(records, "tensorrt-rtx", records[0].runtime_version, 89, bundle)
    assert chosen.plugin == "embedded"
    assert sorted(p.suffix for p in (bundle / "engines").iterdir()) == [".engine", ".engine", ".json", ".json"]


@rtx
def test_two_profiles(bundle: Path) -> None:
    options = EngineOptions(
        "tensorrt-rtx",
        (89,),
        profiles=("x=1x1x64:1x4x64:1x8x64", "x=1x8x64:4x16x64:8x32x64"),
        plugin="always",
        plugin_library=support.plugin_library(),
    )
    (record,) = build_engines(bundle, options)
    assert [profile["skip"].high for profile in record.profiles] == [(1, 8, 64), (8, 32, 64)]


@rtx
def test_a_norm_that_stays_a_body_is_an_error(tmp_path: Path) -> None:
    bundle = support.bundle_of(support.norm_model("RMSNorm", plugin_namespace="elsewhere"), tmp_path / "b")
    options = EngineOptions("tensorrt-rtx", (89,), plugin="always", plugin_library=support.plugin_library())
    with pytest.raises(errors.InputError, match="1 of 1 norms did not become plugin layers: 'norm'"):
        build_engines(bundle, options)
    assert not list((bundle / "engines").iterdir())


@rtx
@pytest.mark.parametrize(
    ("model", "word"),
    [
        (("RMSNorm", {"scale_shape": (32,)}), "scale has shape [32]"),
        (("RMSNorm_clamp", {"epsilon_mode": None}), "field 'epsilon_mode'"),
        (("RMSNorm", {"axis": 2, "scale_shape": (64,)}), "field 'axis' is 2"),
    ],
)
def test_what_the_plugin_says_is_in_the_refusal(model: Any, word: str, tmp_path: Path) -> None:
    name, attributes = model
    bundle = support.bundle_of(support.norm_model(name, **attributes), tmp_path / "b")
    options = EngineOptions("tensorrt-rtx", (89,), plugin="always", plugin_library=support.plugin_library())
    with pytest.raises(errors.InputError) as caught:
        build_engines(bundle, options)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_float64_is_refused_by_name(tmp_path: Path) -> None:
    double = support.ir.DataType.DOUBLE
    bundle = support.bundle_of(support.norm_model("RMSNorm_double", double, double), tmp_path / "b")
    with pytest.raises(errors.InputError, match="'x' is float64"):
        build_engines(bundle, EngineOptions("tensorrt-rtx", (89,)))


@rtx
@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["--sm", "90"], 2, "--sm 90: tensorrt-rtx builds for 75, 80, 86"),
        (["--sm", "many"], 2, "numbers such as 80,89"),
        (["--sm", "89", "--profile", "z=1x1x64"], 2, "no input 'z'"),
        (
            ["--sm", "89", "--precision", "bf16"],
            2,
            "is fp16, and engines run in its dtypes: export the model again with",
        ),
        (["--sm", "89", "--plugin-library", "/nowhere.so"], 2, "no plugin library /nowhere.so"),
        (["--sm", "89", "--timing-cache", "cache"], 2, "no timing cache"),
    ],
)
def test_refusals_of_the_command(
    bundle: Path, arguments: list[str], status: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(bundle), "--runtime", "tensorrt-rtx", "--plugin", "never", *arguments]
    if "--plugin-library" in arguments:
        command[command.index("never")] = "always"
    assert main(command) == status
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert word in last


@rtx
def test_a_library_that_is_no_plugin_library_is_refused(bundle: Path, tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int nothing;")
    library = tmp_path / "libempty.so"
    support.subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    options = EngineOptions("tensorrt-rtx", (89,), plugin="always", plugin_library=library)
    with pytest.raises(errors.InputError, match="getCreators"):
        build_engines(bundle, options)


@pytest.mark.parametrize(
    ("built", "runs_on", "not_on"),
    [
        (["89"], (89, 90, 100, 120), (75, 80, 86)),  # later ones from its PTX
        (["80", "120"], (80, 86, 89, 120, 121), (75,)),
        (["120", "80"], (80, 86, 89, 90, 100, 120, 121), (75,)),
        (["75", "90a"], (75, 90), (80, 89, 100, 120)),
        ([], (), (75, 120)),
    ],
)
def test_code_runs_on_its_own_generation_and_what_is_last_on_all_later(
    built: list[str], runs_on: tuple[int, ...], not_on: tuple[int, ...]
) -> None:
    assert [sm for sm in (*runs_on, *not_on) if covers(built, sm)] == list(runs_on)


@rtx
@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not on this machine")
def test_a_library_without_code_for_a_card_is_not_embedded_for_it(bundle: Path, tmp_path: Path) -> None:
    source, library = tmp_path / "one.c", tmp_path / "libone.so"
    source.write_text('const char* rmsnorm_deploy_architectures(void) { return "89"; }')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    with pytest.raises(errors.InputError, match="has code for SM 89 and none for 80, 86: python -m"):
        check_architectures(library, (80, 86, 89, 120))
    check_architectures(library, (89, 120))
    real = support.plugin_library()
    check_architectures(real, support.SMS)
    with pytest.raises(errors.InputError, match=r"none for 75: python -m rmsnorm_deploy\.native build --tensorrt --sm"):
        build_engines(bundle, EngineOptions("tensorrt-rtx", (75,), plugin="always", plugin_library=real))


def test_without_a_gpu_tensorrt_says_what_it_needs(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_build, "load_module", lambda *_: None)
    monkeypatch.setattr("rmsnorm_deploy.runtime.cuda.no_gpu_reason", lambda: "there is no GPU")
    with pytest.raises(errors.BackendUnavailable, match="there is no GPU"):
        build_engines(bundle, EngineOptions("tensorrt"))


def test_an_abort_in_the_library_is_an_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text("import os, sys\nprint('out of luck', file=sys.stderr)\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    request = BuildRequest("m.onnx", "e", str(tmp_path / "answer.json"), "tensorrt", [], [], None, [], 18)
    with pytest.raises(errors.InputError, match=r"tensorrt ended by SIGABRT while it built m.onnx: "):
        child.run_worker(request, tmp_path)


def test_an_engine_is_vouched_for_by_its_own_bundle_alone(tmp_path: Path) -> None:
    # Two bundles of the same tensors: nothing but the hashes tells their engines apart.
    bundles = [support.bundle_of(support.norm_model(name), tmp_path / name) for name in ("RMSNorm", "RMSNorm_clamp")]
    manifests = [open_bundle(bundle).manifest for bundle in bundles]
    records = []
    for bundle, manifest in zip(bundles, manifests, strict=True):
        path = bundle / "engines" / "e.engine"
        path.parent.mkdir()
        path.write_bytes(bundle.name.encode())
        records.append(support.engine_record(path, manifest))
        assert checked_bytes(records[-1], manifest) == bundle.name.encode()
    for bundle in bundles:
        path = bundle / "engines" / "e.json"
        path.write_text(
            json.dumps(as_metadata(support.engine_record(path.with_suffix(".engine"), open_bundle(bundle).manifest)))
        )
    shutil.copy(records[0].path, records[1].path)
    (swapped,) = read_engines(bundles[1] / "engines")
    with pytest.raises(errors.InputError, match=r"RMSNorm_clamp/engines/e\.engine is damaged, or not the engine that"):
        checked_bytes(swapped, manifests[1])
    shutil.copy(bundles[0] / "engines" / "e.json", bundles[1] / "engines" / "e.json")
    (swapped,) = read_engines(bundles[1] / "engines")
    with pytest.raises(errors.InputError, match=r"RMSNorm_clamp/engines/e\.engine was built from another model"):
        checked_bytes(swapped, manifests[1])


def test_an_interrupted_build_takes_its_child_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def write(self, text: str) -> None:
            raise KeyboardInterrupt

    script = (
        "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); sys.stderr.write('x'); time.sleep(60)"
    )
    monkeypatch.setattr("sys.stderr", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        child.echoed([sys.executable, "-uc", script, str(tmp_path / "pid")], dict(os.environ))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_build_that_ends_leaves_nothing_half_written(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(request: BuildRequest, scratch: Path) -> Any:
        partial(Path(request.engine)).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_build, "run_worker", ended)
    monkeypatch.setattr(engine_build, "load_module", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        build_engines(bundle, EngineOptions("tensorrt-rtx", (89,), plugin="never"))
    assert list((bundle / "engines").iterdir()) == []


# ---- which of two is kept


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rmsnorm_deploy.export.pipeline import export_model

    folder = tmp_path_factory.mktemp("exported") / "b"
    return export_model(support.ROOT / "export" / "rms_norm.py", out_dir=folder, check=False, benchmark=False).path


@pytest.mark.parametrize(("plugin", "native", "kept"), [(0.25, 0.5, "plugin"), (0.5, 0.25, "native")])
def test_the_faster_of_two_engines_is_kept_and_both_times_are_reported(
    plugin: float, native: float, kept: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(shutil.copytree(exported, tmp_path / "b"))
    (bundle.path / "report.html").write_text("before the engines")
    seal(bundle.path, bundle.manifest)
    folder = bundle.path / "engines"
    folder.mkdir()
    records = []
    for name in ("plugin", "native"):
        (folder / f"{name}.engine").write_bytes(name.encode())
        records.append(support.engine_record(folder / f"{name}.engine", bundle.manifest))
        (folder / f"{name}.json").write_text(json.dumps(as_metadata(records[-1], variant=name)))
    said: list[str] = []
    keep.keep_faster(bundle, records, said.append)
    keep.report_engines(bundle, said.append)
    assert (bundle.path / "report.html").read_text().count("kept, untimed") == 2
    monkeypatch.setattr(timing, "runs_here", lambda records: True)
    monkeypatch.setattr(timing, "time_engines", lambda *_: {"plugin": plugin, "native": native})
    (fastest,) = keep.keep_faster(bundle, records, said.append)
    keep.report_engines(bundle, said.append)
    assert (fastest.name, fastest.milliseconds) == (kept, 0.25)
    assert read_engines(folder) == [fastest]
    assert fastest.milliseconds_of_all == {"plugin": plugin, "native": native}
    assert json.loads((folder / f"{kept}.json").read_text())["variant"] == kept
    rows = engine_rows(bundle)
    assert [(row.name, row.milliseconds, row.state) for row in rows] == [
        (kept, 0.25, "kept"),
        ("native" if kept == "plugin" else "plugin", 0.5, "slower, and removed"),
    ]
    page = (bundle.path / "report.html").read_text()
    assert "TensorRT engines" in page
    assert "slower, and removed" in page
    assert sorted(path.name for path in folder.iterdir()) == [f"{kept}.engine", f"{kept}.json"]


def test_evidence_of_another_version_leaves_the_report_as_it_was(exported: Path, tmp_path: Path) -> None:
    bundle = open_bundle(shutil.copytree(exported, tmp_path / "b"))
    (bundle.path / "report.html").write_text("before")
    (bundle.path / "parity.json").write_text('{"format": 0}')
    seal(bundle.path, bundle.manifest)
    said: list[str] = []
    keep.report_engines(bundle, said.append)
    assert (bundle.path / "report.html").read_text() == "before"
    assert said[0].startswith("warning: report.html is left as it was: parity.json has format 0")


# ---- precision


@pytest.mark.parametrize(("x", "name"), [(support.FLOAT, "fp32"), (support.HALF, "fp16"), (support.BFLOAT, "bf16")])
def test_a_bundle_exported_as_it_was_has_the_precision_that_it_runs_in(x: Any, name: str, tmp_path: Path) -> None:
    opened = open_bundle(support.bundle_of(support.norm_model("RMSNorm", x, support.FLOAT), tmp_path / "b"))
    opened.manifest["signature"]["outputs"] = []
    assert check_precision(opened, "keep") == name
    assert check_precision(opened, name) == name
    opened.manifest["precision"] = "bf16"
    assert check_precision(opened, "keep") == "bf16"


def test_a_half_model_with_float32_norms_and_logits_is_half(tmp_path: Path) -> None:
    model = support.norm_model("RMSNorm", support.FLOAT, support.FLOAT)
    model.graph.initializer.append(onnx.helper.make_tensor("embedding", 10, [2, 3], [0.0] * 6))
    assert check_precision(open_bundle(support.bundle_of(model, tmp_path / "b")), "keep") == "fp16"


@pytest.mark.parametrize(
    ("source", "cure"),
    [
        (
            {"kind": "module", "path": "my models/net.pt", "recipe": "net.py"},
            "python -m rmsnorm_deploy.export 'my models/net.pt' --precision fp32 --out b-fp32.bundle --recipe net.py",
        ),
        (
            {"kind": "module", "path": "net.py", "recipe": "net.py"},
            "python -m rmsnorm_deploy.export net.py --precision fp32 --out b-fp32.bundle",
        ),
        ({"kind": "module", "path": None}, 'export_model(..., precision="fp32")'),
        ({"kind": "onnx", "path": "net.onnx"}, "onnx has its dtypes built in"),
    ],
)
def test_another_precision_is_refused_with_the_command_that_makes_it(
    bundle: Path, source: dict[str, Any], cure: str
) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source": source}))
    with pytest.raises(errors.InputError) as caught:
        build_engines(bundle, EngineOptions("tensorrt-rtx", (89,), precision="fp32"))
    assert str(caught.value).startswith(f"--precision fp32: {bundle} is fp16")
    assert str(caught.value).endswith(cure)


def test_the_command_that_a_refusal_names_is_one_that_the_export_takes(bundle: Path) -> None:
    from rmsnorm_deploy.export.cli import parser

    opened = open_bundle(bundle)
    opened.manifest["source"] = {"kind": "module", "path": "net.pt", "recipe": "net.py"}
    with pytest.raises(errors.InputError) as caught:
        check_precision(opened, "bf16")
    words = shlex.split(str(caught.value))
    options = parser().parse_args(words[words.index("rmsnorm_deploy.export") + 1 :])
    assert (str(options.model), options.precision, str(options.recipe)) == ("net.pt", "bf16", "net.py")


# ---- opset 23


def attention_model(heads: int = 4, size: int = 16) -> onnx.ModelProto:
    """A norm in front of the op Attention, in float32, for which TensorRT has no fused kernel."""
    model = support.norm_model("RMSNorm", support.FLOAT, support.FLOAT, ("batch", heads, "seq", size), version=23)
    model.graph.node.append(onnx.helper.make_node("Neg", ["y"], ["keys"], "keys"))  # TensorRT-RTX 1.7 takes no q = k
    output = onnx.helper.make_tensor_value_info("out", 1, ["batch", heads, "seq", size])
    model.graph.node.append(
        onnx.helper.make_node("Attention", ["y", "keys", "keys"], ["out"], "attention", is_causal=1)
    )
    del model.graph.output[:]
    model.graph.output.append(output)
    return model


@rtx
def test_attention_without_a_fused_kernel_is_taken_apart(tmp_path: Path) -> None:
    bundle = support.bundle_of(attention_model(), tmp_path / "b")
    options = EngineOptions("tensorrt-rtx", (89,), plugin_library=support.plugin_library())
    records = build_engines(bundle, options)
    assert [record.plugin for record in records] == ["embedded", None]


@rtx
@pytest.mark.parametrize(("version", "hinted"), [(23, True), (18, False)])
def test_what_opset_23_brought_and_tensorrt_lacks_is_refused_with_a_hint(
    version: int, hinted: bool, tmp_path: Path
) -> None:
    model = support.norm_model("RMSNorm", support.FLOAT, support.FLOAT, version=version)
    model.graph.node.append(onnx.helper.make_node("StringNormalizer", ["y"], ["z"], "strings"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, None))
    bundle = support.bundle_of(model, tmp_path / "b")
    with pytest.raises(errors.InputError, match="StringNormalizer") as caught:
        build_engines(bundle, EngineOptions("tensorrt-rtx", (89,), plugin="never"))
    assert str(caught.value).endswith("the bundle is of opset 23; try one exported with --opset 18") == hinted
    assert "\n" not in str(caught.value)


# ---- whole models


def norm_nodes(path: Path) -> int:
    return sum(node.domain == "rmsnorm_deploy" for node in onnx.load(path, load_external_data=False).graph.node)


def build_recipe(recipe: str, folder: Path, **changes: Any) -> tuple[int, dict[str, Any]]:
    from rmsnorm_deploy.export.pipeline import export_model

    bundle = export_model(support.ROOT / "export" / f"{recipe}.py", out_dir=folder / "bundle", **changes)
    library = support.plugin_library()
    records = build_engines(bundle, EngineOptions("tensorrt-rtx", support.SMS, plugin_library=library))
    described = json.loads((bundle.path / "engines" / f"{records[0].name}.json").read_text())
    assert described["plugin_layers"] == len(open_bundle(bundle.path).norms) == norm_nodes(bundle.model_path)
    return described["plugin_layers"], described


@rtx
def test_a_transformer_block_has_a_plugin_layer_for_every_norm(tmp_path: Path) -> None:
    count, _ = build_recipe("transformer_block", tmp_path)
    assert count > 0


@rtx
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "recipe", ["rms_norm", "transformer_block", "llama_tiny", "qwen3_tiny", "gemma3_tiny", "t5_tiny"]
)
def test_recipes_have_a_plugin_layer_for_every_norm(recipe: str, precision: str, tmp_path: Path) -> None:
    count, _ = build_recipe(recipe, tmp_path, precision=precision)
    assert count > 0


@rtx
@pytest.mark.real
@pytest.mark.slow
def test_smollm2_has_61_plugin_layers(tmp_path: Path) -> None:
    count, described = build_recipe("smollm2", tmp_path)
    assert count == 61
    print(f"{described['build_seconds']} s, {described['build_peak_bytes'] / 2**30:.2f} GB")


# ---- Triton


def test_a_triton_repository_holds_the_model_and_its_tensors(bundle: Path, tmp_path: Path) -> None:
    assert triton([str(bundle), str(tmp_path / "repository"), "--name", "norm"]) == 0
    folder = tmp_path / "repository" / "norm"
    assert sorted(path.name for path in (folder / "1").iterdir()) == ["model.onnx"]
    text = (folder / "config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in text
    assert '{ name: "x", data_type: TYPE_FP16, dims: [ -1, -1, 64 ] }' in text
    assert text.count("{ name:") == 4
    assert triton([str(bundle), str(tmp_path / "repository"), "--name", "norm"]) == 2
    assert triton([str(bundle), str(tmp_path / "repository"), "--name", "../norm"]) == 2
    assert triton([str(bundle), str(tmp_path / "repository"), "--name", "n", "--engine", "none"]) == 2
    assert [path.name for path in (tmp_path / "repository").iterdir()] == ["norm"]


def write_engine(bundle: Path, **changes: Any) -> EngineRecord:
    path = bundle / "engines" / "e.engine"
    path.parent.mkdir()
    path.write_bytes(b"plan")
    record = replace(support.engine_record(path, open_bundle(bundle).manifest), **changes)
    path.with_suffix(".json").write_text(json.dumps(as_metadata(record)))
    return record


@pytest.mark.parametrize("plugin", [None, "embedded"])
def test_an_engine_is_served_and_its_code_allowed_where_it_has_any(
    plugin: str | None, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_engine(bundle, plugin=plugin)
    assert triton([str(bundle), str(tmp_path / "repository"), "--engine", "e"]) == 0
    assert (tmp_path / "repository" / "b" / "1" / "model.plan").read_bytes() == b"plan"
    allowed = "--backend-config=tensorrt,version-compatible=true" in capsys.readouterr().out
    assert allowed == (plugin is not None)


def test_a_damaged_engine_and_one_of_tensorrt_rtx_are_not_served(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = write_engine(bundle)
    record.path.write_bytes(b"plam")
    command = [str(bundle), str(tmp_path / "repository"), "--engine", "e"]
    assert triton(command) == 2
    assert "e.engine is damaged" in capsys.readouterr().err
    record.path.with_suffix(".json").write_text(json.dumps(as_metadata(replace(record, runtime="tensorrt-rtx"))))
    assert triton(command) == 2
    assert "Triton runs engines of tensorrt" in capsys.readouterr().err
    assert not (tmp_path / "repository").exists()


def test_every_dtype_of_the_runtime_has_a_type_in_triton() -> None:
    assert set(TYPES) == set(DTYPES)


PARSE = """
import importlib.util, json, sys
from google.protobuf import json_format, text_format
# The module alone: its package asks for more than protobuf.
path = sys.argv[1] + "/tritonclient/grpc/model_config_pb2.py"
spec = importlib.util.spec_from_file_location("model_config_pb2", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
parsed = text_format.Parse(open(sys.argv[2]).read(), module.ModelConfig())
print(json.dumps(json_format.MessageToDict(parsed, preserving_proto_field_name=True)))
"""


@pytest.mark.slow
def test_config_pbtxt_is_what_tritons_own_schema_takes(bundle: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages")]
    done = subprocess.run([*install, "tritonclient==2.73.0"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"tritonclient cannot be installed: {done.stderr.strip()[-200:]}")
    one = {"x": ShapeRange((1, 1, 64), (1, 4, 64), (1, 8, 64))}
    opened = open_bundle(bundle)
    inputs = [{"name": f"in_{dtype}", "dtype": dtype, "shape": ["batch", 3]} for dtype in DTYPES]
    inputs += [
        {"name": 'a "b"\\c', "dtype": "bool", "shape": []},
        {"name": "unnamed", "dtype": "int8", "shape": [None]},
    ]
    opened.manifest["signature"]["inputs"] = inputs
    record = write_engine(bundle, profiles=(one, one))
    for given in (None, record):
        path = tmp_path / "config.pbtxt"
        path.write_text(config(opened.manifest, "norm", given))
        command = [sys.executable, "-c", PARSE, str(tmp_path / "packages"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        parsed = json.loads(done.stdout)
        assert ("KIND_AUTO" in path.read_text()) == (given is None)
        assert (parsed["name"], parsed["backend"]) == ("norm", "tensorrt" if given else "onnxruntime")
        assert parsed["instance_group"] == [
            {"kind": "KIND_GPU", "profile": ["0", "1"]} if given else {}  # KIND_AUTO, the schema's default
        ]
        assert parsed["output"][0] == {"name": "y", "data_type": "TYPE_FP16", "dims": ["-1", "-1", "64"]}
        assert [item["name"] for item in parsed["input"]] == [item["name"] for item in inputs]
        assert [item["data_type"] for item in parsed["input"]] == [TYPES[item["dtype"]] for item in inputs]
        assert parsed["input"][-2] == {"name": 'a "b"\\c', "data_type": "TYPE_BOOL", "dims": ["1"], "reshape": {}}
        assert parsed["input"][-1]["dims"] == ["-1"]
