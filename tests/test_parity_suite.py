"""The op-level suite: right everywhere, complete, and able to see a backend that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rmsnorm_deploy.opset import VARIANT_BY_NAME
from rmsnorm_deploy.parity import suite
from rmsnorm_deploy.parity.result import FAIL, NOT_RUN, PASS
from rmsnorm_deploy.parity.suite import DTYPES, Case, Outputs, backends, cases_for, run_suite

HERE = ["PyTorch functional", "PyTorch operators", "ONNX Runtime", "ONNX Runtime (optimizer off)"]


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_every_backend_keeps_the_limit(dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "DTYPES", (dtypes,))
    results = {result.backend: result for result in run_suite()}
    assert set(results) == set(backends())
    assert [(r.backend, r.worst, r.max) for r in results.values() if r.verdict == FAIL] == []
    for name in HERE:
        lacking = results[name].reason or ""
        assert results[name].verdict == PASS or "NOT_IMPLEMENTED" in lacking, f"{name}: {lacking}"
    assert all(result.reason for result in results.values() if result.verdict == NOT_RUN)


def test_the_suite_has_every_name_of_the_domain() -> None:
    names = {case.variant.name for dtypes in DTYPES for case in cases_for(dtypes)}
    rounds_once = {name for name in VARIANT_BY_NAME if "_before_cast_double" in name}  # written as after_cast
    assert names == set(VARIANT_BY_NAME) - rounds_once
    shapes = {case.arrays["X"].shape for case in cases_for(("float32", "float32"))}
    assert any(0 in shape for shape in shapes)
    assert any(shape[-1] == 1 for shape in shapes)
    assert {case.axis for case in cases_for(("float32", "float32"))} == {-1, -2}


def wrong_epsilon(cases: Sequence[Case]) -> Outputs:
    right = backends()["PyTorch operators"](cases)
    return {
        case.name: [np.asarray(right[case.name][0] * np.float32(1 + 1e-5)), *right[case.name][1:]] for case in cases
    }


def unwritten_rows(cases: Sequence[Case]) -> Outputs:
    right = backends()["PyTorch operators"](cases)
    for case in cases:
        if right[case.name][0].size:
            right[case.name][0][..., -1] = 0
    return right


def lost_sums(cases: Sequence[Case]) -> Outputs:
    right = backends()["PyTorch operators"](cases)
    return {case.name: [right[case.name][0], *([case.arrays["X"]] if case.variant.skip else [])] for case in cases}


@pytest.mark.parametrize("wrong", [wrong_epsilon, unwritten_rows, lost_sums])
def test_a_wrong_backend_fails(wrong: suite.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "DTYPES", DTYPES[:1])
    monkeypatch.setattr(suite, "backends", lambda: {"wrong": wrong})
    (result,) = run_suite()
    assert result.verdict == FAIL
    assert result.share > 1
    assert result.worst


def test_the_command_prints_a_table_the_limits_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "DTYPES", DTYPES[:1])
    monkeypatch.setattr(suite, "SHAPES", suite.SHAPES[1:2])
    two = {name: backends()[name] for name in ("PyTorch operators", "ONNX Runtime on CUDA")}
    monkeypatch.setattr(suite, "backends", lambda: two)
    assert suite.main() == 0
    out = capsys.readouterr().out
    assert "PyTorch operators" in out
    assert "limits in ULPs of the rows' dtype: half types 4.0" in out
    monkeypatch.setattr(suite, "backends", lambda: {"wrong": lost_sums})
    assert suite.main() == 1
    assert "failed: wrong, float32, SkipRMSNorm" in capsys.readouterr().out
