"""Qwen3-MoE, two layers with random weights: 9 norms, 4 experts of which each token takes 2.

python -m rmsnorm_deploy.export export/qwen3_moe_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Qwen3MoeForCausalLM",
    "Qwen3MoeConfig",
    {
        **SIZES,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    experts="batched_mm",
)
build, inputs, dims, high, engine_profile = MODEL.functions()
