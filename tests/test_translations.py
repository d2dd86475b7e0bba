"""Operators that PyTorch's exporter has no function for are written, and compute what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export import pipeline

WIDTH = 16


def test_a_stable_sort_keeps_the_order_of_equal_elements(tmp_path: Path) -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            up, places = torch.sort(x.round(), dim=1, stable=True)
            down = torch.argsort(x.round(), dim=-1, descending=True, stable=True)
            return nn.functional.rms_norm(up, (WIDTH,)), places, down

    x = torch.randn(2, 7, WIDTH)
    bundle = export_model(Sorted(), (x,), out_dir=tmp_path / "b")
    for size in (7, 3):
        rounded = x[:, :size].round()
        _, places, down = bundle.session("onnxruntime")(x[:, :size])
        np.testing.assert_array_equal(places.numpy(), np.argsort(rounded.numpy(), 1, kind="stable"))
        np.testing.assert_array_equal(down.numpy(), np.argsort(-rounded.numpy(), -1, kind="stable"))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances_to_a_codebook(p: float, tmp_path: Path) -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(9, WIDTH))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            far = torch.cdist(nn.functional.rms_norm(x, (WIDTH,), eps=1e-6), self.rows[None], p=p)
            return far, far.argmin(-1)

    model = Codebook().eval()
    bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b")
    x = torch.randn(3, 4, WIDTH)
    found, nearest = bundle.session("onnxruntime")(x)
    row = x.double().numpy()
    row = row / np.sqrt((row * row).mean(-1, keepdims=True) + 1e-6)
    far = np.linalg.norm(row[:, :, None] - model.rows.detach().double().numpy(), ord=p, axis=-1)
    np.testing.assert_allclose(found.numpy(), far, rtol=1e-5)
    np.testing.assert_array_equal(nearest.numpy(), far.argmin(-1))


def test_logarithms_of_exponentials_do_not_overflow(tmp_path: Path) -> None:
    class Logarithms(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            gate = nn.functional.logsigmoid(x)
            return nn.functional.rms_norm(x, (WIDTH,)), gate, torch.logaddexp(x, x.flip(-1)), torch.logaddexp(x, x)

    bundle = export_model(Logarithms(), (torch.randn(2, WIDTH),), out_dir=tmp_path / "b")
    x = torch.linspace(-500, 500, 3 * WIDTH).reshape(3, WIDTH)
    x[0, 0], x[1, 0] = -float("inf"), float("inf")
    _, gate, both, twice = (found.double().numpy() for found in bundle.session("onnxruntime")(x))
    wide = x.double().numpy()
    np.testing.assert_allclose(gate, -np.logaddexp(0, -wide), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(both, np.logaddexp(wide, wide[:, ::-1]), rtol=1e-5)
    np.testing.assert_allclose(twice, np.logaddexp(wide, wide), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_small_numbers_are_not_lost_beside_one(dtype: torch.dtype, rtol: float, tmp_path: Path) -> None:
    class BesideOne(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return nn.functional.rms_norm(x, (WIDTH,)), x.expm1(), x.log1p()

    bundle = export_model(BesideOne(), (torch.randn(2, WIDTH, dtype=dtype),), out_dir=tmp_path / "b")
    sizes = torch.logspace(-30, 1.9, 4 * WIDTH - 2, dtype=dtype)
    x = torch.cat((sizes, -sizes / 80, torch.tensor([-1, 0, torch.inf, -torch.inf], dtype=dtype))).reshape(8, WIDTH)
    _, less, more = (found.double().numpy() for found in bundle.session("onnxruntime")(x))
    wide = x.double().numpy()
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(less, np.expm1(wide), rtol=rtol)
        np.testing.assert_allclose(more, np.log1p(wide), rtol=rtol)


def test_a_program_that_torch_cannot_save_is_refused_in_a_line(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError("no name for this class\nand more")

    monkeypatch.setattr(pipeline, "save_program", refuse)
    says = r"^PyTorch can't write the traced program to a file: .*no name for this class$"
    with pytest.raises(InputError, match=says):
        export_model(nn.RMSNorm(WIDTH), (torch.randn(2, WIDTH),), out_dir=tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
