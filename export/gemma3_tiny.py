"""Gemma 3 (text), two layers with random weights: 13 norms, over heads and around sublayers.

python -m rmsnorm_deploy.export export/gemma3_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    {
        **SIZES,
        "head_dim": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
