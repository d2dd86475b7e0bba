"""The budget in ULPs and the verdict on one measurement. docs/parity.md derives the formula and shows how it fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.result import FAIL, PASS, PASS_LIKE_EAGER, Budget
from rmsnorm_deploy.parity.ulp import FORMATS, UlpError

# an error over the budget passes up to so many times the model's own before export: the largest error is a single
# element's, and in a trained model differs by more from one right backend to the next than the average does
EAGER_FACTOR_MEAN = 2.0
EAGER_FACTOR_MAX = 4.0
# up to so many times the error of the model before fusing on the same runtime is as exact as that
UNFUSED_FACTOR_MEAN = 1.25
UNFUSED_FACTOR_MAX = 2.0

_ROUNDING = 1 / math.sqrt(12)  # standard deviation of one rounding, in ULPs
_HEADROOM = 3.0  # for what a model does to the rounding errors of its own parts
_MATMULS = {
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
}
_ONNX_FLOATS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


def budget_for(unit: str, computed_in: str, norms: int, matmuls: int, width: int) -> Budget:
    """The budget of an output of dtype ``unit`` whose model computes in ``computed_in`` (the narrowest float in it)."""
    roundings = 1.0 + norms / 2 + min(matmuls, 6)
    if FORMATS[computed_in].precision >= 24:  # narrower types accumulate in float32, so their sums cost nothing
        roundings += width if matmuls else 4
    expected = _ROUNDING * math.sqrt(roundings)
    coarser = 2.0 ** max(FORMATS[unit].precision - FORMATS[computed_in].precision, 0)
    return Budget(
        unit=unit,
        computed_in=computed_in,
        norms=norms,
        matmuls=matmuls,
        width=width,
        max=_HEADROOM * 5.0 * expected * coarser,
        mean=_HEADROOM * 0.8 * expected * coarser,
    )


def budgets(manifest: Mapping[str, Any], model: Path) -> dict[str, Budget]:
    """A budget for each output dtype of a bundle's manifest; ``model`` is its ONNX file, whose weights are not read."""
    census = _census(model)
    norms = manifest["norms"]
    dtypes = [norm["dtype"] for norm in norms] + census["dtypes"]
    widths = [size for norm in norms for size in _row(norm) if isinstance(size, int)]
    result = {}
    for item in manifest["signature"]["outputs"]:
        unit = item["dtype"]
        if unit in FORMATS:
            narrowest = _narrowest([*dtypes, unit])
            result[unit] = budget_for(unit, narrowest, max(len(norms), 1), census["matmuls"], max(widths, default=1))
    return result


def norm_budget(dtype: str, width: int) -> Budget:
    """The budget of one norm on a given input, over rows of ``width``.

    Half types: the statistics are as good as exact, and row, product and sum are rounded, each by up to one ULP of a
    result that lies lower in its binade than what was rounded. Single: sums that are rounded at every step add error
    with the root of the width. Double: ONNX Runtime sums it one element after the other, and equal ones are all
    rounded the same way.
    """
    if FORMATS[dtype].precision < 24:
        return Budget(dtype, dtype, 1, 0, width, max=4.0, mean=0.7)
    root = math.sqrt(width)
    top = 6 + (width / 32 if dtype == "float64" else root / 4)
    return Budget(dtype, dtype, 1, 0, width, max=top, mean=1 + root / 16)


def judge(error: UlpError, eager: UlpError | None, budget: Budget | None) -> str:
    """The rule id for one measurement; ``budget`` is None for outputs that must be equal (integers, booleans)."""
    max_budget, mean_budget = (budget.max, budget.mean) if budget else (0.0, 0.0)
    if error.mismatched == 0 and error.max <= max_budget and error.mean <= mean_budget:
        return PASS
    return PASS_LIKE_EAGER if _like_eager(error, eager, max_budget, mean_budget) else FAIL


def _like_eager(error: UlpError, eager: UlpError | None, max_budget: float, mean_budget: float) -> bool:
    if eager is None or error.mismatched > eager.mismatched:
        return False
    # a mismatch makes max infinite, and its count was compared above
    comparable = error.mismatched > 0 or error.max <= max(max_budget, EAGER_FACTOR_MAX * eager.max)
    return comparable and error.mean <= max(mean_budget, EAGER_FACTOR_MEAN * eager.mean)


def as_exact_as_unfused(error: UlpError, unfused: UlpError) -> bool:
    """Whether a fused file is no less exact than the file before fusing on the same runtime."""
    if error.mismatched > unfused.mismatched:
        return False
    comparable = error.mismatched > 0 or error.max <= UNFUSED_FACTOR_MAX * unfused.max
    return comparable and error.mean <= UNFUSED_FACTOR_MEAN * unfused.mean


def _narrowest(dtypes: Iterable[str]) -> str:
    return min((dtype for dtype in dtypes if dtype in FORMATS), key=lambda dtype: FORMATS[dtype].precision)


def _row(norm: Mapping[str, Any]) -> list[Any]:
    return list(norm["shape"][norm["axis"] :]) if norm["shape"] else []


def _census(model: Path) -> dict[str, Any]:
    """How many matrix products a file has, and the float dtypes of its weights of two and more dims."""
    proto = read_model(model)
    bodies = [proto.graph.node, *(function.node for function in proto.functions)]
    weights = {_ONNX_FLOATS.get(init.data_type) for init in proto.graph.initializer if len(init.dims) >= 2}
    return {
        "matmuls": sum(node.op_type in _MATMULS for nodes in bodies for node in nodes),
        "dtypes": sorted(dtype for dtype in weights if dtype),
    }
