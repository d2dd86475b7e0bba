"""A traced torch program, run as it is or with every float lifted to float64.

Lifted means: parameters, buffers, constants and inputs keep their values but are held in float64; an operator argument
that names a narrower float dtype names float64 instead; the default dtype is float64. So no cast, accumulation or
stored intermediate of the model's own rounds to less than float64 does. Integers and booleans are left alone.
The operators are PyTorch's own, never this package's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.runtime.binding import bind_parameters, key_text

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

# metadata assertions name the dtypes that lifting changes; guards and shape constraints say nothing about values
_SKIPPED = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}

# where the subgraph and its operands sit among the arguments of an operator that only changes a mode around it
_WRAPPERS = {
    "wrap_with_set_grad_enabled": (1, 2),
    "wrap_with_autocast": (4, 5),
    "invoke_subgraph": (0, 2),
    "wrap_activation_checkpoint": (0, 1),
    "tag_activation_checkpoint": (0, 1),
    "wrap": (0, 1),
}

# what operators say that have no kernel for double precision; not what they say of operands that do not fit together
_NO_KERNEL = re.compile(
    r"not implemented for '(Complex)?Double'|[Uu]nsupported (dtype|scalar type):? (torch\.)?(double|Double|float64)\b"
    r"|\bgot (Double|double|torch\.float64)\b(?! and )|expected scalar type (Float|Half|BFloat16) but found Double"
    r"|expect \w+ to be either 32-bit or 16-bit float"
)


def _epsilon(dtype: torch.dtype) -> float:
    """What PyTorch's RMSNorm adds where it is given none: the epsilon of the dtype that it accumulates in."""
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


# arguments that operators take from the limits of their operand's dtype where they are not given
_LIMITS: dict[str, dict[str, Callable[[torch.dtype], float]]] = {
    "aten::rms_norm": {"eps": _epsilon},
    "aten::_fused_rms_norm": {"eps": _epsilon},
    "aten::nan_to_num": {
        "posinf": lambda dtype: torch.finfo(dtype).max,
        "neginf": lambda dtype: torch.finfo(dtype).min,
    },
}

Observer = Callable[[fx.Node, Any], None]


def widen(value: Any) -> Any:
    """A float tensor as float64 (complex as complex128), a dtype or device as the lifted run needs it, others as is."""
    if isinstance(value, torch.Tensor):
        wide = _WIDE.get(value.dtype)
        return value.detach().to("cpu", wide or value.dtype)
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


@dataclass(frozen=True)
class ProgramInput:
    """One leaf of the program's call: ``path`` is such as ``pair.0``; ``constant`` leaves are fixed at export."""

    path: str
    name: str
    constant: bool
    value: Any  # the fixed value, or the example tensor where the program kept one


