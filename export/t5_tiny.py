"""T5, encoder and decoder of two layers each with random weights: 5 + 7 norms.

python -m rmsnorm_deploy.export export/t5_tiny.py
"""

from __future__ import annotations

from rmsnorm_deploy.tiny import TinyModel

MODEL = TinyModel(
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": 256,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 176,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
    },
    attention="eager",
    decoder=True,
)
build, inputs, dims, high, engine_profile = MODEL.functions()
