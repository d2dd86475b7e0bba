"""Masks of attention are asked for blind queries where there may be some, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from attention_models import SHAPES, Attention, export, rows, same, sdpa
from torch import Tensor, nn

Mask = Callable[[Tensor, Tensor, Tensor], Tensor]  # of queries' and keys' positions, and an int64[batch, seq]

PROVED: dict[str, Mask] = {
    "causal": lambda q, k, x: k <= q,
    "both ways": lambda q, k, x: q >= k,
    "a bit ahead": lambda q, k, x: k - 1 <= q + 1,
    "window": lambda q, k, x: (k <= q) & (k > q - 3),
    "window of itself": lambda q, k, x: (k < q + 1) & (k > q - 1),
    "of one document": lambda q, k, x: (x[:, None, :, None] == x[:, None, None]) & (k <= q),
    "of one document or what is hidden": lambda q, k, x: (k < q) & (x > 0)[:, None, None] | (k == q),
    "given twice": lambda q, k, x: ((k <= q) & (k <= q))[None, None].expand(x.shape[0], 1, -1, -1),
}

DOUBTED: dict[str, Mask] = {
    "padding": lambda q, k, x: (k <= q) & (x > 0)[:, None, None],
    "padding or padding": lambda q, k, x: (x > 0)[:, None, None] | (x > 1)[:, None, :, None] & (k <= q),
    "of the past alone": lambda q, k, x: k < q,
    "of the future alone": lambda q, k, x: k > q,
    "all but itself": lambda q, k, x: (k != q) & (k <= q),
    "positions from elsewhere": lambda q, k, x: k + 2 <= q,
    "window of nothing": lambda q, k, x: (k <= q) & (k > q - 0),
    "every second": lambda q, k, x: 2 * k + 1 <= q,
    "two values": lambda q, k, x: (x[:, None, :, None] == x.flip(1)[:, None, None]) & (k <= q),
    "other rows": lambda q, k, x: (x[:, None, :, None] < x[:, None, None]) & (k <= q),
    "numbers that overflow": lambda q, k, x: (k <= q) & _overflows(x),
    "no numbers": lambda q, k, x: (k <= q) & _is_itself(x),
    "none at all": lambda q, k, x: (k <= q) & torch.zeros(1, dtype=torch.bool),
}


def _overflows(x: Tensor) -> Tensor:
    huge = torch.where(x > 0, torch.iinfo(torch.int64).max, x)
    return huge[:, None, :, None] + 1 > huge[:, None, None]


def _is_itself(x: Tensor) -> Tensor:
    some = torch.where(x > 0, torch.nan, x.double())
    return some[:, None, :, None] == some[:, None, None]


class Masked(nn.Module):
    """Attention under each of several masks, which are of positions and of x."""

    def __init__(self, masks: Iterable[Mask]) -> None:
        super().__init__()
        self.masks = list(masks)
        self.layers = nn.ModuleList(Attention(_masked) for _ in self.masks)

    def seen(self, x: Tensor) -> list[Tensor]:
        """bool[..., queries, keys] for each mask"""
        queries, keys = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None]
        return [mask(queries, keys, x) for mask in self.masks]

    def forward(self, y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(y, seen) for layer, seen in zip(self.layers, self.seen(x), strict=True))


def _masked(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return m.out(sdpa(q, m.repeated(k), m.repeated(v), attn_mask=seen))


def call(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Rows and numbers: zeros on the left, zeros on the right, zeros throughout, others."""
    x = torch.randint(1, 3, (batch, seq))
    x[:1, : seq // 2] = 0
    x[1:2, seq // 2 :] = 0
    x[2:3] = 0
    return (*rows(batch, seq), x)


CALLS = [call(*shape) for shape in (*SHAPES, (4, 6))]


def test_masks_whose_queries_see_themselves_are_not_asked(tmp_path: Path) -> None:
    model = Masked(PROVED.values())
    bundle, ops = export(model, call(2, 6), tmp_path)
    assert (ops["IsNaN"], ops["ReduceMax"]) == (0, 0)
    same(bundle, model, CALLS)


def test_queries_that_may_be_blind_get_zero(tmp_path: Path) -> None:
    model = Masked(DOUBTED.values())
    bundle, ops = export(model, call(2, 6), tmp_path)
    assert (ops["IsNaN"], ops["ReduceMax"]) == (0, len(DOUBTED))
    blinded = [model.seen(x) for _, x in CALLS]
    assert not any(all(seen.any(-1).all() for seen in each) for each in zip(*blinded, strict=True))
    same(bundle, model, CALLS)


@pytest.mark.parametrize("queries", [3, 9])
def test_a_query_without_a_key_of_its_own_may_be_blind(queries: int, tmp_path: Path) -> None:
    def ahead(m: Attention, q: Tensor, k: Tensor, v: Tensor, others: Tensor) -> Tensor:
        k, v = (m.split(others)[index] for index in (1, 2))
        seen = torch.arange(k.shape[2])[None] >= torch.arange(q.shape[2])[:, None]
        return _masked(m, q, k, v, seen)

    model = Attention(ahead)
    bundle, ops = export(model, (*rows(2, queries), *rows(2, 6)), tmp_path)
    assert (ops["IsNaN"], ops["ReduceMax"]) == (0, 1)
    same(bundle, model, [(*rows(2, one), *rows(2, other)) for one, other in ((9, 6), (6, 6), (3, 6), (1, 0), (0, 4))])


@pytest.mark.parametrize(
    ("size", "dims"), [((1, 1), {}), ((2, 5), {}), ((2, 5), {0: "batch"}), ((2, 5), {1: "seq"}), ((1, 5), {1: "seq"})]
)
def test_fixed_sizes_are_proved_alike(size: tuple[int, int], dims: dict[int, str], tmp_path: Path) -> None:
    model = Masked([PROVED["window"], DOUBTED["padding"], PROVED["of one document"]])
    bundle, ops = export(model, call(*size), tmp_path, dynamic_shapes={"y": dims, "x": dims})
    assert (ops["IsNaN"], ops["ReduceMax"]) == (0, 1)
    batch, seq = (4 if axis in dims else full for axis, full in enumerate(size))
    same(bundle, model, [call(*size), call(batch, seq)])
