"""Sessions on PyTorch: the user's own module where it is at hand, else the traced program."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.runtime.binding import bind_call, bind_parameters, key_text
from rmsnorm_deploy.runtime.optional import one_line
from rmsnorm_deploy.runtime.results import opened
from rmsnorm_deploy.runtime.session import BundleLike, Session
from rmsnorm_deploy.runtime.signature import check_feeds
from rmsnorm_deploy.runtime.tensors import Array, is_array, to_torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram


class PyTorchSession(Session):
    """The bundle's eager module when the bundle was made in this process, else its traced program, without gradients.

    Options:
        device: where to run ("cuda"); inputs are moved there. None is where the weights are. The user's module is
            copied, never moved.

    Raises:
        BackendUnavailable: a bundle made from an ONNX file has no PyTorch model; no such device.
    """

    backend = "pytorch"

    def __init__(self, bundle: BundleLike, *, device: str | torch.device | None = None) -> None:
        super().__init__(bundle)
        self._device = None if device is None else _usable_device(device)
        self._program = bundle.program() if bundle.eager is None else None
        self._bundle = bundle
        self._eager = _on_device(bundle.eager, self._device)
        self._lock = threading.Lock()
        if self._eager is None and self._program is None:
            raise BackendUnavailable(
                "this bundle was made from an ONNX file and has no PyTorch model: use the onnxruntime backend"
            )
        self._module = self._eager if self._eager is not None else _program_module(self._program, self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if self._eager is None or not self.signature.parameters:
            return super().__call__(*args, **kwargs)
        check_feeds(self.signature, bind_call(self.signature, args, kwargs))
        return self._call(args, {**kwargs, **self._absent_constants(args, kwargs)})

    def _absent_constants(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Arguments left out of a call take the value they had at export, which need not be forward()'s default."""
        given = bind_parameters(self.signature.parameters, args, kwargs)
        names = [name for name in self.signature.parameters if name in self.signature.constants]
        return {name: self.signature.constants[name] for name in names if name not in given}

    def _execute(self, feeds: Mapping[str, Array]) -> list[torch.Tensor]:
        # a model may write to what it is given: to no array that is passed by name, as on every other backend
        args, kwargs = self._structured({name: to_torch(array).clone() for name, array in feeds.items()})
        return self._call(args, kwargs)

    def _structured(self, feeds: Mapping[str, Array]) -> tuple[Any, dict[str, Any]]:
        """The call's arguments, nested as they were at export."""
        leaves = {**self.signature.constants, **{spec.path: feeds[spec.name] for spec in self.signature.inputs}}
        if self._program is None:
            self._program = self._bundle.program()  # the module knows how to run, the program how it was called
        program = self._program
        if program is None:
            return (), nest(leaves)
        return arguments_like(program, self.signature.parameters, leaves)

    def _call(self, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        args, kwargs = pytree.tree_map(self._to_device, (args, kwargs))
        assert self._module is not None
        with torch.no_grad(), evaluating(self._module, self._lock):
            try:
                result = self._module(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                raise InputError(f"pytorch cannot run the model: {one_line(error)}") from error
        return self._outputs(result)

    def _to_device(self, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        tensor = to_torch(leaf if isinstance(leaf, torch.Tensor) else np.asarray(leaf))
        return tensor if self._device is None else tensor.to(self._device)

    def _outputs(self, result: Any) -> list[torch.Tensor]:
        """The tensors of the result in order; numbers count only where the manifest has a place for them."""
        leaves = [x for x in pytree.tree_leaves(opened(result)) if isinstance(x, (torch.Tensor, bool, int, float))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        expected = len(self.signature.outputs)
        if len(tensors) != expected and len(leaves) == expected:
            tensors = [torch.as_tensor(leaf) for leaf in leaves]
        if len(tensors) != expected:
            raise InputError(f"the module returned {len(tensors)} tensors, and the manifest has {expected} outputs")
        return [tensor.detach() for tensor in tensors]


def arguments_like(
    program: ExportedProgram, parameters: tuple[str, ...], leaves: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """(args, kwargs) in the exact structure that ``program`` was traced with, filled with ``leaves`` by path."""
    spec = program.call_spec.in_spec
    assert spec is not None
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    filled = [leaves.get(_call_path(path, parameters)) for path, _ in pytree.tree_flatten_with_path(numbered)[0]]
    args, kwargs = pytree.tree_unflatten(filled, spec)
    return args, kwargs


def _call_path(path: Any, parameters: tuple[str, ...]) -> str:
    """A leaf's path from its place in (args, kwargs)."""
    side, first, *others = (key_text(key) for key in path)
    positional, named = (range(int(first) + 1), {}) if side == "0" else ((), {first: None})
    root = list(bind_parameters(parameters, positional, named))[-1]
    return ".".join([root, *others])


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments from leaves by path: keys 0, 1, ... make a tuple, others a dict."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return {name: _with_tuples(node) for name, node in tree.items()}


def _with_tuples(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _with_tuples(child) for key, child in node.items()}
    if list(children) and sorted(children) == sorted(str(index) for index in range(len(children))):
        return tuple(children[str(index)] for index in range(len(children)))
    return children


@contextmanager
def evaluating(module: torch.nn.Module, lock: threading.Lock) -> Iterator[None]:
    """Run ``module`` in evaluation mode and leave its training flags as they were."""
    training = [part for part in module.modules() if getattr(part, "training", False)]  # frozen TorchScript has no mode
    if not training or isinstance(module, torch.fx.GraphModule):
        yield
        return
    with lock:  # the flags are the module's, so two threads must not set them at once
        for part in training:
            part.training = False
        try:
            yield
        finally:
            for part in training:
                part.training = True


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        usable = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is not one that torch knows: {one_line(error)}") from error
    if usable.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(f"device {device} was asked for, and torch {torch.__version__} sees no CUDA GPU")
    return usable


def _on_device(module: torch.nn.Module | None, device: torch.device | None) -> torch.nn.Module | None:
    if module is None or device is None or all(p.device == device for p in module.parameters()):
        return module
    return copy.deepcopy(module).to(device)


def _program_module(program: ExportedProgram | None, device: torch.device | None) -> torch.nn.Module:
    assert program is not None
    if device is not None:
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    # The session has checked names, dtypes, shapes and constants already, with errors that name the user's arguments.
    return program.module(check_guards=False)
