"""LFM2, a convolution and an attention layer with random weights: 7 norms, of which 2 are over heads.

python -m rmsnorm_deploy.export export/lfm2_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Lfm2ForCausalLM",
    "Lfm2Config",
    {
        **SIZES,
        "layer_types": ["conv", "full_attention"],
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
