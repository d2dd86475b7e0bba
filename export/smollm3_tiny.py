"""SmolLM3, two layers with random weights: 5 norms, the second layer without rotary embedding.

python -m rmsnorm_deploy.export export/smollm3_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "SmolLM3ForCausalLM",
    "SmolLM3Config",
    {
        **SIZES,
        "no_rope_layers": [1, 0],
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
