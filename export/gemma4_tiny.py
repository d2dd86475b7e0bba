"""Gemma 4 (text), two layers with random weights: norms without scale over the heads of values, per-layer inputs.

python -m rmsnorm_deploy.export export/gemma4_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "Gemma4ForCausalLM",
    "Gemma4TextConfig",
    {
        **SIZES,
        "head_dim": 32,
        "global_head_dim": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
    },
)
build, inputs, dims, high, engine_profile = MODEL.functions()
