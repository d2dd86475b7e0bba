"""A causal transformer whose norms are F.normalize(x, dim=-1) * sqrt(width) * gamma, a common spelling.

    python -m rmsnorm_deploy.export export/l2norm_tiny.py

x / max(|x|, 1e-12) * sqrt(d) is an RMSNorm whose root mean square is clamped. The norms over queries and keys have one
gamma a head, of shape [heads, 1, width]: such a scale varies over more than the row and stays behind the norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 64, 4, 2


class RMSNorm(nn.Module):
    """x / |x| * sqrt(width) * gamma over the last axis; ``shape`` is gamma's."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = float(shape[-1]) ** 0.5
        self.gamma = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width], the result likewise."""
        out: torch.Tensor = F.normalize(x, dim=-1) * self.scale * self.gamma
        return out


class Attention(nn.Module):
    """Causal self-attention, with a norm in front and norms over each head's queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm_q, self.norm_k = RMSNorm(HEADS, 1, WIDTH // HEADS), RMSNorm(HEADS, 1, WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, width], the result likewise."""
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class FeedForward(nn.Module):
    """A gated feed-forward net with its norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, width], the result likewise."""
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        out: torch.Tensor = self.down(value * F.gelu(gate))
        return out


class Transformer(nn.Module):
    """Token ids -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: int64[batch, seq]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            for part in layer:
                x = part(x) + x
        out: torch.Tensor = self.out(self.norm(x))
        return out


def build() -> nn.Module:
    """Fixed random weights, gammas that are not all ones included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("gamma"):
                    parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model.eval()


def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """input_ids: int64[batch, seq]."""
    return (torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1)),), {}


def dims() -> dict[str, dict[int, str]]:
    """Batch and length are free."""
    return {"input_ids": {0: "batch", 1: "seq"}}


def high() -> dict[str, int]:
    """Token ids stay below the vocabulary's size."""
    return {"input_ids": VOCABULARY}


def engine_profile() -> dict[str, tuple[int, int, int]]:
    """Sizes a TensorRT engine is tuned for."""
    return {"batch": (1, 1, 8), "seq": (1, 64, 512)}
