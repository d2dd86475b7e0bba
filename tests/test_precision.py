"""Weights in another dtype keep their values, up to its rounding; what has no number there is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.precision import cast_module


class Scaled(nn.Module):
    """A norm, a layer, and a buffer that masks."""

    def __init__(self, mask: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-5)
        self.fc = nn.Linear(16, 4)
        self.register_buffer("mask", torch.full((4,), mask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x)) + self.mask


@torch.no_grad()
def with_weight(value: float) -> Scaled:
    model = Scaled().eval()
    model.fc.weight[0, 0], model.fc.weight[2, 5] = value, -value
    return model


@pytest.mark.parametrize(
    ("value", "precision", "instead"),
    [
        (1e5, "fp16", "bf16 or fp32 or keep"),
        (65520.0, "fp16", "bf16 or fp32 or keep"),
        (3.4e38, "bf16", "fp32 or keep"),
    ],
)
def test_a_weight_becomes_infinite_without_a_word(value: float, precision: str, instead: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"--precision {precision}: .*: 2 of 64 in fc.weight; use .*{instead}$"):
        export_model(with_weight(value), (torch.randn(2, 16),), out_dir=tmp_path / "b", precision=precision)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("value", "precision"), [(65504.0, "fp16"), (65519.0, "fp16"), (1e5, "bf16"), (3.4e38, "fp32")]
)
def test_a_weight_that_fits_is_refused(value: float, precision: str) -> None:
    weight = with_weight(value).fc.weight.detach()
    cast, notes = cast_module(with_weight(value), precision)
    assert torch.isfinite(cast.fc.weight).all()
    assert not notes
    assert abs(float(cast.fc.weight[0, 0]) / float(weight[0, 0]) - 1) < 2**-8


def test_infinity_that_was_there_before_is_refused() -> None:
    cast, notes = cast_module(with_weight(float("inf")), "fp16")
    assert int(torch.isinf(cast.fc.weight).sum()) == 2
    assert not notes


def test_a_mask_of_the_least_number_becomes_infinite_without_a_word(tmp_path: Path) -> None:
    model = Scaled(mask=torch.finfo(torch.float32).min).eval()
    bundle = export_model(model, (torch.randn(2, 16),), out_dir=tmp_path / "b", precision="fp16")
    assert bundle.manifest["notes"] == ["4 of 4 numbers of the buffer mask become infinite in fp16"]
