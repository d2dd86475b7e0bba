"""The command that says what parity costs: it measures what it says, and the inputs have the size asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rmsnorm_deploy import RMSNorm, export_model
from rmsnorm_deploy.benchmark.__main__ import main
from rmsnorm_deploy.parity.samples import sample_of_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), RMSNorm(16))
    path = tmp_path_factory.mktemp("cost") / "b"
    export_model(model, (torch.randn(2, 3, 16),), out_dir=path, check=False, benchmark=False)
    return path


def test_the_cost_of_parity_is_told_beside_one_float64_pass(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["parity", str(folder), "--size", "5", "--backend", "onnxruntime", "--repeat", "1"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["verdicts"] == {"onnxruntime": "pass"}
    assert figures["float64"] == 8 * (16 * 16 + 16)
    assert figures["parity"] > figures["forward"] > figures["again"] > 0
    assert figures["peak"] > 0
    assert main(arguments) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "times one float64 forward pass" in printed.out


def test_a_sample_of_a_size_has_it_in_every_dim_but_the_first(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (array,) = sample_of_size(manifest, 9).feeds.values()
    assert array.shape == (1, 9, 16)


def test_what_is_no_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(tmp_path)]) == 2
    assert "is not a bundle" in capsys.readouterr().err
