"""Norms and look-alikes of a model, found in memory: nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.bundle import MANIFEST, Bundle, open_bundle
from rmsnorm_deploy.fusion.records import LeftRecord, NormRecord
from rmsnorm_deploy.inspect.agree import agree, differences, norms_of_file

if TYPE_CHECKING:
    from rmsnorm_deploy.load import Source

Progress = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Inspection:
    """What was found in one model.

    Attributes:
        model: what was looked at, as the user named it; ``kind`` is "bundle" or what `Source.kind` says.
        norms: in the order of the graph; ``left`` likewise.
        notes: choices that were made on the way.
    """

    model: str
    kind: str
    norms: list[NormRecord]
    left: list[LeftRecord]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "model": self.model,
            "kind": self.kind,
            "norms": [norm.to_json() for norm in self.norms],
            "left": [left.to_json() for left in self.left],
            "notes": list(self.notes),
        }


def inspect_model(
    path: str | Path,
    *,
    precision: str = "keep",
    opset: int = 18,
    progress: Progress | None = None,
    **source_options: Any,
) -> Inspection:
    """The norms of whatever is at ``path``: a bundle, or anything the export takes.

    A bundle's are those of its model.onnx, see `inspect_bundle`. Every other model is traced and fused in memory.
    ``precision`` and ``opset`` are as for the export, ``source_options`` those of `rmsnorm_deploy.load.load_source`.

    Raises:
        InputError: the file can't be used, or PyTorch can't trace the model.
    """
    progress = progress or (lambda stage: nullcontext())
    path = Path(path)
    if (path / MANIFEST).is_file():
        return inspect_bundle(open_bundle(path))
    from rmsnorm_deploy.load import load_source

    with progress("load"):
        source = load_source(path, **source_options)
    return inspect_source(source, precision=precision, opset=opset, progress=progress)


def inspect_bundle(bundle: Bundle) -> Inspection:
    """The norms that a bundle's model.onnx has, told as its manifest tells them, which knows their origin and proof.

    Where the two differ it is the file that is shown, and a note says what the manifest claims.

    Raises:
        InputError: model.onnx can't be read.
    """
    norms, left = norms_of_file(bundle.model_path)
    notes = [*bundle.manifest.get("notes", []), *differences(bundle.norms, bundle.left, norms, left)]
    told = {norm.node: norm for norm in bundle.norms}
    reasons = {item.node: item for item in bundle.left}
    return Inspection(
        str(bundle.path),
        "bundle",
        [told[norm.node] if agree(told.get(norm.node), norm) else norm for norm in norms],
        [reasons.get(item.node, item) for item in left],
        notes,
    )


def inspect_source(
    source: Source, *, precision: str = "keep", opset: int = 18, progress: Progress | None = None
) -> Inspection:
    """The norms of a loaded source; an ONNX model given in memory (not by path) is changed by it."""
    from rmsnorm_deploy.export.pipeline import in_precision
    from rmsnorm_deploy.export.trace import trace
    from rmsnorm_deploy.fusion import fuse

    progress = progress or (lambda stage: nullcontext())
    source = in_precision(source, precision)
    with progress("trace"):
        traced = trace(source, opset)
    with progress("fuse"):
        found = fuse(traced.model)
    name = str(source.path) if source.path is not None else type(source.model).__name__
    return Inspection(name, source.kind, found.norms, found.left, [*source.notes, *traced.notes])
