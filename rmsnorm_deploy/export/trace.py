"""From a loaded source to an ONNX graph that still spells everything out, and to how the model is called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.chance import program_draws, random_draws
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export import translations
from rmsnorm_deploy.export.complex_numbers import with_pairs
from rmsnorm_deploy.export.dynamic import Image, fixed_axes, guesses, name_keywords
from rmsnorm_deploy.export.example import grown
from rmsnorm_deploy.export.float8 import widen_float8
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
from rmsnorm_deploy.export.outputs import with_plain_call
from rmsnorm_deploy.export.own_ops import spell_out
from rmsnorm_deploy.export.quiet import reason, silence, why_not_traced
from rmsnorm_deploy.export.scalars import restore_scalars
from rmsnorm_deploy.export.stacked import stack_weights
from rmsnorm_deploy.export.straighten import straighten
from rmsnorm_deploy.export.traced import Traced
from rmsnorm_deploy.export.weights import merge_tied
from rmsnorm_deploy.load import Source, refused_call
from rmsnorm_deploy.load.infer import first_layer
from rmsnorm_deploy.load.prepare import structural_copy
from rmsnorm_deploy.load.quantized import quantized_modules
from rmsnorm_deploy.runtime.results import opened

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
    traced = _traced(source, opset)
    traced.draws = random_draws(traced.model)
    if traced.program is not None:
        traced.draws = traced.draws or program_draws(traced.program)
    if traced.draws is not None:
        traced.notes.append(f"the model draws random numbers ({traced.draws}): it gives others each time it is run")
    return traced


def _traced(source: Source, opset: int) -> Traced:
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
    if source.kind == "exported_program":
        _check_values(source.model, source)
        return _from_program(source.model, source, opset)
    return _from_module(source, opset)


def _from_module(source: Source, opset: int) -> Traced:
    """A module by torch.export; batch and sequence stay dynamic wherever the model and the exporter allow it."""
    first: _Refused | None = None
    for attempt in _attempts(source):
        try:
            return _try(attempt, source, opset)
        except _Refused as refused:
            first = first or refused
    assert first is not None
    quantized = quantized_modules(source.model)
    if quantized is not None:
        raise InputError(f"{type(source.model).__name__} can't be exported, {quantized} ({first})") from first.__cause__
    raise InputError(refused_call(source) or str(first)) from first.__cause__


class _Refused(InputError):
    """PyTorch can't trace the model, or write what it traced; with other dynamic axes it may."""


def _try(attempt: _Attempt, source: Source, opset: int) -> Traced:
    """One attempt, on modules and tensors of its own.

    A failed one leaves marks: on the tensors, which axes are dynamic; in caches of the model, symbols for their sizes.
    """
    model = structural_copy(source.model)[0]
    model.register_forward_hook(lambda module, given, result: opened(result))
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (attempt.args, attempt.kwargs))
    name_keywords(model, kwargs)
    try:
        with torch.no_grad(), silence():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=attempt.shapes, strict=False)
    except Exception as error:  # torch.export raises whatever the model's own code raises
        raise _Refused(f"PyTorch can't trace {type(source.model).__name__}: {why_not_traced(error)}") from error
    _check_values(program, source)
    traced = _from_program(program, source, opset)
    traced.notes += [attempt.note] if attempt.note else _fixed(traced, source)
    return traced


def _fixed(traced: Traced, source: Source) -> list[str]:
    """Notes on the axes that the model fixed, or takes up to a size only."""
    asked = None if source.dynamic_shapes is None else source.dims
    limits = {name: limit["max"] for name, limit in traced.dims.items() if name not in source.ranges}
    return [
        *fixed_axes(traced.model.graph.inputs, asked, _image(source.model)),
        *(
            f"dim '{name}' is {most} at most: past it the model's code goes another way, and the file would not"
            for name, most in limits.items()
            if most is not None
        ),
    ]


def _image(model: torch.nn.Module) -> Image | None:
    """What a model whose first layer is a convolution takes."""
    layer = first_layer(model)
    return Image.of(layer.shapes[0]) if layer is not None and "Conv" in layer.kind else None


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
    given = source.dynamic_shapes
    wanted = [given] if given is not None else list(guesses(source.model, args, kwargs, _image(source.model)))
    tried = set()
    for grow in ({}, {"batch_only": True}, None):  # an axis of size one would be frozen
        for number, shapes in enumerate(wanted):
            call = (args, kwargs) if grow is None else grown(args, kwargs, shapes, names, **grow)
            key = (number, *(leaf.shape for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)))
            if key not in tried:
                tried.add(key)
                yield _Attempt(call[0], call[1], shapes)
    if given is None:
        yield _Attempt(args, kwargs, None, "no dimension could be made dynamic: all shapes are the example's")


def _from_program(program: torch.export.ExportedProgram, source: Source, opset: int) -> Traced:
    portable = with_plain_call(spell_out(program))
    try:
        with torch.no_grad(), silence():
            exported = torch.onnx.export(
                with_pairs(portable),
                dynamo=True,
                opset_version=opset,
                optimize=False,
                verbose=False,
                custom_translation_table=translations.table(),
            )
    except Exception as error:  # the exporter wraps failures of any kind
        raise _Refused(f"PyTorch can't write the model as ONNX: {reason(error)}") from error
    assert exported is not None
    model = exported.model
    got = model.opset_imports.get("")
    if got != opset:
        raise InputError(f"opset {opset} was asked for and PyTorch's exporter wrote {got}: give --opset {got}")
    merge_tied(model)
    if exported.exported_program is not None:
        restore_scalars(model, exported.exported_program)
    lower(model)
    widen_float8(model)
    _set_traces_aside(model)
    parameters = _parameters(program, source)
    leaves = call_leaves(program, parameters)
    traced = Traced(model, portable, parameters)
    if exported.exported_program is not None:
        traced.notes += _state(exported.exported_program)
    name_inputs(traced, leaves)
    name_outputs(model, program)
    symbols = name_dims(traced, source)
    record_ranges(traced, program, symbols, source)
    straighten(model)
    stack_weights(model.graph)
    traced.high = {**vocabularies(model), **source.high}
    return traced


def _state(program: torch.export.ExportedProgram) -> list[str]:
    """A note on the buffers that a model writes to, which a file can't keep."""
    written = sorted(set(program.graph_signature.buffers_to_mutate.values()))
    if not written:
        return []
    return [f"the model writes to {', '.join(written)}: the file begins every call with what was there at export"]


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
