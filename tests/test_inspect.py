"""python -m rmsnorm_deploy.inspect: what is said of norms and look-alikes, and how it is refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import rmsnorm_deploy
from rmsnorm_deploy.cli import console
from rmsnorm_deploy.fusion.records import LeftRecord
from rmsnorm_deploy.inspect import Inspection, cli, inspect_model
from rmsnorm_deploy.inspect.tables import print_inspection
from rmsnorm_deploy.zoo import Result

ROOT = Path(__file__).parent.parent
BLOCK = ROOT / "export" / "transformer_block.py"


class Mixed(nn.Module):
    """A norm, and a LayerNorm that must be left."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.RMSNorm(16, eps=1e-8), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.norm(x) * 2 + x)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("inspect") / "mixed.bundle"
    return rmsnorm_deploy.export_model(Mixed(), (torch.randn(2, 3, 16),), out_dir=out).path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_every_norm_is_told_with_its_place_epsilon_scale_and_proof(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, BLOCK, "--json")
    assert status == 0
    found = json.loads(out)
    assert (found["kind"], found["left"]) == ("module", [])
    first, second = found["norms"]
    assert [norm["module"] for norm in (first, second)] == ["norm1", "norm2"]
    assert first["epsilon"] == 1e-8
    assert (first["axis"], first["shape"][-1], first["scale"]) == (-1, 256, "norm1.scale")
    assert first["residual"]
    assert first["location"].startswith("transformer_block.py:")
    assert first["proof"]["float64"] < 1e-12


def test_what_was_left_has_its_reason(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, bundle)
    assert status == 0
    assert "1 RMSNorm" in out
    assert "1 look-alike left" in out
    assert "LayerNormalization subtracts the mean" in out


def test_a_bundle_its_reference_and_its_model_tell_of_the_same_norms(bundle: Path) -> None:
    """The model is fused already, the reference not yet, and the bundle's manifest was written in between."""
    names = {
        name: [norm.name for norm in inspect_model(path).norms]
        for name, path in {"bundle": bundle, "file": bundle / "model.onnx", "before": bundle / "reference.onnx"}.items()
    }
    assert names["bundle"] == names["file"] == names["before"] == ["norm"]


def test_a_bundle_is_told_from_its_model_and_what_the_manifest_claims_otherwise_is_said(
    bundle: Path, tmp_path: Path
) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["norms"][0]["epsilon"] = 1e-5
    manifest["left"].clear()
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    found, file = inspect_model(tmp_path / "b"), inspect_model(bundle / "model.onnx")
    assert [norm.epsilon for norm in found.norms] == [1e-8]
    assert (found.norms, found.left) == (file.norms, file.left)
    claim, look_alike = found.notes[-2:]
    assert "model.onnx has the look-alike" in claim
    assert look_alike == "the manifest says that the epsilon of 'norm' is 1e-05, and model.onnx that it is 1e-08"
    assert inspect_model(bundle).norms[0].proof  # which only the manifest has


def test_a_piped_table_keeps_every_row_on_its_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = [f"{i}" * 60 for i in range(4)]
    found = Inspection(long[0], "onnx", [], [LeftRecord(long[1], long[1], " ".join(long[2:]))])
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    print_inspection(found, console())
    assert any(long[1] in line and " ".join(long[2:]) in line for line in out.getvalue().splitlines())


def test_options_that_a_bundle_has_no_use_for_are_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, bundle, "--precision", "fp16")
    assert (status, out) == (2, "")
    assert err == f"error: {bundle}: a bundle is looked at as it was exported: drop --precision\n"


def test_nothing_is_written(bundle: Path) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in bundle.rglob("*")}

    before = state()
    inspect_model(bundle / "reference.onnx")
    assert state() == before


def test_the_table_fits_100_columns(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    long = "model.model.language_model.layers.11.post_attention_layernorm"
    model = onnx.load(bundle / "reference.onnx")
    for node in model.graph.node:
        for entry in node.metadata_props:
            if entry.key == "pkg.torch.onnx.name_scopes":
                entry.value = str(["", long, node.name])
    onnx.save(model, bundle.parent / "long.onnx")
    status, out, _ = run(capsys, bundle.parent / "long.onnx")
    assert status == 0
    assert all(len(line) <= 100 for line in out.splitlines())
    assert "post_attention_layernorm" in out  # broken at a dot, not within the word


def test_a_dtype_is_asked_for_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, BLOCK, "--precision", "bf16", "--json")
    assert {norm["dtype"] for norm in json.loads(out)["norms"]} == {"bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.onnx"], "no such file"),
        ([], "give MODEL, or --zoo"),
        (["--zoo", "m.onnx"], "give MODEL, or --zoo"),
        (["m.onnx", "--dtype", "fp16"], "--dtype goes with --zoo"),
        (["--zoo", "--family", "GPT-9"], "not in the zoo"),
        (["--zoo", "--dtype", "fp8"], "not in the zoo"),
        (["--wrong"], "inspect --help"),
        ([BLOCK, "--opset", "17"], "--opset 17: PyTorch"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_damaged_file_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.onnx").write_bytes(b"\x08\x0a\x12")
    status, _, err = run(capsys, tmp_path / "cut.onnx", "--json")
    assert status == 2
    assert err.count("\n") == 1


def test_the_zoo_ends_with_status_1_when_a_norm_is_not_fused(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    good = Result("Llama", "fp32", 5, 5, 4, 0, runtime="ONNX Runtime", max_ulp=3.0, budget=30.0, verdict="pass")
    lost = Result("Gemma", "bf16", 5, 4, 3, 1, runtime="onnx.reference", refused="no kernel", verdict="pass")
    gone = Result("Qwen2", "fp16", problem="PyTorch can't trace it")
    for results, expected in (([good], 0), ([good, lost], 1), ([good, gone], 1)):
        monkeypatch.setattr("rmsnorm_deploy.zoo.run_zoo", lambda *_, found=results: iter(found))
        status, out, _ = run(capsys, "--zoo", "--markdown")
        assert status == expected
    assert "| Llama | fp32 | 5 of 5 | 4 | 0 | ONNX Runtime | 3.0 of 30.0 | 0.0 | 0e+00 | pass |" in out
    assert "- Qwen2 fp16: PyTorch can't trace it" in out
