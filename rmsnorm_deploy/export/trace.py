"""From a loaded source to an ONNX graph that still spells everything out, and to how the model is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.dynamic import by_parameter, free_axes
from rmsnorm_deploy.export.example import grown
from rmsnorm_deploy.export.foreign import from_onnx, from_torchscript
from rmsnorm_deploy.export.lower import lower
from rmsnorm_deploy.export.naming import (
    call_leaves,
    name_dims,
    name_inputs,
    name_outputs,
    record_ranges,
    vocabularies,
)
from rmsnorm_deploy.export.outputs import with_plain_outputs
from rmsnorm_deploy.export.own_ops import spell_out
from rmsnorm_deploy.export.quiet import reason, silence
from rmsnorm_deploy.export.scalars import restore_scalars
from rmsnorm_deploy.export.straighten import straighten
from rmsnorm_deploy.export.traced import Traced
from rmsnorm_deploy.export.weights import merge_tied
from rmsnorm_deploy.load import Source, refused_call

MIN_TORCH_OPSET = 18
_BULKY_METADATA = (
    "namespace",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.stack_trace",
)


def trace(source: Source, opset: int) -> Traced:
    """The source as an ONNX graph of the given opset.

    Raises:
        InputError: the opset can't be had, or PyTorch can't trace the model; the message carries PyTorch's reason.
    """
    if source.kind == "onnx":
        return from_onnx(source.model, source)
    if source.kind == "torchscript":
        return from_torchscript(source, opset)
    if opset < MIN_TORCH_OPSET:
        raise InputError(
            f"opset {opset}: PyTorch's exporter writes {MIN_TORCH_OPSET} and newer; give --opset 18 or more"
        )
    if source.inputs_from is not None and (problem := refused_call(source)):
        raise InputError(problem)  # said at once, and by the model: torch.export lets a wrong dtype through
    notes: list[str] = []
    program = source.model if source.kind == "exported_program" else _export(source, notes)
    _check_values(program, source)
    return _from_program(program, source, opset, notes)


def _export(source: Source, notes: list[str]) -> torch.export.ExportedProgram:
    """torch.export of a module; batch and sequence stay dynamic wherever the model allows it."""
    error: Exception | None = None
    for attempt in _attempts(source):
        for experts in (False, True):
            if experts and not _batch_experts(source.model, notes):
                continue
            try:
                with torch.no_grad(), silence():
                    program = torch.export.export(
                        source.model, attempt.args, attempt.kwargs, dynamic_shapes=attempt.shapes, strict=False
                    )
            except Exception as failure:  # torch.export raises whatever the model's own code raises
                error = error or failure
                continue
            notes.extend([attempt.note] if attempt.note else [])
            return program
    assert error is not None
    raise InputError(
        refused_call(source) or f"PyTorch can't trace {type(source.model).__name__}: {reason(error)}"
    ) from error


def _check_values(program: torch.export.ExportedProgram, source: Source) -> None:
    """Raise InputError for a model that returns no tensor, or takes or returns numbers that ONNX has no type for."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    name = type(source.model).__name__
    if not any(isinstance(values.get(str(output)), torch.Tensor) for output in program.graph_signature.user_outputs):
        raise InputError(f"{name} returns no tensor: forward must return tensors, alone or in tuples, lists and dicts")
    taken, returned = program.graph_signature.user_inputs, program.graph_signature.user_outputs
    for what, items in (("takes", taken), ("returns", returned)):
        for value in (values.get(str(item)) for item in items):
            if isinstance(value, torch.Tensor) and value.dtype.is_complex:
                raise InputError(f"{name} {what} complex numbers, which no runtime has: use torch.view_as_real there")


@dataclass(frozen=True)
class _Attempt:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Any
    note: str = ""


