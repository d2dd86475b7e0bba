"""The zoo: models of many families, exported and judged by what PyTorch itself executes and by float64.

For each family and dtype: the recipe in export/ is exported with dynamic batch and sequence; the RMSNorms that PyTorch
executes are counted on a run (rmsnorm_deploy/observe.py) and held against the fused call sites; stock ONNX Runtime,
without our kernels, runs the file at two other sizes, and is judged as parity judges it. Where ONNX Runtime has no
kernel for bfloat16, the evaluator of the onnx package runs the file in that very dtype instead, and ONNX Runtime with
those ops widened to float32. In all cases the graph before fusing and the fused one are run in float64 as well, which
shows anything but rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.errors import BackendUnavailable, InputError

if TYPE_CHECKING:
    from rmsnorm_deploy.bundle import Bundle
    from rmsnorm_deploy.parity import Sample
    from rmsnorm_deploy.parity.oracle import BundleLike
    from rmsnorm_deploy.parity.ulp import Array

RECIPES = Path(__file__).parent.parent / "export"
FAMILIES = {
    "Llama": "llama_tiny",
    "Mistral": "mistral_tiny",
    "Mixtral": "mixtral_tiny",
    "Qwen2": "qwen2_tiny",
    "Qwen3": "qwen3_tiny",
    "Qwen3-MoE": "qwen3_moe_tiny",
    "Gemma": "gemma_tiny",
    "Gemma 2": "gemma2_tiny",
    "Gemma 3": "gemma3_tiny",
    "Gemma 4": "gemma4_tiny",
    "Phi-3": "phi3_tiny",
    "OLMo 2": "olmo2_tiny",
    "Granite": "granite_tiny",
    "GPT-OSS": "gpt_oss_tiny",
    "SmolLM3": "smollm3_tiny",
    "DeepSeek-V3": "deepseek_v3_tiny",
    "T5": "t5_tiny",
    "T5 encoder": "t5_encoder_tiny",
    "Mamba 2": "mamba2_tiny",
    "Jamba": "jamba_tiny",
    "Bamba": "bamba_tiny",
    "LFM2": "lfm2_tiny",
    "DiT, adaLN": "dit_tiny",
    "L2-norm": "l2norm_tiny",
    "Cohere": "cohere_tiny",
}
DTYPES = ("fp32", "fp16", "bf16")
SIZES = ((1, 11, 4), (3, 19, 7))  # batch, sequence, and any other length; none is an example's
WIDENED = "ONNX Runtime widened"
GRAPH_TOLERANCE = 2.0**-20  # of a row's size, in float64: constants folded in float32, and an epsilon held in float32


@dataclass(frozen=True)
class Result:
    """One family in one dtype.

    Attributes:
        executed: RMSNorms that PyTorch executed; ``fused`` call sites in the file, ``residual`` of them with an add.
        left: look-alikes that were left.
        fixed: inputs with a dim that is a number although it is no width, as "input_ids[1]=6".
        runtime: what ran the file in its dtype; ``refused`` is what ONNX Runtime said if it did not as it is.
        max_ulp, budget: the largest error against float64, and what parity allows; ``verdict`` is parity's rule.
        eager_ulp: the largest error of PyTorch itself.
        graph_error: what fusing changed in float64, relative to a row's size.
        problem: why there is no bundle, or no numbers.
    """

    family: str
    dtype: str
    executed: int = 0
    fused: int = 0
    residual: int = 0
    left: int = 0
    fixed: tuple[str, ...] = ()
    runtime: str = ""
    refused: str | None = None
    max_ulp: float = 0.0
    eager_ulp: float = 0.0
    budget: float = 0.0
    verdict: str = ""
    graph_error: float = 0.0
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Every executed norm is fused, and the numbers are right."""
        counted = self.problem is None and self.executed == self.fused
        return counted and self.verdict != "fail" and self.graph_error <= GRAPH_TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {**asdict(self), "ok": self.ok}


