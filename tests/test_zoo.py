"""Every RMSNorm that PyTorch executes is one op, in each family, and the values are right by float64.

`pytest -m slow tests/test_zoo.py` runs the rest of docs/zoo.md.
"""

from __future__ import annotations

import pytest

from rmsnorm_deploy.zoo import DTYPES, FAMILIES, RECIPES, WIDENED, Result, run_family

# Norms in the two layers, read from the models' code: an independent word against hooks that see too little or too
# much. And how many have their residual add inside.
EXPECTED = {
    "Llama": (5, 4),
    "Mistral": (5, 4),
    "Mixtral": (5, 4),
    "Qwen2": (5, 4),
    "Qwen3": (9, 4),
    "Qwen3-MoE": (9, 4),
    "Gemma": (5, 4),
    "Gemma 2": (9, 4),
    "Gemma 3": (13, 4),
    "Gemma 4": (18, 2),
    "Phi-3": (5, 4),
    "OLMo 2": (9, 1),
    "Granite": (5, 4),
    "GPT-OSS": (5, 4),
    "SmolLM3": (5, 4),
    "DeepSeek-V3": (9, 4),
    "T5": (12, 10),
    "T5 encoder": (5, 4),
    "Mamba 2": (5, 2),
    "Jamba": (8, 4),
    "Bamba": (6, 4),
    "LFM2": (7, 4),
    "DiT, adaLN": (9, 4),
    "L2-norm": (9, 4),
    "Cohere": (0, 0),
}
# Where PyTorch itself does something between the add and the norm in a half type: Mamba 2 adds in float32 and then
# rounds, and T5 clamps float16 against infinities.
OTHER_RESIDUALS = {
    ("Mamba 2", "fp16"): 1,
    ("Mamba 2", "bf16"): 1,
    ("T5", "fp16"): 0,
    ("T5 encoder", "fp16"): 0,
}
FAST = {
    ("Llama", "fp32"),
    ("Gemma 3", "fp16"),
    ("OLMo 2", "bf16"),
    ("GPT-OSS", "fp16"),
    ("T5", "fp32"),
    ("DeepSeek-V3", "fp32"),
    ("DiT, adaLN", "bf16"),
    ("L2-norm", "fp16"),
    ("Cohere", "fp32"),
}


def cases() -> list[object]:
    return [
        pytest.param(family, dtype, marks=[] if (family, dtype) in FAST else pytest.mark.slow)
        for family in FAMILIES
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("family", "dtype"), cases())
def test_every_executed_norm_is_fused_and_right(family: str, dtype: str) -> None:
    result = run_family(family, dtype)
    assert result.problem is None
    executed, residual = EXPECTED[family]
    assert (result.executed, result.fused) == (executed, executed)
    assert result.residual == OTHER_RESIDUALS.get((family, dtype), residual)
    assert result.left == (7 if family == "Cohere" else 0)
    assert result.fixed == (("input_ids[1]=6",) if family == "Jamba" else ())
    assert result.runtime == "ONNX Runtime" or (dtype == "bf16" and result.runtime.endswith(WIDENED))
    assert result.ok, result


def test_each_family_has_its_recipe_and_its_numbers() -> None:
    assert set(EXPECTED) == set(FAMILIES)
    assert {path.stem for path in RECIPES.glob("*_tiny.py")} == set(FAMILIES.values())


def test_a_result_is_no_pass_when_a_norm_is_unfused_or_a_value_wrong() -> None:
    right = Result("Llama", "fp32", executed=5, fused=5, runtime="ONNX Runtime", verdict="pass")
    assert right.ok
    for wrong in ({"fused": 4}, {"verdict": "fail"}, {"graph_error": 1e-3}, {"problem": "none"}):
        assert not Result(**{**right.__dict__, **wrong}).ok
