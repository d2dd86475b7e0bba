"""Gives an exported graph the names of the model's own call: inputs, outputs, dims, and the limits of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.traced import Traced
from rmsnorm_deploy.load import Source
from rmsnorm_deploy.runtime.binding import bind_parameters, key_text

INDEX_TYPES = (ir.DataType.INT64, ir.DataType.INT32)


@dataclass(frozen=True)
class Leaf:
    """One argument of the example call: where it sits and what it is."""

    path: str
    value: Any


def call_leaves(program: torch.export.ExportedProgram, parameters: list[str]) -> list[Leaf]:
    """The leaves of the example call in the program's order, each with its path in the bound call."""
    in_spec = program.call_spec.in_spec
    users = [spec.arg for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    args, kwargs = pytree.tree_unflatten(list(range(len(users))), in_spec)
    bound = bind_parameters(parameters, args, kwargs)
    paths: dict[int, str] = {}
    for root, value in bound.items():
        for keys, number in pytree.tree_flatten_with_path(value)[0]:
            paths[number] = ".".join([root, *(key_text(key) for key in keys)])
    return [Leaf(paths[i], arg) for i, arg in enumerate(users)]


def name_inputs(traced: Traced, leaves: list[Leaf]) -> None:
    """Inputs get their paths in the bound call as names; arguments that are no tensors become constants.

    Raises:
        InputError: the graph doesn't have the inputs that the call has.
    """
    tensors = [leaf for leaf in leaves if type(leaf.value).__name__ == "TensorArgument"]
    inputs = list(traced.model.graph.inputs)
    by_name = {value.name: value for value in inputs}
    taken = [by_name.get(leaf.value.name) for leaf in tensors]
    if None in taken or len(taken) != len(inputs):
        given, want = [v.name for v in inputs], [leaf.path for leaf in tensors]
        raise InputError(f"the ONNX graph has inputs {given} where the model takes {want}: this call can't be exported")
    _free_names(traced.model, [leaf.path for leaf in tensors], set(inputs))
    for leaf, value in zip(tensors, taken, strict=True):
        assert value is not None
        value.name = leaf.path
    for leaf in leaves:
        if leaf not in tensors:
            traced.constants.append({"path": leaf.path, "value": _plain(getattr(leaf.value, "value", None))})


def _plain(value: Any) -> Any:
    """A constant as JSON can hold it."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def name_outputs(model: ir.Model, program: torch.export.ExportedProgram) -> None:
    """Outputs get the names that the model's own return value gives them; one that is an input too gets both."""
    users = [spec.arg for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    kept = [i for i, arg in enumerate(users) if type(arg).__name__ == "TensorArgument"]
    structure = pytree.tree_unflatten(list(range(len(users))), program.call_spec.out_spec)
    names = {number: _output_name(keys) for keys, number in pytree.tree_flatten_with_path(structure)[0]}
    outputs = model.graph.outputs
    wanted = [names[i] for i in kept] if len(kept) == len(outputs) else [f"output_{i}" for i in range(len(outputs))]
    seen: set[ir.Value] = set()
    for i, value in enumerate(list(outputs)):
        if value.is_graph_input() or value.is_initializer() or value in seen:
            copy = ir.Node("", "Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            model.graph.append(copy)
            outputs[i] = value = copy.outputs[0]
        seen.add(value)
    inputs = {v.name for v in model.graph.inputs}
    final = [f"output.{name}" if name in inputs else name for name in wanted]
    _free_names(model, final, set(outputs))
    for value, name in zip(list(outputs), final, strict=True):
        value.name = name


def _output_name(keys: Iterable[Any]) -> str:
    texts = [key_text(key) for key in keys]
    if not texts:
        return "output"
    return ".".join(texts) if not texts[0].isdigit() else "output_" + ".".join(texts)


def _free_names(model: ir.Model, wanted: Iterable[str], mine: set[ir.Value]) -> None:
    """Rename whatever inside the graph has a name that an input or output is about to get."""
    names = set(wanted)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name in names and value not in mine:
                value.name = f"{value.name}.inner"
    for name in names & set(model.graph.initializers):
        value = model.graph.initializers[name]
        if value not in mine:
            value.name = f"{name}.weight"


def name_dims(traced: Traced, source: Source) -> dict[str, str]:
    """Names for the symbols that torch.export made: the user's, else batch and seq by position. symbol -> name.

    Sizes that PyTorch can't prove equal, since the model never needs them to be, are one where the user gave one name.
    """
    names: dict[str, str] = {}
    given: set[str] = set()
    for value in traced.model.graph.inputs:
        path = value.name or ""
        asked = source.dims.get(path, {})
        for axis, dim in enumerate(value.shape or ()):
            symbol = None if isinstance(dim, int) else str(dim.value)
            if symbol is None or not symbol.isidentifier() or symbol in names:
                continue
            wanted = asked.get(axis) or _usual_name(value, axis)
            names[symbol] = wanted if axis in asked and wanted in given else _unique(wanted, set(names.values()))
            if names[symbol] == asked.get(axis):
                given.add(wanted)
    pattern = re.compile(r"\b[A-Za-z_]\w*")
    _rename_dims(traced.model, lambda text: pattern.sub(lambda match: names.get(match[0], match[0]), text))
    return names


def _usual_name(value: ir.Value, axis: int) -> str:
    rank = len(value.shape or ())
    if axis == 0:
        return "batch"
    if axis == 1 and (rank == 3 or value.dtype in (*INDEX_TYPES, ir.DataType.BOOL)):
        return "seq"
    return f"{(value.name or 'x').replace('.', '_')}_dim{axis}"


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}{number}"
    return candidate


def _rename_dims(model: ir.Model, rename: Callable[[str], str]) -> None:
    """Dims under new names; a dim that PyTorch found to be fixed is written as text there, and is a number here."""
    known: dict[str, str | int] = {}

    def renamed(value: ir.Value) -> None:
        if value.shape is None or all(isinstance(dim, int) for dim in value.shape):
            return
        dims: list[int | str | None] = []
        for dim in value.shape:
            text = None if isinstance(dim, int) or dim.value is None else str(dim.value)
            if text is None:
                dims.append(dim if isinstance(dim, int) else None)
            else:
                if text not in known:
                    known[text] = int(text) if text.isdigit() else rename(text)
                dims.append(known[text])
        value.shape = ir.Shape(dims)

    for value in model.graph.inputs:
        renamed(value)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            renamed(value)


def record_ranges(
    traced: Traced, program: torch.export.ExportedProgram, symbols: dict[str, str], source: Source
) -> None:
    examples = _example_sizes(program)
    for symbol, limits in program.range_constraints.items():
        name = symbols.get(str(symbol))
        if name is None:
            continue
        low, high = source.ranges.get(name, (None, None))
        least, most = _as_int(limits.lower), _as_int(limits.upper)
        limit = {
            "example": examples.get(str(symbol)),
            "min": low if low is not None else (least if least is not None and least > 2 else 0),
            "max": high if high is not None else (most if most is not None and most < 2**31 else None),
        }
        traced.dims[name] = _both(traced.dims[name], limit) if name in traced.dims else limit


def _both(first: dict[str, int | None], second: dict[str, int | None]) -> dict[str, int | None]:
    """The limits of a name that stands for two symbols: what both allow."""
    lows, highs = ([limit[key] for limit in (first, second)] for key in ("min", "max"))
    return first | {
        "min": max(low or 0 for low in lows),
        "max": min((high for high in highs if high is not None), default=None),
    }


def _as_int(bound: Any) -> int | None:
    """A bound of torch.export as a number; None if it is infinite."""
    text = str(bound)
    return int(text) if text.lstrip("-").isdigit() else None


def _example_sizes(program: torch.export.ExportedProgram) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    hint = size.node.hint
                    if hint is not None:
                        sizes.setdefault(str(size), int(hint))
    return sizes


def vocabularies(model: ir.Model) -> dict[str, int]:
    """For integer inputs that index a table, the number of its rows."""
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        if value.dtype not in INDEX_TYPES:
            continue
        for node in _readers(value):
            table = node.inputs[0] if node.op_type == "Gather" else None
            axis = node.attributes.get("axis")
            if table is not None and table.is_initializer() and table.shape is not None:
                rows = table.shape[axis.as_int() if axis else 0]
                if isinstance(rows, int):
                    found[value.name or ""] = min(rows, found.get(value.name or "", rows))
    return found


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Nodes that take a value as their indices, casts and reshapes looked through."""
    for node, index in value.uses():
        if node.op_type == "Gather" and index == 1:
            yield node
        elif node.op_type in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze") and index == 0:
            yield from _readers(node.outputs[0])
