"""What counts as an executed RMSNorm: decided by the numbers, whatever the class is called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm_deploy.observe import executed_norms


class Formula(nn.Module):
    """y = function(x)."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.eps = function, 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def rms(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)


WEIGHT = torch.rand(64, generator=torch.Generator().manual_seed(3)) + 0.5
NORMS = {
    "plain": rms,
    "scaled": lambda x: rms(x) * WEIGHT.to(x.dtype),
    "l2 times sqrt(d)": lambda x: F.normalize(x, dim=-1) * 8,
    "groups": lambda x: rms(x.unflatten(-1, (4, 16))).flatten(-2),
    "a scale for each head": lambda x: rms(x.view(2, 3, 4, 64)).mul(torch.arange(1, 5).view(4, 1)).view(x.shape),
    "torch's function": lambda x: F.rms_norm(x, (64,), WEIGHT.to(x.dtype), 1e-5),
}
OTHERS = {
    "identity": lambda x: x,
    "LayerNorm": lambda x: F.layer_norm(x, (64,)),
    "softmax": lambda x: x.softmax(-1),
    "a scale of its own": lambda x: x * WEIGHT.to(x.dtype),
    "another axis": lambda x: x * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5).to(x.dtype),
    "mean of |x|": lambda x: x / x.float().abs().mean(-1, keepdim=True).to(x.dtype),
    "dropout": lambda x: F.dropout(x, 0.1, training=False),
}


def sample(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(2, 12, 64, generator=generator)
    rows = rows.sign() * rows.abs() ** (3 * torch.rand(2, 12, 1, generator=generator))  # flat ones, and spiky ones
    return (rows * torch.rand(2, 12, 1, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_in_any_spelling_counts_once(name: str, dtype: torch.dtype) -> None:
    assert executed_norms(nn.Sequential(Formula(NORMS[name])), (sample(dtype),)) == ["0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_rms_norm_does_not_count(name: str, dtype: torch.dtype) -> None:
    """Also behind a norm, where all rows have the same size and an identity would look like one."""
    assert executed_norms(nn.Sequential(Formula(OTHERS[name])), (sample(dtype),)) == []
    assert executed_norms(nn.Sequential(Formula(rms), Formula(OTHERS[name])), (sample(dtype),)) == ["0"]


def test_a_single_row_shows_no_norm_in_anything() -> None:
    assert executed_norms(nn.Sequential(Formula(OTHERS["LayerNorm"])), (sample(torch.float32)[:1],)) == []
    assert executed_norms(nn.Sequential(Formula(OTHERS["softmax"])), (sample(torch.float32)[:1, :1],)) == []


def test_tiny_activations_do_not_make_a_norm_of_anything() -> None:
    """Rows far below a large epsilon are multiplied by a constant, as an identity does it."""
    assert executed_norms(nn.Sequential(Formula(OTHERS["identity"])), (1e-3 * sample(torch.bfloat16),)) == []


def test_gates_before_and_behind_the_norm_are_seen_through() -> None:
    class Gated(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first, self.eps = first, 1e-5

        def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return rms(x * F.silu(gate)) * WEIGHT if self.first else rms(x) * WEIGHT * F.silu(gate)

    x = sample(torch.float32)
    for first in (True, False):
        assert executed_norms(Gated(first), (x,), {"gate": x.flip(0)}) == [""]


def test_calls_are_counted_not_modules_and_functions_outside_of_modules_too() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(self.norm(self.norm(x) + x) - x, (64,)) @ torch.ones(64, 64)

    model = Twice()
    assert executed_norms(model, (sample(torch.float32),)) == ["norm", "norm", "torch.nn.functional.rms_norm"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
