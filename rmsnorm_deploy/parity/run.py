"""Parity of a bundle: every backend against the float64 oracle, with the model's own error before export beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.chance import program_draws, random_draws
from rmsnorm_deploy.collector import rare_collections
from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.parity.backends import (
    BACKENDS,
    Backend,
    HeldBundle,
    Runner,
    chosen,
    open_baseline,
    open_on,
    require,
)
from rmsnorm_deploy.parity.departs import REASON, departs, program_errors
from rmsnorm_deploy.parity.judge import budgets, judge
from rmsnorm_deploy.parity.memory import give_back_memory
from rmsnorm_deploy.parity.norm_result import Finding, SiteError
from rmsnorm_deploy.parity.normcheck import (
    NormChecks,
    NormRuns,
    SiteCase,
    judge_sites,
    open_checks,
    run_norms,
    site_case,
    site_truth,
    values_before,
)
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.oracle import BundleLike, Oracle, open_oracle
from rmsnorm_deploy.parity.result import (
    FAIL,
    NOT_RUN,
    PASS,
    PASS_LIKE_EAGER,
    PASS_LIKE_ROUNDING,
    PASS_LIKE_UNFUSED,
    BackendResult,
    Budget,
    Measurement,
    ParityReport,
    SampleRecord,
)
from rmsnorm_deploy.parity.rounding import beside_rounding
from rmsnorm_deploy.parity.samples import Sample, make_samples
from rmsnorm_deploy.parity.scratch import Scratch
from rmsnorm_deploy.parity.sites import Sites, find_sites
from rmsnorm_deploy.parity.ulp import Array, UlpError, ulp_error, worst_of
from rmsnorm_deploy.parity.unfused import beside_unfused, refuses_unfused_too
from rmsnorm_deploy.parity.watched import open_watched
from rmsnorm_deploy.runtime.optional import one_line

if TYPE_CHECKING:
    from rmsnorm_deploy.parity.matched import Nearest

Progress = Callable[[str], None]
Watcher = tuple[dict[str, Array], "Nearest"]

_SEVERITY = {NOT_RUN: 0, PASS: 1, PASS_LIKE_EAGER: 2, PASS_LIKE_UNFUSED: 3, PASS_LIKE_ROUNDING: 4, FAIL: 5}


# what a model's own code may raise on an input that it was not made for
_REFUSALS = (DeployError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AssertionError)


@dataclass(frozen=True)
class Case:
    """One sample with its truth, and the dtype and error of the model before export by output name.

    ``program`` has the error of the traced program in its own dtypes, where the module's is over the budget.
    """

    sample: Sample
    truth: dict[str, Array]
    eager: dict[str, tuple[str, UlpError]]
    program: dict[str, UlpError] = field(default_factory=dict)


@rare_collections()
def run_parity(
    bundle: BundleLike,
    *,
    backends: Sequence[str] | None = None,
    seed: int = 0,
    samples: Sequence[Sample] | None = None,
    progress: Progress | None = None,
    bisect: bool = False,
    save_to: Path | None = None,
) -> ParityReport:
    """Judge ``bundle`` on ``backends`` (None: all that are for it) with ``samples`` (None: `make_samples`).

    ``progress`` is told what is being done, a line at a time. A backend that fails is bisected, with ``bisect`` every
    one that shows its norms; a norm at fault is saved alone in the folder ``save_to``.

    Raises:
        InputError: an unknown backend name, or a bundle without its source.
        BackendUnavailable: a backend in ``backends`` is not on this machine.
    """
    start = time.perf_counter()
    judged = chosen(backends, bundle.manifest)
    for backend in judged if backends is not None else ():
        require(backend, bundle.manifest)  # before the model is read and lifted
    bundle = HeldBundle(bundle)
    prepared = prepare(bundle, seed=seed, samples=samples, progress=progress)
    report = judge_prepared(
        prepared, bundle, judged, insist=backends is not None, progress=progress, bisect=bisect, save_to=save_to
    )
    return replace(report, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class Prepared:
    """What the judgement of a bundle's model is made against: it holds for any model file in that bundle."""

    oracle: str
    baseline: str | None
    baseline_problem: str | None
    seed: int
    cases: list[Case]
    records: list[SampleRecord]
    sites: list[SiteCase]
    narrowed: list[str] = field(default_factory=list)


