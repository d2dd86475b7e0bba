"""Inputs of a module nobody described: from its first layer with weights, tried out before they are believed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load import inputs as call_inputs
from rmsnorm_deploy.load.prepare import structural_copy
from rmsnorm_deploy.load.source import Source
from rmsnorm_deploy.load.specs import Ranges, TensorSpec

Shape = tuple[int | str, ...]
# Class names of modules that want [batch, seq, width], although many would run on [batch, width] too.
_SEQUENCE_WORDS = ("attention", "transformer", "block", "encoder", "decoder", "mamba", "lstm", "gru")


@dataclass(frozen=True)
class FirstLayer:
    """A layer that tells what the model eats: its name and kind, and the shapes it takes, likeliest first."""

    name: str
    kind: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    high: int | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.name else self.kind


def infer_inputs(model: torch.nn.Module, ranges: Ranges) -> tuple[call_inputs.Call, str]:
    """A call for a module with one required tensor parameter, and the note that says what was chosen.

    Raises InputError, with the option to give, when the module needs more, has no telling layer, or refuses every try.
    """
    parameters = call_inputs.signature(model)
    needed = call_inputs.required(parameters) or list(parameters.parameters)[:1]
    if not needed:
        raise InputError(f"forward{parameters} takes no inputs: there is nothing to run the exported model on")
    if len(needed) != 1:
        options = " ".join(f"--input '{n}=DTYPE[DIM,...]'" for n in needed)
        raise InputError(f"forward{parameters} takes inputs whose shapes are not in the file: give {options}")
    layer = first_layer(model)
    if layer is None:
        option = f"--input '{needed[0]}=float32[batch,DIM,...]'"
        raise InputError(f"the shape of '{needed[0]}' is not in the file and no layer tells it: give {option}")
    tried = []
    for shape in layer.shapes:
        spec = TensorSpec(needed[0], layer.dtype, shape, layer.high)
        call = call_inputs.make_call([spec], parameters, ranges)
        problem = try_call(model, call.args)
        if problem is None:
            return call, f"inputs inferred from the first layer {layer}: {spec} (another: --input '{spec.path}=...')"
        tried.append(f"{spec}: {problem}")
    raise InputError(
        f"inputs inferred from the first layer {layer} do not fit the model ({'; '.join(tried)}): "
        f"give --input '{needed[0]}=DTYPE[DIM,...]'"
    )


def first_layer(model: torch.nn.Module) -> FirstLayer | None:
    """The first module, in the order of definition, whose weights say what goes in."""
    sequence = any(word in kind_of(m).lower() for m in model.modules() for word in _SEQUENCE_WORDS)
    for name, module in model.named_modules():
        layer = _layer(name, module, sequence)
        if layer is not None:
            return layer
    return None


def kind_of(module: torch.nn.Module) -> str:
    """Class name; of a TorchScript submodule, the one it had in Python."""
    return str(getattr(module, "original_name", type(module).__name__))


def torch_kind_of(module: torch.nn.Module) -> str:
    """The class of torch.nn that a module is or derives from, else its own class name."""
    bases = [
        c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.nn.") and c is not torch.nn.Module
    ]
    return bases[0] if bases else kind_of(module)


def refused_call(source: Source) -> str | None:
    """Why the module of ``source`` can't be called with its example inputs, naming who gave them and what it takes.

    None when it can, or is no module. It is run once, in PyTorch.
    """
    model = source.model
    if not isinstance(model, torch.nn.Module):
        return None
    problem = try_call(model, source.args, source.kwargs)
    if problem is None:
        return None
    parameters = call_inputs.signature(model)
    takes = f"it takes forward({', '.join(map(str, parameters.parameters))})"
    layer = first_layer(model)
    if layer is not None and len(call_inputs.required(parameters)) == 1:
        spec = TensorSpec(call_inputs.required(parameters)[0], layer.dtype, layer.shapes[0], layer.high)
        takes += f", and its first layer {layer} suggests {spec}"
    return f"{source.inputs_from or 'the example inputs'}: {kind_of(model)} cannot be called so: {problem}; {takes}"


def try_call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> str | None:
    """Run a copy of the model once; what it said when it failed, in a line."""
    probe = model if isinstance(model, torch.jit.ScriptModule) else structural_copy(model)[0].eval()
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of a try; what matters is said again when the model is traced
            probe(*args, **(kwargs or {}))
    except Exception as error:  # the user's forward may raise anything; the caller reports it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        line = lines[-1 if isinstance(model, torch.jit.ScriptModule) else 0][:200] if lines else ""
        return (
            f"{type(error).__name__}: {line}"
            if line and type(error) is not RuntimeError
            else line or type(error).__name__
        )
    return None


def _layer(name: str, module: torch.nn.Module, sequence: bool) -> FirstLayer | None:
    kind, weight = torch_kind_of(module), _weight(module)
    if weight is None:
        return None
    found = _shapes(kind, weight, module, sequence)
    if found is None:
        return None
    if kind.startswith("Embedding"):
        return FirstLayer(name, kind, torch.int64, found, high=weight.shape[0])
    return FirstLayer(name, kind, weight.dtype, found) if weight.dtype.is_floating_point else None


def _weight(module: torch.nn.Module) -> torch.Tensor | None:
    """The parameter that has the width: by its usual name, or the only one there is when it is a vector."""
    own = dict(module.named_parameters(recurse=False))
    for key in ("weight", "in_proj_weight", "weight_ih_l0"):
        if key in own:
            return own[key]
    only = next(iter(own.values())) if len(own) == 1 else None
    return only if only is not None and only.ndim == 1 else None


def _shapes(kind: str, weight: torch.Tensor, module: torch.nn.Module, sequence: bool) -> tuple[Shape, ...] | None:
    if kind.startswith("Embedding"):
        return (("batch", "seq"),)
    if "Conv" in kind and weight.ndim in (3, 4, 5):
        space = ("length",) if weight.ndim == 3 else ("depth", "height", "width")[5 - weight.ndim :]
        return (("batch", int(getattr(module, "in_channels", weight.shape[1])), *space),)
    if kind in ("BatchNorm2d", "BatchNorm1d"):
        return (("batch", weight.shape[0], *(("height", "width") if kind == "BatchNorm2d" else ())),)
    width = _widths(kind, weight)
    if width is None:
        return None
    lead = ("seq", "batch") if getattr(module, "batch_first", True) is False else ("batch", "seq")
    flat, long = ("batch", *width), (*lead, *width)
    return (long, flat) if sequence else (flat, long)


def _widths(kind: str, weight: torch.Tensor) -> Shape | None:
    if "Linear" in kind or kind in ("MultiheadAttention", "LSTM", "GRU", "RNN"):
        return (weight.shape[-1],) if weight.ndim == 2 else None
    if "norm" in kind.lower() or weight.ndim == 1:
        return tuple(weight.shape)
    return None
