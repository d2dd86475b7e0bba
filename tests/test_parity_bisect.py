"""Bisection: the norm that is wrong is named, or the span that is, and what is saved shows the fault by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from parity_bundles import bundle, few_samples

from rmsnorm_deploy import reference
from rmsnorm_deploy.parity import ParityReport, run_parity
from rmsnorm_deploy.parity.__main__ import main
from rmsnorm_deploy.parity.backends import BACKENDS, HeldBundle
from rmsnorm_deploy.parity.bisect import statistics
from rmsnorm_deploy.parity.lone_norm import save_span
from rmsnorm_deploy.parity.model_faults import MODEL_FAULTS
from rmsnorm_deploy.parity.norm_faults import NORM_FAULTS
from rmsnorm_deploy.parity.normcheck import open_checks, site_truth
from rmsnorm_deploy.parity.patient import Patient
from rmsnorm_deploy.parity.scratch import Scratch
from rmsnorm_deploy.report import write_html

LAYER = "model.model.layers"
PLAIN = ["onnxruntime"]


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[..., HeldBundle]:
    """A bundle with one fault in its model."""

    def plant(fault: Callable[[Patient], Any], which: str = "float32") -> HeldBundle:
        patient = Patient(bundle(which).model_path)
        fault(patient)
        (tmp_path / "model.onnx").write_bytes(patient.bytes())
        return HeldBundle(bundle(which), tmp_path / "model.onnx")

    return plant


def judged(made: HeldBundle, **options: Any) -> ParityReport:
    return run_parity(made, backends=PLAIN, samples=few_samples(made), **options)  # type: ignore[arg-type]


def test_the_norm_at_fault_is_named_with_its_input_and_its_error(faulty: Any) -> None:
    report = judged(faulty(NORM_FAULTS["one gamma off by 1%"]))
    assert not report.ok
    (finding,) = report.findings
    assert finding.norm == f"{LAYER}.0.post_attention_layernorm"
    assert finding.rule == "norm-isolated"
    assert "modeling_llama.py" in finding.text
    assert finding.own_max is not None
    assert finding.inherited_max is not None
    assert finding.own_max > 1e4 > 100 > finding.inherited_max
    assert finding.statistics["rows"] > 1
    assert 0 < finding.statistics["rms_min"] <= finding.statistics["rms_max"] <= finding.statistics["max"]
    assert report.summary()[-1] == finding.text
    reason = report.backend("onnxruntime").reason
    assert reason is not None
    assert reason.startswith(f"{LAYER}.0.post_attention_layernorm: ")


def test_of_two_wrong_norms_the_first_is_named_and_the_other_told(faulty: Any) -> None:
    (finding,) = judged(faulty(NORM_FAULTS["gammas exchanged"])).findings
    assert finding.norm == f"{LAYER}.0.input_layernorm"
    assert finding.others == (f"{LAYER}.0.post_attention_layernorm",)


@pytest.mark.parametrize(
    ("fault", "after", "before"),
    [
        ("softmax scale off by 1%", f"{LAYER}.0.input_layernorm", f"{LAYER}.0.post_attention_layernorm"),
        ("one weight off by 1%", f"{LAYER}.0.post_attention_layernorm", f"{LAYER}.1.input_layernorm"),
        ("a layer's matrix again", f"{LAYER}.1.post_attention_layernorm", "model.model.norm"),
    ],
)
def test_a_fault_between_two_norms_is_laid_between_them(faulty: Any, fault: str, after: str, before: str) -> None:
    (finding,) = judged(faulty(MODEL_FAULTS[fault])).findings
    assert (finding.rule, finding.norm) == ("span", None)
    assert (finding.after, finding.before) == (after, before)
    assert f"wrong between {after} and {before}" in finding.text


def test_a_fault_after_the_last_norm_is_laid_there(faulty: Any) -> None:
    def scale_logits(patient: Patient) -> None:
        node = patient.graph.producers["logits"]
        name = node.input[1]
        transpose = patient.graph.producers[name]
        transpose.input[0] = patient.constant("head", patient.array(transpose.input[0]) * 1.001)

    (finding,) = judged(faulty(scale_logits)).findings
    assert (finding.rule, finding.after, finding.norm) == ("tail", "model.model.norm", None)


def test_a_model_that_refuses_an_input_is_said_to(faulty: Any) -> None:
    (finding,) = judged(faulty(MODEL_FAULTS["batch frozen"])).findings
    assert finding.rule == "refused"
    assert "does not run it" in finding.text


def test_a_right_model_is_bisected_on_demand_and_nothing_is_found() -> None:
    made = HeldBundle(bundle("float32"))
    assert judged(made).findings == []
    report = judged(made, bisect=True)
    assert report.ok
    assert [finding.rule for finding in report.findings] == ["nothing"]


def test_findings_survive_json(faulty: Any) -> None:
    report = judged(faulty(NORM_FAULTS["epsilon zero"]))
    text = json.dumps(report.to_json(), allow_nan=False)
    restored = ParityReport.from_json(json.loads(text))
    assert restored.findings == report.findings
    assert restored.sites == report.sites


def test_the_report_names_the_norm_and_draws_the_errors_by_depth(faulty: Any, tmp_path: Path) -> None:
    made = faulty(NORM_FAULTS["epsilon x10"])
    report = judged(made)
    write_html(made, report, None, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert f"{LAYER}.0.post_attention_layernorm (modeling_llama.py:67) is wrong" in text
    assert "Its input: rows" in text
    alt = re.search(r'aria-label="(Mean error at each norm by depth[^"]*)"', text)
    assert alt is not None
    assert f"ULP at {LAYER}.0.input_layernorm" in alt[1]
    assert 'id="depth-wide-' in text


# --- what is saved


@pytest.mark.parametrize("which", ["float32", "float16"])
def test_the_saved_norm_shows_the_fault_by_itself(faulty: Any, tmp_path: Path, which: str) -> None:
    made = faulty(NORM_FAULTS["one gamma's sign"], which)
    (finding,) = judged(made, save_to=tmp_path / "out").findings
    names = [tmp_path / "out" / name for name in finding.saved]
    assert [name.name.split("onnxruntime")[-1] for name in names] == [".onnx", ".npz", ".expected.npz"]
    model = onnx.load(names[0])
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node][-1] == "SkipRMSNorm"
    assert len(model.functions) == 1
    feeds, want = dict(np.load(names[1])), np.load(names[2])
    assert set(feeds) == {"X", "skip"}
    got = onnxruntime.InferenceSession(str(names[0])).run(["Y", "sum"], feeds)
    wrong = ~np.isclose(got[0].astype(np.float64), want["Y"], rtol=1e-2, atol=1e-3, equal_nan=True)
    columns = np.flatnonzero(wrong.reshape(-1, 64).any(axis=0))
    assert columns.tolist() == [21]  # the element whose sign was changed, and no other
    scale = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(np.float64)
    scale[21] *= -1
    total = feeds["X"].astype(np.float64) + feeds["skip"].astype(np.float64)
    np.testing.assert_allclose(reference.rms_norm(total, scale, epsilon=1e-5), want["Y"], rtol=1e-2, atol=1e-3)


def test_each_backend_saves_the_norm_that_it_fails_on_under_a_name_of_its_own(faulty: Any, tmp_path: Path) -> None:
    made = faulty(NORM_FAULTS["one gamma's sign"])
    names = ["onnxruntime", "onnxruntime-unoptimized"]
    report = run_parity(made, backends=names, samples=few_samples(made), save_to=tmp_path / "out")
    saved = [name for finding in report.findings for name in finding.saved]
    assert len(saved) == len(set(saved)) == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(saved)
    assert all(finding.backend in name for finding in report.findings for name in finding.saved)


@pytest.mark.parametrize("fault", ["softmax scale off by 1%", "one weight off by 1%", "a layer's matrix again"])
def test_the_saved_span_shows_the_fault_by_itself(faulty: Any, tmp_path: Path, fault: str) -> None:
    (finding,) = judged(faulty(MODEL_FAULTS[fault]), save_to=tmp_path / "out").findings
    assert finding.saved[0] == f"{finding.after}_to_{finding.before}.{finding.backend}.onnx"
    got, want = run_saved(tmp_path / "out", finding.saved)
    assert np.abs(got - want).max() > 1e-4 * np.abs(want).max()


def test_what_lies_after_the_last_norm_is_saved_too(faulty: Any, tmp_path: Path) -> None:
    def scale_logits(patient: Patient) -> None:
        transpose = patient.graph.producers[patient.graph.producers["logits"].input[1]]
        transpose.input[0] = patient.constant("head", patient.array(transpose.input[0]) * 1.001)

    (finding,) = judged(faulty(scale_logits), save_to=tmp_path / "out").findings
    assert finding.saved[0] == "model.model.norm_to_output.onnxruntime.onnx"
    got, want = run_saved(tmp_path / "out", finding.saved)
    np.testing.assert_allclose(got, 1.001 * want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["float32", "float16"])
def test_a_right_span_is_right_when_saved(tmp_path: Path, which: str) -> None:
    """From the model's input to the first norm, and between any two norms."""
    made = HeldBundle(bundle(which))
    with Scratch() as scratch:
        checks = open_checks(made, scratch)
        assert checks is not None
        (case,) = site_truth(made, checks.sites, few_samples(made)[:1], scratch)
        values = checks.running(BACKENDS["onnxruntime-unoptimized"], [case])
        assert not isinstance(values, str)
        known = {**case.sample.feeds, **values[0]}
        for site in checks.sites.sites:
            name = site.inputs[-1]
            saved = save_span(checks, name, known, tmp_path, f"to {site.name}")
            got, want = run_saved(tmp_path, saved)
            assert np.abs(got - want).max() <= (1e-5 if which == "float32" else 1e-2) * np.abs(want).max()


