"""Qwen3, two layers with random weights: 9 norms, of which 4 are over the heads of queries and keys.

python -m rmsnorm_deploy.export export/qwen3_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Qwen3ForCausalLM",
    "Qwen3Config",
    {
        **SIZES,
        "head_dim": 32,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
