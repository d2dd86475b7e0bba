"""The bundle: a folder with a model, how it is called, the evidence that it is right. Written whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.fusion.records import LeftRecord, NormRecord
from rmsnorm_deploy.place import MANIFEST as MANIFEST

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.runtime.session import Session

FORMAT = 2
_READABLE = (1, FORMAT)  # 1 has each weight on its own, in rows
MODEL = "model.onnx"
REFERENCE = "reference.onnx"
PROGRAM = "program.pt2"
PROGRAM_WEIGHTS = "program.weights.json"
SUMS = "SHA256SUMS"
UNHASHED = (MANIFEST, SUMS, "parity.json", "benchmark.json", "report.html")  # not the model: SUMS has their hashes


class Bundle:
    """A bundle on disk. ``eager`` is the user's own module, in the process that exported it."""

    def __init__(self, path: Path, manifest: dict[str, Any], eager: torch.nn.Module | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.eager = eager

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, {len(self.norms)} norms)"

    @property
    def model_path(self) -> Path:
        """The ONNX model with the fused ops."""
        return self.path / MODEL

    @property
    def reference_path(self) -> Path | None:
        """The same model before fusing, over the same weights; None if the bundle has none."""
        path = self.path / REFERENCE
        return path if path.is_file() else None

    @property
    def norms(self) -> list[NormRecord]:
        """One entry a fused call site."""
        return [NormRecord(**record) for record in self.manifest["norms"]]

    @property
    def left(self) -> list[LeftRecord]:
        """Look-alikes that were left, with the reason."""
        return [LeftRecord(**record) for record in self.manifest["left"]]

    def program(self) -> torch.export.ExportedProgram | None:
        """The traced PyTorch program with its weights; None for a bundle made from ONNX or TorchScript."""
        path = self.path / PROGRAM
        if not path.is_file():
            return None
        import torch

        program = torch.export.load(path)
        weights = self.path / PROGRAM_WEIGHTS
        if weights.is_file():
            _fill(program, json.loads(weights.read_text(encoding="utf-8")), self.path)
        return program

    def session(self, backend: str = "onnxruntime", **options: Any) -> Session:
        """A session on "onnxruntime", "pytorch", "tensorrt" or "tensorrt-rtx"; see runtime.open_session."""
        from rmsnorm_deploy.runtime import open_session

        return open_session(self, backend, **options)


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle.

    Raises:
        InputError: there is no bundle at ``path``, or a newer format than this version reads.
    """
    folder = Path(path)
    file = folder / MANIFEST
    if not file.is_file():
        raise InputError(
            f"{folder} is not a bundle: it has no {MANIFEST}; make one with python -m rmsnorm_deploy.export"
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in _READABLE:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise InputError(f"{folder} has bundle format {found}; this version reads {FORMAT}: export the model again")
    if not (folder / MODEL).is_file():
        raise InputError(f"{folder} has no {MODEL}: export the model again")
    return Bundle(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with the size and SHA-256 of every file that makes up the model."""
    manifest["files"] = {
        str(file.relative_to(folder)): {"sha256": sha256(file), "bytes": file.stat().st_size}
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in UNHASHED
    }
    manifest["sums"] = SUMS
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the SHA-256 of every file, manifest and evidence too, as ``sha256sum --check`` reads them."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    known = {name: record["sha256"] for name, record in manifest["files"].items()}
    lines = [f"{known.get(name) or sha256(folder / name)}  {name}\n" for name in names if name != SUMS]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def replace_sealed(folder: Path, name: str, write: Callable[[Path], None], sources: Sequence[str] = ()) -> None:
    """Write file ``name`` of a bundle anew, and its line in SHA256SUMS with it; no other line is touched.

    write: is given a path to write to, which takes the name when it returns.
    sources: the files that it is made from.

    Raises:
        InputError: the file or a source is not the one that SHA256SUMS knows: what others altered is not vouched for.
    """
    sums = _read_sums(folder)
    for known in (name, *sources) if sums is not None else ():
        _refuse_altered(folder, known, sums or {})
    made, sealed = (folder / f".{file}.partial" for file in (name, SUMS))
    try:
        write(made)
        if sums is not None:
            lines = (f"{digest}  {file}\n" for file, digest in {**sums, name: sha256(made)}.items())
            sealed.write_text("".join(lines), encoding="utf-8")
        os.replace(made, folder / name)
        if sums is not None:
            os.replace(sealed, folder / SUMS)
    finally:
        made.unlink(missing_ok=True)
        sealed.unlink(missing_ok=True)


def _read_sums(folder: Path) -> dict[str, str] | None:
    """SHA256SUMS by name; None in a bundle from before it."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except FileNotFoundError:
        return None
    except ValueError:
        raise InputError(f"{SUMS} is altered: not in the form that sha256sum reads") from None


def _refuse_altered(folder: Path, name: str, sums: Mapping[str, str]) -> None:
    file = folder / name
    if not file.exists() and name not in sums:
        return
    if name not in sums or not file.is_file() or sha256(file) != sums[name]:
        raise InputError(f"{name} is not the one that was exported; python -m rmsnorm_deploy.verify tells of all files")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def save_program(program: torch.export.ExportedProgram, folder: Path, places: dict[str, dict[str, Any]]) -> None:
    """Write the traced program; weights that are in the data file are left out and found there again."""
    import torch

    state = dict(program.state_dict)
    slim = {
        name: torch.nn.Parameter(tensor.to("meta"), requires_grad=False)
        if name in places and isinstance(tensor, torch.nn.Parameter)
        else tensor
        for name, tensor in state.items()
    }
    kept = {name: place for name, place in places.items() if isinstance(state.get(name), torch.nn.Parameter)}
    program._state_dict = slim
    try:
        torch.export.save(program, folder / PROGRAM)
    finally:
        program._state_dict = state
    if kept:
        (folder / PROGRAM_WEIGHTS).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _fill(program: torch.export.ExportedProgram, places: dict[str, dict[str, Any]], folder: Path) -> None:
    import numpy as np
    import torch

    for name, place in places.items():
        file = (folder / place["file"]).resolve()
        if file.parent != folder.resolve():
            raise InputError(f"{folder / PROGRAM_WEIGHTS} names a file outside the bundle: {place['file']}")
        bytes_ = np.memmap(file, np.uint8, "c", place["offset"], (place["length"],))
        elements = torch.from_numpy(bytes_).view(getattr(torch, place["dtype"]))
        strides = place.get("strides")  # which bundles of before stacked weights do not have
        tensor = elements.view(place["shape"]) if strides is None else elements.as_strided(place["shape"], strides)
        program._state_dict[name] = torch.nn.Parameter(tensor, requires_grad=False)
