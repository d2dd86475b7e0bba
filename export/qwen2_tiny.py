"""Qwen2, two layers with random weights: 5 norms, biases in the projections.

python -m rmsnorm_deploy.export export/qwen2_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Qwen2ForCausalLM",
    "Qwen2Config",
    {
        **SIZES,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