def run_saved(folder: Path, saved: tuple[str, ...]) -> tuple[Any, Any]:
    """What ONNX Runtime makes of a saved file, and the truth beside it."""
    onnx.checker.check_model(onnx.load(folder / saved[0]))
    feeds = dict(np.load(folder / saved[1]))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    (got,) = onnxruntime.InferenceSession(str(folder / saved[0]), options).run(["Y"], feeds)
    return got.astype(np.float64), np.load(folder / saved[2])["Y"]


def test_a_wired_up_op_is_named_and_nothing_is_saved(faulty: Any, tmp_path: Path) -> None:
    report = judged(faulty(NORM_FAULTS["residual adds one operand twice"]), save_to=tmp_path / "out")
    (finding,) = report.findings
    assert (finding.rule, finding.saved) == ("norm-wiring", ())
    assert finding.norm == f"{LAYER}.1.input_layernorm"


def test_statistics_count_zero_rows_and_see_one_large_value() -> None:
    x = np.zeros((2, 2, 4), np.float16)
    x[0, 0] = [3, -3, 3, -3]
    x[1, 1, 2] = -8
    assert statistics(x) == {"rows": 4, "zero_rows": 2, "rms_min": 0, "rms_max": 4, "max": 8}
    assert statistics(np.zeros((0, 4), np.float32)) == {"rows": 0}