class TorchProgram:
    """Runs an ``ExportedProgram`` on flat inputs, in its own dtypes or lifted to float64.

    Attributes:
        inputs: the leaves of the call, in the program's order.
        narrowed: names of operators that have no float64 kernel, and ran in the model's dtype even in a lifted run.
    """

    def __init__(self, program: torch.export.ExportedProgram, parameters: Sequence[str] = ()) -> None:
        self._graph_module = program.module(check_guards=False)
        self.inputs = _program_inputs(program, parameters)
        self.narrowed: set[str] = set()
        self._wide: dict[tuple[Any, ...], torch.Tensor] = {}

    def bind(self, feeds: dict[str, torch.Tensor]) -> list[Any]:
        """Flat arguments from tensors keyed by path. A leaf that is not fed takes its fixed or example value."""
        unknown = sorted(set(feeds) - {leaf.path for leaf in self.inputs})
        if unknown:
            known = ", ".join(leaf.path for leaf in self.inputs)
            raise InputError(f"the traced program has no input {unknown[0]!r}; it has {known}")
        values = []
        for leaf in self.inputs:
            if leaf.path not in feeds and leaf.value is None and not leaf.constant:
                raise InputError(f"input {leaf.path!r} of the traced program has no value; pass an array for it")
            values.append(feeds.get(leaf.path, leaf.value))
        return values

    def run(self, values: Sequence[Any], *, lift: bool, observe: Observer | None = None) -> list[torch.Tensor]:
        """Tensors of the output in flattened order; float64 when lifted. ``observe`` sees each node and its value."""
        interpreter = _Interpreter(self._graph_module, self, lift, observe)
        with torch.no_grad(), _default_dtype(torch.float64 if lift else torch.get_default_dtype()):
            # buffers and inputs may be written in place by the program: it gets its own
            copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
            result = interpreter.run(*[widen(v) for v in copies] if lift else copies, enable_io_processing=False)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def constant(self, value: torch.Tensor, lift: bool) -> torch.Tensor:
        """A parameter as it is, or in float64 (tied ones made once); a buffer as a copy, to be written to."""
        if not isinstance(value, torch.nn.Parameter):
            copy = value.detach().clone()
            return widen(copy) if lift else copy
        if not lift:
            return value.detach()
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if key not in self._wide:
            self._wide[key] = widen(value)
        return self._wide[key]


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, owner: TorchProgram, lift: bool, observe: Observer | None) -> None:
        super().__init__(module)
        self._owner, self._lift, self._observe = owner, lift, observe
        self._node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        value = super().run_node(n)
        if self._observe is not None:
            self._observe(n, value)
        return value

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if isinstance(value, fx.GraphModule):
            return _Subprogram(value, self._owner, self._lift, self._observe)
        if isinstance(value, torch.Tensor):
            return self._owner.constant(value, self._lift)
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target).endswith("_guards_fn"):
            return None
        return super().call_module(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = _operator_name(target)
        if name in _SKIPPED:
            return None
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(target, args, kwargs)
        if not self._lift:
            return super().call_function(target, args, kwargs)
        if name == "aten::view" and any(isinstance(argument, torch.dtype) for argument in args):
            return self._narrow_call(target, args, kwargs)  # the bits of a float64 are not the model's bits
        if name in _LIMITS:
            args, kwargs = self._with_limits(name, target, args, kwargs), {}
        try:
            return super().call_function(target, *pytree.tree_map(widen, (args, kwargs)))
        except RuntimeError as error:  # NotImplementedError is one
            if not _lacks_double(error):
                raise
            self._owner.narrowed.add(name)
            return self._narrow_call(target, args, kwargs)

    def _higher_order(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = _WRAPPERS.get(target.name())
        if place is not None and self._lift:  # under autocast a lifted run stays in float64
            return args[place[0]](*args[place[1] :])
        if target.name() == "cond":
            predicate, if_true, if_false, operands = args
            return (if_true if bool(predicate) else if_false)(*operands)
        return super().call_function(target, args, kwargs)

    def _with_limits(
        self, name: str, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """All arguments of an operator, with those that it would take from the limits of the operand's dtype."""
        given = {item.name: item.default_value for item in target._schema.arguments}
        given.update(zip(given, args, strict=False))
        given.update(kwargs)
        operand = self._node.args[0] if self._node is not None else None
        traced = operand.meta.get("val") if isinstance(operand, fx.Node) else None
        dtype = traced.dtype if isinstance(traced, torch.Tensor) else torch.float32
        for argument, limit in _LIMITS[name].items():
            if given[argument] is None and dtype.is_floating_point:
                given[argument] = limit(dtype)
        return tuple(given.values())

    def _narrow_call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator in the dtypes the model traced, and lift what comes out."""
        assert self._node is not None
        traced = pytree.tree_leaves((self._node.args, self._node.kwargs), is_leaf=lambda x: isinstance(x, fx.Node))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if len(traced) == len(leaves):
            leaves = [_as_traced(value, node) for value, node in zip(leaves, traced, strict=True)]
        narrow_args, narrow_kwargs = pytree.tree_unflatten(leaves, spec)
        return pytree.tree_map(widen, super().call_function(target, narrow_args, narrow_kwargs))


@dataclass
class _Subprogram:
    """A subgraph handed to a control-flow operator, called like the module it stands for."""

    module: fx.GraphModule
    owner: TorchProgram
    lift: bool
    observe: Observer | None

    def __call__(self, *operands: Any) -> Any:
        values = [widen(operand) for operand in operands] if self.lift else operands
        interpreter = _Interpreter(self.module, self.owner, self.lift, self.observe)
        return interpreter.run(*values, enable_io_processing=False)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _operator_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    return getattr(target, "__name__", str(target))


def _lacks_double(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or _NO_KERNEL.search(str(error)) is not None


def _as_traced(value: Any, node: Any) -> Any:
    traced = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor) and value.dtype != traced.dtype:
        return value.to(traced.dtype)
    return value


def _program_inputs(program: torch.export.ExportedProgram, parameters: Sequence[str]) -> list[ProgramInput]:
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    paths = _leaf_paths(program, parameters)
    examples = pytree.tree_leaves(program.example_inputs) if program.example_inputs else []
    inputs = []
    for index, spec in enumerate(specs):
        constant = not hasattr(spec.arg, "name") or hasattr(spec.arg, "value")
        example = examples[index] if index < len(examples) else None
        inputs.append(
            ProgramInput(
                path=paths[index] if index < len(paths) else str(getattr(spec.arg, "name", index)),
                name=str(getattr(spec.arg, "name", index)),
                constant=constant,
                value=getattr(spec.arg, "value", None) if constant else example,
            )
        )
    return inputs


def _leaf_paths(program: torch.export.ExportedProgram, parameters: Sequence[str]) -> list[str]:
    """Where each leaf sits in the bound call. Without parameter names a positional argument is called by its index."""
    spec = program.call_spec.in_spec
    if spec is None:
        return []
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [_leaf_path(keys, parameters) for keys, _ in pytree.tree_flatten_with_path(numbered)[0]]


def _leaf_path(keys: Any, parameters: Sequence[str]) -> str:
    side, first, *rest = [key_text(key) for key in keys]
    if parameters and side == "0":
        first = list(bind_parameters(parameters, range(int(first) + 1), {}))[-1]
    elif parameters:
        first = next(iter(bind_parameters(parameters, (), {first: None})))
    return ".".join([first, *rest])
