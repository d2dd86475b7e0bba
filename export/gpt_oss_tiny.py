"""GPT-OSS, two layers with random weights: 5 norms, attention sinks, 4 experts of which each token takes 2.

python -m rmsnorm_deploy.export export/gpt_oss_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "GptOssForCausalLM",
    "GptOssConfig",
    {
        **SIZES,
        "head_dim": 32,
        "sliding_window": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    attention="eager",
    experts="batched_mm",
)
build, inputs, dims, high, engine_profile = MODEL.functions()
