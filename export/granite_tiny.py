"""Granite, two layers with random weights: 5 norms, multipliers on embeddings, residuals and logits.

python -m rmsnorm_deploy.export export/granite_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "GraniteForCausalLM",
    "GraniteConfig",
    {
        **SIZES,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "logits_scaling": 8.0,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