# --- the command


def test_the_command_saves_the_norm_and_prints_how_to_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = bundle("float32")
    copy = tmp_path / "copy.bundle"
    copy.mkdir()
    for file in made.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    patient = Patient(copy / "model.onnx")
    NORM_FAULTS["epsilon x10"](patient)
    (copy / "model.onnx").write_bytes(patient.bytes())
    sample = few_samples(made)[0]
    np.savez(tmp_path / "mine.npz", **sample.feeds)  # type: ignore[arg-type]
    status = main([str(copy), "--backend", "onnxruntime", "--inputs", str(tmp_path / "mine.npz")])
    out = capsys.readouterr().out
    assert status == 1
    assert "Parity failed on ONNX Runtime" in out.splitlines()[0]
    assert (tmp_path / "copy.bundle.bisect" / f"{LAYER}.0.post_attention_layernorm.onnxruntime.onnx").is_file()
    code = re.search(r"to run it:\n(.*?)\Z", out, re.DOTALL)
    assert code is not None
    assert len(code[1].strip().splitlines()) == 3
    ran = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "[[[" in ran.stdout or "[[" in ran.stdout
    assert not [file for file in copy.iterdir() if file.name.startswith("bisect")]


def test_the_command_wants_something_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "name a bundle, or give --suite or --faults" in capsys.readouterr().err
