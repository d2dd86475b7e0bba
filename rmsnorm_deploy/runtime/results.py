"""What a module returns, in containers that PyTorch looks into."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.utils._pytree as pytree


def opened(result: Any) -> Any:
    """``result`` with dataclasses that PyTorch has not been told of as dicts of their fields, at any depth.

    Registered ones, as those of transformers and diffusers are, stay what they are, and so do named tuples.
    """
    return pytree.tree_map(_fields, result)


def _fields(leaf: Any) -> Any:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    return {field.name: opened(getattr(leaf, field.name, None)) for field in dataclasses.fields(leaf)}
