"""Gemma 2, two layers with random weights: 9 norms, before and after each sublayer; soft-capped logits.

python -m rmsnorm_deploy.export export/gemma2_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Gemma2ForCausalLM",
    "Gemma2Config",
    {
        **SIZES,
        "head_dim": 32,
        "sliding_window": 4,
        "query_pre_attn_scalar": 32,
    },
    attention="eager",
)
build, inputs, dims, high, engine_profile = MODEL.functions()
