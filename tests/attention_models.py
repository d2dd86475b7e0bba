"""Small attention as models spell it, for tests of what is made of its graph."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional

from rmsnorm_deploy import Bundle, export_model

WIDTH, SIZE = 24, 8
SHAPES = ((2, 5), (1, 1), (3, 9), (1, 4), (0, 3), (2, 0))


class Attention(nn.Module):
    """Heads of RMSNorm'ed rows; what is done with them is ``attend(self, q, k, v, *others)``."""

    def __init__(self, attend: Callable[..., Any], heads: int = 6, groups: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.attend, self.heads, self.groups = attend, heads, groups
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, heads * SIZE, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, groups * SIZE, bias=bias) for _ in range(2))
        self.o = nn.Linear(heads * SIZE, WIDTH, bias=bias)

    def split(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x; keys and values of y."""
        x = self.norm(x)
        y = x if y is None else y
        return (
            self.q(x).view(*x.shape[:2], self.heads, SIZE).transpose(1, 2),
            self.k(y).view(*y.shape[:2], self.groups, SIZE).transpose(1, 2),
            self.v(y).view(*y.shape[:2], self.groups, SIZE).transpose(1, 2),
        )

    def repeated(self, x: Tensor) -> Tensor:
        """Keys or values of groups for each of their heads, as transformers writes it."""
        batch, groups, seq, size = x.shape
        each = self.heads // groups
        return x[:, :, None].expand(batch, groups, each, seq, size).reshape(batch, self.heads, seq, size)

    def out(self, x: Tensor) -> Tensor:
        result: Tensor = self.o(x.transpose(1, 2).reshape(x.shape[0], x.shape[2], self.heads * SIZE))
        return result

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.attend(self, *self.split(x), *others)


def tables(seq: int, like: Tensor, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, [1, 1, seq, size]."""
    angles = torch.outer(torch.arange(seq), 100.0 ** (-torch.arange(0, size, 2) / size))
    angles = torch.cat((angles, angles), -1)[None, None].to(like.dtype)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def plain(model: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """PyTorch's attention of rotated, repeated heads."""
    table = tables(q.shape[2], q)
    q, k = rotated(q, *table), rotated(k, *table)
    return model.out(sdpa(q, model.repeated(k), model.repeated(v), attn_mask=mask))


sdpa = functional.scaled_dot_product_attention


def rows(*shape: int) -> tuple[Tensor]:
    return (torch.randn(*shape, WIDTH),)


def export(model: nn.Module, args: Sequence[Any], folder: Path, **options: Any) -> tuple[Bundle, Counter[str]]:
    """A valid bundle of the model, and how many nodes of each op its file has."""
    bundle = export_model(model.eval(), tuple(args), out_dir=folder / "m.bundle", force=True, **options)
    for name in ("model.onnx", "reference.onnx"):
        onnx.checker.check_model(str(bundle.path / name), full_check=True)
    return bundle, Counter(_kind(node) for node in ir.load(bundle.path / "model.onnx").graph)


def _kind(node: ir.Node) -> str:
    """An op's name; that of an Expand of heads for their group is "Repeat"."""
    shape = node.outputs[0].shape
    return "Repeat" if node.op_type == "Expand" and shape is not None and len(shape) == 5 else node.op_type


def same(bundle: Bundle, model: nn.Module, calls: Sequence[Sequence[Any]], unit: float = 2.0**-23) -> None:
    """What the file gives must be what PyTorch gives in float64."""
    session = bundle.session("onnxruntime")
    exact = copy.deepcopy(model).double()
    for call in calls:
        wide = [x.double() if x.is_floating_point() else x for x in call]
        expected = exact(*wide)
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = session(*call)
        assert len(found) == len(expected)
        for mine, true in zip(found, expected, strict=True):
            assert mine.shape == true.shape
            atol = 100 * unit * (1 + float(true.abs().max().nan_to_num())) if true.numel() else 0.0
            torch.testing.assert_close(mine.double(), true, rtol=0, atol=atol, equal_nan=True)
