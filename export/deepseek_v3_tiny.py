"""DeepSeek-V3, a dense and a sparse layer with random weights: 9 norms, of which 4 are over compressed heads.

python -m rmsnorm_deploy.export export/deepseek_v3_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    {
        **SIZES,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    experts="batched_mm",
)
build, inputs, dims, high, engine_profile = MODEL.functions()
