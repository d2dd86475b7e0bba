"""Phi-3, two layers with random weights: 5 norms, fused projections.

python -m rmsnorm_deploy.export export/phi3_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Phi3ForCausalLM",
    "Phi3Config",
    {
        **SIZES,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
