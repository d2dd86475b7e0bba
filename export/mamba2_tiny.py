"""Mamba 2, two layers with random weights: 5 norms, of which 2 are over a product with a gate.

python -m rmsnorm_deploy.export export/mamba2_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import TinyModel

MODEL = TinyModel(
    "Mamba2ForCausalLM",
    "Mamba2Config",
    {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    },
    attention=None,
    length=20,
)
build, inputs, dims, high, engine_profile = MODEL.functions()
