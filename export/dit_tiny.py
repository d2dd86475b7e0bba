"""A diffusion transformer in plain PyTorch: RMSNorm without scale under adaLN, and norms over queries and keys.

    python -m rmsnorm_deploy.export export/dit_tiny.py

Each block's norms are scaled and shifted by what the timestep says: norm(x) * (1 + scale(t)) + shift(t). That scale is
an activation of every image, so it stays a multiplication behind the norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm_deploy.tiny import vary_norms

PATCH, WIDTH, HEADS, LAYERS = 12, 64, 4, 2


class Attention(nn.Module):
    """Self-attention over all patches, with RMSNorm over each head's queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH // HEADS, eps=1e-6), nn.RMSNorm(WIDTH // HEADS, eps=1e-6)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, patches, width], the result likewise."""
        batch, patches, width = x.shape
        q, k, v = self.qkv(x).view(batch, patches, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, patches, width))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each normed, modulated and gated by the conditioning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """x: [batch, patches, width], condition: [batch, width]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        out: torch.Tensor = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return out


class DiT(nn.Module):
    """Patches of a noisy image and a timestep -> patches of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.out = nn.Linear(WIDTH, PATCH)
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2) / (WIDTH // 2)))

    def forward(self, patches: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """patches: [batch, patches, 12], timestep in [0, 1): [batch]."""
        angles = timestep[:, None] * self.frequencies[None]
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x, condition)
        out: torch.Tensor = self.out(self.final_norm(x))
        return out


def build() -> nn.Module:
    """Fixed random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DiT()
        vary_norms(model)
    return model.eval()


def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """patches: float32[batch, patches, 12], timestep: float32[batch]."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 9, PATCH, generator=generator), torch.rand(2, generator=generator)), {}


def dims() -> dict[str, dict[int, str]]:
    """Batch and number of patches are free."""
    return {"patches": {0: "batch", 1: "seq"}, "timestep": {0: "batch"}}


def engine_profile() -> dict[str, tuple[int, int, int]]:
    """Sizes a TensorRT engine is tuned for."""
    return {"batch": (1, 2, 8), "seq": (16, 256, 1024)}