def _attempts(source: Source) -> Iterator[_Attempt]:
    """Ways to call torch.export, the most dynamic first."""
    args, kwargs = source.args, source.kwargs
    names = list(inspect.signature(source.model.forward).parameters)[: len(args)]
    shapes = source.dynamic_shapes
    if shapes is None:
        shapes = automatic_dims(source.model, args, kwargs)
    bigger = grown(args, kwargs, shapes, names)
    if not _same_shapes(bigger, (args, kwargs)):
        yield _Attempt(*bigger, shapes)
    yield _Attempt(args, kwargs, shapes)
    if source.dynamic_shapes is None:
        yield _Attempt(args, kwargs, None, "no dimension could be made dynamic: all shapes are the example's")


def _same_shapes(a: Any, b: Any) -> bool:
    shapes = [[leaf.shape for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)] for call in (a, b)]
    return shapes[0] == shapes[1]


def automatic_dims(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Every axis that may be a batch or a sequence as ``Dim.AUTO``: an integer tensor's, all but the last of others.

    Dim.AUTO becomes a number where the model needs one; unlike a named Dim it isn't frozen by an example size of 1.
    """

    def axes(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return dict.fromkeys(free_axes(value), torch.export.Dim.AUTO)

    call = {**by_parameter(model, args), **kwargs}
    return {name: pytree.tree_map(axes, value) for name, value in call.items()}


def _batch_experts(model: torch.nn.Module, notes: list[str]) -> bool:
    """Switch a mixture of experts of transformers to the implementation that can be traced; whether there was one."""
    switched = False
    for module in model.modules():
        config = getattr(module, "config", None)
        setter = getattr(module, "set_experts_implementation", None)
        current = getattr(config, "_experts_implementation", None)
        if setter is not None and current not in (None, "batched_mm"):
            setter("batched_mm")
            switched = True
    if switched:
        notes.append(
            "experts run as batched_mm in the export: PyTorch can't trace a loop over the experts that were hit"
        )
    return switched


def _from_program(program: torch.export.ExportedProgram, source: Source, opset: int, notes: list[str]) -> Traced:
    portable = with_plain_outputs(spell_out(program))
    try:
        with torch.no_grad(), silence():
            exported = torch.onnx.export(portable, dynamo=True, opset_version=opset, optimize=False, verbose=False)
    except Exception as error:  # the exporter wraps failures of any kind
        raise InputError(f"PyTorch can't write the model as ONNX: {reason(error)}") from error
    assert exported is not None
    model = exported.model
    got = model.opset_imports.get("")
    if got != opset:
        raise InputError(f"opset {opset} was asked for and PyTorch's exporter wrote {got}: give --opset {got}")
    merge_tied(model)
    if exported.exported_program is not None:
        restore_scalars(model, exported.exported_program)
    lower(model)
    _set_traces_aside(model)
    parameters = _parameters(program, source)
    leaves = call_leaves(program, parameters)
    traced = Traced(model, portable, parameters, notes=notes)
    name_inputs(traced, leaves)
    name_outputs(model, program)
    symbols = name_dims(traced, source)
    record_ranges(traced, program, symbols, source)
    straighten(model)
    traced.high = {**vocabularies(model), **source.high}
    return traced


def _set_traces_aside(model: ir.Model) -> None:
    """Keep the exporter's stack traces for the norms' locations, out of the files: they are most of a graph's size."""
    for node in model.graph.all_nodes():
        for key in _BULKY_METADATA:
            text = node.metadata_props.pop(key, None)
            if text is not None:
                node.meta[key] = text


def _parameters(program: torch.export.ExportedProgram, source: Source) -> list[str]:
    """forward's parameter names; "*rest" and "**rest" for variadic ones."""
    if source.kind == "module":
        marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        found = inspect.signature(source.model.forward).parameters.values()
        return [marks.get(parameter.kind, "") + parameter.name for parameter in found]
    names = program.module_call_graph[0].signature
    given = names.forward_arg_names if names is not None else None
    if given:
        return list(given)
    args_spec, kwargs_spec = program.call_spec.in_spec.children()
    count = args_spec.num_children
    users = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    plain = (
        users[:count] if all(child.is_leaf() for child in args_spec.children()) else [f"arg{i}" for i in range(count)]
    )
    return [*plain, *(kwargs_spec.context or [])]
