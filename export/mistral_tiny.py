"""Mistral, two layers with random weights: 5 norms, sliding window.

python -m rmsnorm_deploy.export export/mistral_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "MistralForCausalLM",
    "MistralConfig",
    {
        **SIZES,
        "sliding_window": 4,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
