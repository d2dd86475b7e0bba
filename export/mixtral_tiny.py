"""Mixtral, two layers with random weights: 5 norms, 4 experts of which each token takes 2.

python -m rmsnorm_deploy.export export/mixtral_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "MixtralForCausalLM",
    "MixtralConfig",
    {
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    experts="batched_mm",
)
build, inputs, dims, high, engine_profile = MODEL.functions()