def run_zoo(
    families: Iterable[str] = (), dtypes: Iterable[str] = (), progress: Callable[[str], None] | None = None
) -> Iterator[Result]:
    """Results for the named families and dtypes (all of them for none), as they come.

    Raises:
        InputError: an unknown name, or the recipes are not there (they come with the sources, not with the wheel).
    """
    families, dtypes = list(families) or list(FAMILIES), list(dtypes) or list(DTYPES)
    by_name = {_plain(family): family for family in FAMILIES}
    for name in families:
        if _plain(name) not in by_name:
            raise InputError(f"--family {name}: not in the zoo; there is {', '.join(FAMILIES)}")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise InputError(f"--dtype {dtype}: not in the zoo; there is {', '.join(DTYPES)}")
    for name in families:
        for dtype in dtypes:
            if progress is not None:
                progress(f"{by_name[_plain(name)]} {dtype}")
            yield run_family(by_name[_plain(name)], dtype)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def run_family(family: str, dtype: str, recipes: Path = RECIPES) -> Result:
    """Build, export, count and judge one family in one dtype ("fp32", "fp16" or "bf16")."""
    from rmsnorm_deploy.export.pipeline import export_model

    recipe = recipes / f"{FAMILIES[family]}.py"
    if not recipe.is_file():
        raise InputError(f"{recipe}: not there: the zoo's recipes come with the project's sources")
    result = Result(family, dtype)
    with tempfile.TemporaryDirectory(prefix="zoo.") as folder:
        try:
            bundle = export_model(recipe, out_dir=Path(folder) / "bundle", precision=dtype)
            return judge_bundle(bundle, result)
        except InputError as error:
            return replace(result, problem=str(error).replace(folder, ""))


def judge_bundle(bundle: Bundle, result: Result) -> Result:
    """Counts and errors of a bundle that was made in this process, put into ``result``."""
    from rmsnorm_deploy.observe import executed_norms
    from rmsnorm_deploy.parity.backends import HeldBundle
    from rmsnorm_deploy.runtime.tensors import to_torch

    samples = other_sizes(bundle.manifest)
    if bundle.eager is None:
        raise InputError(f"{bundle.path}: there is no PyTorch module to count norms in")
    paths = {item["name"]: item["path"] for item in bundle.manifest["signature"]["inputs"]}
    call = {paths[name]: to_torch(array) for name, array in samples[-1].feeds.items()}
    norms = bundle.norms
    counted = replace(
        result,
        executed=len(executed_norms(bundle.eager, kwargs=call)),
        fused=len(norms),
        residual=sum(norm.residual for norm in norms),
        left=len(bundle.left),
        fixed=tuple(_fixed(bundle.manifest)),
    )
    return _Judge(HeldBundle(bundle), samples).judge(counted)


def other_sizes(manifest: Mapping[str, Any]) -> list[Sample]:
    """Random inputs at the two sizes of ``SIZES``, as far as the model's dims are free."""
    from rmsnorm_deploy.parity import make_samples

    samples = []
    for batch, sequence, other in SIZES:
        usual = {"batch": batch, "seq": sequence}
        dims = {name: {**limits, "example": usual.get(name, other)} for name, limits in manifest["dims"].items()}
        samples.append(make_samples({**manifest, "dims": dims}, adversarial=False)[0])
    return samples


def _fixed(manifest: Mapping[str, Any]) -> Iterator[str]:
    for item in manifest["signature"]["inputs"]:
        free = item["shape"] if item["dtype"].startswith("int") else item["shape"][:-1] or item["shape"]
        for axis, dim in enumerate(free):
            if isinstance(dim, int):
                yield f"{item['name']}[{axis}]={dim}"


