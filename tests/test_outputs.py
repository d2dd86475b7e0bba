"""Whatever a model returns its tensors in, the bundle yields them in order, and is read where no class of it is."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from rmsnorm_deploy import export_model

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    """An output of the user's own."""

    last: torch.Tensor
    total: torch.Tensor
    absent: torch.Tensor | None = None


torch.export.register_dataclass(Result)


@dataclasses.dataclass
class Unregistered:
    """One that PyTorch has not been told of."""

    last: torch.Tensor
    parts: dict[str, Part]
    loss: torch.Tensor | None = None


@dataclasses.dataclass
class Part:
    """Inside of another."""

    total: torch.Tensor
    steps: int = 3


RETURNS: dict[str, Any] = {
    "named tuple": Pair,
    "dataclass": lambda y, total: Result(y, total),
    "dataclass unknown to torch": lambda y, total: Unregistered(y, collections.OrderedDict(a=Part(total))),
    "number and text": lambda y, total: (y, 3, total, "text", 0.5),
    "nested": lambda y, total: {"a": [y, None], "b": Pair(total, None)},
    "ordered dict": lambda y, total: collections.OrderedDict(z=y, a=total),
}


class Model(nn.Module):
    """A norm and its sum, in a container."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.norm, self.returns = nn.RMSNorm(8, eps=1e-5), returns

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        y += 0  # written in place, as models do
        return RETURNS[self.returns](y, y.sum(-1))


@pytest.mark.parametrize("returns", RETURNS)
def test_a_container_of_the_users_is_written_into_the_bundle(returns: str, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    bundle = export_model(Model(returns).eval(), (x,), out_dir=tmp_path / "b")
    wide = x.double().numpy()
    y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    for backend in ("onnxruntime", "pytorch"):
        first, second = bundle.session(backend)(x)
        np.testing.assert_allclose(first.numpy(), y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(second.numpy(), y.sum(-1), rtol=1e-4, atol=1e-5)
    if returns == "dataclass unknown to torch":
        assert [output["name"] for output in bundle.manifest["signature"]["outputs"]] == ["last", "parts.a.total"]
    program = bundle.program()
    assert program is not None
    spec = program.call_spec.out_spec
    structure = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    assert {type(part) for part in _containers(structure)} <= {tuple, list, dict}


def _containers(value: Any) -> list[Any]:
    if isinstance(value, int):
        return []
    items = list(value.values()) if isinstance(value, dict) else list(value)
    return [value, *(inner for item in items for inner in _containers(item))]


def test_the_users_own_program_is_changed(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    program = torch.export.export(Model("number and text").eval(), (x,))
    export_model(program, out_dir=tmp_path / "b")
    result = program.module()(x)
    assert result[1] == 3
    assert result[3] == "text"


def test_a_named_tuple_among_the_arguments_is_written_into_the_bundle(tmp_path: Path) -> None:
    class Difference(nn.Module):
        def forward(self, pair: Pair) -> torch.Tensor:
            return nn.functional.rms_norm(pair.first - pair.second, (8,), eps=1e-5)

    pair = Pair(torch.randn(3, 8), torch.randn(3, 8))
    bundle = export_model(Difference().eval(), (pair,), out_dir=tmp_path / "b", check=True)
    wide = (pair.first - pair.second).double().numpy()
    y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    for backend in ("onnxruntime", "pytorch"):
        np.testing.assert_allclose(bundle.session(backend)(pair)[0].numpy(), y, rtol=1e-5, atol=1e-6)
