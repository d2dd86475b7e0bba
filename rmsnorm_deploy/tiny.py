"""Small transformers models with fixed random weights, from which the recipes in export/ are made.

MODEL = TinyModel("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 4})
build, inputs, dims, high, engine_profile = MODEL.functions()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rmsnorm_deploy.load.huggingface import import_transformers, quiet_transformers, wrap

# Two layers, grouped key and value heads, and widths that are all different.
SIZES: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class TinyModel:
    """A class of transformers, its config, and the way its attention and its experts can be traced.

    Attributes:
        model, config: names of classes in transformers.
        settings: arguments of the config.
        attention: "sdpa" or "eager"; None leaves it to the model, which may have none.
        experts: "batched_mm" for a mixture of experts, whose loop over the experts has no static graph.
        decoder: whether forward takes decoder_input_ids too.
        length: of the example sequence.
        free_length: whether another length may be run; not where PyTorch unrolls a loop over the sequence.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    attention: str | None = "sdpa"
    experts: str | None = None
    decoder: bool = False
    length: int = 6
    free_length: bool = True

    def functions(self) -> Functions:
        """The functions of a recipe: build, inputs, dims, high, engine_profile."""
        return self.build, self.inputs, self.dims, self.high, self.engine_profile

    def build(self) -> nn.Module:
        """Token ids -> logits (or the last hidden state), in float32."""
        transformers = import_transformers(self.model)
        config = getattr(transformers, self.config)(**self.settings)
        if self.attention is not None:
            config._attn_implementation = self.attention
        if self.experts is not None:
            config._experts_implementation = self.experts
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)(config)
            vary_norms(model)
        return wrap(model)[0]

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """input_ids: int64[batch, seq], and decoder_input_ids: int64[batch, target] where there is a decoder."""
        generator = torch.Generator().manual_seed(1)
        lengths = (self.length, self.length - 1) if self.decoder else (self.length,)
        return tuple(torch.randint(0, self.settings["vocab_size"], (2, n), generator=generator) for n in lengths), {}

    def dims(self) -> dict[str, dict[int, str]]:
        """Batch and lengths are free, unless the length cannot be."""
        own = {"decoder_input_ids": {0: "batch", 1: "target"}} if self.decoder else {}
        return {"input_ids": {0: "batch", 1: "seq"} if self.free_length else {0: "batch"}, **own}

    def high(self) -> dict[str, int]:
        """Token ids stay below the vocabulary's size."""
        return dict.fromkeys(self.dims(), self.settings["vocab_size"])

    def engine_profile(self) -> dict[str, tuple[int, int, int]]:
        """Sizes a TensorRT engine is tuned for."""
        own = {"target": (1, 16, 256)} if self.decoder else {}
        return {"batch": (1, 1, 8), **({"seq": (1, 64, 512)} if self.free_length else {}), **own}


def vary_norms(model: nn.Module) -> None:
    """Give the scales of norms values in [0.5, 1.5): a fresh model's are all ones, or zeros, and hide a lost scale."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower():
                parameter.copy_(torch.rand_like(parameter) + 0.5)
