"""A GatherND that takes everything in order is a view, and any other stays what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from attention_models import SHAPES, WIDTH, export, rows, same
from torch import Tensor, nn

Gather = Callable[[Tensor, Tensor, Tensor], Tensor]  # int64[batch, seq] and the numbers of its rows and columns

WHOLE: dict[str, Gather] = {
    "queries": lambda x, b, t: x[b[:, None, None, None], t[None, None, :, None]],
    "keys": lambda x, b, t: x[b[:, None, None, None], t[None, None, None, :]],
    "with an offset of nothing": lambda x, b, t: x[b[:, None], t + 0],
    "as it is": lambda x, b, t: x[b[:, None], t[None]],
    "turned": lambda x, b, t: x[b[:, None, None], t[:, None, None].permute(1, 2, 0)],
    "three axes": lambda x, b, t: torch.stack((x, -x, x), 2)[b[:, None, None], t[:, None], torch.arange(3)],
}

PARTS: dict[str, Gather] = {
    "the other way round": lambda x, b, t: x[b[None], t[:, None]],
    "backwards": lambda x, b, t: x[b[:, None], -1 - t[None]],
    "backwards from the first": lambda x, b, t: x[b[:, None], torch.arange(0, -x.shape[1], -1)],
    "from the second on": lambda x, b, t: torch.cat((x, x), 1)[b[:, None], t[None] + 1],
    "the first half": lambda x, b, t: torch.cat((x, x), 1)[b[:, None], t[None]],
    "every second": lambda x, b, t: torch.cat((x, x), 1)[b[:, None], torch.arange(0, 2 * x.shape[1], 2)],
    "a diagonal": lambda x, b, t: (x[:, :, None] - x[:, None] * 3)[b[:, None], t, t],
    "again and again": lambda x, b, t: x[b[:, None, None], t[:, None].expand(-1, 3)],
    "one row": lambda x, b, t: x[b[:, None] * 0, t],
    "rows alone": lambda x, b, t: x[b.flip(0)],
}


class Gathered(nn.Module):
    """A norm, and what is gathered."""

    def __init__(self, gathers: Iterable[Gather]) -> None:
        super().__init__()
        self.norm, self.gathers = nn.RMSNorm(WIDTH), list(gathers)

    def forward(self, y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        numbers = [torch.arange(size) for size in x.shape]
        return self.norm(y), *(gather(x, *numbers).to(y.dtype) for gather in self.gathers)


def call(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    return (*rows(batch, seq), torch.arange(batch * seq).view(batch, seq))


def test_what_gathers_everything_in_order_is_a_view(tmp_path: Path) -> None:
    model = Gathered(WHOLE.values())
    bundle, ops = export(model, call(2, 6), tmp_path)
    assert ops["GatherND"] == ops["Expand"] == 0
    same(bundle, model, [call(*shape) for shape in SHAPES])


def test_what_gathers_something_else_still_does(tmp_path: Path) -> None:
    model = Gathered(PARTS.values())
    bundle, ops = export(model, call(2, 6), tmp_path)
    assert ops["GatherND"] > 0
    same(bundle, model, [call(*shape) for shape in SHAPES if 0 not in shape])
