"""Reads ONNX of any origin into the form the rest works on; weights of a file stay on disk.

- Sparse weights become dense: the graph's classes have no sparse ones, and no kernel here does.
- ``ai.onnx`` is the long name of the standard domain: written as the short one.
- Nodes are put in an order in which each comes after those that it needs: converters append nodes at the end, and
  runtimes sort for themselves.
- Functions of the file are written out, since norms are looked for inside them: the model before and after fusing has
  the same names then. This package's own stay, unless the file gives one of their names another body.
- A dimension of -1 is one of any size.
- Large constants that are nodes become initializers, so that they are stored once, with the other weights.
- What a file says of its inner values is only a claim, and some claims are wrong; runtimes go by inference. Shapes are
  inferred anew, and a claim is kept where nothing can be inferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.quiet import reason
from rmsnorm_deploy.export.weights import INLINE_TENSOR
from rmsnorm_deploy.fusion.imports import infer_shapes, inline_functions, inline_strangers
from rmsnorm_deploy.load.onnx_file import follow_links

_LONG_NAME = "ai.onnx"


def read_onnx(source: Path | onnx.ModelProto) -> ir.Model:
    """A file, or a model in memory (which is left as it is), as a graph.

    Raises:
        InputError: it can't be read, or a value of it depends on itself.
    """
    name = source if isinstance(source, Path) else f"the ONNX model '{source.graph.name}'"
    try:
        if isinstance(source, Path):
            proto = onnx.load(source, load_external_data=False)
            folder = follow_links(proto, source.parent)
        else:
            proto, folder = source, Path()
        if _has_sparse(proto):
            proto = _dense(proto, folder)
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, folder)
    except Exception as error:  # protobuf, onnx and the file system each have their own
        raise InputError(f"{name} can't be read as ONNX: {reason(error)}") from error
    _forget_negative(model.graph)
    _sort(model, str(name))
    _shorten_domain(model)
    inline_functions(model)
    _complete(model)
    if inline_strangers(model):
        _complete(model)
    return model


def _complete(model: ir.Model) -> None:
    LiftConstantsToInitializersPass(size_limit=INLINE_TENSOR)(model)
    _infer_anew(model)


def _forget_negative(graph: ir.Graph) -> None:
    """Some converters write a dimension of any size as -1: to ONNX that is a size, which nothing has."""
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape])


def _sort(model: ir.Model, name: str) -> None:
    try:
        model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ValueError as error:
        raise InputError(
            f"{name} holds nodes that need each other's outputs, so no order runs them: write it anew"
        ) from error


def _shorten_domain(model: ir.Model) -> None:
    for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if _LONG_NAME in imports:
            imports.setdefault("", imports.pop(_LONG_NAME))


def _infer_anew(model: ir.Model) -> None:
    claims = {value: (value.shape, value.type) for value in _inner_values(model)}
    for value in claims:
        value.shape, value.type = None, None
    infer_shapes(model)
    unknown = [value for value, claim in claims.items() if value.type is None and claim[1] is not None]
    for value in unknown:
        value.shape, value.type = claims[value]
    if unknown:
        infer_shapes(model)
    for value, (shape, _) in claims.items():
        value.shape = _reconciled(value.shape, shape)


def _reconciled(inferred: ir.Shape | None, claimed: ir.Shape | None) -> ir.Shape | None:
    """What was inferred, with the claim's dimensions where inference could but invent a name."""
    if inferred is None or claimed is None or len(inferred) != len(claimed):
        return claimed if inferred is None else inferred
    return ir.Shape([b if _is_invented(a) else a for a, b in zip(inferred, claimed, strict=True)])


def _is_invented(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and (dim.value is None or str(dim.value).startswith("unk__"))


def _inner_values(model: ir.Model) -> Iterator[ir.Value]:
    """Tensors that nodes yield and no graph's output is: an output's shape is part of the model's interface."""
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output() and (value.type is None or isinstance(value.type, ir.TensorType)):
                yield value


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.output:
                    yield from _graphs(inner)


def _has_sparse(proto: onnx.ModelProto) -> bool:
    return any(
        graph.sparse_initializer or any(_sparse_value(node) is not None for node in graph.node)
        for graph in _graphs(proto.graph)
    )


def _sparse_value(node: onnx.NodeProto) -> onnx.AttributeProto | None:
    if node.op_type != "Constant":
        return None
    return next((attribute for attribute in node.attribute if attribute.name == "sparse_value"), None)


def _dense(proto: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """A copy of a model with dense tensors in place of its sparse ones."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for graph in _graphs(copy.graph):
        graph.initializer.extend(_dense_tensor(tensor, folder) for tensor in graph.sparse_initializer)
        del graph.sparse_initializer[:]
        for node in graph.node:
            attribute = _sparse_value(node)
            if attribute is not None:
                tensor = _dense_tensor(attribute.sparse_tensor, folder)
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    return copy


def _dense_tensor(sparse: onnx.SparseTensorProto, folder: Path) -> onnx.TensorProto:
    """Indices are positions in the flattened tensor, or one row of coordinates for each value."""
    values = numpy_helper.to_array(sparse.values, str(folder))
    indices = numpy_helper.to_array(sparse.indices, str(folder))
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        array.reshape(-1)[indices] = values
    else:
        array[tuple(indices.T)] = values
    return numpy_helper.from_array(array, sparse.values.name)
