"""Sizes of a bundle's dynamic dims: expressions such as ``2*seq``, and what a profile says of them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from rmsnorm_deploy.errors import InputError

_OPERATIONS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(dim: int | str, sizes: Mapping[str, int]) -> int | None:
    """The size of one entry of a shape, or None where it depends on a name without a size or is no plain expression."""
    if isinstance(dim, int):
        return dim
    try:
        return _value(ast.parse(dim, mode="eval").body, sizes)
    except (SyntaxError, ZeroDivisionError, KeyError):
        return None


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        result: int = _OPERATIONS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
        return result
    raise SyntaxError(ast.dump(node))


def learn(shape: Sequence[int | str], given: Sequence[int], sizes: dict[str, int], who: str) -> None:
    """Take from a concrete shape what it says of the named dims; what is fixed must agree.

    Raises:
        InputError: another rank, a fixed size that differs, or a name that has two sizes.
    """
    if len(shape) != len(given):
        raise InputError(f"--profile gives {who} {len(given)} axes, it has {len(shape)}: {_text(shape)}")
    for dim, size in zip(shape, given, strict=True):
        if isinstance(dim, str) and dim.isidentifier():
            dim = sizes.setdefault(dim, size)
        if isinstance(dim, int) and dim != size:
            raise InputError(f"--profile gives {who} {_text(given)}, which {_text(shape)} with {sizes} does not allow")


def _text(shape: Sequence[int | str]) -> str:
    return "x".join(str(dim) for dim in shape) or "scalar"
