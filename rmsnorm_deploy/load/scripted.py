"""TorchScript inside a module, as the tracer wants it: its code runs over parameters that a plain module holds.

A ScriptModule gives out new tensor objects whenever it is asked for its parameters, so a trace can't tell them apart
from constants, and a cast never arrives.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

_NOTHING = torch.empty(0)


class _Holder(nn.Module):
    """The parameters and buffers of a ScriptModule and its children, under their names."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.original_name = str(script.original_name)
        for name, parameter in script.named_parameters(recurse=False):
            self.register_parameter(name, nn.Parameter(_plain(parameter), requires_grad=False))
        for name, buffer in script.named_buffers(recurse=False):
            self.register_buffer(name, _plain(buffer))
        for name, child in script.named_children():
            self.add_module(name, _Holder(child))  # type: ignore[arg-type]


class Scripted(_Holder):
    """A ScriptModule, called as it was. It holds no values itself while it does not run, so a copy costs none."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__(script)
        self._script = (script,)  # in a tuple: no child
        self._put(dict.fromkeys(self._tensors(), _NOTHING))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the ScriptModule's forward makes of the same arguments."""
        tensors = self._tensors()
        self._put(tensors)
        try:
            # its optimizer would write the sizes of earlier calls into the code
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
                return self._script[0]._c._get_method("forward")(*args, **kwargs)
        finally:
            self._put(dict.fromkeys(tensors, _NOTHING))

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        for path, tensor in tensors.items():
            *parents, name = path.split(".")
            owner = functools.reduce(getattr, parents, self._script[0])
            owner._c.setattr(name, tensor)


def hold_scripted(model: nn.Module) -> None:
    """Put a ``Scripted`` in place of every ScriptModule below ``model``, which must be a copy: those are emptied."""
    done: dict[int, Scripted] = {}
    for module in list(model.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, child in list(module._modules.items()):
            if isinstance(child, torch.jit.ScriptModule):
                if id(child) not in done:
                    done[id(child)] = Scripted(child).eval()
                module._modules[name] = done[id(child)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU and outside inference mode."""
    with torch.inference_mode(False):
        moved = tensor.detach().cpu()
        return moved.clone() if moved.is_inference() else moved
