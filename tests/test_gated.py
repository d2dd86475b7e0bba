"""The two projections of a gated MLP are one product, and nothing else is taken for a pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_models import SHAPES, WIDTH, export, rows, same
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from rmsnorm_deploy.export.weights import described

WIDE = 40
EXAMPLE = rows(2, 5)


class Gated(nn.Module):
    """A norm and an MLP that multiplies two projections; what becomes of them is ``meet(self, gate, up)``."""

    def __init__(self, meet: Callable[..., Any], bias: tuple[bool, bool] = (False, False)) -> None:
        super().__init__()
        self.norm, self.meet = nn.RMSNorm(WIDTH), meet
        self.gate, self.up = (nn.Linear(WIDTH, WIDE, each) for each in bias)
        self.down = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        n = self.norm(x)
        return self.meet(self, self.gate(n), self.up(n), n)


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def meet(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
        return m.down(activation(gate) * up)

    return meet


def capped(gate: Tensor) -> Tensor:
    """As in GPT-OSS."""
    gate = gate.clamp(max=0.7)
    return gate * torch.sigmoid(gate * 1.702)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: ACT2FN[name] for name in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu2", "mish", "linear")
} | {"capped": capped, "softmax": lambda gate: gate.softmax(-1), "sin": torch.sin}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_whatever_the_activation_there_is_one_product_before_it(name: str, tmp_path: Path) -> None:
    model = Gated(gated(ACTIVATIONS[name]))
    bundle, ops = export(model, EXAMPLE, tmp_path)
    assert (ops["MatMul"], ops["Split"]) == (2, 1)
    same(bundle, model, [rows(*shape) for shape in SHAPES])


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_rows_may_have_any_number_of_axes(rank: int, tmp_path: Path) -> None:
    model = Gated(gated(functional.silu))
    shapes = [size[-1:] * (rank - 1) for size in SHAPES[:4]]
    bundle, ops = export(model, rows(*shapes[0]), tmp_path)
    assert (ops["Gemm"], ops["MatMul"]) == ((3, 0) if rank == 2 else (0, 2))
    same(bundle, model, [rows(*shape) for shape in shapes])


def test_biases_are_joined_too_but_not_one_with_none(tmp_path: Path) -> None:
    for bias, products in (((True, True), 2), ((True, False), 3), ((False, True), 3)):
        model = Gated(gated(functional.silu), bias)
        bundle, ops = export(model, EXAMPLE, tmp_path)
        assert ops["MatMul"] == products
        same(bundle, model, [rows(*shape) for shape in SHAPES])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_types_are_joined_alike(precision: str, tmp_path: Path) -> None:
    model = Gated(gated(functional.silu), (True, True))
    bundle, ops = export(model, EXAMPLE, tmp_path, precision=precision)
    assert ops["MatMul"] == 2
    if precision == "fp16":
        same(bundle, model.half(), [(x.half(),) for (x,) in (rows(*shape) for shape in SHAPES[:4])], unit=2.0**-14)


def test_the_file_says_which_columns_are_whose(tmp_path: Path) -> None:
    import onnx

    model = Gated(gated(functional.silu))
    bundle, _ = export(model, EXAMPLE, tmp_path)
    tensors = {t.name: t for t in onnx.load(bundle.model_path).graph.initializer}
    joint = tensors["gate+up.weight.T"]
    parts = described({entry.key: entry.value for entry in joint.metadata_props})
    assert [(part.name, part.column, part.rows) for part in parts] == [
        ("gate.weight", 0, WIDE),
        ("up.weight", WIDE, WIDE),
    ]
    columns = torch.from_numpy(onnx.numpy_helper.to_array(joint).copy()).T
    assert torch.equal(columns, torch.cat((model.gate.weight, model.up.weight)))


def returned(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(gate) * up), gate, up


def read_again(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(gate) * up + gate - up.mean(-1, keepdim=True))


@pytest.mark.parametrize("meet", [returned, read_again], ids=lambda f: f.__name__)
def test_projections_that_others_read_are_joined_all_the_same(meet: Any, tmp_path: Path) -> None:
    model = Gated(meet)
    bundle, ops = export(model, EXAMPLE, tmp_path)
    assert ops["MatMul"] == 2
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def of_another(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(m.gate(n * 2)) * up)


def of_itself(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(gate) * gate)


def of_both(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(gate + up) * up)


def of_one_weight(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(gate) * (n @ m.gate.weight.mT))


def one_after_the_other(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(m.gate(m.down(up))) * up)


def added(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
    return m.down(functional.silu(gate) + up)


@pytest.mark.parametrize(
    "meet", [of_another, of_itself, of_both, of_one_weight, one_after_the_other, added], ids=lambda f: f.__name__
)
def test_what_is_no_gate_keeps_its_products(meet: Any, tmp_path: Path) -> None:
    model = Gated(meet)
    bundle, ops = export(model, EXAMPLE, tmp_path)
    assert ops["Split"] == 0
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def test_layers_that_share_their_weights_stay_what_they_are(tmp_path: Path) -> None:
    def twice(m: Gated, gate: Tensor, up: Tensor, n: Tensor) -> Any:
        n = n + m.down(functional.silu(gate) * up)
        return n + m.down(functional.silu(m.gate(n)) * m.up(n))

    model = Gated(twice)
    bundle, ops = export(model, EXAMPLE, tmp_path)
    assert ops["MatMul"] == 4
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def test_gates_of_heads_keep_their_values(tmp_path: Path) -> None:
    class Heads(Gated):
        """A product's columns are read as heads before they gate."""

        def forward(self, x: Tensor) -> Any:
            n = self.norm(x)
            gate = self.gate(n).view(*x.shape[:-1], 5, 8)
            return self.down((functional.silu(gate) * self.up(n).view_as(gate)).flatten(-2))

    model = Heads(gated(functional.silu))
    bundle, _ = export(model, EXAMPLE, tmp_path)
    same(bundle, model, [rows(*shape) for shape in SHAPES])
