"""Bamba, a Mamba 2 and an attention layer with random weights: 6 norms, of which 1 is over a product with a gate.

python -m rmsnorm_deploy.export export/bamba_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import SIZES, TinyModel

MODEL = TinyModel(
    "BambaForCausalLM",
    "BambaConfig",
    {
        **SIZES,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
    length=20,
)
build, inputs, dims, high, engine_profile = MODEL.functions()
