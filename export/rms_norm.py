"""The bare layer: one RMSNorm over the last axis of [batch, seq, 512].

python -m rmsnorm_deploy.export export/rms_norm.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, EPS = 512, 1e-6


def build() -> nn.Module:
    """torch's own layer with a scale that is not all ones, so that a lost scale shows."""
    layer = nn.RMSNorm(WIDTH, eps=EPS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(WIDTH, generator=generator) + 0.5)
    return layer


def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """x: float32[batch, seq, 512]."""
    return (torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)),), {}


def dims() -> dict[str, dict[int, str]]:
    """Batch and length are free."""
    return {"x": {0: "batch", 1: "seq"}}


def engine_profile() -> dict[str, tuple[int, int, int]]:
    """From one token to a long prompt."""
    return {"batch": (1, 1, 16), "seq": (1, 128, 4096)}
