"""Makes what PyTorch's exporter writes a graph that ONNX allows and runtimes take.

- A split is written as a sequence and its items: TensorRT has no sequences, and none holds bfloat16. It becomes Split.
- Operators are given bfloat16 (or float16) that ONNX doesn't define them for at the graph's opset, and no runtime loads
  that. They get casts around them, and compute in float32 as PyTorch's own kernels do.
- Shifts of uint8, as weights of four bits are unpacked with, end in int8. They get the type that PyTorch gives them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.defs import OpSchema

_HALVES = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def lower(model: ir.Model) -> None:
    """Lower ``model`` in place."""
    opset = model.opset_imports[""]
    for node in list(model.graph.all_nodes()):
        if node.domain == "" and node.op_type == "SplitToSequence":
            _split(node)
    for node in list(model.graph.all_nodes()):
        if node.domain == "":
            _unsigned(node)
            _fit_types(node, opset)


def _split(node: ir.Node) -> None:
    """Split in place of a SplitToSequence whose sizes are known and whose every item is taken by number."""
    x, items = node.inputs[0], [use.node for use in node.outputs[0].uses()]
    indices = [_number(item.inputs[1]) for item in items if item.op_type == "SequenceAt"]
    if x is None or len(indices) != len(items) or node.outputs[0].is_graph_output() or len(node.inputs) < 2:
        return
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    sizes = _sizes(x, node.inputs[1], axis)
    if sizes is None or any(index is None or not -len(sizes) <= index < len(sizes) for index in indices):
        return
    assert node.graph is not None
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(np.asarray(sizes, np.int64))})
    split = ir.node(
        "Split", [x, constant.outputs[0]], attributes={"axis": axis}, num_outputs=len(sizes), name=node.name
    )
    constant.outputs[0].type, constant.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(sizes)])
    split.metadata_props.update(node.metadata_props)
    split.meta.update(node.meta)
    node.graph.insert_before(node, [constant, split])
    for output, size in zip(split.outputs, sizes, strict=True):
        output.type = x.type
        output.shape = x.shape.copy() if x.shape is not None else None
        if output.shape is not None:
            output.shape[axis] = size
    for item, index in zip(items, indices, strict=True):
        assert index is not None
        _replace(item, split.outputs[index])
    node.graph.remove(node, safe=True)


def _replace(item: ir.Node, output: ir.Value) -> None:
    old = item.outputs[0]
    old.replace_all_uses_with(output, replace_graph_outputs=True)
    assert item.graph is not None
    item.graph.remove(item, safe=True)
    output.name, old.name = old.name, None


def _number(value: ir.Value | None) -> int | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return int(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


def _sizes(x: ir.Value, split: ir.Value | None, axis: int) -> list[int] | None:
    """The sizes of the parts; a lone number is that of each but the last."""
    tensor = ir.convenience.get_const_tensor(split) if split is not None else None
    if tensor is None:
        return None
    sizes = tensor.numpy()
    if sizes.ndim == 1:
        return [int(size) for size in sizes]
    whole = x.shape[axis] if x.shape is not None else None
    each = int(sizes)
    if not isinstance(whole, int) or each < 1:
        return None
    return [min(each, whole - start) for start in range(0, whole, each)]


def _unsigned(node: ir.Node) -> None:
    """The casts to int8 that a shift of uint8 ends in, as casts to uint8."""
    if node.op_type not in ("Cast", "Where") or node.outputs[0].dtype != ir.DataType.UINT8:
        return
    ends = [node] if node.op_type == "Cast" else [value.producer() for value in node.inputs[1:] if value is not None]
    for end in ends:
        if end is not None and end.op_type == "Cast" and end.attributes["to"].as_int() == ir.DataType.INT8:
            end.attributes["to"] = ir.AttrInt64("to", ir.DataType.UINT8)
            end.outputs[0].dtype = ir.DataType.UINT8


@functools.cache
def _schema(op_type: str, opset: int) -> OpSchema | None:
    return onnx.defs.get_schema(op_type, opset, "") if onnx.defs.has(op_type, opset, "") else None


def _fit_types(node: ir.Node, opset: int) -> None:
    """Casts around an operator for the half types that its schema doesn't list."""
    schema = _schema(node.op_type, opset)
    if schema is None:
        return
    _infer_types(node, schema)
    unfit = {
        formal.type_str
        for value, formal in _with_formals(node.inputs, schema.inputs)
        if value is not None and value.dtype in _HALVES and _text(value) not in formal.types
    }
    if not unfit:
        return
    assert node.graph is not None
    for index, (value, formal) in enumerate(_with_formals(node.inputs, schema.inputs)):
        if value is not None and formal.type_str in unfit and value.dtype in _HALVES:
            cast = _cast(value, ir.DataType.FLOAT)
            node.graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
    for output, formal in list(_with_formals(node.outputs, schema.outputs)):
        if output is not None and formal.type_str in unfit and output.dtype in _HALVES:
            _narrow(node, output)


def _infer_types(node: ir.Node, schema: OpSchema) -> None:
    """Types of outputs that the exporter left open (inside of its own functions), from inputs of the same type."""
    inputs = _with_formals(node.inputs, schema.inputs)
    known = {formal.type_str: value.dtype for value, formal in inputs if value is not None}
    for output, formal in _with_formals(node.outputs, schema.outputs):
        if output is None or output.dtype is not None:
            continue
        dtype = _attribute_type(node) or known.get(formal.type_str) or _only_type(formal)
        if dtype is not None:
            output.type = ir.TensorType(dtype)


def _attribute_type(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type == "Constant" and "value" in node.attributes:
        return node.attributes["value"].as_tensor().dtype
    return None


def _only_type(formal: OpSchema.FormalParameter) -> ir.DataType | None:
    """The type of an output that may have no other, such as a comparison's."""
    names = [text.removeprefix("tensor(").rstrip(")").upper() for text in formal.types]
    return ir.DataType[names[0]] if len(names) == 1 and names[0] in ir.DataType.__members__ else None


def _narrow(node: ir.Node, output: ir.Value) -> None:
    """Let ``node`` give float32, and those who read ``output`` a cast of it under the same name."""
    narrow = output.dtype
    assert narrow is not None
    assert node.graph is not None
    cast = _cast(output, narrow)
    node.graph.insert_after(node, cast)
    name = output.name
    output.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    output.type, output.name = ir.TensorType(ir.DataType.FLOAT), f"{name}.wide"
    cast.outputs[0].name = name


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], attributes={"to": dtype})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast


def _with_formals(
    values: Sequence[ir.Value | None], formals: Sequence[OpSchema.FormalParameter]
) -> list[tuple[ir.Value | None, OpSchema.FormalParameter]]:
    """Actual and formal parameters; the last formal one stands for all that follow."""
    return [(value, formals[min(index, len(formals) - 1)]) for index, value in enumerate(values)] if formals else []


def _text(value: ir.Value) -> str:
    assert value.dtype is not None
    return f"tensor({value.dtype.name.lower()})"