@rare_collections()
def prepare(
    bundle: BundleLike, *, seed: int = 0, samples: Sequence[Sample] | None = None, progress: Progress | None = None
) -> Prepared:
    """Float64 truth for the outputs on every sample, and on some for the norms."""
    say = progress or _silent
    say("lifting the model to float64")
    _refuse_random(bundle)
    oracle = open_oracle(bundle)
    baseline, baseline_problem = _baseline(bundle)
    inputs = list(samples) if samples is not None else make_samples(bundle.manifest, seed=seed)
    names = [item["name"] for item in bundle.manifest["signature"]["outputs"]]
    sites = find_sites(bundle)
    watchers = _watchers(bundle, sites, inputs)
    limits = budgets(bundle.manifest, bundle.model_path) if bundle.eager is not None else None
    cases, records = _cases(inputs, names, oracle, baseline[1] if baseline else None, watchers, say, limits)
    description, title, narrowed = oracle.description, baseline[0] if baseline else None, list(oracle.narrowed)
    del oracle, baseline
    give_back_memory(bundle.path)
    say("float64 truth of the norms")
    at_norms = _site_cases(bundle, sites, cases, watchers) if sites is not None else []
    return Prepared(description, title, baseline_problem, seed, cases, records, at_norms, narrowed)


def _refuse_random(bundle: BundleLike) -> None:
    """Two runs of a model that draws random numbers differ, and no backend could be judged by one of them."""
    program = bundle.program()
    if program is not None:
        draws = program_draws(program)
    else:
        path = bundle.reference_path or bundle.model_path
        model = ir.from_proto(read_model(path))
        ir.external_data.set_base_dir(model.graph, path.parent)
        draws = random_draws(model)
    if draws is not None:
        raise InputError(f"{bundle.path} draws random numbers ({draws}): nothing it gives can be compared")


def _for_norms(samples: Sequence[Sample]) -> list[Sample]:
    """Two samples: prime sizes, so that no dim is taken for another, and the last adversarial one."""
    wanted = [sample for sample in samples if sample.has_rows]
    first = next((sample for sample in wanted if "prime" in sample.name), wanted[0] if wanted else None)
    chosen_ones = [sample for sample in (first, wanted[-1] if wanted else None) if sample is not None]
    return list({id(sample): sample for sample in chosen_ones}.values())


def _watchers(bundle: BundleLike, sites: Sites | None, samples: Sequence[Sample]) -> dict[str, Watcher]:
    """For the samples by whose truth norms are judged, by name: what the graph before fusing has at the sites, and what
    finds those values in the lifted run of a traced program."""
    if sites is None or bundle.program() is None:
        return {}
    from rmsnorm_deploy.parity.matched import Nearest

    wanted = _for_norms(samples)
    with Scratch() as scratch:
        seen = values_before(bundle, sites, wanted, scratch)
    return {sample.name: (values, Nearest(values)) for sample, values in zip(wanted, seen, strict=False)}


def _site_cases(
    bundle: BundleLike, sites: Sites, cases: Sequence[Case], watchers: dict[str, Watcher]
) -> list[SiteCase]:
    """Truth at the norms: what was found in the run that gave the truth of the outputs, else a run for them alone."""
    known = {case.sample.name: case for case in cases}
    made = []
    with Scratch() as scratch:
        for sample in _for_norms([case.sample for case in cases]):
            case = known[sample.name]
            values, nearest = watchers.pop(sample.name, ({}, None))
            found = nearest.found() if nearest is not None else None
            if found is not None:
                made.append(site_case(sites, sample, {**case.truth, **found}, values, named=False))
            else:
                made += _truth_at_sites(bundle, sites, [case], scratch)
    return made


