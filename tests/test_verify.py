"""verify: an altered, missing or extra file is named, and an altered model is never run."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from parity_fakes import TokenModel
from tensorrt_support import engine_record

from rmsnorm_deploy import export_model
from rmsnorm_deploy.bundle import Bundle, open_bundle, seal
from rmsnorm_deploy.engine.keep import report_engines
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import ParityReport
from rmsnorm_deploy.runtime.engines import as_metadata
from rmsnorm_deploy.verify import check_files, check_norms, main

GOOD = "every file is as exported, and the manifest tells the norms that model.onnx has\n"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    class Mixed(torch.nn.Module):
        """A norm, and a LayerNorm that is left."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other = torch.nn.RMSNorm(8, eps=1e-6), torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.norm(x))

    out = tmp_path_factory.mktemp("verify") / "out"
    return export_model(Mixed(), (torch.randn(3, 8),), out_dir=out, check=True).path


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(exported, tmp_path / "out")
    return open_bundle(tmp_path / "out")


def resealed(bundle: Bundle) -> list[str]:
    """What is found when the manifest in memory is written back, and hashes are made to fit."""
    (bundle.path / "manifest.json").write_text(json.dumps(bundle.manifest))
    seal(bundle.path, bundle.manifest)
    assert check_files(bundle.path) == []
    return [str(problem) for problem in check_norms(bundle.path)]


@pytest.mark.parametrize("name", ["manifest.json", "parity.json", "report.html", "model.onnx", "program.pt2"])
def test_every_file_is_vouched_for_evidence_and_manifest_too(bundle: Bundle, name: str) -> None:
    content = bytearray((bundle.path / name).read_bytes())
    at = content.index(b" ") if name == "manifest.json" else len(content) // 2
    content[at : at + 1] = b"\n" if name == "manifest.json" else bytes([content[at] ^ 1])
    (bundle.path / name).write_bytes(bytes(content))
    assert [str(p) for p in check_files(bundle.path)] == [
        f"{name} is altered: its sha256 is not the one it had when exported"
    ]
    (bundle.path / name).unlink()
    if name != "manifest.json":
        assert [str(p) for p in check_files(bundle.path)] == [f"{name} is missing: the export wrote it"]


def test_evidence_that_the_export_did_not_make_is_extra(bundle: Bundle) -> None:
    (bundle.path / "benchmark.json").write_text("{}")
    assert [(p.name, p.problem) for p in check_files(bundle.path)] == [("benchmark.json", "extra")]


@pytest.mark.parametrize("content", [None, "no sums", "\xff"])
def test_sums_that_are_gone_or_damaged_are_named(bundle: Bundle, content: str | None) -> None:
    (bundle.path / "SHA256SUMS").unlink()
    if content is not None:
        (bundle.path / "SHA256SUMS").write_bytes(content.encode("latin1"))
    (problem,) = check_files(bundle.path)
    assert (problem.name, problem.problem) == ("SHA256SUMS", "missing" if content is None else "altered")


