"""Programs rather than weights: TorchScript archives and torch.export programs (.pt2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.inputs import Call, example_tensor, walk
from rmsnorm_deploy.load.pickles import LOAD_ERRORS
from rmsnorm_deploy.load.specs import Spec, TensorSpec
from rmsnorm_deploy.load.vet import vet_program

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# Names given to the symbols of a program by the axis on which they first appear.
_AXIS_NAMES = ("batch", "seq")


def load_torchscript(path: Path) -> torch.jit.ScriptModule:
    """A TorchScript archive in eval mode, on the CPU. Its code runs in TorchScript's interpreter, not in Python."""
    try:
        module: torch.jit.ScriptModule = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    except LOAD_ERRORS as error:
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(f"{path}: not a TorchScript archive that this torch reads: {text[:200]}") from error
    if not module._c._has_method("forward"):
        raise InputError(f"{path}: the TorchScript module has no forward()")
    module.eval()
    return module


def load_program(path: Path) -> torch.export.ExportedProgram:
    """A .pt2 archive, vetted first and its pickles restricted: by itself torch would unpickle and evaluate anything."""
    vet_program(path)
    try:
        with path.open("rb") as file, _weights_only():
            return torch.export.load(file)
    except LOAD_ERRORS as error:
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"{path}: not a program that torch {torch.__version__} reads: {type(error).__name__}: {text[:200]}"
        ) from error


def program_call(path: Path, program: torch.export.ExportedProgram, specs: list[Spec], notes: list[str]) -> Call:
    """Example inputs of a program and names for its dynamic axes.

    A program has its shapes already: ``specs`` may only name its dynamic axes. Without them the axes are named after
    where they are, one name a symbol.
    """
    symbols = _placeholders(program)
    args, kwargs = _examples(program, symbols)
    names = _parameter_names(program, args)
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    paths = [p for n, v in bound.items() for p, leaf in walk(v, n) if isinstance(leaf, torch.Tensor)]
    shapes = dict(zip(paths, [s for s in symbols.values() if s is not None], strict=False))
    given = _given_names(path, specs, shapes)
    dims, chosen = _name_axes(shapes, given)
    high = {s.path: s.high for s in specs if isinstance(s, TensorSpec) and s.high}
    notes.append("inputs taken from the program: " + ", ".join(_text(p, s, dims.get(p, {})) for p, s in shapes.items()))
    if chosen:
        notes.append(f"dynamic axes named {', '.join(chosen)}")
    return Call(args, kwargs, dims, high)


Shape = tuple[Any, ...]


def _placeholders(program: torch.export.ExportedProgram) -> dict[str, Shape | None]:
    """Shapes of the user's inputs by placeholder, in order; None for one that is no tensor."""
    user = [str(n) for n in program.graph_signature.user_inputs if isinstance(n, str)]
    nodes = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    return {n: tuple(nodes[n].shape) if isinstance(nodes.get(n), torch.Tensor) else None for n in user}


def _examples(
    program: torch.export.ExportedProgram, symbols: dict[str, Shape | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs saved with the program, or made up from its placeholders."""
    saved = program.example_inputs
    if saved is not None and saved[0] is not None and (saved[0] or saved[1] or not symbols):
        return tuple(saved[0]), dict(saved[1])
    leaves: list[Any] = []
    nodes = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    for spec in program.graph_signature.user_inputs:
        value = nodes.get(spec) if isinstance(spec, str) else spec
        leaves.append(_like(str(spec), value) if isinstance(value, torch.Tensor) else value)
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return tuple(args), dict(kwargs)


def _like(name: str, fake: torch.Tensor) -> torch.Tensor:
    sizes = tuple(_hint(d) for d in fake.shape)
    return example_tensor(TensorSpec(name, fake.dtype, sizes), {})


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if isinstance(hint, int) else 2


def _parameter_names(program: torch.export.ExportedProgram, args: tuple[Any, ...]) -> list[str]:
    signature = program.module_call_graph[0].signature
    names = list(getattr(signature, "forward_arg_names", None) or []) if signature is not None else []
    return names[: len(args)] if len(names) >= len(args) else [f"arg{i}" for i in range(len(args))]


def _given_names(path: Path, specs: list[Spec], shapes: dict[str, Shape]) -> dict[str, str]:
    """Symbol -> name from the --input options, each checked against the program's own shape."""
    given: dict[str, str] = {}
    for spec in specs:
        if not isinstance(spec, TensorSpec) or spec.path not in shapes:
            raise InputError(
                f"--input {spec.path}: {path} has no such tensor input; it has {', '.join(shapes) or 'none'}"
            )
        shape = shapes[spec.path]
        if len(shape) != len(spec.shape):
            raise InputError(f"--input {spec}: {path} has {len(shape)} axes there")
        for axis, (size, name) in enumerate(zip(shape, spec.shape, strict=True)):
            if isinstance(size, int) and size != name:
                raise InputError(
                    f"--input {spec}: {path} fixes axis {axis} at {size}: export it with a dynamic axis there"
                )
            if not isinstance(size, int) and isinstance(name, str):
                given[str(size)] = name
    return given


def _name_axes(shapes: dict[str, Shape], given: dict[str, str]) -> tuple[dict[str, dict[int, str]], list[str]]:
    """Names for symbolic axes; expressions of symbols get none. Also the names that were made up here."""
    names, chosen = dict(given), []
    for shape in shapes.values():
        for axis, size in enumerate(shape):
            symbol = str(size)
            if isinstance(size, int) or symbol in names or not symbol.isidentifier():
                continue
            wanted = _AXIS_NAMES[axis] if axis < len(_AXIS_NAMES) else f"dim{axis}"
            names[symbol] = wanted if wanted not in names.values() else f"{wanted}{len(names)}"
            chosen.append(names[symbol])
    dims = {
        path: {i: names[str(d)] for i, d in enumerate(shape) if not isinstance(d, int) and str(d) in names}
        for path, shape in shapes.items()
    }
    return {p: d for p, d in dims.items() if d}, chosen


def _text(path: str, shape: Shape, names: dict[int, str]) -> str:
    return f"{path}[{','.join(names.get(i, str(size)) for i, size in enumerate(shape))}]"


@contextmanager
def _weights_only() -> Iterator[None]:
    """torch.load inside is restricted to tensors, whatever it is called with."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
