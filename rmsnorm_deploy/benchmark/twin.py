"""Twins of a model, for timing only: with LayerNorm where each RMSNorm is, and with no norm at all.

Both norms read and write the same bytes, so what the LayerNorm twin shows is what the choice of norm costs, apart from
what fusing it brings. The twin without norms shows what there is to gain from any norm. The twins' outputs are
meaningless.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.opset import DOMAIN, VARIANT_BY_NAME, is_fused_op
from rmsnorm_deploy.parity.onnx_file import read_model

if TYPE_CHECKING:
    import torch

_ONNX_NAMES = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT", "float64": "DOUBLE"}


def onnx_twin(model: Path, norms: Sequence[Mapping[str, Any]]) -> tuple[bytes, int]:
    """The twin of the ONNX file ``model``, serialized, and how many norms were exchanged.

    Weights that are in other files stay there; the twin refers to them. ``norms`` are the manifest's records, which
    know each row's width.

    Raises:
        InputError: the file has no fused norm, or none whose row has a fixed size.
    """
    twin = ir.from_proto(read_model(model))
    records = {record["node"]: record for record in norms}
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(twin.graph) if is_fused_op(node)]
    if not nodes:
        raise InputError(f"{model.name} has no fused norm to exchange")
    exchanged = sum(_exchange(node, records.get(str(node.name))) for node in nodes)
    if not exchanged:
        raise InputError(f"no norm of {model.name} has a row of fixed size, which a LayerNorm needs")
    if exchanged == len(nodes):
        for key in [key for key in twin.functions if key[0] == DOMAIN]:
            del twin.functions[key]
        twin.opset_imports.pop(DOMAIN, None)
    return ir.to_proto(twin).SerializeToString(), exchanged


def without_norms(model: Path) -> bytes:
    """The ONNX file ``model``, serialized, with its fused norms left out; only their residual adds are kept.

    Raises:
        InputError: the file has no fused norm.
    """
    twin = ir.from_proto(read_model(model))
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(twin.graph) if is_fused_op(node)]
    if not nodes:
        raise InputError(f"{model.name} has no fused norm to leave out")
    for node in nodes:
        total, new = node.inputs[0], []
        assert total is not None
        assert node.graph is not None
        if VARIANT_BY_NAME[node.op_type].skip:
            new = [ir.node("Add", [total, node.inputs[1]])]
            total = new[0].outputs[0]
        results = [total] * len(node.outputs)
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, list(node.outputs), results)
    for key in [key for key in twin.functions if key[0] == DOMAIN]:
        del twin.functions[key]
    twin.opset_imports.pop(DOMAIN, None)
    return bytes(ir.to_proto(twin).SerializeToString())


def _exchange(node: ir.Node, record: Mapping[str, Any] | None) -> bool:
    """Put Add (of a residual) and LayerNormalization with a bias of zeros in the place of one fused op.

    False, and nothing is changed, where the row has no fixed size.
    """
    row = list(record["shape"])[record["axis"] :] if record is not None else []
    if record is None or not row or not all(isinstance(size, int) for size in row):
        return False
    variant = VARIANT_BY_NAME[node.op_type]
    operands = list(node.inputs)
    total = operands.pop(0)
    assert total is not None
    new: list[ir.Node] = []
    if variant.skip:
        new.append(ir.node("Add", [total, operands.pop(0)]))
        total = new[-1].outputs[0]
    scale, bias = (*operands, None, None)[:2]
    dtype = ir.DataType[_ONNX_NAMES[record["dtype"]]]
    norm = ir.node(
        "LayerNormalization",
        [total, _parameter(scale, 1.0, row, dtype, new), _parameter(bias, 0.0, row, dtype, new)],
        attributes={"axis": node.attributes["axis"].as_int(), "epsilon": node.attributes["epsilon"].as_float()},
    )
    new.append(norm)
    result = norm.outputs[0]
    if not variant.before_cast and scale is not None and record["scale_dtype"] != record["dtype"]:
        # a wider scale after the cast makes a wider result
        new.append(ir.node("Cast", [result], attributes={"to": int(ir.DataType[_ONNX_NAMES[record["scale_dtype"]]])}))
        result = new[-1].outputs[0]
    results = [result, total][: len(node.outputs)]
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, list(node.outputs), results)
    return True


def _parameter(
    value: ir.Value | None, fill: float, row: Sequence[int], dtype: ir.DataType, new: list[ir.Node]
) -> ir.Value:
    """Scale or bias as LayerNormalization wants it: in ``dtype``, of the row's shape. Constant folding works it out."""
    if value is None:
        value = _constant(np.full(list(row), fill, np.float32), new)
    shape = _constant(np.asarray(row, np.int64), new)
    cast = ir.node("Cast", [value], attributes={"to": int(dtype)})
    expand = ir.node("Expand", [cast.outputs[0], shape])
    reshape = ir.node("Reshape", [expand.outputs[0], shape])  # drops leading ones
    new += [cast, expand, reshape]
    return reshape.outputs[0]


def _constant(array: np.ndarray[Any, Any], new: list[ir.Node]) -> ir.Value:
    new.append(ir.node("Constant", [], attributes={"value": ir.tensor(array)}))
    return new[-1].outputs[0]


def torch_twin(model: torch.nn.Module, norms: Sequence[Mapping[str, Any]]) -> tuple[torch.nn.Module, int]:
    """The twin of a module, over the same parameters in memory, and how many of its modules were exchanged.

    ``norms`` are the manifest's records: a module that one of them names is exchanged when it has a weight.

    Raises:
        InputError: no norm is a module with a weight.
    """
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    names = sorted({record["module"] for record in norms if record["module"]})
    exchanged = sum(_exchange_module(twin, name, norms) for name in names)
    if not exchanged:
        raise InputError("no norm of the model is a module with a weight, which LayerNorm could stand in for")
    return twin, exchanged


def _exchange_module(model: torch.nn.Module, name: str, norms: Sequence[Mapping[str, Any]]) -> bool:
    import torch

    parent_name, _, own_name = name.rpartition(".")
    try:
        parent, norm = model.get_submodule(parent_name), model.get_submodule(name)
    except AttributeError:
        return False
    record = next(record for record in norms if record["module"] == name)
    weight = _scale_of(norm, record)
    if weight is None or weight.ndim < 1:
        return False
    epsilon = float(record["epsilon"])
    with torch.device("meta"):
        layer = torch.nn.LayerNorm(list(weight.shape), eps=epsilon, bias=False)
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    setattr(parent, own_name, layer.train(norm.training))
    return True


def _scale_of(norm: torch.nn.Module, record: Mapping[str, Any]) -> torch.Tensor | None:
    """The parameter by which a module scales, whatever its name: that of the record, or the only one of a row's shape.

    The record has another name where the scale was worked out of a parameter, as 1 + w is.
    """
    own = dict(norm.named_parameters(recurse=False)) | dict(norm.named_buffers(recurse=False))
    named = own.get(str(record["scale"] or "").removeprefix(f"{record['module']}."))
    if named is not None:
        return named
    row = list(record["shape"] or [])[record["axis"] :]
    shaped = [tensor for tensor in own.values() if list(tensor.shape) == row]
    return own.get("weight", shaped[0] if len(shaped) == 1 else None)
