"""Parametrized weights (``torch.nn.utils.parametrize``) as what they are once training is over: plain weights.

A weight that is worked out from others at every call would be worked out at every run of the exported model too, and
some parametrizations, such as ``orthogonal``, use operators that ONNX lacks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize


def write_out(model: nn.Module) -> list[str]:
    """Put the present values in place of all parametrizations of ``model``, which is in eval mode and a copy; a note.

    Each instance gets its class from before: the class that it has is shared with the module it is a copy of.
    """
    names = []
    for path, module in list(model.named_modules()):
        if not parametrize.is_parametrized(module):
            continue
        with torch.no_grad():
            values = {name: getattr(module, name).clone() for name in module.parametrizations}
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value, requires_grad=False))
            names.append(f"{path}.{name}" if path else name)
    return [f"parametrized weights written out: {', '.join(names)}"] if names else []
