"""OLMo 2, two layers with random weights: 9 norms, behind the sublayers and over whole queries and keys.

python -m rmsnorm_deploy.export export/olmo2_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Olmo2ForCausalLM",
    "Olmo2Config",
    {
        **SIZES,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
