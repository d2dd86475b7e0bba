"""A Llama of two layers with fixed random weights, built from its config by transformers: 5 norms, GQA, RoPE, SwiGLU.

    python -m rmsnorm_deploy.export export/llama_tiny.py

Change the numbers in ``CONFIG`` to build your own and give its weights: MODEL.safetensors --recipe this_file.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rmsnorm_deploy.load.huggingface import import_transformers, wrap

CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def build() -> nn.Module:
    """input_ids -> logits, in float32."""
    transformers = import_transformers(__file__)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(torch.rand_like(parameter) + 0.5)
    return wrap(model)[0]


def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """input_ids: int64[batch, seq]."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(0, CONFIG["vocab_size"], (2, 6), generator=generator),), {}


def dims() -> dict[str, dict[int, str]]:
    """Batch and length are free."""
    return {"input_ids": {0: "batch", 1: "seq"}}


def high() -> dict[str, int]:
    """Token ids stay below the vocabulary's size."""
    return {"input_ids": CONFIG["vocab_size"]}


def engine_profile() -> dict[str, tuple[int, int, int]]:
    """Sizes a TensorRT engine is tuned for."""
    return {"batch": (1, 1, 8), "seq": (1, 64, 512)}
