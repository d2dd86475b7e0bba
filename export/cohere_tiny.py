"""Cohere, two layers with random weights: LayerNorm without bias, which is no RMSNorm and must be left.

python -m rmsnorm_deploy.export export/cohere_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "CohereForCausalLM",
    "CohereConfig",
    {
        **SIZES,
        "use_qk_norm": True,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
