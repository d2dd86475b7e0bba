"""From a path to a ``Source``: one function a kind of file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load import inputs as call_inputs
from rmsnorm_deploy.load.infer import infer_inputs
from rmsnorm_deploy.load.inputs import Call
from rmsnorm_deploy.load.pickles import load_checkpoint
from rmsnorm_deploy.load.prepare import prepare_module
from rmsnorm_deploy.load.safetensors_file import read_safetensors, read_shards
from rmsnorm_deploy.load.sniff import FileKind, identify
from rmsnorm_deploy.load.source import Source
from rmsnorm_deploy.load.specs import Ranges, Spec, TensorSpec, parse_dims, parse_inputs
from rmsnorm_deploy.load.state import Weights, find_state, load_state
from rmsnorm_deploy.load.trust import Trust
from rmsnorm_deploy.recipe import Recipe, load_recipe


def load_source(
    path: str | Path,
    *,
    recipe: str | Path | None = None,
    imports: Iterable[str | Path] = (),
    allow_classes: Iterable[str] = (),
    inputs: Iterable[str] = (),
    dims: Iterable[str] = (),
    state_key: str | None = None,
) -> Source:
    """Whatever is at ``path``, ready to be traced.

    Args:
        path: a file written by torch.save (a module, or a state dict with a recipe), a TorchScript archive, a .pt2, a
            safetensors or GGUF file, a folder of safetensors with an index, an ONNX file, a Hugging Face directory,
            or a recipe.
        recipe: the .py file that builds the model of a state dict, or gives the inputs of another model.
        imports: .py files whose classes a pickle may use.
        allow_classes: further classes a pickle may use, as "mod.Class" or "mod.*".
        inputs: ``--input`` options, see ``rmsnorm_deploy.load.specs``.
        dims: ``--dim`` options.
        state_key: which entry of a checkpoint holds the weights.

    Raises InputError, in one line, for everything that cannot be used as it is.
    """
    request = _Request(
        path=Path(path),
        recipe=load_recipe(recipe) if recipe is not None else None,
        imports=list(imports),
        allow_classes=list(allow_classes),
        specs=parse_inputs(list(inputs)),
        ranges=parse_dims(list(dims)),
        state_key=state_key,
    )
    kind = identify(request.path)
    source = _LOADERS[kind](request)
    source.path = request.path
    source.recipe = request.recipe.path if request.recipe else None
    source.notes = request.notes
    return source


@dataclass
class _Request:
    """The options of one load, and the notes that gather on the way."""

    path: Path
    recipe: Recipe | None
    imports: list[str | Path]
    allow_classes: list[str]
    specs: list[Spec]
    ranges: Ranges
    state_key: str | None
    notes: list[str] = field(default_factory=list)


def _load_pickle(request: _Request) -> Source:
    modules = [request.recipe.module] if request.recipe else []
    trust = Trust(request.imports, request.allow_classes, modules)
    found = load_checkpoint(request.path, trust)
    state = find_state(request.path, found, request.state_key, request.notes)
    if isinstance(state, nn.Module):
        if request.recipe:
            name = request.recipe.path.name
            request.notes.append(f"{request.path.name} holds a whole module: {name} gives the inputs only")
        return _module_source(request, state)
    return _state_source(request, state)


def _load_safetensors(request: _Request) -> Source:
    if request.recipe is None:
        raise _no_recipe(request)
    return _state_source(request, read_safetensors(request.path))


def _load_shards(request: _Request) -> Source:
    if request.recipe is None:
        raise _no_recipe(request)
    return _state_source(request, read_shards(request.path))


def _load_torchscript(request: _Request) -> Source:
    from rmsnorm_deploy.load.programs import load_torchscript

    module = load_torchscript(request.path)
    return _with_call(request, "torchscript", module, _call(request, module))


def _load_program(request: _Request) -> Source:
    from rmsnorm_deploy.load.programs import load_program, program_call

    program = load_program(request.path)
    for given, option in ((request.recipe, "--recipe"), (request.ranges, "--dim")):
        if given:
            raise InputError(f"{request.path}: a program has its own inputs and ranges: drop {option}")
    call = program_call(request.path, program, request.specs, request.notes)
    return Source("exported_program", program, call.args, call.kwargs, dims=call.dims, high=call.high)


def _load_huggingface(request: _Request) -> Source:
    from rmsnorm_deploy.load.huggingface import load_huggingface

    model, specs = load_huggingface(request.path, request.notes)
    if request.recipe or request.specs:
        return _module_source(request, model)
    prepared, notes = prepare_module(model)
    request.notes += notes
    call = call_inputs.make_call(specs, call_inputs.signature(prepared), request.ranges)
    return _with_call(request, "module", prepared, call)


def _load_recipe(request: _Request) -> Source:
    if request.recipe is not None:
        raise InputError(f"{request.path}: is a recipe itself: drop --recipe, or give the weights' file in its place")
    request.recipe = load_recipe(request.path, option="")
    model = request.recipe.build()
    request.notes.append(f"model and weights as {request.path.name} builds them")
    return _module_source(request, model)


def _load_onnx(request: _Request) -> Source:
    from rmsnorm_deploy.load.onnx_file import check_onnx

    for given, option in ((request.specs, "--input"), (request.ranges, "--dim"), (request.recipe, "--recipe")):
        if given:
            raise InputError(f"{request.path}: an ONNX file has its own inputs and weights: drop {option}")
    check_onnx(request.path)
    return Source("onnx", request.path)


_LOADERS: dict[FileKind, Callable[[_Request], Source]] = {
    "pickle": _load_pickle,
    "safetensors": _load_safetensors,
    "shards": _load_shards,
    "torchscript": _load_torchscript,
    "program": _load_program,
    "huggingface": _load_huggingface,
    "gguf": _load_huggingface,
    "recipe": _load_recipe,
    "onnx": _load_onnx,
}


def _state_source(request: _Request, weights: Weights) -> Source:
    if request.recipe is None:
        raise _no_recipe(request)
    model = request.recipe.build(weights)
    load_state(model, weights, request.path, request.recipe.path, request.notes)
    return _module_source(request, model)


def _no_recipe(request: _Request) -> InputError:
    return InputError(
        f"{request.path}: holds weights only, no model: give --recipe FILE.py, whose build() returns the model they "
        f"belong to (docs/recipes.md)"
    )


def _module_source(request: _Request, model: nn.Module) -> Source:
    prepared, notes = prepare_module(model)
    request.notes += notes
    source = _with_call(request, "module", prepared, _call(request, prepared))
    if request.recipe:
        source.engine_profile = request.recipe.engine_profile()
        unknown = set(source.engine_profile) - {n for axes in source.dims.values() for n in axes.values()}
        if unknown:
            raise InputError(
                f"{request.recipe.path}: engine_profile() names {', '.join(sorted(unknown))}, which no input has"
            )
    return source


def _call(request: _Request, model: nn.Module) -> Call:
    """Inputs from the options, else the recipe, else the first layer."""
    parameters = call_inputs.signature(model)
    if request.specs:
        return call_inputs.make_call(_with_bounds(request.specs, model), parameters, request.ranges)
    given = request.recipe.inputs() if request.recipe else None
    if given is not None and request.recipe is not None:
        return _recipe_call(request, request.recipe, model, given)
    call, note = infer_inputs(model, request.ranges)
    request.notes.append(note)
    return call


def _recipe_call(
    request: _Request, recipe: Recipe, model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]
) -> Call:
    call = Call(given[0], given[1], recipe.dims(), recipe.high())
    tensors = call_inputs.tensors_of(call_inputs.signature(model), call.args, call.kwargs)
    call_inputs.check_dims(tensors, call.dims, str(recipe.path))
    used = {name for axes in call.dims.values() for name in axes.values()}
    for name in request.ranges:
        if name not in used:
            raise InputError(
                f"--dim {name}: {recipe.path} names no such dim; it has {', '.join(sorted(used)) or 'none'}"
            )
    text = ", ".join(f"{p}={_dtype(t)}{_shape(t, call.dims.get(p, {}))}" for p, t in tensors.items())
    request.notes.append(f"inputs taken from {recipe.path.name}: {text}")
    return call


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor, names: dict[int, str]) -> str:
    return f"[{','.join(names.get(i, str(n)) for i, n in enumerate(tensor.shape))}]"


def _with_bounds(specs: list[Spec], model: nn.Module) -> list[Spec]:
    """Integers without a bound that feed an embedding get the smallest vocabulary of the model."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]

    def bounded(spec: Spec) -> Spec:
        ids = isinstance(spec, TensorSpec) and spec.dtype in (torch.int64, torch.int32) and spec.high is None
        if not ids or not isinstance(spec, TensorSpec) or not tables or "mask" in spec.path:
            return spec
        return TensorSpec(spec.path, spec.dtype, spec.shape, min(tables))

    return [bounded(spec) for spec in specs]


def _with_call(request: _Request, kind: Any, model: Any, call: Call) -> Source:
    """A source with its dynamic shapes: those asked for by name must hold, inferred ones give way to the model."""
    asked = bool(request.specs) or (request.recipe is not None and bool(call.dims))
    shapes = None
    if kind == "module":
        hint = Dim.DYNAMIC if asked else Dim.AUTO
        shapes = call_inputs.dynamic_shapes(call_inputs.signature(model), call, request.ranges, hint)
    source = Source(kind, model, call.args, call.kwargs, shapes, call.dims, dict(request.ranges), call.high)
    if request.specs:
        source.inputs_from = " ".join(f"--input {shlex.quote(str(spec))}" for spec in request.specs)
    elif request.recipe is not None:
        source.inputs_from = f"inputs() of {request.recipe.path}"
    return source
