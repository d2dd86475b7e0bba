"""Gemma, two layers with random weights: 5 norms that scale by 1 + weight, in float32.

python -m rmsnorm_deploy.export export/gemma_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "GemmaForCausalLM",
    "GemmaConfig",
    {
        **SIZES,
        "head_dim": 32,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