def _truth_at_sites(bundle: BundleLike, sites: Sites, cases: Sequence[Case], scratch: Scratch) -> list[SiteCase]:
    samples, outputs = [case.sample for case in cases], [case.truth for case in cases]
    return site_truth(bundle, sites, samples, scratch, outputs)


@rare_collections()
def judge_prepared(
    prepared: Prepared,
    bundle: BundleLike,
    judged: Sequence[Backend],
    *,
    insist: bool = False,
    progress: Progress | None = None,
    bisect: bool = False,
    save_to: Path | None = None,
) -> ParityReport:
    """Judge the model file of ``bundle`` on the backends ``judged`` against what was prepared."""
    say, start = progress or _silent, time.perf_counter()
    limits = budgets(bundle.manifest, bundle.model_path)
    results, measurements, sites, findings = [], [], [], []
    with Scratch() as scratch:
        checks = open_checks(bundle, scratch, prepared.seed)
        for backend in judged:
            give_back_memory(bundle.path)  # what the session before held
            say(f"parity of {backend.title}")
            values: list[dict[str, Array]] | None = None
            if backend.title == prepared.baseline:
                result, own = _judge_baseline(bundle, backend, prepared.cases, limits)
            else:
                watched = open_watched(checks, backend, prepared.sites, limits) if checks is not None else None
                result, own = _judge_backend(bundle, backend, prepared.cases, limits, insist, watched)
                values = watched.at_norms() if watched is not None else None
                del watched
            if checks is not None and backend.shows_norms and result.verdict != NOT_RUN:
                runs = run_norms(checks, backend, prepared.sites, values=values)
                at_norms = judge_sites(checks, runs)
                result = _with_norms(result, at_norms)
                sites += at_norms
                if bisect or result.verdict == FAIL:
                    say(f"bisection on {backend.title}")
                    findings += _bisected(checks, runs, result, prepared, limits, save_to)
            results.append(result)
            measurements += own
    eager = BACKENDS["pytorch"]
    if prepared.baseline == eager.title and eager not in judged:  # asked for or not, truth hangs on it
        result, own = _judge_baseline(bundle, eager, prepared.cases, limits)
        if result.verdict == FAIL:
            results, measurements = [*results, result], [*measurements, *own]
    return ParityReport(
        oracle=prepared.oracle,
        baseline=prepared.baseline,
        seed=prepared.seed,
        budgets=limits,
        samples=prepared.records,
        backends=results,
        measurements=measurements,
        seconds=time.perf_counter() - start,
        problem=_problem(prepared),
        baseline_problem=prepared.baseline_problem,
        sites=sites,
        findings=findings,
        narrowed=prepared.narrowed,
    )


def _problem(prepared: Prepared) -> str | None:
    """Why nothing was proved, whatever the backends gave."""
    if not prepared.cases:
        skipped = [record.skipped for record in prepared.records if record.skipped]
        return f"no input could be judged: {skipped[0] if skipped else 'there are no samples'}"
    truths = [truth for case in prepared.cases for truth in case.truth.values()]
    if all(isinstance(truth, np.ndarray) and _holds_none(truth) for truth in truths) and any(t.size for t in truths):
        return "the model gives nothing but NaN and infinity, on every input"
    return None


def _holds_none(truth: Array) -> bool:
    """Whether no element is a finite number."""
    return truth.size == 0 or (truth.dtype.kind == "f" and not np.isfinite(truth).any())


def _with_norms(result: BackendResult, sites: Sequence[SiteError]) -> BackendResult:
    """A backend with a wrong norm fails, whatever its outputs look like."""
    wrong = [site for site in sites if site.verdict == FAIL]
    if not wrong:
        return result
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return replace(result, verdict=FAIL, reason=result.reason or f"{wrong[0].norm}{more}: {wrong[0].reason}")


