"""A quantized model that can't be exported is refused with what is quantized, and one that can be isn't refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load import load_source
from rmsnorm_deploy.load.quantized import quantized_modules

pytestmark = pytest.mark.filterwarnings("ignore")
eager: Any = quantization
fx: Any = quantize_fx
CURE = "export the float model, or dequantize it first"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return result


class Codes(torch.Tensor):
    """A weight in int8, a float to all that use it."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        assert isinstance(made, cls)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, torch.Tensor], *_: Any) -> Codes:
        return cls(tensors["codes"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale)
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.codes.to(t.scale.dtype) * t.scale, args)
        return function(*plain, **(kwargs or {}))


class Packed(nn.Parameter):
    """Two weights a byte, and how to read them in an attribute, as bitsandbytes has it."""

    quant_state: torch.Size


class Nibbles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.randint(0, 255, (8, 16), dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = torch.Size((16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.weight
        weight = torch.cat([packed & 15, packed >> 4]).view(packed.quant_state)
        return x @ weight.to(x.dtype)


def dynamic() -> nn.Module:
    model: nn.Module = eager.quantize_dynamic(Net().eval(), {nn.Linear}, torch.qint8)
    return model


def prepared() -> nn.Module:
    mapping = eager.QConfigMapping().set_object_type(nn.Linear, eager.get_default_qconfig("x86"))
    model: nn.Module = fx.prepare_fx(Net().eval(), mapping, (torch.randn(3, 16),))
    return model


def static() -> nn.Module:
    observed = prepared()
    observed(torch.randn(3, 16))
    model: nn.Module = fx.convert_fx(observed)
    return model


def in_training() -> nn.Module:
    plain: Any = Net()
    plain.qconfig = eager.get_default_qat_qconfig("x86")
    model: nn.Module = eager.prepare_qat(plain).eval()
    return model


def packed() -> nn.Module:
    model = Net().eval()
    model.add_module("up", Nibbles())
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (dynamic, "'up' is quantized (torch.ao.nn.quantized.dynamic.modules.linear.Linear), and so are 1 more"),
        (static, "'up' is quantized (torch.ao.nn.quantized.modules.linear.Linear), and so are 1 more"),
        (prepared, "'activation_post_process_0' is quantized (torch.ao.quantization.observer."),
        (in_training, "'up' is quantized (torch.ao.nn.qat.modules.linear.Linear), and so are 1 more"),
        (packed, "'up' is quantized ("),
    ],
)
def test_what_is_quantized_is_not_named(make: Callable[[], nn.Module], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        export_model(make(), (torch.randn(3, 16),), out_dir=tmp_path / "b")
    assert f"can't be exported, its module {named}" in str(caught.value)
    assert CURE in str(caught.value)


def test_a_model_of_floats_is_called_quantized() -> None:
    model = Net()
    model.add_module("add", torch.ao.nn.quantized.FloatFunctional())  # what a float model has in place of +
    model.register_buffer("positions", torch.arange(4))
    model.register_buffer("weight_mask", torch.ones(4, dtype=torch.bool))
    assert quantized_modules(model) is None


def test_int8_weights_that_plain_arithmetic_makes_floats_are_refused(tmp_path: Path) -> None:
    model = Net().eval()
    scale = model.up.weight.detach().abs().amax(1, keepdim=True) / 127
    codes = (model.up.weight.detach() / scale).round().to(torch.int8)
    model.up.weight = nn.Parameter(Codes(codes, scale), requires_grad=False)
    bundle = export_model(model, (torch.randn(3, 16),), out_dir=tmp_path / "b")
    x = torch.randn(5, 16)
    got = next(iter(bundle.session("onnxruntime").run({"x": x.numpy()}).values()))
    weight = codes.double() * scale.double()
    normal = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    hidden = torch.relu(normal @ weight.T + model.up.bias.double())
    truth = hidden @ model.down.weight.double().T + model.down.bias.double()
    assert np.abs(np.asarray(got) - truth.detach().numpy()).max() < 1e-5


def test_a_quantized_checkpoint_is_answered_with_options_that_lead_nowhere(tmp_path: Path) -> None:
    torch.save(dynamic(), tmp_path / "m.pt")
    with pytest.raises(InputError, match=rf"m.pt: a quantized model, with torch.ao.nn.quantized\S+: {CURE}"):
        load_source(tmp_path / "m.pt")


def test_a_quantized_checkpoint_of_hugging_face_is_answered_with_a_package_that_does_not_help(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **sizes)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"; it is quantized: {CURE}"):
        load_source(tmp_path)


def test_a_quantized_torchscript_model_is_not_told_so(tmp_path: Path) -> None:
    script = torch.jit.trace(dynamic(), torch.randn(3, 16))  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match=rf"quantized::linear_dynamic.*: it is quantized, {CURE}"):
        export_model(script, (torch.randn(3, 16),), out_dir=tmp_path / "b")
