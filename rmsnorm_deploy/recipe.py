"""A recipe: one small Python file that says how a model is built and called. See docs/recipes.md.

    def build() -> nn.Module                       required; or build(weights) to see the state dict it will get
    def inputs() -> (args, kwargs)                 example tensors; a lone tensor or a tuple of them will do too
    def dims() -> {"x": {0: "batch", 1: "seq"}}    names of the dynamic axes
    def high() -> {"input_ids": 32000}             exclusive upper bound of integer inputs
    def engine_profile() -> {"batch": (1, 4, 32)}  least, usual and greatest size of a dim for a TensorRT engine

Only ``build`` is required. Importing a recipe must not build the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

from rmsnorm_deploy.errors import DeployError, InputError
from rmsnorm_deploy.usercode import import_file


class RecipeModule(Protocol):
    """What a recipe file looks like to a type checker; see the head of this page for the optional functions."""

    def build(self) -> nn.Module:
        """The model, in any mode, with the weights that it is to be exported with or that a file will replace."""
        ...

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Example arguments of one call: tensors whose named dims are above 1 and all different."""
        ...

    def dims(self) -> dict[str, dict[int, str]]:
        """Names of the dynamic axes by path of the tensor in the call."""
        ...


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been read and checked as far as is possible without running it."""

    path: Path
    module: ModuleType
    _build: Callable[..., Any]
    _optional: Mapping[str, Callable[[], Any]]

    def build(self, weights: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
        """The module; ``weights`` reach a ``build`` that takes an argument."""
        model = self._run("build", self._build, *([weights] if self._takes_weights() else []))
        if not isinstance(model, nn.Module):
            raise InputError(f"{self.path}: build() must return a torch.nn.Module, not {type(model).__name__}")
        return model

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """(args, kwargs), or None when the recipe has no ``inputs``."""
        if "inputs" not in self._optional:
            return None
        got = self._run("inputs", self._optional["inputs"])
        if isinstance(got, torch.Tensor):
            return (got,), {}
        if isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], tuple) and isinstance(got[1], dict):
            return got
        if isinstance(got, dict):
            return (), got
        if isinstance(got, tuple) and got and all(isinstance(v, torch.Tensor) for v in got):
            return got, {}
        raise InputError(f"{self.path}: inputs() must return (args, kwargs), a tuple and a dict, not {_shape_of(got)}")

    def dims(self) -> dict[str, dict[int, str]]:
        """Names of axes by path; {} without ``dims``."""
        got = self._mapping("dims")
        for path, axes in got.items():
            if not isinstance(path, str) or not isinstance(axes, dict):
                raise InputError(f'{self.path}: dims() must return {{"input": {{axis: "name"}}}}, not {got!r}')
            for axis, name in axes.items():
                if not isinstance(axis, int) or not isinstance(name, str) or not name.isidentifier():
                    raise InputError(
                        f"{self.path}: dims() has {axis!r}: {name!r} for '{path}': an axis number and a name are wanted"
                    )
        return got

    def high(self) -> dict[str, int]:
        """Upper bounds of integer inputs by path; {} without ``high``."""
        got = self._mapping("high")
        for path, bound in got.items():
            if not isinstance(path, str) or not isinstance(bound, int) or bound < 1:
                raise InputError(f"{self.path}: high() has {path!r}: {bound!r}: a path and a number above 0 are wanted")
        return got

    def engine_profile(self) -> dict[str, tuple[int, int, int]]:
        """(least, usual, greatest) by name of dim; {} without ``engine_profile``."""
        got = self._mapping("engine_profile")
        for name, sizes in got.items():
            numbers = isinstance(sizes, tuple) and len(sizes) == 3 and all(isinstance(n, int) for n in sizes)
            if not numbers or not 0 < sizes[0] <= sizes[1] <= sizes[2]:
                raise InputError(
                    f"{self.path}: engine_profile() has {name!r}: {sizes!r}: (least, usual, greatest) is wanted, rising"
                )
        return got

    def _takes_weights(self) -> bool:
        return bool(inspect.signature(self._build).parameters)

    def _mapping(self, name: str) -> dict[Any, Any]:
        if name not in self._optional:
            return {}
        got = self._run(name, self._optional[name])
        if not isinstance(got, dict):
            raise InputError(f"{self.path}: {name}() must return a dict, not {_shape_of(got)}")
        return got

    def _run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except DeployError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            text = str(error).splitlines()[0] if str(error) else ""
            raise InputError(f"{self.path}: {name}() failed with {type(error).__name__}: {text}") from error


_OPTIONAL = ("inputs", "dims", "high", "engine_profile")


def load_recipe(path: str | Path, option: str = "--recipe") -> Recipe:
    """Import and check a recipe file, which ``option`` named ("" for none); InputError says what it lacks."""
    module = import_file(path, option)
    path = Path(path)
    build = getattr(module, "build", None)
    if not callable(build):
        raise InputError(f"{path}: not a recipe: it defines no build() that returns the model (docs/recipes.md)")
    given = {name: getattr(module, name) for name in _OPTIONAL if hasattr(module, name)}
    for name, function in given.items():
        if not callable(function):
            raise InputError(f"{path}: {name} must be a function, not {type(function).__name__}")
        if inspect.signature(function).parameters:
            raise InputError(f"{path}: {name}() must take no arguments")
    if "inputs" not in given and {"dims", "high"} & set(given):
        raise InputError(f"{path}: dims() and high() describe inputs(), which the recipe lacks")
    if len(inspect.signature(build).parameters) > 1:
        raise InputError(f"{path}: build() must take no argument, or one: the state dict")
    return Recipe(path, module, build, given)


def _shape_of(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