def _bisected(
    checks: NormChecks,
    runs: NormRuns,
    result: BackendResult,
    prepared: Prepared,
    limits: dict[str, Budget],
    save_to: Path | None,
) -> list[Finding]:
    """What bisection finds on the sample that is worst, if truth at the norms can be had for it, else on the first."""
    from rmsnorm_deploy.parity.bisect import bisect

    usable = {case.sample.name: case for case in prepared.cases if case.sample.has_rows}
    names = [result.worst_sample, *(case.sample.name for case in prepared.sites)]
    wanted = [usable[name] for name in names if name in usable][:1]
    cases = [case for case in prepared.sites if case.named and wanted and case.sample is wanted[0].sample]
    cases = cases or _truth_at_sites(checks.bundle, checks.sites, wanted, checks.scratch)
    if not cases:
        return []
    return [bisect(checks, runs, cases[0], next(iter(limits.values()), None), save_to)]


def _baseline(bundle: BundleLike) -> tuple[tuple[str, Runner] | None, str | None]:
    """The model before export, or why it does not run: a source may be invalid where the exported model is not."""
    try:
        return open_baseline(bundle), None
    except DeployError as error:
        return None, str(error)


def _silent(message: str) -> None:
    return None


def _cases(
    samples: Sequence[Sample],
    names: Sequence[str],
    oracle: Oracle,
    baseline: Runner | None,
    watchers: Mapping[str, Watcher],
    say: Progress,
    limits: dict[str, Budget] | None,
) -> tuple[list[Case], list[SampleRecord]]:
    """Truth and eager's own error for each sample; a sample that either refuses judges nobody, and says why.

    With ``limits`` the baseline is a module, and where it is over them its traced program runs too.
    """
    cases, records = [], []
    for index, sample in enumerate(samples):
        say(f"float64 truth {index + 1} of {len(samples)}: {sample.name}")
        record = SampleRecord(sample.name, sample.kind, sample.dims)
        try:
            own = _run(baseline, sample) if baseline is not None else {}
            _, nearest = watchers.get(sample.name, ({}, None))
            truth = dict(zip(names, oracle(sample.feeds, nearest), strict=True))
            eager = {name: (array.dtype.name, ulp_error(array, truth[name])) for name, array in own.items()}
            program = program_errors(oracle, sample, truth, eager, limits) if limits is not None else {}
        except _REFUSALS as error:
            records.append(replace(record, skipped=f"the model refuses it: {one_line(error)}"))
            continue
        records.append(record)
        cases.append(Case(sample, truth, eager, program))
    return cases, records


def _run(session: Runner, sample: Sample) -> dict[str, Array]:
    return {name: np.asarray(array) for name, array in session.run(sample.feeds).items()}


def _judge_baseline(
    bundle: BundleLike, backend: Backend, cases: Sequence[Case], limits: dict[str, Budget]
) -> tuple[BackendResult, list[Measurement]]:
    """The model before export ran already, for the cases: as exact as itself, but if it departs from its program."""
    measurements = []
    for case in cases:
        for output, (dtype, error) in case.eager.items():
            other = departs(error, case.program.get(output, error), limits.get(dtype))
            verdict = FAIL if other else judge(error, error, limits.get(dtype))
            measurements.append(Measurement(backend.name, case.sample.name, output, dtype, verdict, error, error))
    measurements = beside_rounding(bundle, measurements, {case.sample.name: case.sample for case in cases}, limits)
    measurements = [replace(m, reason=REASON) if m.verdict == FAIL else m for m in measurements]
    return _summarise(backend, measurements, 0.0), measurements