@dataclass
class _Judge:
    """The float64 truth of a bundle for some samples, and PyTorch's own error."""

    bundle: BundleLike
    samples: list[Sample]
    truth: list[list[Array]] = field(default_factory=list)
    eager: list[list[Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from rmsnorm_deploy.parity.oracle import open_oracle

        oracle, eager = open_oracle(self.bundle), self.bundle.session("pytorch")
        self.names = [item["name"] for item in self.bundle.manifest["signature"]["outputs"]]
        for sample in self.samples:
            self.truth.append(oracle(sample.feeds))
            self.eager.append(self._in_order(eager.run(sample.feeds)))

    def _in_order(self, outputs: Mapping[str, Any]) -> list[Array]:
        import numpy as np

        return [np.asarray(outputs[name]) for name in self.names]

    def judge(self, result: Result) -> Result:
        """The file in its dtype, and the fused graph in float64."""
        result = replace(result, graph_error=self._graph_error())
        try:
            session = self.bundle.session("onnxruntime", custom_ops=False)
            return self._measure(
                replace(result, runtime="ONNX Runtime"), lambda feeds: self._in_order(session.run(feeds))
            )
        except BackendUnavailable as error:
            refusal = str(error)
        except InputError as error:
            if result.dtype != "bf16":
                raise
            refusal = str(error)
        refusal = refusal.split("[ONNXRuntimeError] : ")[-1].replace(str(self.bundle.model_path), "the model")
        refusal = refusal.split(" node with name")[0]  # the operator tells more than the node
        return self._widened(self._reference(replace(result, refused=refusal)))

    def _reference(self, result: Result) -> Result:
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(str(self.bundle.model_path))
        return self._measure(
            replace(result, runtime="onnx.reference"), lambda feeds: list(evaluator.run(self.names, feeds))
        )

    def _widened(self, result: Result) -> Result:
        """ONNX Runtime with what it has no kernel for in float32, besides: the worse of the two counts."""
        session = self.bundle.session("onnxruntime", custom_ops=False, widen_bfloat16=True)
        return self._measure(
            replace(result, runtime=f"{result.runtime}, {WIDENED}"), lambda feeds: self._in_order(session.run(feeds))
        )

    def _measure(self, result: Result, run: Callable[[dict[str, Array]], list[Array]]) -> Result:
        """The worst verdict over samples and outputs."""
        from rmsnorm_deploy.parity.judge import budgets, judge
        from rmsnorm_deploy.parity.ulp import ulp_error

        limits = budgets(self.bundle.manifest, self.bundle.model_path)
        for sample, truth, eager in zip(self.samples, self.truth, self.eager, strict=True):
            for got, want, own in zip(run(sample.feeds), truth, eager, strict=True):
                if got.dtype != own.dtype:
                    raise InputError(f"{result.runtime} gives {got.dtype} where PyTorch gives {own.dtype}")
                limit = limits.get(got.dtype.name)
                error, base = ulp_error(got, want), ulp_error(own, want)
                verdict = judge(error, base, limit)
                result = replace(
                    result,
                    max_ulp=max(result.max_ulp, error.max),
                    eager_ulp=max(result.eager_ulp, base.max),
                    budget=limit.max if limit else 0.0,
                    verdict=max(result.verdict, verdict, key=_severity),
                )
        return result

    def _graph_error(self) -> float:
        """Between the graph before fusing and after it, both with every float lifted: what is left is no rounding."""
        import numpy as np

        from rmsnorm_deploy.parity.lift_onnx import OnnxProgram
        from rmsnorm_deploy.parity.ulp import row_scale

        before, after = OnnxProgram(self._before()), OnnxProgram(self.bundle.model_path)
        worst = 0.0
        for sample in self.samples:
            for want, got in zip(before.run(sample.feeds), after.run(sample.feeds), strict=True):
                error = np.abs(got - want) / np.maximum(row_scale(want), np.finfo(np.float64).tiny)
                worst = max(worst, float(np.max(error, initial=0.0)))
        return worst

    def _before(self) -> Path:
        """The unfused graph with its constants folded in their own dtype, as the fused one's are."""
        import onnx_ir as ir

        from rmsnorm_deploy.fusion.cleanup import clean_up
        from rmsnorm_deploy.fusion.imports import import_graph

        assert self.bundle.reference_path is not None
        model = ir.load(self.bundle.reference_path)
        import_graph(model)
        clean_up(model)
        path = self.bundle.path.parent / "before.onnx"
        path.write_bytes(ir.to_proto(model).SerializeToString())
        return path


def _severity(verdict: str) -> int:
    return ["", "pass"].index(verdict) if verdict in ("", "pass") else 3 if verdict == "fail" else 2
