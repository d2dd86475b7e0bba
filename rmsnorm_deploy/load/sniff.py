"""What a path holds, told from its bytes and not from its name."""

from __future__ import annotations

import json
import shlex
import zipfile
from pathlib import Path
from typing import Literal

from rmsnorm_deploy.errors import InputError

FileKind = Literal["huggingface", "recipe", "gguf", "safetensors", "shards", "torchscript", "program", "pickle", "onnx"]

_MODELS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pt2", ".onnx", ".gguf", ".py")
_SHOWN = 4
SHARD_INDEX = ".safetensors.index.json"  # how the name of a file ends that says which weight is in which file
_LFS = b"version https://git-lfs"
_ZIP = b"PK\x03\x04"
# First bytes of files people pass by mistake, and what they are.
_FOREIGN = (
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\xfd7zXZ\x00", "an xz archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive: unpack it first"),
    (b"\x89HDF", "an HDF5 (Keras) file: only PyTorch and ONNX models are read"),
    (b"\x93NUMPY", "a NumPy array: only PyTorch and ONNX models are read"),
    (b"\x7fELF", "a program or library, not a model"),
    (b"ftrt", "a TensorRT engine, which is built already: give the model that it was built from"),
)


def identify(path: Path) -> FileKind:
    """The kind of model at ``path``; InputError says what else it is and what to do."""
    if path.is_dir():
        return _directory(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    if not path.is_file():
        raise InputError(f"{path}: not a regular file")
    head = _head(path)
    if not head:
        raise InputError(f"{path}: the file is empty")
    if path.name.endswith(SHARD_INDEX):
        return "shards"
    refuse_foreign(path, head)
    if head.startswith(_ZIP):
        return _archive(path)
    if path.suffix == ".py":
        return "recipe"
    if head.startswith(b"GGUF"):
        return "gguf"
    if _is_safetensors(path, head):
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return "pickle"
    if path.suffix == ".onnx" or head[:1] == b"\x08":  # a ModelProto starts with field 1, ir_version
        return "onnx"
    raise InputError(
        f"{path}: not a model file of a known kind (torch.save, TorchScript, .pt2, safetensors, GGUF, ONNX, recipe .py)"
    )


def refuse_foreign(path: Path, head: bytes | None = None) -> None:
    """Raise for a Git LFS pointer, a web page, plain JSON, an archive and other files that are not models."""
    head = _head(path) if head is None else head
    if head.startswith(_LFS):
        raise InputError(f"{path}: a Git LFS pointer, not the file itself: run `git lfs pull` where it came from")
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise InputError(f"{path}: a web page, not a model: the download went wrong")
    if text.startswith((b"{", b"[")) and path.suffix != ".py":
        raise InputError(f"{path}: a JSON text, not a model; a Hugging Face model is given by its directory")
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            raise InputError(f"{path}: {what}")
    if head[257:262] == b"ustar":
        raise InputError(f"{path}: a tar archive: unpack it first")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _directory(path: Path) -> FileKind:
    if (path / "config.json").is_file() or len(list(path.glob("*.gguf"))) == 1:
        return "huggingface"
    if len(list(path.glob(f"*{SHARD_INDEX}"))) == 1:
        return "shards"
    if (path / "adapter_config.json").is_file():
        raise InputError(f"{path}: a LoRA adapter without its model: merge it (merge_and_unload) and save the whole")
    if (path / "manifest.json").is_file():
        raise InputError(f"{path}: a bundle made by this tool already; check it with python -m rmsnorm_deploy.verify")
    raise InputError(f"{path}: a directory without config.json, so not a Hugging Face model; {_instead(path)}")


def _instead(path: Path) -> str:
    """What to give in place of a directory that is no model."""
    if (path / ".metadata").is_file():
        converter = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        return f"a distributed checkpoint: {converter} {shlex.quote(str(path))} weights.pt makes a file of it"
    if (path / "latest").is_file() or any(path.glob("*zero_pp_rank_*")):
        return "a DeepSpeed checkpoint: the zero_to_fp32.py that lies in it makes a file of it"
    if any(path.glob("*.bin.index.json")):
        return "load its shards, torch.save them as one dict, and give that file"
    found = sorted(file.name for file in path.iterdir() if file.suffix in _MODELS)[:_SHOWN]
    return f"give the model file in it: {', '.join(found)}" if found else "nor is a model file in it"


def _archive(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.split("/", 1)[-1] for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError):
        raise InputError(f"{path}: a damaged or cut-off archive: copy or download it again") from None
    if "archive_format" in names or "serialized_exported_program.json" in archive.namelist():
        return "program"
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return "torchscript"
    if "data.pkl" in names:
        return "pickle"
    raise InputError(f"{path}: a zip archive that torch did not write: unpack it and give the model file in it")


def _is_safetensors(path: Path, head: bytes) -> bool:
    """Eight bytes of length, then a JSON header of that length."""
    length = int.from_bytes(head[:8], "little")
    if len(head) < 10 or head[8:9] != b"{" or not 2 <= length <= path.stat().st_size - 8:
        return path.suffix == ".safetensors" and _cut_off(path)
    with path.open("rb") as file:
        file.seek(8)
        try:
            return isinstance(json.loads(file.read(length)), dict)
        except ValueError:
            return path.suffix == ".safetensors" and _cut_off(path)


def _cut_off(path: Path) -> bool:
    raise InputError(f"{path}: a damaged or cut-off safetensors file: copy or download it again")
