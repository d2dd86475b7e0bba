"""torch.ops.rmsnorm_deploy in a model: exported, found again as what was called, and right against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsnorm_deploy import export_model, torch_ops
from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.parity import run_parity

OURS = torch.ops.rmsnorm_deploy
WIDTH = 16
BOUND = {torch.float32: 3e-6, torch.float16: 4e-3, torch.float64: 1e-14}


class Block(nn.Module):
    """A norm with all that it can have, after a residual sum that is used again; then one with 1 + weight."""

    def __init__(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(3)
        self.scale = nn.Parameter((0.5 + torch.rand(WIDTH, generator=make)).to(dtype))
        self.bias = nn.Parameter(torch.rand(WIDTH, generator=make).to(dtype))
        self.options = options

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        y, total = OURS.skip_rms_norm(x, skip, self.scale, self.bias, **self.options)
        return y + OURS.rms_norm(total, 1 + self.scale, **self.options), total


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        super().__init__()
        self.block = Block(dtype, options)

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x, skip)


def truth(x: Tensor, scale: Tensor, bias: Tensor | None, mode: str, epsilon: float) -> Tensor:
    x = x.double()
    square = x.square().mean(-1, keepdim=True)
    root = {
        "inside": (square + epsilon).sqrt(),
        "outside": square.sqrt() + epsilon,
        "clamp": square.sqrt().clamp(min=epsilon),
    }[mode]
    y = x / root * scale.double()
    return y if bias is None else y + bias.double()


def exported(model: nn.Module, inputs: tuple[Tensor, ...], out: Path) -> Bundle:
    return export_model(model, inputs, out_dir=out, benchmark=False, check=True)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("mode", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("order", ["after_cast", "before_cast"])
def test_the_ops_are_exported_as_the_norms_that_they_are(
    dtype: torch.dtype, mode: str, order: str, tmp_path: Path
) -> None:
    epsilon = 1e-5 if mode == "inside" else 0.5
    model = Model(dtype, {"epsilon_mode": mode, "epsilon": epsilon, "scale_order": order})
    x, skip = (torch.randn(3, 5, WIDTH).mul(0.6).to(dtype) for _ in range(2))
    bundle = exported(model, (x, skip), tmp_path / "out")
    first, second = sorted(bundle.norms, key=lambda norm: norm.residual, reverse=True)
    assert [norm.epsilon_mode for norm in (first, second)] == [mode, mode]
    assert [norm.epsilon for norm in (first, second)] == pytest.approx([epsilon, epsilon])
    assert (first.residual, first.bias is not None, second.bias is not None) == (True, True, False)
    assert {norm.module for norm in (first, second)} == {"block"}
    double = dtype == torch.float64
    assert first.stash_type == second.stash_type == ("float64" if double else "float32")
    if dtype == torch.float16:  # elsewhere there is no cast that the scale could come before or after
        assert first.scale_order == second.scale_order == order
    y, total = bundle.session("onnxruntime")(x, skip)
    scale, bias = model.block.scale.detach(), model.block.bias.detach()
    whole = (x + skip).double()
    wanted = truth(whole, scale, bias, mode, epsilon) + truth(whole, 1 + scale, None, mode, epsilon)
    assert torch.equal(total, x + skip)
    assert float((y.double() - wanted).abs().max() / wanted.abs().max()) < BOUND[dtype]


def test_the_program_that_parity_judges_by_has_the_formula_and_no_kernel(tmp_path: Path) -> None:
    model = Model(torch.float32, {})
    bundle = exported(model, tuple(torch.randn(3, 5, WIDTH) for _ in range(2)), tmp_path / "out")
    program = bundle.program()
    assert program is not None
    targets = {str(node.target) for node in program.graph.nodes}
    assert not [target for target in targets if target.startswith("rmsnorm_deploy")]
    assert any(target.startswith("aten.mean") for target in targets)
    assert run_parity(bundle).ok


def test_a_program_without_our_ops_is_left_as_it_is() -> None:
    from rmsnorm_deploy.export.own_ops import spell_out

    program = torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),))
    assert spell_out(program) is program


def test_float64_has_float64_statistics_by_default() -> None:
    x, scale = torch.randn(3, 5, WIDTH).double(), torch.rand(WIDTH).double()
    for y in (OURS.rms_norm(x, scale), torch_ops.rms_norm(x, scale), OURS.skip_rms_norm(x, 0 * x, scale)[0]):
        assert float((y - truth(x, scale, None, "inside", 1e-6)).abs().max()) < 1e-14
    assert torch.autograd.gradcheck(lambda *both: OURS.rms_norm(*both), (x.requires_grad_(), scale.requires_grad_()))


def test_masks_that_are_functions_are_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 4}
    config = transformers.Gemma3TextConfig(**sizes, **heads, use_bidirectional_attention=True)

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.Gemma3TextModel(config)

        def forward(self, input_ids: Tensor) -> Any:
            return self.model(input_ids=input_ids, use_cache=False, return_dict=False)[0]

    model = Embedder().eval()
    bundle = export_model(model, (torch.arange(12).view(2, 6),), out_dir=tmp_path / "b")
    assert len(bundle.norms) == 13
    ids = torch.arange(21).view(3, 7)
    (found,) = bundle.session("onnxruntime")(ids)
    with torch.no_grad():
        torch.testing.assert_close(found.double(), model.double()(ids), rtol=1e-3, atol=1e-4)
