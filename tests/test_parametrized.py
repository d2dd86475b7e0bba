"""Parametrized weights are exported as what they are worth, and the user's model keeps its parametrizations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from rmsnorm_deploy import export_model

WIDTH = 8


class Exponential(nn.Module):
    """A positive weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.exp()


class Model(nn.Module):
    """A norm and a linear layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.linear = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH)
        nn.init.uniform_(self.norm.weight, -0.3, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.norm(x))
        return y


APPLY: dict[str, Any] = {
    "exponential": lambda m: parametrize.register_parametrization(m.norm, "weight", Exponential()),
    "orthogonal": lambda m: parametrizations.orthogonal(m.linear),
    "weight norm": lambda m: parametrizations.weight_norm(m.linear),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.linear),
}


@pytest.mark.parametrize("kind", APPLY)
def test_a_parametrization_is_worked_out_at_every_run(kind: str, tmp_path: Path) -> None:
    model, x = Model(), torch.randn(3, WIDTH)
    APPLY[kind](model)
    model.eval()
    weights = [model.norm.weight, model.linear.weight, model.linear.bias]
    gain, matrix, bias = (weight.detach().double().numpy() for weight in weights)
    wide = x.double().numpy()
    truth = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * gain) @ matrix.T + bias
    bundle = export_model(model, (x,), out_dir=tmp_path / "b")
    assert len(bundle.norms) == 1
    for backend in ("onnxruntime", "pytorch"):
        np.testing.assert_allclose(bundle.session(backend)(x)[0].detach().numpy(), truth, rtol=1e-4, atol=1e-5)
    assert len(onnx.load(bundle.model_path).graph.node) <= 4
    assert any("written out" in note for note in bundle.manifest["notes"])
    parametrized = model.norm if kind == "exponential" else model.linear
    assert parametrize.is_parametrized(parametrized, "weight")
    np.testing.assert_allclose(model(x).detach().numpy(), truth, rtol=1e-4, atol=1e-5)
