"""The doctor and `available()`: what users are told of their machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from rmsnorm_deploy import doctor
from rmsnorm_deploy.runtime import available
from rmsnorm_deploy.runtime.status import PROVIDER_INSTALL, BackendStatus, versions


def by_name() -> dict[str, BackendStatus]:
    return {status.name: status for status in available()}


def test_every_backend_is_listed_with_a_version_or_what_to_install():
    statuses = by_name()
    assert {"pytorch (cpu)", "pytorch (cuda)", "onnxruntime", "tensorrt", "tensorrt-rtx"} <= set(statuses)
    assert {"native ort: custom ops for onnxruntime", "native tensorrt: plugin for tensorrt"} <= set(statuses)
    for status in statuses.values():
        assert status.detail
        assert status.available or status.install, status
        assert "\n" not in status.detail


def test_pytorch_on_the_cpu_is_always_there():
    status = by_name()["pytorch (cpu)"]
    assert status.available
    assert status.version == torch.__version__


def test_each_execution_provider_that_onnxruntime_knows_is_told_apart():
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    statuses = by_name()
    for name in ort.get_all_providers():
        status = statuses[f"onnxruntime {name}"]
        assert status.available <= (name in ort.get_available_providers())
    assert statuses["onnxruntime CPUExecutionProvider"].available


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_no_gpu_backend_is_said_to_be_there():
    statuses = by_name()
    for name in ("pytorch (cuda)", "tensorrt", "tensorrt-rtx"):
        assert not statuses[name].available
    if statuses["tensorrt-rtx"].version:
        assert statuses["tensorrt-rtx"].builds
        assert "SM 75" in statuses["tensorrt-rtx"].detail


def test_a_package_that_is_not_installed_is_absent_and_not_an_error(monkeypatch):
    for module in ("onnxruntime", "tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, module, None)
    statuses = by_name()
    assert statuses["onnxruntime"].detail == "onnxruntime is not installed"
    assert statuses["tensorrt-rtx"].install == "pip install tensorrt-rtx-cu13"


def test_a_package_that_is_broken_says_how(monkeypatch, tmp_path):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert "does not load (libnvinfer.so.10: cannot open" in by_name()["tensorrt"].detail


def test_the_report_names_every_backend_and_package(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    for status in available():
        assert status.name.removeprefix("onnxruntime ") in printed
    for package in versions():
        assert package in printed


def test_providers_that_a_package_would_bring_are_never_folded_away():
    absent = {name: BackendStatus(f"onnxruntime {name}", False, None, "x", "y") for name in (*PROVIDER_INSTALL, "Rare")}
    assert [name for name, status in absent.items() if doctor.is_exotic(status)] == ["Rare"]


def test_json_is_one_object_on_standard_output():
    done = subprocess.run([sys.executable, "-m", "rmsnorm_deploy.doctor", "--json"], capture_output=True, check=True)
    report = json.loads(done.stdout)
    assert {"backends", "versions"} == set(report)
    assert report["versions"]["torch"] == torch.__version__
    assert {"name", "available", "version", "detail", "install", "builds"} == set(report["backends"][0])


def test_a_path_is_never_broken_and_words_are_kept_within_the_width():
    path = "/a/long/path-with-hyphens/" + "x" * 90 + "/librmsnorm_deploy.so"
    status = BackendStatus("native cpu", True, "1.0", f"built 2026-01-01 with a compiler of some kind, {path}")
    lines = [line.plain for line in doctor.backend_lines([status], 80)]
    assert [line for line in lines if path in line]
    assert all(len(line) <= 80 for line in lines if path not in line)
    assert [line.plain for line in doctor.backend_lines([status], None)][1].strip() == status.detail
