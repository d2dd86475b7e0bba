"""Jamba, a Mamba and an attention layer with random weights: norms over the scan's parameters too.

python -m rmsnorm_deploy.export export/jamba_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "JambaForCausalLM",
    "JambaConfig",
    {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    experts="batched_mm",
    free_length=False,
)
build, inputs, dims, high, engine_profile = MODEL.functions()
