"""Whether a bundle's manifest and its model.onnx speak of the same norms and the same look-alikes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.fusion.records import LeftRecord, NormRecord

# What an op in the file says of itself; a manifest also has where it came from, and its proof.
_FIELDS = (
    "op",
    "axis",
    "epsilon",
    "epsilon_mode",
    "scale_order",
    "stash_type",
    "scale",
    "bias",
    "dtype",
    "scale_dtype",
)


def norms_of_file(path: Path) -> tuple[list[NormRecord], list[LeftRecord]]:
    """The norms and look-alikes of an ONNX file, found anew; nothing is written.

    Raises:
        InputError: it can't be read as ONNX.
    """
    import onnx_ir as ir

    from rmsnorm_deploy.fusion import fuse

    try:
        model = ir.load(path)
    except Exception as error:  # protobuf, onnx and the file system each have their own
        raise InputError(f"{path}: not readable as ONNX: {error}") from error
    found = fuse(model)
    return found.norms, found.left


def agree(claimed: NormRecord | None, found: NormRecord) -> bool:
    """Whether a manifest has a norm of the file, and tells the same of it."""
    return claimed is not None and all(getattr(claimed, field) == getattr(found, field) for field in _FIELDS)


def differences(
    claimed: Sequence[NormRecord],
    claimed_left: Sequence[LeftRecord],
    norms: Sequence[NormRecord],
    left: Sequence[LeftRecord],
) -> Iterator[str]:
    """What a manifest claims and its model.onnx does not hold, or holds otherwise, or in addition; a line each."""
    yield from _absent([norm.node for norm in claimed], [norm.node for norm in norms], "the norm")
    yield from _absent([item.node for item in claimed_left], [item.node for item in left], "the look-alike")
    found = {norm.node: norm for norm in norms}
    for norm in claimed:
        for field in _FIELDS if norm.node in found else ():
            said, is_ = getattr(norm, field), getattr(found[norm.node], field)
            if said != is_:
                yield f"the manifest says that the {field} of {norm.node!r} is {said}, and model.onnx that it is {is_}"


def _absent(claimed: Iterable[str], found: Iterable[str], what: str) -> Iterator[str]:
    claimed, found = list(claimed), list(found)
    for name in dict.fromkeys(claimed):
        if claimed.count(name) > found.count(name):
            yield f"the manifest lists {what} {name!r}, which model.onnx does not have"
    for name in dict.fromkeys(found):
        if found.count(name) > claimed.count(name):
            yield f"model.onnx has {what} {name!r}, which the manifest does not list"
