"""Any ``nn.Module`` as the tracer wants it, the user's own object left exactly as it was.

The tracer gets a structural copy: new module objects and new Parameter objects over the same storage, so that eval
mode, a cast or an unwrapped child never reaches the original, and a 10 GB model is not held twice. Buffers are copied,
since a forward may write to them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.inputs import bind, signature
from rmsnorm_deploy.load.parametrized import write_out
from rmsnorm_deploy.load.scripted import hold_scripted

_COMPILED = "_orig_mod"


def prepare_module(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[nn.Module, list[str]]:
    """A copy of ``model`` in eval mode, unwrapped, with ordinary CPU parameters, and notes on what was done.

    Children that are TorchScript become plain modules around copies of them. DataParallel, DistributedDataParallel and
    torch.compile wrappers are taken off, at any depth. Parameters share their storage with the original's, save
    inference tensors and those on another device, which are cloned; tied ones stay tied. With ``args`` or
    ``kwargs`` the call is checked against ``forward``'s signature.

    Raises InputError for what is no module, has no ``forward``, holds parameters without values (meta device, lazy
    modules), or cannot be called with these inputs.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a model must be a torch.nn.Module, not {type(model).__name__}")
    notes: list[str] = []
    inner = unwrap(model, notes)
    _check_values(inner)
    if args or kwargs:
        bind(signature(inner), args, dict(kwargs or {}))
    if isinstance(inner, torch.jit.ScriptModule):
        return copy.deepcopy(inner).eval(), [*notes, *_mode_note(inner)]
    notes += _non_finite_note(inner)
    duplicate, more = structural_copy(inner)
    notes += more + _mode_note(inner)
    _unwrap_children(duplicate, notes)
    notes += _without_cache(duplicate, inner) + _batched_experts(duplicate, inner)
    _evaluate(duplicate)
    hold_scripted(duplicate)
    return duplicate, notes + write_out(duplicate)


def _evaluate(duplicate: nn.Module) -> None:
    """``duplicate.eval()``, which leaves shared storage as it is.

    A class may have a ``train()`` of its own that writes to weights, as LoRA layers do to merge their update. Those
    weights are copied while it runs; what came out unchanged is shared again.
    """
    shared = {parameter: parameter.data for parameter in _written_by_mode(duplicate)}
    for parameter, data in shared.items():
        parameter.data = data.clone()
    duplicate.eval()
    for parameter, data in shared.items():
        if parameter.dtype == data.dtype and torch.equal(parameter.data, data):
            parameter.data = data


def _written_by_mode(model: nn.Module) -> list[nn.Parameter]:
    """Parameters within modules in train mode whose ``train()`` or ``eval()`` is not torch's."""
    found: dict[nn.Parameter, None] = {}
    for module in model.modules():
        torchs = all(getattr(getattr(module, n), "__func__", None) is getattr(nn.Module, n) for n in ("train", "eval"))
        if not torchs and any(getattr(part, "training", False) for part in module.modules()):
            found.update(dict.fromkeys(module.parameters()))
    return list(found)


def _without_cache(duplicate: nn.Module, original: nn.Module) -> list[str]:
    """Turn off the key-value cache that a transformers model would return beside its outputs, and say so.

    Only where the copy has a config of its own: the original's is left as it is.
    """
    theirs = {id(config) for config in _configs(original)}
    caching = [config for config in _configs(duplicate) if id(config) not in theirs and config.use_cache is True]
    for config in caching:
        config.use_cache = False
    return ["use_cache turned off on a copy: a key-value cache is no output of the exported model"] if caching else []


def _batched_experts(duplicate: nn.Module, original: nn.Module) -> list[str]:
    """Switch a mixture of experts of transformers to the form that can be exported, and say so.

    A loop over the experts that were hit has no static graph, and ONNX has no grouped matrix product. Only where the
    copy has a config of its own.
    """
    theirs = {id(config) for config in _expert_configs(original)}
    other = [
        config
        for config in _expert_configs(duplicate)
        if id(config) not in theirs and config._experts_implementation not in (None, "batched_mm")
    ]
    before = sorted({config._experts_implementation for config in other})
    for config in other:
        config._experts_implementation = "batched_mm"
    return [f"experts run as batched_mm on a copy: as {', '.join(before)} they can't be exported"] if other else []


def _expert_configs(model: nn.Module) -> list[Any]:
    """Configs by which experts choose how they run; a dense model's config has the field too."""
    experts = [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
    found = [getattr(module, "config", None) for module in experts]
    return list({id(config): config for config in found if hasattr(config, "_experts_implementation")}.values())


def _configs(model: nn.Module) -> list[Any]:
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if hasattr(config, "use_cache")}.values())


def to_cpu(value: Any) -> Any:
    """Tensors of an argument (tuples, lists and dicts looked through) on the CPU and outside inference mode."""
    if isinstance(value, torch.Tensor):
        with torch.inference_mode(False):
            moved = value.detach().cpu()
            return moved.clone() if moved.is_inference() else moved
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(to_cpu(v) for v in value)
    return value


