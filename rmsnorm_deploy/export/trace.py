"""From a loaded source to an ONNX graph that still spells everything out, and to how the model is called."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.example import grown
from rmsnorm_deploy.export.weights import merge_tied
from rmsnorm_deploy.load import Source
from rmsnorm_deploy.runtime.binding import bind_parameters, key_text

MIN_TORCH_OPSET = 18
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BULKY_METADATA = tuple(f"pkg.torch.onnx.{key}" for key in ("stack_trace", "fx_node", "class_hierarchy")) + ("namespace",)
_INT_TYPES = (ir.DataType.INT64, ir.DataType.INT32)


@dataclass
class Traced:
    """An unfused ONNX model, with names and dims as the user knows them."""

    model: ir.Model
    program: torch.export.ExportedProgram | None
    parameters: list[str]
    constants: list[dict[str, Any]] = field(default_factory=list)
    dims: dict[str, dict[str, int | None]] = field(default_factory=dict)
    high: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Leaf:
    """One argument of the example call: where it sits and what it is."""

    path: str
    value: Any


def trace(source: Source, opset: int) -> Traced:
    """The source as an ONNX graph of the given opset.

    Raises:
        InputError: the opset can't be had, or PyTorch can't trace the model; the message carries PyTorch's reason.
    """
    if source.kind == "onnx":
        return _from_onnx(source.model, source)
    if source.kind == "torchscript":
        return _from_torchscript(source, opset)
    if opset < MIN_TORCH_OPSET:
        raise InputError(f"opset {opset}: PyTorch's exporter writes {MIN_TORCH_OPSET} and newer; give --opset 18 or more")
    notes: list[str] = []
    program = source.model if source.kind == "exported_program" else _export(source, notes)
    return _from_program(program, source, opset, notes)


# -- PyTorch modules and programs


def _export(source: Source, notes: list[str]) -> torch.export.ExportedProgram:
    """torch.export of a module; batch and sequence stay dynamic wherever the model allows it."""
    error: Exception | None = None
    for attempt in _attempts(source):
        for experts in (False, True):
            if experts and not _batch_experts(source.model, notes):
                continue
            try:
                with torch.no_grad(), _silence():
                    program = torch.export.export(
                        source.model, attempt.args, attempt.kwargs, dynamic_shapes=attempt.shapes, strict=False
                    )
            except Exception as failure:  # torch.export raises whatever the model's own code raises
                error = error or failure
                continue
            notes.extend([attempt.note] if attempt.note else [])
            return program
    assert error is not None
    raise InputError(f"PyTorch can't trace {type(source.model).__name__}: {_reason(error)}") from error


@dataclass(frozen=True)
class _Attempt:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Any
    note: str = ""


def _attempts(source: Source) -> Iterator[_Attempt]:
    """Ways to call torch.export, the most dynamic first."""
    args, kwargs = source.args, source.kwargs
    names = [name for name in inspect.signature(source.model.forward).parameters][: len(args)]
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
    """Every axis that may be a batch or a sequence as ``Dim.AUTO``: all of an integer tensor's, all but the last of others.

    Dim.AUTO becomes a number where the model needs one; unlike a named Dim it isn't frozen by an example size of 1.
    """

    def axes(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        count = value.ndim if not value.is_floating_point() and value.dtype != torch.bool else value.ndim - 1
        return dict.fromkeys(range(count), torch.export.Dim.AUTO)

    call = {**_by_parameter(model, args), **kwargs}
    return {name: pytree.tree_map(axes, value) for name, value in call.items()}


def _by_parameter(model: torch.nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    parameters = list(inspect.signature(model.forward).parameters.values())
    for i, parameter in enumerate(parameters[: len(args)]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            named[parameter.name] = tuple(args[i:])
            break
        named[parameter.name] = args[i]
    return named


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
        notes.append("experts run as batched_mm in the export: PyTorch can't trace a loop over the experts that were hit")
    return switched


def _from_program(program: torch.export.ExportedProgram, source: Source, opset: int, notes: list[str]) -> Traced:
    try:
        with torch.no_grad(), _silence():
            exported = torch.onnx.export(program, dynamo=True, opset_version=opset, optimize=False, verbose=False)
    except Exception as error:  # the exporter wraps failures of any kind
        raise InputError(f"PyTorch can't write the model as ONNX: {_reason(error)}") from error
    assert exported is not None
    model = exported.model
    got = model.opset_imports.get("")
    if got != opset:
        raise InputError(f"opset {opset} was asked for and PyTorch's exporter wrote {got}: give --opset {got}")
    merge_tied(model)
    _set_traces_aside(model)
    parameters = _parameters(program, source)
    leaves = call_leaves(program, parameters)
    traced = Traced(model, program, parameters, notes=notes)
    _name_inputs(traced, leaves)
    _name_outputs(model, program)
    symbols = _name_dims(traced, leaves, source)
    _record_ranges(traced, program, symbols, source)
    traced.high = {**_vocabularies(model), **source.high}
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
        marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        found = inspect.signature(source.model.forward).parameters.values()
        return [marks.get(parameter.kind, "") + parameter.name for parameter in found]
    names = program.module_call_graph[0].signature
    given = names.forward_arg_names if names is not None else None
    if given:
        return list(given)
    args_spec, kwargs_spec = program.call_spec.in_spec.children()
    count = args_spec.num_children
    users = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    plain = users[:count] if all(child.is_leaf() for child in args_spec.children()) else [f"arg{i}" for i in range(count)]
    return [*plain, *(kwargs_spec.context or [])]


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


def _name_inputs(traced: Traced, leaves: list[Leaf]) -> None:
    tensors = [leaf for leaf in leaves if type(leaf.value).__name__ == "TensorArgument"]
    inputs = list(traced.model.graph.inputs)
    by_name = {value.name: value for value in inputs}
    taken = [by_name.get(leaf.value.name) for leaf in tensors]
    if None in taken or len(taken) != len(inputs):
        given, want = [v.name for v in inputs], [leaf.path for leaf in tensors]
        raise InputError(f"the ONNX graph has inputs {given} where the model takes {want}: this call can't be exported")
    _free_names(traced.model, [leaf.path for leaf in tensors], {v for v in inputs})
    for leaf, value in zip(tensors, taken, strict=True):
        assert value is not None
        value.name = leaf.path
    for leaf in leaves:
        if leaf not in tensors:
            traced.constants.append({"path": leaf.path, "value": _plain(getattr(leaf.value, "value", None))})


def _plain(value: Any) -> Any:
    """A constant as JSON can hold it."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _name_outputs(model: ir.Model, program: torch.export.ExportedProgram) -> None:
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
            copy.outputs[0].dtype, copy.outputs[0].shape = value.dtype, value.shape
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