def _judge_backend(
    bundle: BundleLike,
    backend: Backend,
    cases: Sequence[Case],
    limits: dict[str, Budget],
    insist: bool,
    watched: Runner | None,
) -> tuple[BackendResult, list[Measurement]]:
    """``watched`` is a session of the backend's own, where one is open."""
    start = time.perf_counter()
    try:
        session = watched or open_on(bundle, backend, insist=insist)
    except BackendUnavailable as error:
        if insist:
            raise
        return BackendResult(backend.name, backend.title, NOT_RUN, str(error)), []
    except InputError as error:
        verdict = NOT_RUN if refuses_unfused_too(bundle, backend, str(error)) else FAIL
        if insist and verdict == NOT_RUN:
            raise BackendUnavailable(f"{backend.title} cannot run this model: {error}") from error
        return BackendResult(backend.name, backend.title, verdict, str(error)), []
    measurements = [m for case in cases for m in _judge_case(session, backend, case, limits)]
    del session
    known = {case.sample.name: (case.sample, case.truth) for case in cases}
    measurements = beside_unfused(bundle, backend, measurements, known, limits)
    measurements = beside_rounding(bundle, measurements, {case.sample.name: case.sample for case in cases}, limits)
    return _summarise(backend, measurements, time.perf_counter() - start), measurements


def _judge_case(session: Runner, backend: Backend, case: Case, limits: dict[str, Budget]) -> list[Measurement]:
    try:
        outputs = _run(session, case.sample)
    except DeployError as error:
        verdict = NOT_RUN if backend.limited_shapes else FAIL
        return [Measurement(backend.name, case.sample.name, "", "", verdict, None, None, str(error))]
    return [_measure(backend, case, name, outputs[name], limits) for name in case.truth if _is_defined(case, name)]


def _is_defined(case: Case, output: str) -> bool:
    """Whether ONNX says what an output is: not what a mean over no rows is, or a softmax of what is all hidden, which
    PyTorch makes NaN."""
    truth = case.truth[output]
    defined = case.sample.has_rows and not case.sample.hides
    return defined or truth.size == 0 or not np.isnan(truth).any()


def _measure(backend: Backend, case: Case, output: str, got: Array, limits: dict[str, Budget]) -> Measurement:
    dtype = got.dtype.name
    eager = case.eager[output][1] if case.eager else None
    try:
        error = ulp_error(got, case.truth[output])
    except ValueError as problem:
        return Measurement(backend.name, case.sample.name, output, dtype, FAIL, None, eager, str(problem))
    verdict = judge(error, eager, limits.get(dtype))
    return Measurement(backend.name, case.sample.name, output, dtype, verdict, error, eager)


def _summarise(backend: Backend, measurements: Sequence[Measurement], seconds: float) -> BackendResult:
    """The backend's verdict is its worst measurement's; where the verdicts are equal the larger error is the worse."""
    if not measurements:
        return BackendResult(backend.name, backend.title, NOT_RUN, "there was no input to judge it on")
    worst = max(measurements, key=lambda m: (_SEVERITY[m.verdict], m.error.max if m.error else 0.0))
    measured = [m for m in measurements if m.error is not None]
    return BackendResult(
        name=backend.name,
        title=backend.title,
        verdict=worst.verdict,
        reason=worst.reason,
        error=worst_of([m.error for m in measured if m.error]) if measured else None,
        versus_eager=_versus_eager(measured),
        worst_sample=worst.sample,
        worst_output=worst.output,
        seconds=seconds,
        unfused=_worst_unfused(measurements),
    )


def _worst_unfused(measurements: Sequence[Measurement]) -> UlpError | None:
    errors = [m.unfused for m in measurements if m.unfused is not None]
    return worst_of(errors) if errors else None


def _versus_eager(measurements: Sequence[Measurement]) -> float | None:
    """The median, over what was measured, of the mean error as a ratio to eager's."""
    ratios = [m.error.mean / m.eager.mean for m in measurements if m.error and m.eager and m.eager.mean > 0]
    return statistics.median(ratios) if ratios else None