def unwrap(model: nn.Module, notes: list[str]) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile wrappers, and a note on each."""
    while True:
        inner = _inside(model)
        if inner is None:
            return model
        notes.append(f"{_wrapper_name(model)} wrapper taken off")
        model = inner


def structural_copy(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """New modules over the same parameter storage; notes say what was cloned, or that no deep copy was possible."""
    notes: list[str] = []
    with torch.inference_mode(False), torch.no_grad():
        try:
            # The memo is filled with stand-ins for every tensor, so that deepcopy allocates no weights.
            return copy.deepcopy(model, dict(_Tensors(model, notes).memo)), notes
        except Exception as error:  # a model's own attributes may refuse to be copied in any way they like
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
        notes = [f"the model cannot be deep-copied ({reason}): its modules are copied singly, other attributes shared"]
        return _shallow_copy(model, _Tensors(model, notes).memo, {}), notes


class _Tensors:
    """Stand-ins for the tensors of a model: id -> tensor, as deepcopy's memo wants it."""

    def __init__(self, model: nn.Module, notes: list[str]) -> None:
        self.memo: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._inference = self._moved = 0
        for module in _modules(model):
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in self.memo:
                    self.memo[id(parameter)] = self._parameter(parameter)
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in self.memo:
                    self.memo[id(buffer)] = buffer.detach().cpu().clone()
            for value in module.__dict__.values():
                if isinstance(value, torch.Tensor) and id(value) not in self.memo:
                    self.memo[id(value)] = value.detach().cpu().clone()
        if self._inference:
            notes.append(f"{self._inference} inference tensors among the parameters: cloned")
        if self._moved:
            notes.append(f"{self._moved} parameters copied to the CPU")

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        data = parameter.detach()
        if data.device.type != "cpu":
            self._moved += 1
            data = data.cpu()
        elif data.is_inference():
            self._inference += 1
            data = self._outside_inference(data)
        twin = nn.Parameter(data, requires_grad=False)
        twin.__dict__.update(parameter.__dict__)
        return twin

    def _outside_inference(self, data: torch.Tensor) -> torch.Tensor:
        """A clone by storage, so that parameters which are views of one storage stay so."""
        key = data.untyped_storage().data_ptr()
        if key not in self._storages:
            self._storages[key] = data.untyped_storage().clone()  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=data.dtype).set_(
            self._storages[key], data.storage_offset(), data.size(), data.stride()
        )


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """All modules whose tensors are theirs, compiled ones' insides too, each once; TorchScript makes new ones."""
    found = {id(m): m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)}
    return iter(found.values())


def _inside(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model._modules.get(_COMPILED) if type(model).__name__ == "OptimizedModule" else None


def _wrapper_name(model: nn.Module) -> str:
    return "torch.compile" if type(model).__name__ == "OptimizedModule" else type(model).__name__


def _unwrap_children(model: nn.Module, notes: list[str]) -> None:
    for name, module in list(model.named_modules(remove_duplicate=False)):
        for key, child in list(module._modules.items()):
            inner = None if child is None else _inside(child)
            if child is not None and inner is not None:
                module._modules[key] = unwrap(inner, [])
                notes.append(f"{_wrapper_name(child)} wrapper taken off {name + '.' if name else ''}{key}")


def _mode_note(model: nn.Module) -> list[str]:
    # a frozen TorchScript module has no mode any more
    training = [name or "the model" for name, module in model.named_modules() if getattr(module, "training", False)]
    if not training:
        return []
    count = f" ({len(training)} modules)" if len(training) > 1 else ""
    return [f"{training[0]} was in train mode{count}: eval() called on a copy"]


def _non_finite_note(model: nn.Module) -> list[str]:
    """Weights that hold NaN or infinity: they are exported as they are, and no comparison would show them."""
    bad = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.numel() and not _is_finite(parameter.detach()):
                bad.append(name)
    more = f" and {len(bad) - 6} more" if len(bad) > 6 else ""
    return [f"NaN or infinity in the weights {', '.join(bad[:6])}{more}"] if bad else []


def _is_finite(values: torch.Tensor) -> bool:
    if values.element_size() == 1:  # torch compares no float8, and reads no packed float4, which has no infinity
        if values.dtype == torch.float4_e2m1fn_x2:
            return True
        values = values.float()
    least, greatest = values.aminmax()
    return bool(torch.isfinite(least) and torch.isfinite(greatest))


def _check_values(model: nn.Module) -> None:
    scripted = isinstance(model, torch.jit.ScriptModule)
    if not scripted and type(model).forward is nn.Module.forward and "forward" not in model.__dict__:
        raise InputError(f"{type(model).__name__} has no forward()")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        where = f"{name} of {type(model).__name__}"
        if nn.parameter.is_lazy(tensor):
            raise InputError(f"{where} has no shape yet (a lazy module): call the model once first")
        if tensor.is_meta:
            raise InputError(f"{where} is on the meta device and has no values: load the weights first")


def _shallow_copy(model: nn.Module, memo: Mapping[int, torch.Tensor], done: dict[int, nn.Module]) -> nn.Module:
    if id(model) in done:
        return done[id(model)]
    if isinstance(model, torch.jit.ScriptModule):
        return done.setdefault(id(model), copy.deepcopy(model))
    twin = model.__class__.__new__(model.__class__)
    done[id(model)] = twin
    twin.__dict__ = {k: memo.get(id(v), v) for k, v in model.__dict__.items()}
    for key in ("_parameters", "_buffers"):
        twin.__dict__[key] = {k: None if v is None else memo[id(v)] for k, v in model.__dict__[key].items()}
    twin.__dict__["_modules"] = {
        k: None if m is None else _shallow_copy(m, memo, done) for k, m in model._modules.items()
    }
    twin.__dict__["_compiled_call_impl"] = None
    for key in [k for k in model.__dict__ if k.endswith(("_hooks", "_kwargs"))]:
        twin.__dict__[key] = copy.copy(model.__dict__[key])
    return twin
