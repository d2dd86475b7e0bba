"""Writes a model's weights once, in one file, without holding them in memory.

Tensors of the source are streamed: a file's tensors in blocks, PyTorch's from where they are. Tied weights (the same
storage, or the same bytes of the same file) are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

INLINE_TOTAL = 8 << 20  # a model with fewer bytes of weights is one file
INLINE_TENSOR = 1 << 10  # tensors up to this size stay in the model: shape inference and parsers look at them
_BLOCK = 16 << 20
_ALIGN = 64  # the widest vector load; tensors of a page and more start on a page, so that they can be mapped
_PAGE = 4096
DATA_FILE = "model.onnx.data"
PARTS = "rmsnorm_deploy.columns"  # in a stacked weight's metadata: the weights it is made of, and where they are


@dataclass(frozen=True)
class Stored:
    """Where a tensor's elements are in the data file."""

    offset: int
    length: int  # bytes from the first element to the last
    strides: tuple[int, ...] | None = None  # in elements; None where they are one behind the other


@dataclass(frozen=True)
class Part:
    """Where in a stacked weight another one is: its columns are that one's rows."""

    name: str
    column: int
    rows: int


def describe(parts: Iterable[Part]) -> dict[str, str]:
    """What a stacked weight's tensor says of itself, in the file."""
    return {PARTS: json.dumps([[part.name, part.column, part.rows] for part in parts])}


def described(metadata: Mapping[str, str]) -> list[Part]:
    """The weights that one is made of, by what its tensor says; none where it is itself."""
    return [Part(*part) for part in json.loads(metadata.get(PARTS, "[]"))]


def merge_tied(model: ir.Model) -> None:
    """Let initializers over the same memory, or the same bytes of a file, be one."""
    first: dict[tuple[object, ...], ir.Value] = {}
    for value in list(model.graph.initializers.values()):
        key = _identity(value)
        if key is None or value.is_graph_output() or value.is_graph_input():
            continue
        kept = first.setdefault(key, value)
        if kept is not value:
            ir.convenience.replace_all_uses_with(value, kept)
            assert value.name is not None
            del model.graph.initializers[value.name]


def _identity(value: ir.Value) -> tuple[object, ...] | None:
    """What two initializers share if and only if they are the same bytes in the same place."""
    tensor = value.const_value
    if tensor is None or tensor.nbytes <= INLINE_TENSOR:
        return None
    kind = (tensor.dtype, tuple(tensor.shape.numpy()))
    if isinstance(tensor, ir.ExternalTensor):
        return (*kind, str(tensor.path), tensor.offset, tensor.length)
    raw = getattr(tensor, "raw", None)
    if raw is not None and hasattr(raw, "untyped_storage"):
        return (*kind, raw.data_ptr(), raw.stride())
    return None


def write_weights(model: ir.Model, folder: Path) -> dict[str, Stored]:
    """Move the weights of ``model`` to ``folder/model.onnx.data``; by name, where each one is.

    Those that a stacked weight is made of (`stacked`) are found in it, under their own names. A model with few weights
    keeps them, and no file is written.
    """
    values = [v for graph in model.graphs() for v in graph.initializers.values() if v.const_value is not None]
    large = [v for v in values if v.const_value is not None and v.const_value.nbytes > INLINE_TENSOR]
    if sum(v.const_value.nbytes for v in large if v.const_value is not None) <= INLINE_TOTAL:
        for value in values:
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = ir.tensor(value.const_value.numpy().copy(), value.dtype, name=value.name)
        return {}
    stored: dict[str, Stored] = {}
    with (folder / DATA_FILE).open("wb") as file:
        for value in large:
            whole = stored[value.name or ""] = _write_value(value, file, folder)
            stored.update(_parts(value, whole))
    return stored


def _parts(value: ir.Value, whole: Stored) -> dict[str, Stored]:
    """Where the weights are that a stacked one is made of."""
    tensor = value.const_value
    assert tensor is not None
    found = {}
    for part in described(tensor.metadata_props):
        depth, width = (int(size) for size in tensor.shape.numpy())
        size = int(tensor.dtype.itemsize)
        length = ((depth - 1) * width + part.rows) * size
        found[part.name] = Stored(whole.offset + part.column * size, length, (1, width))
    return found


def _write_value(value: ir.Value, file: BinaryIO, folder: Path) -> Stored:
    tensor = value.const_value
    assert tensor is not None
    align = _PAGE if tensor.nbytes >= _PAGE else _ALIGN
    offset = -(-file.tell() // align) * align
    file.write(b"\0" * (offset - file.tell()))
    if isinstance(tensor, ir.ExternalTensor):
        _copy_range(Path(tensor.path), tensor.offset or 0, tensor.nbytes, file)
    else:
        array = np.ascontiguousarray(tensor.numpy())
        file.write(array.reshape(-1).view(np.uint8).data)
    value.const_value = ir.ExternalTensor(
        DATA_FILE,
        offset,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=value.name or "",
        base_dir=folder,
        metadata_props=dict(tensor.metadata_props),
    )
    return Stored(offset, tensor.nbytes)


def _copy_range(source: Path, offset: int, length: int, target: BinaryIO) -> None:
    with source.open("rb") as file:
        file.seek(offset)
        while length > 0:
            block = file.read(min(_BLOCK, length))
            if not block:
                raise EOFError(f"{source} ends {length} bytes before the last weight does")
            target.write(block)
            length -= len(block)


def save_graph(model: ir.Model, path: Path) -> None:
    """Write the graph; weights that are in the data file stay there."""
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.type is None:
                value.shape = None  # ONNX has no place for a shape without a type
    path.write_bytes(ir.to_proto(model).SerializeToString())
