"""A bundle takes its place whole and in one step, or leaves everything as it was."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rmsnorm_deploy import export_model
from rmsnorm_deploy.cli import run_command
from rmsnorm_deploy.errors import EXIT_FAULT, BackendUnavailable, InputError
from rmsnorm_deploy.parity.scratch import Scratch
from rmsnorm_deploy.place import MANIFEST, check_place, new_bundle
from rmsnorm_deploy.runtime.optional import one_line


def fill(place: Path, text: str, *, replace: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Write a bundle; ``meanwhile`` is called when it is complete and not yet in its place."""
    with new_bundle(place, replace=replace) as folder:
        (folder / MANIFEST).write_text(text)
        meanwhile()


def fails(error: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def text_at(place: Path) -> str:
    return (place / MANIFEST).read_text()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_and_an_old_bundle_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        fill(tmp_path / "new" / "deep" / "b", "half", meanwhile=fails(error))
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / "b", "old")
    with pytest.raises(error):
        fill(tmp_path / "b", "half", replace=True, meanwhile=fails(error))
    assert text_at(tmp_path / "b") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_of_two_exports_at_once_the_second_is_refused_and_the_first_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another export wrote a bundle there in the meantime"):
        fill(tmp_path / "b", "second", meanwhile=lambda: fill(tmp_path / "b", "first"))
    assert text_at(tmp_path / "b") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_of_two_that_may_replace_each_other_the_last_stays(tmp_path: Path) -> None:
    fill(tmp_path / "b", "second", replace=True, meanwhile=lambda: fill(tmp_path / "b", "first", replace=True))
    assert text_at(tmp_path / "b") == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_an_old_bundle_survives_a_replacement_that_fails_at_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "b", "old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == target.name == "b" and not target.exists():
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "b", "new", replace=True)
    assert text_at(tmp_path / "b") == "old"


def test_a_refusal_names_the_place_that_was_asked_for(tmp_path: Path) -> None:
    def refuse() -> None:
        (holder,) = tmp_path.iterdir()
        raise BackendUnavailable(f"cannot write {holder}/b/report.html: No space left on device")

    with pytest.raises(BackendUnavailable) as caught:
        fill(tmp_path / "b", "half", meanwhile=refuse)
    assert str(caught.value) == f"cannot write {tmp_path}/b/report.html: No space left on device"


def test_nothing_written_or_said_names_the_folder_that_is_written_first(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)).bfloat16()  # no product on the CPU
    example = (torch.randn(3, 8, dtype=torch.bfloat16),)
    bundle = export_model(model, example, out_dir=tmp_path / "b", check=True, benchmark=True)
    written = {path.name: path.read_bytes() for path in bundle.path.iterdir()}
    assert f"cannot load {tmp_path}/b/model.onnx".encode() in written["parity.json"]
    assert [name for name, content in written.items() if f"{tmp_path}/.b.".encode() in content] == []


def test_an_error_cut_to_its_first_part_names_no_part_of_the_folder_that_is_written_first(tmp_path: Path) -> None:
    with new_bundle(tmp_path / "b", replace=False) as folder:
        for fill_up in range(340, 400):
            assert ".b." not in one_line(RuntimeError("x" * fill_up + f" {folder}/model.onnx failed"))


def test_a_fault_of_the_program_itself_names_the_place_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: list[str]) -> int:
        with new_bundle(tmp_path / "b", replace=False) as folder:
            raise RuntimeError(f"cannot read {folder}/model.onnx")

    assert run_command([], command) == EXIT_FAULT
    assert f"internal fault, RuntimeError: cannot read {tmp_path}/b/model.onnx;" in capsys.readouterr().err


def test_a_model_made_on_the_side_is_not_named_by_a_folder_that_vanishes() -> None:
    with Scratch() as scratch:
        said = str(InputError(f"cannot load {scratch.path}/1/model.onnx"))
    assert said == "cannot load (made on the side)/1/model.onnx"


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    fill(tmp_path / "link", "new")
    assert text_at(tmp_path / "there") == "new"
    assert (tmp_path / "link").is_symlink()


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_place(tmp_path / "a" / "b", replace=False)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_had_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="there is a file of that name"):
        export_model(tmp_path / "no such model.pt", out_dir=tmp_path / "file")


@pytest.mark.parametrize("check", [False, True])
def test_the_sums_cover_every_file_as_sha256sum_reads_them(tmp_path: Path, check: bool) -> None:
    bundle = export_model(torch.nn.RMSNorm(8), (torch.randn(3, 8),), out_dir=tmp_path / "b", check=check)
    sums = dict(reversed(line.split("  ")) for line in (bundle.path / "SHA256SUMS").read_text().splitlines())
    files = {path.name for path in bundle.path.iterdir()} - {"SHA256SUMS"}
    assert set(sums) == files
    assert {"manifest.json", "model.onnx"} <= files
    assert ("parity.json" in files) == check
    for name, digest in sums.items():
        assert hashlib.sha256((bundle.path / name).read_bytes()).hexdigest() == digest
    if sys.platform == "linux":
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=bundle.path, check=True)
