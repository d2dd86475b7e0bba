"""The classic post-norm transformer block in plain PyTorch, with a hand-written RMSNorm in place of LayerNorm.

    python -m rmsnorm_deploy.export export/transformer_block.py
    python -m rmsnorm_deploy.export block.pt --recipe export/transformer_block.py    # block.pt: a state dict of yours

Self-attention and a feed-forward net, each followed by a residual add and a norm: x = norm(x + sublayer(x)). The norm
is x / sqrt(mean(x^2) + 1e-8) times a learnable scale. An epsilon that small is what exporters tend to lose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, HIDDEN = 256, 4, 1024
EPS = 1e-8


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis. No mean is taken off, and no bias added."""

    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., width], the result likewise."""
        rms = torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return x / rms * self.scale


class SelfAttention(nn.Module):
    """Multi-head self-attention without mask: softmax(Q K^T / sqrt(d)) V."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, width], the result likewise."""
        batch, seq, width = x.shape
        q, k, v = (
            layer(x).view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        mixed = torch.softmax(scores, dim=-1) @ v
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with its residual and its norm behind the add."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, hidden: int = HIDDEN, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.norm1 = RMSNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.norm2 = RMSNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, seq, width], the result likewise."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        out: torch.Tensor = self.norm2(x + self.dropout(self.feed_forward(x)))
        return out


def build() -> nn.Module:
    """A block with fixed random weights, scales that are not all ones included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = TransformerBlock()
        with torch.no_grad():
            for norm in (block.norm1, block.norm2):
                norm.scale.copy_(torch.rand(WIDTH) + 0.5)
    return block.eval()


def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """x: float32[batch, seq, 256]."""
    return (torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)),), {}


def dims() -> dict[str, dict[int, str]]:
    """Batch and length are free."""
    return {"x": {0: "batch", 1: "seq"}}


def engine_profile() -> dict[str, tuple[int, int, int]]:
    """Sizes a TensorRT engine is tuned for."""
    return {"batch": (1, 1, 16), "seq": (1, 128, 1024)}
