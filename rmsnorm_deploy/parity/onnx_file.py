"""Reads an ONNX file without its external data, and says in one line why one cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from rmsnorm_deploy.errors import InputError


def read_model(path: Path) -> onnx.ModelProto:
    """The model at ``path``, weights in other files left there. Raises InputError for a missing or broken file."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (OSError, ValueError, TypeError, DecodeError) as error:
        raise InputError(f"{path} is not a readable ONNX file: {error}") from error
    if not model.graph.node and not model.graph.output:
        raise InputError(f"{path} is not a readable ONNX file: it has no graph")
    return model


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of every graph in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from all_nodes(inner)