def test_a_bundle_from_before_the_sums_is_verified_as_far_as_it_goes(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    del bundle.manifest["sums"]
    (bundle.path / "manifest.json").write_text(json.dumps(bundle.manifest))
    (bundle.path / "SHA256SUMS").unlink()
    assert main([str(bundle.path), "--files-only"]) == 0
    assert "manifest and evidence have no hashes: an older version wrote them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"), [("epsilon", 1e-5), ("op", "SkipRMSNorm"), ("scale_order", "before_cast"), ("axis", -2)]
)
def test_a_manifest_that_tells_another_norm_than_the_file_has_is_contradicted(
    bundle: Bundle, field: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    (norm,) = bundle.manifest["norms"]
    true = norm[field]
    norm[field] = value
    assert resealed(bundle) == [
        "manifest.json is contradicted: "
        f"the manifest says that the {field} of 'norm' is {value}, and model.onnx that it is {true}"
    ]
    assert main([str(bundle.path)]) == 1
    assert "ONNX Runtime" not in capsys.readouterr().out  # nothing was run


def test_norms_and_look_alikes_that_only_one_of_them_has_are_named(bundle: Bundle) -> None:
    assert resealed(bundle) == []
    bundle.manifest["norms"].append({**bundle.manifest["norms"][0], "node": "ghost"})
    bundle.manifest["left"].clear()
    first, second = resealed(bundle)
    assert first.endswith("the manifest lists the norm 'ghost', which model.onnx does not have")
    assert second.endswith("which the manifest does not list")
    assert "model.onnx has the look-alike" in second


def test_a_bundle_as_exported_is_verified_and_judged(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle.path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(GOOD)
    assert "ONNX Runtime: pass" in out


def test_an_altered_file_of_the_same_size_is_named(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(bundle.model_path.read_bytes())
    content[-1] ^= 1
    bundle.model_path.write_bytes(bytes(content))
    assert main([str(bundle.path)]) == 1
    altered = "model.onnx is altered: its sha256 is not the one it had when exported\n"
    out = capsys.readouterr().out
    assert out.startswith(altered + "parity was not judged: ")
    assert f"python -m rmsnorm_deploy.parity {bundle.path} --bisect" in out
    assert main([str(bundle.path), "--files-only"]) == 1
    assert capsys.readouterr().out == altered


def test_a_truncated_file_is_named(bundle: Bundle) -> None:
    bundle.model_path.write_bytes(bundle.model_path.read_bytes()[:-10])
    (problem,) = check_files(bundle.path)
    assert (problem.name, problem.problem) == ("model.onnx", "altered")
    assert "bytes" in problem.detail


def test_a_missing_and_an_extra_file_are_named(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_link_in_place_of_a_file_is_not_followed(bundle: Bundle, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.onnx"
    bundle.model_path.rename(elsewhere)
    bundle.model_path.symlink_to(elsewhere)
    (problem,) = check_files(bundle.path)
    assert str(problem) == "model.onnx is altered: a link stands in its place"


def test_engines_are_checked_against_their_own_description(bundle: Bundle) -> None:
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


def with_engine(bundle: Bundle) -> list[str]:
    """An engine as a build leaves it, told of in the report; what the build says meanwhile."""
    folder = bundle.path / "engines"
    folder.mkdir()
    (folder / "a.engine").write_bytes(b"engine")
    (folder / "a.json").write_text(json.dumps(as_metadata(engine_record(folder / "a.engine", bundle.manifest))))
    said: list[str] = []
    report_engines(bundle, said.append)
    return said


def test_an_engine_in_the_report_leaves_the_bundle_verified(bundle: Bundle) -> None:
    before = (bundle.path / "SHA256SUMS").read_text().splitlines()
    assert with_engine(bundle) == []
    assert "TensorRT engines" in (bundle.path / "report.html").read_text()
    assert check_files(bundle.path) == []
    after = (bundle.path / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in set(before) ^ set(after)} == {"report.html"}
    assert not list(bundle.path.glob("*.partial")) + list(bundle.path.glob(".*"))
    with (bundle.path / "report.html").open("a") as file:
        file.write("<p>and more")
    assert [(p.name, p.problem) for p in check_files(bundle.path)] == [("report.html", "altered")]


@pytest.mark.parametrize("name", ["report.html", "parity.json", "manifest.json"])
def test_what_others_altered_is_not_vouched_for_by_a_new_report(bundle: Bundle, name: str) -> None:
    with (bundle.path / name).open("a") as file:
        file.write(" ")
    before = {file: (bundle.path / file).read_text() for file in ("SHA256SUMS", "report.html")}
    (said,) = with_engine(bundle)
    assert said.startswith(f"warning: report.html is left as it was: {name} is not the one that was exported")
    assert {file: (bundle.path / file).read_text() for file in before} == before
    assert [(p.name, p.problem) for p in check_files(bundle.path)] == [(name, "altered")]


@pytest.mark.parametrize("name", ["../outside.onnx", "/etc/passwd", "a\\b"])
def test_a_manifest_that_names_a_file_outside_is_refused(bundle: Bundle, name: str) -> None:
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


def test_hashes_alone_run_nothing(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle.path), "--files-only"]) == 0
    assert capsys.readouterr().out == GOOD


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
    assert capsys.readouterr().out.startswith(GOOD)
    (made.path / "extra.onnx").write_text("")
    assert main([str(made.path), "--files-only"]) == 1
    assert capsys.readouterr().out.startswith("extra.onnx is extra")
    (made.path / "extra.onnx").unlink()
    content = bytearray(made.model_path.read_bytes())
    content[len(content) // 2] ^= 1
    made.model_path.write_bytes(bytes(content))
    assert main([str(made.path)]) == 1
    assert capsys.readouterr().out.startswith("model.onnx is altered")
