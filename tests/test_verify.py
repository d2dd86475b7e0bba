"""verify: an altered, missing or extra file is named, and an altered model is never run."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from parity_fakes import FakeBundle, TokenModel, make_bundle

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import ParityReport
from rmsnorm_deploy.verify import check_files, main


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBundle:
    made = make_bundle(tmp_path / "out", torch.nn.RMSNorm(8, eps=1e-6), (torch.randn(3, 8),), dims={"n": (0,)})
    fake = types.ModuleType("rmsnorm_deploy.bundle")
    fake.open_bundle = lambda path: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rmsnorm_deploy.bundle", fake)
    return made


def test_a_bundle_as_exported_is_verified_and_judged(bundle: FakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle.path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("every file of the model is as exported\n")
    assert "ONNX Runtime: pass" in out


def test_an_altered_file_of_the_same_size_is_named(bundle: FakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(bundle.model_path.read_bytes())
    content[-1] ^= 1
    bundle.model_path.write_bytes(bytes(content))
    assert main([str(bundle.path)]) == 1
    assert capsys.readouterr().out == "model.onnx is altered: its sha256 is not the one in the manifest\n"


def test_a_truncated_file_is_named(bundle: FakeBundle) -> None:
    bundle.model_path.write_bytes(bundle.model_path.read_bytes()[:-10])
    (problem,) = check_files(bundle.path)
    assert (problem.name, problem.problem) == ("model.onnx", "altered")
    assert "bytes" in problem.detail


def test_a_missing_and_an_extra_file_are_named(bundle: FakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    bundle.model_path.rename(bundle.path / "other.onnx")
    (bundle.path / "sub").mkdir()
    (bundle.path / "sub" / "note.txt").write_text("hello")
    assert main([str(bundle.path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {(item["name"], item["problem"]) for item in report["files"]} == {
        ("model.onnx", "missing"),
        ("other.onnx", "extra"),
        ("sub/note.txt", "extra"),
    }
    assert report["parity"] is None


def test_a_link_in_place_of_a_file_is_not_followed(bundle: FakeBundle, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.onnx"
    bundle.model_path.rename(elsewhere)
    bundle.model_path.symlink_to(elsewhere)
    (problem,) = check_files(bundle.path)
    assert str(problem) == "model.onnx is altered: a link stands in its place"


def test_engines_are_checked_against_their_own_description(bundle: FakeBundle) -> None:
    folder = bundle.path / "engines"
    folder.mkdir()
    (folder / "a.engine").write_bytes(b"engine")
    description = {"engine": "a.engine", "sha256": hashlib.sha256(b"engine").hexdigest()}
    (folder / "a.json").write_text(json.dumps(description))
    assert check_files(bundle.path) == []
    (folder / "a.engine").write_bytes(b"enginE")
    assert [str(p) for p in check_files(bundle.path)] == [
        "engines/a.engine is altered: its sha256 is not the one in its description"
    ]
    (folder / "a.engine").unlink()
    (folder / "b.engine").write_bytes(b"")
    assert {(p.name, p.problem) for p in check_files(bundle.path)} == {
        ("engines/a.engine", "missing"),
        ("engines/b.engine", "extra"),
    }


@pytest.mark.parametrize("name", ["../outside.onnx", "/etc/passwd", "a\\b"])
def test_a_manifest_that_names_a_file_outside_is_refused(bundle: FakeBundle, name: str) -> None:
    bundle.manifest["files"][name] = {"sha256": "0", "bytes": 1}
    (bundle.path / "manifest.json").write_text(json.dumps(bundle.manifest))
    with pytest.raises(InputError, match="outside the bundle"):
        check_files(bundle.path)


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"files": {"a": {}}}', '{"files": {"a": {"sha256": "", "bytes": "x"}}}']
)
def test_what_is_no_bundle_is_refused_with_2(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    assert main([str(tmp_path)]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith(f"error: {tmp_path}")
    assert captured.count("\n") == 1


def test_a_file_or_nothing_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("is not a bundle: it has no manifest.json") == 2


def test_hashes_alone_run_nothing(bundle: FakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle.path), "--files-only"]) == 0
    assert capsys.readouterr().out == "every file of the model is as exported\n"


def test_the_whole_road_from_export_to_an_altered_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    made = export_model(
        TokenModel(width=64).half(),
        (torch.randint(0, 50, (2, 7)),),
        out_dir=tmp_path / "out",
        check=True,
    )
    assert len(made.norms) == 5
    judged = ParityReport.from_json(json.loads((made.path / "parity.json").read_text()))
    assert judged.ok
    assert judged.backend("onnxruntime").verdict == "pass"
    page = (made.path / "report.html").read_text()
    assert "The same model</h1>" in page
    assert main([str(made.path)]) == 0
    assert "every file of the model is as exported" in capsys.readouterr().out
    (made.path / "extra.onnx").write_text("")
    assert main([str(made.path), "--files-only"]) == 1
    assert capsys.readouterr().out.startswith("extra.onnx is extra")
    (made.path / "extra.onnx").unlink()
    content = bytearray(made.model_path.read_bytes())
    content[len(content) // 2] ^= 1
    made.model_path.write_bytes(bytes(content))
    assert main([str(made.path)]) == 1
    assert capsys.readouterr().out.startswith("model.onnx is altered")
