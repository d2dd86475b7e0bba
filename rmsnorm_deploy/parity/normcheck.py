"""Each fused norm against its own formula: what reference.onnx computes in its place, in float64.

Three errors tell a fault in a norm from one that it inherits:

- *isolated*: the op alone, on rows made to tell norms apart (rows.py);
- *own*: the op in the running model, against the formula on the very input that it read there;
- *error*: the value in the running model against the value in the float64 run of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.errors import DeployError
from rmsnorm_deploy.fusion.evaluate import CannotEvaluateError, evaluate
from rmsnorm_deploy.parity.backends import BACKENDS, Backend, HeldBundle, Runner, open_on
from rmsnorm_deploy.parity.extract import assemble, ending_at, with_outputs
from rmsnorm_deploy.parity.judge import judge, norm_budget
from rmsnorm_deploy.parity.lift_onnx import OnnxProgram
from rmsnorm_deploy.parity.norm_result import SiteError
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.result import FAIL, PASS, Budget
from rmsnorm_deploy.parity.rows import NORMAL_ROWS, adversarial_rows, laid_out, split, width_of
from rmsnorm_deploy.parity.samples import Sample
from rmsnorm_deploy.parity.scratch import Scratch, open_backend
from rmsnorm_deploy.parity.sites import Site, Sites, find_sites, is_closed, op_piece, pieces_of
from rmsnorm_deploy.parity.ulp import FORMATS, Array, UlpError, ulp_error, ulp_size, worst_of

# a norm that rounds as the model's own does keeps nearly every bit in half precision; one that rounds elsewhere, three
# in four
SAME_BITS = 0.9
_BIT_FOR_BIT = 0.97  # claimed by the proof: below it, the two are not expected to agree to the bit

_HALVES = {"float16", "bfloat16"}
_BEFORE = BACKENDS["onnxruntime-unoptimized"]  # what runs the graph before fusing in the model's own dtypes


@dataclass(frozen=True)
class SiteCase:
    """One sample with the float64 value of every value at a site and of the outputs, and the error before fusing.

    ``named``: the values at the sites are those of that name in the graph before fusing, not found by their size.
    """

    sample: Sample
    truth: dict[str, Array]
    before: dict[str, UlpError] = field(default_factory=dict)
    named: bool = True


class NormChecks:
    """What is needed to check the norms of one bundle, made once and used for every backend."""

    def __init__(self, bundle: BundleLike, sites: Sites, scratch: Scratch, seed: int = 0) -> None:
        assert bundle.reference_path is not None
        self.bundle, self.sites, self.scratch = bundle, sites, scratch
        self.usable = [
            site for site in sites.sites if site.problem is None and width_of(site.record) and is_closed(site, sites)
        ]
        pieces = [piece for site in self.usable for piece in pieces_of(site, sites.reference).values()]
        self.formula = assemble(sites.reference, pieces)
        self.op = assemble(sites.model, [op_piece(site, sites.model) for site in self.usable])
        self._program = OnnxProgram(bundle.reference_path, self.formula) if self.usable else None
        self.rows = {site.depth: _rows(site, seed) for site in self.usable}
        self.rounding = self._rounding()

    def isolated(self, backend: Backend) -> Own | str:
        """The error of each op alone, by depth, on rows of its own; or why the backend cannot run them."""
        if not self.usable:
            return Own({}, {})
        dtypes = {f"op{site.depth}/{name}": site.dtype_of(name) for site in self.usable
                  for name in (*site.inputs, *site.outputs)}  # fmt: skip
        feeds = {f"op{depth}/{name}": array for depth, rows in self.rows.items() for name, array in rows.items()}
        try:
            file = self.scratch.alone(self.op, dtypes, {name: array.ndim for name, array in feeds.items()})
            got = open_backend(file, backend).run(feeds)
        except DeployError as error:
            return str(error)
        seen = {
            site.depth: {
                **self.rows[site.depth],
                **{name: np.asarray(got[f"op{site.depth}/{name}"]) for name in site.outputs},
            }
            for site in self.usable
        }
        return self.own(seen)

    def own(self, values: Mapping[int, Mapping[str, Array]], *, held: bool = False) -> Own:
        """The worse error of y and of the sum at each site, given the site's own inputs among ``values``.

        ``held``: what the values were computed by may hold inputs in more precision than the values have.
        """
        if self._program is None:
            return Own({}, {})
        feeds = self._formula_feeds(values)
        truth = dict(zip(self._program.outputs, self._program.run(feeds), strict=True))
        errors = {site.depth: _site_errors(site, values[site.depth], values[site.depth], truth) for site in self.usable}
        own = Own(errors, {})
        if not any(own.fails(site) for site in self.usable):
            return own
        expected = self._typed_errors(values, feeds, truth)
        if held:
            expected = _worse(expected, self._held_errors(feeds, truth))
        return Own(errors, expected)

    def _typed_errors(
        self, values: Mapping[int, Mapping[str, Array]], feeds: dict[str, Array], truth: Mapping[str, Array]
    ) -> dict[int, UlpError]:
        """Those that the model's own formula makes in its own dtypes, by depth."""
        try:
            typed = _run_typed(self.formula, feeds)
        except CannotEvaluateError:
            return {}
        formula = {
            site.depth: {
                site.y: typed[f"norm{site.depth}/{site.y}"],
                **({site.x: typed[f"sum{site.depth}/{site.x}"]} if site.addends else {}),
            }
            for site in self.usable
        }
        return {site.depth: _site_errors(site, formula[site.depth], values[site.depth], truth) for site in self.usable}

    def _held_errors(self, feeds: dict[str, Array], truth: Mapping[str, Array]) -> dict[int, UlpError]:
        """Those of inputs in half precision that a runtime has not rounded, as ONNX Runtime's CPU provider has not."""
        assert self._program is not None
        random = np.random.default_rng(0)
        moved = {name: _before_rounding(array, random) for name, array in feeds.items()}
        given = dict(zip(self._program.outputs, self._program.run(moved), strict=True))
        names = {site.depth: f"norm{site.depth}/{site.y}" for site in self.usable}
        return {site.depth: site_error(given[names[site.depth]], truth[names[site.depth]], site.dtype)
                for site in self.usable}  # fmt: skip

    def formula_of(self, site: Site, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The float64 outputs of one site, by name, from its inputs (the sum is not rounded)."""
        assert self.bundle.reference_path is not None
        assert self._program is not None
        values = {other.depth: self._filled(other, self.rows[other.depth]) for other in self.usable}
        values[site.depth] = self._filled(site, inputs)
        truth = dict(zip(self._program.outputs, self._program.run(self._formula_feeds(values)), strict=True))
        total = {site.x: truth[f"sum{site.depth}/{site.x}"]} if site.addends else {}
        return {site.y: truth[f"norm{site.depth}/{site.y}"], **total}

    def _filled(self, site: Site, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """A site's inputs with the sum of its addends as the op rounds it."""
        if not site.addends:
            return dict(inputs)
        first, second = (inputs[name] for name in site.addends)
        with np.errstate(all="ignore"):
            return {**inputs, site.x: np.asarray(first + second)}

    def _formula_feeds(self, values: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
        feeds = {}
        for site in self.usable:
            for name in (site.x, *((site.activation,) if site.activation else ())):
                feeds[f"norm{site.depth}/{name}"] = values[site.depth][name]
            for name in site.addends:
                feeds[f"sum{site.depth}/{name}"] = values[site.depth][name]
        return feeds

    def _rounding(self) -> dict[int, str]:
        """Sites in half precision whose op rounds elsewhere than the model did, with a sentence."""
        halves = [site for site in self.usable if site.dtype in _HALVES and _claims_bits(site)]
        if not halves:
            return {}
        values = {site.depth: dict(self.rows[site.depth]) for site in self.usable}
        try:
            got = _run_typed(self.op, {f"op{d}/{name}": a for d, named in values.items() for name, a in named.items()})
            for site in self.usable:
                values[site.depth].update({name: got[f"op{site.depth}/{name}"] for name in site.outputs})
            want = _run_typed(self.formula, self._formula_feeds(values))
        except CannotEvaluateError:
            return {}  # an op of the user's that numpy does not stand in for; the errors above hold all the same
        found = {}
        for site in halves:
            problem = _compare_bits(values[site.depth][site.y], want[f"norm{site.depth}/{site.y}"], site)
            if problem:
                found[site.depth] = problem
        return found

    def running(self, backend: Backend, cases: Sequence[SiteCase]) -> list[dict[str, Array]] | str:
        """Every value at a site, for each case, from the backend running the model; or why it does not run."""
        try:
            file = self.scratch.shown(self.sites.model, self.bundle.manifest, self.present())
            session = open_backend(file, backend)
            return [_arrays(session, case.sample) for case in cases]
        except DeployError as error:
            return str(error)

    def outputs(self, backend: Backend, sample: Sample) -> dict[str, Array]:
        """What the model itself gives. Raises DeployError where the backend does not run it."""
        return _arrays(open_on(self.bundle, backend, insist=True), sample)

    def outputs_before(self, case: SiteCase) -> dict[str, UlpError]:
        """The error of what the model gave before fusing, in its own dtypes; nothing where that does not run."""
        assert self.bundle.reference_path is not None
        try:
            got = _arrays(open_on(HeldBundle(self.bundle, self.bundle.reference_path), _BEFORE), case.sample)
        except DeployError:
            return {}
        return {name: site_error(array, case.truth[name]) for name, array in got.items()}

    def present(self) -> dict[str, str]:
        """The dtypes of the values at sites that the judged model has."""
        return {name: dtype for name, dtype in self.sites.dtypes().items() if self.sites.model.is_computed(name)}


def open_checks(bundle: BundleLike, scratch: Scratch, seed: int = 0) -> NormChecks | None:
    """The checks of a bundle's norms; None where there are none, or nothing from before fusing to check against."""
    sites = find_sites(bundle)
    return NormChecks(bundle, sites, scratch, seed) if sites is not None else None


def site_truth(
    bundle: BundleLike,
    sites: Sites,
    samples: Sequence[Sample],
    scratch: Scratch,
    outputs: Sequence[Mapping[str, Array]] | None = None,
) -> list[SiteCase]:
    """The float64 run of the graph before fusing: its values at the sites, and the truth of the model's ``outputs`` for
    each sample (None: what that graph gives).

    Samples that it refuses are left out. Weights are held in float64 during this call only.
    """
    assert bundle.reference_path is not None
    graph, dtypes = sites.reference, sites.dtypes_before()
    model = with_outputs(graph.model, dtypes) if outputs is None else ending_at(graph, dtypes)
    program = OnnxProgram(bundle.reference_path, model)
    truths = []
    for sample, known in zip(samples, outputs or [{}] * len(samples), strict=True):
        try:
            values = program.run(sample.feeds)
        except DeployError:
            continue
        truths.append((sample, {**known, **dict(zip(program.outputs, values, strict=True))}))
    del program
    before = values_before(bundle, sites, [sample for sample, _ in truths], scratch) or [{}] * len(truths)
    return [site_case(sites, *truth, values) for truth, values in zip(truths, before, strict=True)]


def values_before(
    bundle: BundleLike, sites: Sites, samples: Sequence[Sample], scratch: Scratch
) -> list[dict[str, Array]]:
    """What the graph before fusing has at the sites in the model's own dtypes, for each sample.

    Empty where ONNX Runtime lacks a kernel for those: there is no error to set beside.
    """
    try:
        session = open_backend(scratch.shown(sites.reference, bundle.manifest, sites.dtypes_before()), _BEFORE)
        return [_arrays(session, sample) for sample in samples]
    except DeployError:
        return []


def site_case(
    sites: Sites, sample: Sample, truth: dict[str, Array], values: Mapping[str, Array], *, named: bool = True
) -> SiteCase:
    """One sample with its ``truth`` at the sites, and the error that the ``values`` before fusing have."""
    units = {name: site.dtype for site in sites.sites for name in (*site.inputs, *site.outputs)}
    before = {name: site_error(value, truth[name], units[name]) for name, value in values.items()}
    return SiteCase(sample, truth, before, named)


@dataclass(frozen=True)
class Own:
    """Errors that each norm makes by itself, by depth, and those that the model's own formula makes on such an input.

    ``expected`` is worked out for the sites that are over their budget alone.
    """

    errors: dict[int, UlpError]
    expected: dict[int, UlpError]

    def fails(self, site: Site) -> bool:
        """Whether a site is over its budget, and worse than the model's own norm is on the same input."""
        error = self.errors.get(site.depth)
        return error is not None and judge(error, self.expected.get(site.depth), budget_of(site)) == FAIL


def budget_of(site: Site) -> Budget:
    """The budget of one norm."""
    return norm_budget(site.dtype, width_of(site.record) or 1)


@dataclass(frozen=True)
class NormRuns:
    """What one backend gives at the norms: each op alone, and in the running model on each case; or why it does not."""

    backend: Backend
    cases: Sequence[SiteCase]
    alone: Own | str
    values: list[dict[str, Array]] | str
    owns: Sequence[Own]

    def on(self, case: SiteCase) -> NormRuns | None:
        """On the sample of one of its cases alone; None for another."""
        place = next((number for number, known in enumerate(self.cases) if known.sample is case.sample), None)
        if place is None:
            return None
        values = self.values if isinstance(self.values, str) else [self.values[place]]
        return NormRuns(self.backend, [case], self.alone, values, self.owns[place : place + 1])


def run_norms(
    checks: NormChecks,
    backend: Backend,
    cases: Sequence[SiteCase],
    alone: Own | str | None = None,
    values: list[dict[str, Array]] | None = None,
) -> NormRuns:
    """Run the ops alone and the whole model on each case, unless ``alone`` or the ``values`` at norms are known."""
    alone = checks.isolated(backend) if alone is None else alone
    run = checks.running(backend, cases) if values is None else values
    owns = [] if isinstance(run, str) else [checks.own(by_site(checks, each), held=True) for each in run]
    return NormRuns(backend, cases, alone, run, owns)


def judge_sites(checks: NormChecks, runs: NormRuns) -> list[SiteError]:
    """A verdict on every norm in one backend. What a norm inherits is told, and is not held against it."""
    return [_judge_site(site, checks, runs) for site in checks.sites.sites]


def _judge_site(site: Site, checks: NormChecks, runs: NormRuns) -> SiteError:
    place = runs.backend.name, site.name, site.depth, site.dtype
    if site.problem is not None:
        return SiteError(*place, FAIL, *site.problem)
    alone, owns = runs.alone, runs.owns
    pairs = [] if isinstance(runs.values, str) else [
        (site_error(run[site.y], case.truth[site.y], site.dtype), case.before.get(site.y))
        for run, case in zip(runs.values, runs.cases, strict=True)
        if site.y in run and site.y in case.truth
    ]  # fmt: skip
    verdict, rule, reason = _verdict(site, checks.rounding.get(site.depth), alone, owns)
    return SiteError(
        *place, verdict, rule, reason or None,
        *_figures(_worst([e for e, _ in pairs])),
        *_figures(_worst([own.errors[site.depth] for own in owns if site.depth in own.errors])),
        *_figures(alone.errors.get(site.depth) if isinstance(alone, Own) else None),
        *_figures(_worst([b for _, b in pairs if b is not None])),
    )  # fmt: skip


def _verdict(site: Site, rounding: str | None, alone: Own | str, owns: Sequence[Own]) -> tuple[str, str, str]:
    if isinstance(alone, Own) and alone.fails(site):
        top = alone.errors[site.depth].max
        return FAIL, "norm-isolated", f"alone, on rows that tell norms apart, it is off by {top:.3g} ULP"
    worst = _worst([own.errors[site.depth] for own in owns if own.fails(site)])
    if worst is not None:
        return FAIL, "norm-own-input", f"on the input that it reads in the model it is off by {worst.max:.3g} ULP"
    if rounding is not None:
        return FAIL, "norm-rounding", rounding
    return PASS, PASS, ""


def _arrays(session: Runner, sample: Sample) -> dict[str, Array]:
    return {name: np.asarray(value) for name, value in session.run(sample.feeds).items()}


def by_site(checks: NormChecks, values: Mapping[str, Array]) -> dict[int, dict[str, Array]]:
    return {site.depth: {name: values[name] for name in (*site.inputs, *site.outputs)} for site in checks.usable}


def _rows(site: Site, seed: int) -> dict[str, Array]:
    record = site.record
    rows = adversarial_rows(width_of(record) or 1, site.dtype, record["epsilon"], record["epsilon_mode"], seed)
    placed = laid_out(rows, list(record["shape"]), record["axis"])
    x = placed if site.order is None else np.transpose(placed, np.argsort(site.order))
    inputs = dict(zip(site.addends, split(placed, seed), strict=True)) if site.addends else {site.x: x}
    if site.activation:
        scale = np.random.default_rng(seed).uniform(0.5, 1.5, placed.shape[record["axis"] :])
        inputs[site.activation] = scale.astype(adversarial_rows(1, site.dtype_of(site.activation), 1.0, "inside").dtype)
    return inputs


def _claims_bits(site: Site) -> bool:
    return float(site.record["proof"].get("same_bits", 1.0)) >= _BIT_FOR_BIT


def _compare_bits(got: Array, want: Array, site: Site) -> str | None:
    """Whether two arrays of one half type are equal nearly everywhere, and in no column always different."""
    width = width_of(site.record) or 1
    if got.dtype != want.dtype:
        return None  # a cast whose type the file does not say
    same = (got == want) | (np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    rows = same.reshape(-1, width)[:NORMAL_ROWS]
    share = float(rows.mean())
    if share < SAME_BITS:
        return f"it rounds elsewhere than the model: {share:.0%} of the bits are the same"
    columns = np.flatnonzero(rows.mean(axis=0) < 0.5)
    if columns.size:
        return f"element {int(columns[0])} of most rows differs in its last bits: its scale or bias is another"
    return None


def _run_typed(proto: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a model, each operator rounded to its own dtype, in numpy."""
    model = ir.from_proto(proto)
    ir.passes.common.InlinePass()(model)
    values: dict[str, Array] = dict(feeds)
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        values[name] = np.asarray(value.const_value.numpy())
    for node in model.graph:
        result = evaluate(node, [values[str(v.name)] if v is not None else None for v in node.inputs], lifted=False)
        values[str(node.outputs[0].name)] = result
    return values


def _site_errors(
    site: Site, values: Mapping[str, Array], inputs: Mapping[str, Array], truth: Mapping[str, Array]
) -> UlpError:
    """Of y and, where there is one, of the sum: the larger."""
    y = site_error(values[site.y], truth[f"norm{site.depth}/{site.y}"], site.dtype)
    if not site.addends:
        return y
    addends = [inputs[name].astype(np.float64) for name in site.addends]
    total = _sum_error(values[site.x], truth[f"sum{site.depth}/{site.x}"], addends, site.dtype)
    return max(y, total, key=lambda error: error.max)


def _sum_error(got: Array, truth: Array, addends: Sequence[Array], dtype: str) -> UlpError:
    """Error of a sum in ULPs of the largest of itself and its addends.

    Where they cancel, a runtime that holds an addend in more precision than the graph says, as ONNX Runtime does with
    half types, is off by the rounding that it left out.
    """
    if got.shape != truth.shape:
        return site_error(got, truth, dtype)
    wide = got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(truth)
        for addend in addends:
            np.maximum(size, np.abs(addend), out=size)
        moved = size + (wide - truth)
        known = np.isfinite(moved)
        if known.all():
            return ulp_error(moved, size, dtype, spread=False)
        known = np.isfinite(size) & np.isfinite(wide)
    return ulp_error(np.where(known, moved, wide), np.where(known, size, truth), dtype, spread=False)


def site_error(got: Array, truth: Array, dtype: str = "float64") -> UlpError:
    """Error in ULPs of the dtype of ``got`` or of ``dtype``, whichever is coarser: a half row scaled by single
    precision has the exactness of the half."""
    if got.shape != truth.shape:
        return UlpError(np.inf, np.inf, np.inf, int(truth.size), int(truth.size))
    if got.dtype.name not in FORMATS:
        return ulp_error(got, truth)
    unit = min(got.dtype.name, dtype, key=lambda name: FORMATS[name].precision)
    return ulp_error(got, truth, unit, spread=False)


def _before_rounding(array: Array, random: np.random.Generator) -> Array:
    """Numbers in half precision moved by up to half a unit in the last place: one of those that are rounded to them."""
    dtype = array.dtype.name
    if dtype not in _HALVES:
        return array
    wide = array.astype(np.float64)
    return np.asarray(wide + ulp_size(wide, dtype) * random.uniform(-0.5, 0.5, wide.shape))


def _worse(errors: Mapping[int, UlpError], others: Mapping[int, UlpError]) -> dict[int, UlpError]:
    """Of two errors at a site, the larger figures."""
    depths = {**errors, **others}
    return {depth: worst_of([known[depth] for known in (errors, others) if depth in known]) for depth in depths}


def _worst(errors: Sequence[UlpError]) -> UlpError | None:
    return max(errors, key=lambda error: (error.max, error.mean)) if errors else None


def _figures(error: UlpError | None) -> tuple[float | None, float | None]:
    return (None, None) if error is None else (error.max, error.mean)
