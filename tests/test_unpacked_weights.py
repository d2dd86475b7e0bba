"""Weights of few bits, which a model unpacks as it runs, come out as the numbers that they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import run_parity

WIDTH = 16
EIGHTS = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


class Dequantized(nn.Module):
    """A product with weights of eight bits and their scale, behind a norm."""

    def __init__(self, dtype: str, rows: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.weight = nn.Parameter(torch.randn(rows, WIDTH).to(getattr(torch, dtype)), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.tensor([2.0**-9]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t().to(x.dtype) * self.weight_scale
        return self.norm(x) @ weight

    def expected(self, x: torch.Tensor) -> np.ndarray:
        row = x.double().numpy()
        normed = row / np.sqrt((row * row).mean(-1, keepdims=True) + 1e-6)
        product: np.ndarray = normed @ self.weight.float().double().numpy().T * 2.0**-9
        return product


@pytest.mark.parametrize("dtype", EIGHTS)
def test_float8_weights_are_float16_below_opset_19(dtype: str, tmp_path: Path) -> None:
    model, x = Dequantized(dtype).eval(), torch.randn(2, 3, WIDTH)
    bundle = export_model(model, (x,), out_dir=tmp_path / "b")
    (y,) = bundle.session("onnxruntime")(x)
    np.testing.assert_allclose(y.numpy(), model.expected(x), rtol=1e-4, atol=1e-7)
    onnx.checker.check_model(bundle.model_path, full_check=True)
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(bundle.model_path).graph.initializer}
    assert weights["weight.float16.T"] == onnx.TensorProto.FLOAT16
    assert run_parity(bundle).ok


def test_wide_float8_weights_in_a_file_of_their_own_leave_the_program_s_as_they_are(tmp_path: Path) -> None:
    model, x = Dequantized("float8_e4m3fn", rows=300_000).eval(), torch.randn(1, 1, WIDTH)
    bundle = export_model(model, (x,), out_dir=tmp_path / "b")
    assert (bundle.path / "model.onnx.data").stat().st_size >= 2 * model.weight.numel()
    bundle.eager = None
    for backend in ("onnxruntime", "pytorch"):
        (y,) = bundle.session(backend)(x)
        np.testing.assert_allclose(y.numpy(), model.expected(x), rtol=1e-4, atol=1e-6)


def test_float8_stays_float8_where_the_opset_has_it(tmp_path: Path) -> None:
    model, x = Dequantized("float8_e4m3fn").eval(), torch.randn(2, 3, WIDTH)
    bundle = export_model(model, (x,), out_dir=tmp_path / "b", opset=21)
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(bundle.model_path).graph.initializer}
    assert weights["weight.T"] == onnx.TensorProto.FLOAT8E4M3FN
    (y,) = bundle.session("onnxruntime")(x)
    np.testing.assert_allclose(y.numpy(), model.expected(x), rtol=1e-4, atol=1e-7)


def test_a_cast_to_float8_is_refused_with_the_opset_that_has_it(tmp_path: Path) -> None:
    class Rounded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x.to(torch.float8_e4m3fn).to(x.dtype), (WIDTH,))

    with pytest.raises(InputError, match=r"opset 18: .* is float8, .* give --opset 19"):
        export_model(Rounded(), (torch.randn(2, WIDTH),), out_dir=tmp_path / "b")


class Nibbles(nn.Module):
    """Weights of four bits, two in a byte, whose high ones are found by a shift."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.register_buffer("packed", torch.randint(0, 256, (WIDTH, WIDTH // 2)).to(torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(-2)
        low = self.packed << 4  # the low one alone, in the byte's high half
        return self.norm(x) @ (weight.to(x.dtype) - 8).t() + low.to(x.dtype).sum()


def test_shifts_of_bytes_are_shifts_of_unsigned_numbers(tmp_path: Path) -> None:
    model, x = Nibbles().eval(), torch.randn(2, 3, WIDTH)
    bundle = export_model(model, (x,), out_dir=tmp_path / "b")
    (y,) = bundle.session("onnxruntime")(x)
    packed, row = model.packed.numpy().astype(int), x.double().numpy()
    weight = np.stack([packed % 16, packed // 16], -1).reshape(WIDTH, WIDTH) - 8
    normed = row / np.sqrt((row * row).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(y.numpy(), normed @ weight.T + (packed % 16 * 16).sum(), rtol=1e-5)
