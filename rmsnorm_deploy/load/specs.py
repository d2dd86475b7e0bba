"""The grammar of ``--input`` and ``--dim``.

    --input NAME=DTYPE[DIM,DIM,...]          a tensor: x=float32[batch,seq,64]
    --input NAME=DTYPE[DIM,...]:HIGH         integers below HIGH: input_ids=int64[batch,seq]:32000
    --input NAME=VALUE                       a constant: scale=0.5, mask=None, causal=True
    --dim   NAME=MIN:MAX | NAME=MIN:         the sizes a named dim may have: batch=1:32, seq=1:

A DIM is a number (fixed) or a name (dynamic, and the same size everywhere the name is used). NAME is a parameter of
``forward``; a dot goes into a tuple or a dict: pair.0, extras.mask.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

import torch

from rmsnorm_deploy.errors import InputError

EXAMPLE = "x=float32[batch,seq,64]"
_SPEC = re.compile(r"(?P<dtype>[a-z][a-z0-9_]*)\s*\[(?P<dims>[^\[\]]*)\]\s*(?::\s*(?P<high>\S+))?")
_NAME = re.compile(r"[A-Za-z_]\w*")
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the call: where it goes, its dtype, its shape with named dims, the bound of its values."""

    path: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    high: int | None = None

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{self.path}={str(self.dtype).removeprefix('torch.')}[{dims}]" + (f":{self.high}" if self.high else "")


@dataclass(frozen=True)
class ConstantSpec:
    """One argument of the call that is not a tensor and is fixed at export."""

    path: str
    value: bool | int | float | str | None

    def __str__(self) -> str:
        return f"{self.path}={self.value!r}"


Spec = TensorSpec | ConstantSpec
Ranges = dict[str, tuple[int, int | None]]


def parse_input(text: str) -> Spec:
    """One ``--input`` option; an InputError says which part cannot be read."""
    path, equals, right = (part.strip() for part in text.partition("="))
    if not equals or not _PATH.fullmatch(path):
        raise InputError(f"--input {text}: not of the form NAME=DTYPE[DIM,...]; an example: --input {EXAMPLE}")
    match = _SPEC.fullmatch(right)
    if not match:
        return ConstantSpec(path, _constant(text, right))
    dtype = _dtype(text, match["dtype"])
    shape = tuple(_dim(text, part.strip()) for part in match["dims"].split(",")) if match["dims"].strip() else ()
    return TensorSpec(path, dtype, shape, _high(text, dtype, match["high"]))


def parse_inputs(texts: list[str] | tuple[str, ...]) -> list[Spec]:
    """All ``--input`` options; each path may be given once, and not both whole and in parts."""
    specs = [parse_input(text) for text in texts]
    for i, spec in enumerate(specs):
        for other in specs[:i]:
            if _overlap(spec.path, other.path):
                raise InputError(f"--input {spec.path}: given twice ({other.path} is there already)")
    return specs


def parse_dims(texts: list[str] | tuple[str, ...]) -> Ranges:
    """All ``--dim`` options: name -> (least, greatest or None)."""
    ranges: Ranges = {}
    for text in texts:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*(?::|\.\.)\s*(\d*)\s*", text)
        if not match:
            raise InputError(f"--dim {text}: not of the form NAME=MIN:MAX; an example: --dim batch=1:32")
        name, low, high = match[1], int(match[2]), int(match[3]) if match[3] else None
        if name in ranges:
            raise InputError(f"--dim {name}: given twice")
        if high is not None and high <= max(low, 1):
            raise InputError(f"--dim {text}: the greatest size must be above the least and above 1; a fixed size goes "
                             f"into --input as a number")  # fmt: skip
        ranges[name] = (low, high)
    return ranges


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")


def _dtype(text: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"--input {text}: {name} is not a torch dtype; float32, float16, bfloat16, int64 and bool are")
    return dtype


def _dim(text: str, part: str) -> int | str:
    if part.isdecimal():
        if int(part) == 0:
            raise InputError(
                f"--input {text}: a fixed size of 0 leaves nothing to compute; name the dim to make it free"
            )
        return int(part)
    if _NAME.fullmatch(part):
        return part
    raise InputError(f"--input {text}: '{part}' is neither a size nor a name of a dim; an example: --input {EXAMPLE}")


def _high(text: str, dtype: torch.dtype, high: str | None) -> int | None:
    if high is None:
        return None
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not high.isdecimal() or int(high) < 1:
        raise InputError(
            f"--input {text}: ':{high}' must be a number above 0 that bounds integers, as in ids=int64[batch,seq]:1000"
        )
    return int(high)


def _constant(text: str, right: str) -> Any:
    try:
        value = ast.literal_eval(right)
    except (ValueError, SyntaxError):
        raise InputError(
            f"--input {text}: neither DTYPE[DIM,...] nor a constant; an example: --input {EXAMPLE}"
        ) from None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"--input {text}: a constant is a number, a string, True, False or None")