def _name_dims(traced: Traced, leaves: list[Leaf], source: Source) -> dict[str, str]:
    """Names for the symbols that torch.export made: the user's, else batch and seq by position. symbol -> name."""
    names: dict[str, str] = {}
    for value in traced.model.graph.inputs:
        path = value.name or ""
        asked = source.dims.get(path, {})
        for axis, dim in enumerate(value.shape or ()):
            symbol = None if isinstance(dim, int) else str(dim.value)
            if symbol is None or not symbol.isidentifier() or symbol in names:
                continue
            wanted = asked.get(axis) or _usual_name(value, axis)
            names[symbol] = _unique(wanted, set(names.values()))
    pattern = re.compile(r"\b[A-Za-z_]\w*")
    _rename_dims(traced.model, lambda text: pattern.sub(lambda match: names.get(match[0], match[0]), text))
    return names


def _usual_name(value: ir.Value, axis: int) -> str:
    rank = len(value.shape or ())
    if axis == 0:
        return "batch"
    if axis == 1 and (rank == 3 or value.dtype in (*_INT_TYPES, ir.DataType.BOOL)):
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


def _record_ranges(
    traced: Traced, program: torch.export.ExportedProgram, symbols: dict[str, str], source: Source
) -> None:
    examples = _example_sizes(program)
    for symbol, limits in program.range_constraints.items():
        name = symbols.get(str(symbol))
        if name is None:
            continue
        low, high = source.ranges.get(name, (None, None))
        least, most = _as_int(limits.lower), _as_int(limits.upper)
        traced.dims[name] = {
            "example": examples.get(str(symbol)),
            "min": low if low is not None else (least if least is not None and least > 2 else 0),
            "max": high if high is not None else (most if most is not None and most < 2**31 else None),
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


def _vocabularies(model: ir.Model) -> dict[str, int]:
    """For integer inputs that index a table, the number of its rows."""
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        if value.dtype not in _INT_TYPES:
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


# -- ONNX files and TorchScript


def _from_onnx(path: Path | ir.Model, source: Source) -> Traced:
    try:
        model = path if isinstance(path, ir.Model) else ir.load(path)
    except Exception as error:  # protobuf, onnx and the file system each have their own
        raise InputError(f"{path} can't be read as ONNX: {_reason(error)}") from error
    if model.ir_version < 4:
        # before IR 4 every initializer had to be listed as an input too
        kept = [v for v in model.graph.inputs if not v.is_initializer()]
        model.graph.inputs.clear()
        model.graph.inputs.extend(kept)
    merge_tied(model)
    traced = Traced(model, None, [], high=_vocabularies(model))
    for value in model.graph.inputs:
        for dim in value.shape or ():
            name = None if isinstance(dim, int) or dim.value is None else str(dim.value)
            if name is not None and name.isidentifier():
                low, high = source.ranges.get(name, (0, None))
                traced.dims.setdefault(name, {"example": None, "min": low, "max": high})
    return traced


def _from_torchscript(source: Source, opset: int) -> Traced:
    """TorchScript goes through PyTorch's older exporter: the newer one can't read it."""
    leaves = [(path, value) for path, value in _script_leaves(source) if isinstance(value, torch.Tensor)]
    axes = {
        path: {axis: (source.dims.get(path, {}).get(axis) or f"{path}_dim{axis}") for axis in source.dims.get(path, {})}
        for path, _ in leaves
    }
    buffer = io.BytesIO()
    try:
        with torch.no_grad(), _silence():
            torch.onnx.export(
                source.model,
                (*source.args, *source.kwargs.values()),
                buffer,
                dynamo=False,
                opset_version=opset,
                input_names=[path for path, _ in leaves],
                dynamic_axes={path: found for path, found in axes.items() if found},
                do_constant_folding=False,
            )
    except Exception as error:  # as above
        raise InputError(f"PyTorch can't write the TorchScript model as ONNX: {_reason(error)}") from error
    import onnx

    proto = onnx.shape_inference.infer_shapes(onnx.load_from_string(buffer.getvalue()))
    traced = _from_onnx(ir.from_proto(proto), source)
    traced.parameters = [path for path, _ in _script_leaves(source)]
    for path, value in _script_leaves(source):
        for axis, name in axes.get(path, {}).items():
            traced.dims.setdefault(name, {"example": None, "min": 0, "max": None})["example"] = value.shape[axis]
    return traced


def _script_leaves(source: Source) -> list[tuple[str, Any]]:
    names = [argument.name for argument in source.model.forward.schema.arguments[1:]]
    return [*zip(names, source.args, strict=False), *source.kwargs.items()]


# -- helpers


def cast_module(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    """The module's floating-point weights in another dtype; rotary frequencies keep theirs, since half rounds angles."""
    dtype = PRECISIONS[precision]
    done: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                cast = done.setdefault(id(parameter), torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
                module._parameters[name] = cast
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not name.endswith("inv_freq"):
                module._buffers[name] = buffer.to(dtype)
    return model


def cast_floats(value: Any, precision: str) -> Any:
    """Floating-point tensors of example inputs in the dtype of ``precision``."""
    dtype = PRECISIONS[precision]

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, value)


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """PyTorch prints and logs whole programs while it tries; its errors arrive as exceptions anyway."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
