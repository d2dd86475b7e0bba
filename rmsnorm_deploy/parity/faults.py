"""How much parity can see: faults are planted one at a time in a right model, and clean models are tried on many seeds.

A fault is *caught* when the verdict fails. It's *named* when bisection names the norm that it is in, or the span
between norms that holds it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rmsnorm_deploy.errors import EXIT_OK, EXIT_PARITY, BackendUnavailable, InputError
from rmsnorm_deploy.parity.backends import BACKENDS, REFERENCE, HeldBundle
from rmsnorm_deploy.parity.bisect import upstream
from rmsnorm_deploy.parity.model_faults import MODEL_FAULTS
from rmsnorm_deploy.parity.norm_faults import NORM_FAULTS
from rmsnorm_deploy.parity.norm_result import Finding
from rmsnorm_deploy.parity.normcheck import open_checks
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.oracle import BundleLike
from rmsnorm_deploy.parity.patient import CannotPlantError, Patient
from rmsnorm_deploy.parity.result import FAIL
from rmsnorm_deploy.parity.run import Prepared, judge_prepared, prepare
from rmsnorm_deploy.parity.samples import Sample, make_samples
from rmsnorm_deploy.parity.scratch import Scratch, external_files
from rmsnorm_deploy.parity.sites import unfused_graph

HERE = ("onnxruntime",)


@dataclass(frozen=True)
class Outcome:
    """One planted fault: ``where`` is "norm" or "model"; ``told`` is what bisection said."""

    fault: str
    where: str
    caught: bool
    named: bool
    told: str


class Ward:
    """A bundle in whose model faults are planted; truth is worked out once."""

    def __init__(
        self,
        bundle: BundleLike,
        *,
        seed: int = 0,
        samples: Sequence[Sample] | None = None,
        backends: Sequence[str] = HERE,
    ) -> None:
        if bundle.reference_path is None:
            raise InputError(f"{bundle.path} has no reference.onnx to name faults by: export the model again")
        self.bundle = HeldBundle(bundle)
        self.backends = [BACKENDS[name] for name in backends]
        self.prepared: Prepared = prepare(self.bundle, seed=seed, samples=samples)
        self._scratch = Scratch()
        for file in external_files(read_model(bundle.model_path)):
            shutil.copyfile(bundle.model_path.parent / file, self._scratch.path / file)
        self.reference = unfused_graph(bundle.reference_path)

    def __enter__(self) -> Ward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.__exit__(kind, error, trace)

    def faults(self) -> Iterator[tuple[str, str]]:
        """(where, name) of every fault, those that this model has no place for too.

        In half precision only those in norms: one weight 1% too large moves the rest by less than its roundings do.
        """
        yield from (("norm", name) for name in NORM_FAULTS)
        if all(norm["dtype"] in ("float32", "float64") for norm in self.bundle.manifest["norms"]):
            yield from (("model", name) for name in MODEL_FAULTS)

    def plant(self, where: str, name: str) -> Outcome | None:
        """Plant one fault and judge the model; None when the model has no place for it."""
        patient = Patient(self.bundle.model_path)
        try:
            wrong: Any = NORM_FAULTS[name](patient) if where == "norm" else MODEL_FAULTS[name](patient)
        except CannotPlantError:
            return None
        path = self._scratch.path / "model.onnx"
        path.write_bytes(patient.bytes())
        report = judge_prepared(self.prepared, HeldBundle(self.bundle, path), self.backends)
        caught = all(backend.verdict == FAIL for backend in report.backends)
        findings = report.findings
        named = bool(findings) and all(self._is_named(finding, where, wrong) for finding in findings)
        return Outcome(name, where, caught, named, findings[0].text if findings else "nothing")

    def _is_named(self, finding: Finding, where: str, wrong: Any) -> bool:
        if where == "norm":
            modules = {r["module"] or r["name"] for r in self.bundle.manifest["norms"] if r["node"] in wrong}
            return finding.norm in modules
        if finding.rule == "refused":
            return True
        return finding.norm is None and self._lies_in(finding, wrong)

    def _lies_in(self, finding: Finding, value: str) -> bool:
        """Whether a value is computed between the norms that a finding names."""
        with Scratch() as scratch:
            checks = open_checks(self.bundle, scratch)
            assert checks is not None
            after = upstream(checks, value)
            first = {site.name for site in checks.sites.sites if self._follows(value, site.inputs, checks.sites.sites)}
        span_starts = finding.after is None or (after is not None and after.name == finding.after)
        return (finding.rule == "tail" and not first) or (finding.before in first and (span_starts or after is None))

    def _follows(self, value: str, reads: Sequence[str], sites: Sequence[Any]) -> bool:
        """Whether what a norm reads follows from ``value`` with no norm between."""
        stop = {site.y for site in sites}
        seen: set[str] = set()
        wanted = [name for name in reads if name not in stop]
        while wanted:
            name = wanted.pop()
            if name == value:
                return True
            node = self.reference.producers.get(name)
            for read in node.input if node is not None else ():
                if read and read not in seen and read not in stop:
                    seen.add(read)
                    wanted.append(read)
        return False


def false_alarms(
    bundle: BundleLike,
    seeds: Sequence[int],
    say: Callable[[str], None] = lambda line: None,
    samples: Callable[[int], list[Sample]] | None = None,
) -> list[int]:
    """The seeds on which the clean bundle does not pass on every backend that is here.

    ``samples`` makes the inputs for a seed; `make_samples` does otherwise.
    """
    held = HeldBundle(bundle)
    wrong = []
    for seed in seeds:
        prepared = prepare(
            held, seed=seed, samples=samples(seed) if samples else make_samples(held.manifest, seed=seed)
        )
        report = judge_prepared(prepared, held, [BACKENDS[name] for name in _RUN_ANYWHERE])
        if not report.ok:
            wrong.append(seed)
            say(f"seed {seed}: {report.headline()}")
    return wrong


_RUN_ANYWHERE = ("pytorch", REFERENCE, "onnxruntime", "onnxruntime-unoptimized", "onnxruntime-kernels")


def tiny_bundles(folder: Path) -> Iterator[tuple[str, BundleLike]]:
    """A Llama of two layers in float32 and in float16, and norms with a bias, exported into ``folder``."""
    from rmsnorm_deploy import export_model
    from rmsnorm_deploy.tiny import SIZES, TinyModel

    llama = TinyModel("LlamaForCausalLM", "LlamaConfig", {**SIZES, "rms_norm_eps": 1e-5})
    for precision in ("keep", "fp16"):
        out = folder / f"llama-{precision}"
        title = f"Llama of two layers in {'float32' if precision == 'keep' else 'float16'}"
        args, kwargs = llama.inputs()
        yield title, export_model(llama.build(), args, kwargs, out_dir=out, precision=precision)
    yield "norms with a bias", export_model(_biased(), (_example(),), out_dir=folder / "biased")


def _example() -> Any:
    import torch

    return torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(3))


def _biased() -> Any:
    import torch

    class Biased(torch.nn.Module):
        """A norm whose scale is 1 + w, with a bias, behind a residual add."""

        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(4)
            self.weight = torch.nn.Parameter(torch.randn(48, generator=generator) / 4)
            self.bias = torch.nn.Parameter(torch.randn(48, generator=generator) / 4)
            self.up_proj = torch.nn.Parameter(torch.randn(48, 48, generator=generator) / 7)

        def norm(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return x * scale * (1.0 + self.weight) + self.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + torch.nn.functional.silu(self.norm(x) @ self.up_proj))

    return Biased().eval()


def main(path: Path | None, seeds: int) -> int:
    """The command: plants everything in one bundle, or in tiny ones made for it, and prints the counts."""
    from rmsnorm_deploy.bundle import open_bundle

    _quiet()
    with tempfile.TemporaryDirectory(prefix="rmsnorm_deploy-") as folder:
        bundles: Iterator[tuple[str, BundleLike]]
        bundles = iter([(path.name, open_bundle(path))]) if path is not None else tiny_bundles(Path(folder))
        right = True
        for title, bundle in bundles:
            right &= _report(title, bundle, seeds)
    return EXIT_OK if right else EXIT_PARITY


def _quiet() -> None:
    """ONNX Runtime writes about every faulty model; the outcome says it in a line."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendUnavailable("faults are judged with onnxruntime: pip install onnxruntime") from error
    onnxruntime.set_default_logger_severity(4)


def _report(title: str, bundle: BundleLike, seeds: int) -> bool:
    print(f"{title}: {len(bundle.manifest['norms'])} norms", flush=True)
    outcomes = list[Outcome]()
    with Ward(bundle) as ward:
        for where, name in ward.faults():
            outcome = ward.plant(where, name)
            if outcome is not None:
                outcomes.append(outcome)
                state = "MISSED" if not outcome.caught else "caught" if outcome.named else "caught, not named"
                print(f"  {state:<18}{where:<7}{name}: {outcome.told}", flush=True)
    caught, named = sum(o.caught for o in outcomes), sum(o.named for o in outcomes)
    wrong = false_alarms(bundle, range(seeds), lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    print(
        f"{title}: {caught} of {len(outcomes)} faults caught, {named} named; "
        f"{len(wrong)} false alarms on {seeds} seeds",
        flush=True,
    )
    return caught == len(outcomes) and not wrong
