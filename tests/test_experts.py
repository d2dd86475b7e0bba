"""A mixture of experts of transformers, given as a module in its default form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rmsnorm_deploy import export_model
from rmsnorm_deploy.load import prepare_module

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**ROUTED, "num_experts": 4, "decoder_sparse_step": 1, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "DeepseekV3": {
        **ROUTED,
        **LATENT,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def model_of(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_their_default_form_can_not_be_exported(family: str, tmp_path: Path) -> None:
    model = model_of(family, **FAMILIES[family])
    before = model.config._experts_implementation
    bundle = export_model(model, (torch.randint(0, 32, (2, 5)),), out_dir=tmp_path / "b")
    said = [note for note in bundle.manifest["notes"] if "experts" in note]
    assert said == [f"experts run as batched_mm on a copy: as {before} they can't be exported"]
    assert model.config._experts_implementation == before
    model.set_experts_implementation("eager")
    model.double()
    for shape in ((3, 9), (1, 4)):
        ids = torch.randint(0, 32, shape)
        with torch.no_grad():
            wanted = model(ids).logits
        got = bundle.session("onnxruntime")(ids)[0].double()
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


def test_a_model_without_experts_is_said_to_have_them() -> None:
    model = model_of("Llama")
    assert not [note for note in prepare_module(model)[1] if "experts" in note]
