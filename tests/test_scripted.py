"""A module some of whose children are TorchScript is exported like any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rmsnorm_deploy import export_model
from rmsnorm_deploy.load.prepare import structural_copy

WIDTH, EPSILON = 16, 1e-5


class HandWritten(nn.Module):
    """A norm over a layer, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x) + self.shift
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.randn(2, 3, WIDTH))  # type: ignore[no-untyped-call]


class Outer(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = HandWritten()
        self.inner = how(copy.deepcopy(self.plain))
        self.twice = nn.ModuleList([self.inner])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.twice[0](self.inner(x))
        return x + y


def truth(model: Outer, x: torch.Tensor) -> np.ndarray[Any, Any]:
    """By numpy alone, from the weights of the plain twin."""
    part = {name: value.detach().double().numpy() for name, value in model.plain.state_dict().items()}

    def once(v: Any) -> Any:
        v = v @ part["fc.weight"].T + part["fc.bias"] + part["shift"]
        return part["weight"] * v / np.sqrt((v * v).mean(-1, keepdims=True) + EPSILON)

    v = x.double().numpy()
    return np.asarray(v + once(once(v)))


@pytest.mark.parametrize("how", [scripted, traced])
@pytest.mark.parametrize("precision", ["keep", "fp16"])
def test_a_torchscript_child_stops_the_export(how: Any, precision: str, tmp_path: Path) -> None:
    model = Outer(how).eval()
    bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b", precision=precision)
    assert len(bundle.norms) == 2
    tolerance = 2e-5 if precision == "keep" else 2e-2
    for shape in ((3, 7, WIDTH), (1, 4, WIDTH)):
        x = torch.randn(shape).to(torch.float32 if precision == "keep" else torch.float16)
        (got,) = bundle.session("onnxruntime")(x)
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got.double().numpy(), truth(model, x), rtol=tolerance, atol=tolerance)
    x = torch.randn(2, 3, WIDTH)
    np.testing.assert_allclose(model(x).detach().double().numpy(), truth(model, x), rtol=2e-5, atol=5e-6)


def test_a_scripted_branch_on_the_sizes_is_frozen_without_a_word(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.size(1) > 6 else x * 3

    model = nn.Sequential(nn.RMSNorm(WIDTH, eps=EPSILON), torch.jit.script(Branching())).eval()
    bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b")
    assert bundle.manifest["signature"]["inputs"][0]["shape"][1:] == [5, WIDTH]
    assert [note for note in bundle.manifest["notes"] if note.startswith("axis 1 of 'input' is fixed at 5")]


def test_copies_of_a_torchscript_child_lose_their_values() -> None:
    model = Outer(scripted).eval()
    copied, notes = structural_copy(model)
    twin: Any = copied
    assert not notes
    for name, value in model.inner.state_dict().items():
        assert torch.equal(twin.inner.state_dict()[name], value)
    assert twin.inner is twin.twice[0]
