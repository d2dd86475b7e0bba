"""Rotary embeddings on complex numbers, in the ways that models write them, are exported and rotate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rmsnorm_deploy import export_model
from rmsnorm_deploy.parity import run_parity

WIDTH, LONGEST = 8, 16
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def angles() -> np.ndarray:
    frequencies: np.ndarray = 1 / 100 ** (np.arange(0, WIDTH, 2) / WIDTH)
    return np.arange(LONGEST)[:, None] * frequencies


# z: complex64[batch, seq, 4] and the table complex64[16, 4] -> z turned by the first seq rows
SPELLINGS: dict[str, Turn] = {
    "unsqueezed": lambda z, table: z * table[: z.shape[1]].unsqueeze(0),
    "heads": lambda z, table: (z.unsqueeze(2) * table[None, : z.shape[1], None]).squeeze(2),
    "positions": lambda z, table: z * table[torch.arange(z.shape[1])],
    "index_select": lambda z, table: z * table.index_select(0, torch.arange(z.shape[1])),
    "embedding": lambda z, table: z * F.embedding(torch.arange(z.shape[1]), table),
    "gather": lambda z, table: z * table.gather(0, torch.arange(z.shape[1])[:, None].expand(-1, WIDTH // 2)),
    "expanded": lambda z, table: z * table[: z.shape[1]].unsqueeze(0).expand(z.shape[0], -1, -1),
    "repeated": lambda z, table: z * table[: z.shape[1]].unsqueeze(0).repeat(z.shape[0], 1, 1),
    "interleaved": lambda z, table: z.repeat_interleave(2, dim=-1)[..., ::2] * table[: z.shape[1]],
    "axes": lambda z, table: z * torch.cat([part[: z.shape[1]] for part in table.split([1, 2, 1], dim=-1)], -1),
    "chunks": lambda z, table: torch.cat(z.chunk(2, -1), -1) * table[: z.shape[1]],
    "selected": lambda z, table: z * torch.stack([table, table])[1, : z.shape[1]],
    "unbound": lambda z, table: z * torch.stack([table, -table]).unbind(0)[0][: z.shape[1]],
    "padded": lambda z, table: z * F.pad(table, (0, 0, 0, 3))[: z.shape[1]],
    "where": lambda z, table: torch.where(z.real.isnan(), z * 0, z) * table[: z.shape[1]],
    "einsum": lambda z, table: torch.einsum("bsd,sd->bsd", z, table[: z.shape[1]]),
    "broadcast": lambda z, table: torch.mul(*torch.broadcast_tensors(z, table[: z.shape[1]])),
    "exponential": lambda z, table: z * torch.exp(1j * torch.as_tensor(angles(), dtype=torch.float32))[: z.shape[1]],
    "scalars": lambda z, table: z * 2 * 1j * (-0.5j) * table[: z.shape[1]],
    "wide": lambda z, table: (z.to(torch.complex128) * table[: z.shape[1]].to(torch.complex128)).to(torch.complex64),
    "from real": lambda z, table: z * table[: z.shape[1]] * torch.ones(1).to(torch.complex64),
    "detached": lambda z, table: z.detach() * table[: z.shape[1]].detach(),
}


class Rotary(nn.Module):
    """A norm, and its pairs turned by their place."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.norm, self.turn = nn.RMSNorm(WIDTH, eps=1e-6), turn
        turns = torch.as_tensor(angles(), dtype=torch.float32)
        self.register_buffer("table", torch.polar(torch.ones_like(turns), turns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.norm(x).unflatten(-1, (-1, 2)))
        return torch.view_as_real(self.turn(pairs, self.table)).flatten(-2)


def expected(x: torch.Tensor) -> np.ndarray:
    row = x.double().numpy()
    normed = row / np.sqrt((row * row).mean(-1, keepdims=True) + 1e-6)
    turned = (normed[..., ::2] + 1j * normed[..., 1::2]) * np.exp(1j * angles()[: x.shape[1]])
    return np.stack([turned.real, turned.imag], -1).reshape(row.shape)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_complex_rotation_is_exported(name: str, tmp_path: Path) -> None:
    model = Rotary(SPELLINGS[name]).eval()
    bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b")
    assert len(bundle.norms) == 1
    session = bundle.session("onnxruntime")
    for shape in ((2, 5, WIDTH), (3, 7, WIDTH)):
        x = torch.randn(shape)
        (y,) = session(x)
        np.testing.assert_allclose(y.numpy(), expected(x), rtol=1e-4, atol=1e-5)


def test_parity_knows_the_truth_of_complex_numbers(tmp_path: Path) -> None:
    for name in ("heads", "exponential"):
        model = Rotary(SPELLINGS[name]).eval()
        bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / name)
        report = run_parity(bundle, backends=("onnxruntime", "pytorch"))
        assert report.ok, report.summary()
