"""The model before fusing on the same runtime with the same options: what would be deployed without this package.

A runtime's own optimizer may cost more exactness than the budget has, whichever file it is given, and may refuse an
input that the model takes. A fused file is not to blame for that. It is blamed unless two things are shown: the file
before fusing, in float64, is the model's truth (so the graph is right, and what is off is rounding); and that file is
as far off on that runtime.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rmsnorm_deploy.errors import DeployError
from rmsnorm_deploy.parity.backends import Backend, HeldBundle, Runner, open_on
from rmsnorm_deploy.parity.judge import as_exact_as_unfused, judge
from rmsnorm_deploy.parity.lift_onnx import OnnxProgram
from rmsnorm_deploy.parity.memory import give_back_memory
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.result import FAIL, NOT_RUN, PASS, PASS_LIKE_UNFUSED, Budget, Measurement
from rmsnorm_deploy.parity.samples import Sample
from rmsnorm_deploy.parity.ulp import Array, ulp_error


def beside_unfused(
    bundle: BundleLike,
    backend: Backend,
    measurements: Sequence[Measurement],
    cases: Mapping[str, tuple[Sample, Mapping[str, Array]]],
    limits: Mapping[str, Budget],
) -> list[Measurement]:
    """The measurements, those that fail set beside the file before fusing; ``cases`` has sample and truth by name.

    Nothing is run where none fails, or the backend cannot run such a file; and nothing more once the file before fusing
    is more exact somewhere, since the backend fails then whatever comes.
    """
    if bundle.reference_path is None or backend.unfused is None or all(m.verdict != FAIL for m in measurements):
        return list(measurements)
    give_back_memory(bundle.path)
    compared, as_exact = _compared(bundle, backend, measurements, cases)
    if not as_exact:
        return compared
    give_back_memory(bundle.path)
    excused = {m.sample: cases[m.sample] for m in compared if m.verdict == FAIL}
    rightful = _right_in_float64(bundle, excused, limits)
    return [
        replace(m, verdict=PASS_LIKE_UNFUSED) if m.verdict == FAIL and (m.sample, m.output) in rightful else m
        for m in compared
    ]


def _compared(
    bundle: BundleLike,
    backend: Backend,
    measurements: Sequence[Measurement],
    cases: Mapping[str, tuple[Sample, Mapping[str, Array]]],
) -> tuple[list[Measurement], bool]:
    """The measurements with the error before fusing where they fail, and whether no failing one is less exact.

    The largest errors come first, and the first that is less exact is the last that is compared.
    """
    assert bundle.reference_path is not None
    assert backend.unfused is not None
    session: Runner | None = None
    with contextlib.suppress(DeployError):
        session = open_on(HeldBundle(bundle, bundle.reference_path), backend.unfused)
    compared = {id(m): m for m in measurements}
    runs: dict[str, Mapping[str, Array] | None] = {}
    failing = [m for m in measurements if m.verdict == FAIL]
    for measured in sorted(failing, key=lambda m: m.error.max if m.error else math.inf, reverse=True):
        sample, truth = cases[measured.sample]
        if sample.name not in runs:
            runs[sample.name] = _run(session, sample)
        beside = compared[id(measured)] = _beside(measured, runs[sample.name], truth)
        if beside.verdict == FAIL and not _as_exact(beside):
            return list(compared.values()), False
    return list(compared.values()), True


def _run(session: Runner | None, sample: Sample) -> dict[str, Array] | None:
    """What the file before fusing gives; None where it is refused."""
    if session is None:
        return None
    try:
        return {name: np.asarray(array) for name, array in session.run(sample.feeds).items()}
    except DeployError:
        return None


def _beside(measured: Measurement, run: Mapping[str, Array] | None, truth: Mapping[str, Array]) -> Measurement:
    if not measured.output:  # the sample was refused
        return replace(measured, verdict=NOT_RUN) if run is None else measured
    if run is None or run[measured.output].shape != truth[measured.output].shape:
        return measured
    return replace(measured, unfused=ulp_error(run[measured.output], truth[measured.output]))


def _as_exact(measured: Measurement) -> bool:
    error, unfused = measured.error, measured.unfused
    return error is not None and unfused is not None and as_exact_as_unfused(error, unfused)


def refuses_unfused_too(bundle: BundleLike, backend: Backend, reason: str) -> bool:
    """Whether a backend that cannot load the model, for ``reason``, cannot load it before fusing either: then it
    computes nothing wrong. Where there is no such file, a kernel that it lacks is excuse enough."""
    if backend.unfused is None:
        return False
    if bundle.reference_path is None:
        return "NOT_IMPLEMENTED" in reason
    try:
        open_on(HeldBundle(bundle, bundle.reference_path), backend.unfused)
    except DeployError:
        return True
    return False


def _right_in_float64(
    bundle: BundleLike, cases: Mapping[str, tuple[Sample, Mapping[str, Array]]], limits: Mapping[str, Budget]
) -> set[tuple[str, str]]:
    """(sample, output) where the graph before fusing, lifted to float64, is within the budget of the truth."""
    assert bundle.reference_path is not None
    units = {item["name"]: item["dtype"] for item in bundle.manifest["signature"]["outputs"]}
    if bundle.program() is None:  # that graph is the truth
        return {(name, output) for name in cases for output in units}
    program = OnnxProgram(bundle.reference_path)
    right = set()
    for name, (sample, truth) in cases.items():
        try:
            values = dict(zip(program.outputs, program.run(sample.feeds), strict=True))
        except DeployError:
            continue
        for output, unit in units.items():
            if unit in limits and values[output].shape == truth[output].shape:
                error = ulp_error(values[output], truth[output], unit)
                if judge(error, None, limits[unit]) == PASS:
                    right.add((name, output))
    return right
