"""An ONNX model: readable, complete, and its external data where it says, beside the file.

Where a file's data lies is judged by what the file says: a link that its owner made is followed, as in the cache of
Hugging Face, where the model and its data are links to where both are stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING

from rmsnorm_deploy.errors import InputError

if TYPE_CHECKING:
    import onnx


def check_onnx(path: Path) -> None:
    """Raise InputError for a file that is no ONNX model, or not a whole one, or whose weights are missing, cut off or
    outside its folder."""
    import onnx  # the graph alone is parsed here; weights stay on disk
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from onnx.external_data_helper import ExternalDataInfo

    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise InputError(f"{path}: not an ONNX model, or a damaged one ({error})") from None
    _check_whole(str(path), model.graph)
    needed: dict[str, int] = {}
    for tensor in _external(model):
        info = ExternalDataInfo(tensor)
        end = (info.offset or 0) + (info.length or 0)
        needed[info.location] = max(needed.get(info.location, 0), end)
    for location, size in needed.items():
        _check_data(path, location, size)


def check_in_memory(model: onnx.ModelProto) -> None:
    """Raise InputError for a model that is not whole, or whose weights were left in their file."""
    name = f"the ONNX model '{model.graph.name}'"
    _check_whole(name, model.graph)
    tensor = next(_external(model), None)
    if tensor is not None:
        places = {entry.key: entry.value for entry in tensor.external_data}
        raise InputError(
            f"{name}: weight '{tensor.name}' is not in it, but in a file ({places.get('location', '')}): give the path "
            f"of the model's file, or load it with its weights, as onnx.load does by default"
        )


def follow_links(model: onnx.ModelProto, folder: Path) -> Path:
    """Let external weights name the files where they are stored, in place of links to those in ``folder``.

    Returns the folder that the new names are relative to.
    """
    places = [entry for tensor in _external(model) for entry in tensor.external_data if entry.key == "location"]
    stored = {entry.value: (folder / entry.value).resolve() for entry in places}
    if not stored:
        return folder
    base = Path(os.path.commonpath([file.parent for file in stored.values()]))
    for entry in places:
        entry.value = stored[entry.value].relative_to(base).as_posix()
    return base


def _check_data(path: Path, location: str, size: int) -> None:
    if PureWindowsPath(location).anchor or ".." in PureWindowsPath(location).parts:  # both kinds of slash
        raise InputError(f"{path}: refused: its weights point outside its folder ({location})")
    data = path.parent / location
    if not data.is_file():
        raise InputError(f"{path}: its weights are missing: {location} must lie beside it")
    if data.stat().st_size < size:
        raise InputError(f"{path}: its weights are cut off: {location} has {data.stat().st_size} of {size} bytes")


def _check_whole(name: str, graph: onnx.GraphProto) -> None:
    if not graph.node or not graph.output:
        raise InputError(f"{name}: an ONNX model without {'outputs' if graph.node else 'nodes'}")
    _check_graph(name, graph)


def _check_graph(name: str, graph: onnx.GraphProto, outside: Iterable[str] = ()) -> None:
    """Every value that a graph, or a graph in it, reads or returns must be given; ``outside`` are the surrounding
    graph's."""
    given = {*outside, *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    given |= {tensor.values.name for tensor in graph.sparse_initializer}
    given |= {value for node in graph.node for value in node.output}
    for node in graph.node:
        for value in node.input:
            if value and value not in given:
                raise InputError(
                    f"{name}: {node.op_type} '{node.name or node.output[0]}' reads '{value}', which no input, weight "
                    f"or node gives: export the model again"
                )
        for inner in _graphs_of(node):
            _check_graph(name, inner, given)
    for output in graph.output:
        if output.name not in given:
            raise InputError(f"{name}: nothing gives its output '{output.name}': export the model again")


def _graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def _external(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors whose values are in another file: weights, and constants of nodes, of graphs in graphs too."""
    from onnx.external_data_helper import uses_external_data

    bodies = (function.node for function in model.functions)
    for tensor in [*_tensors(model.graph), *_constants(node for body in bodies for node in body)]:
        if uses_external_data(tensor):
            yield tensor


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _constants(graph.node)


def _constants(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t
        for inner in _graphs_of(node):
            yield from _tensors(inner)
