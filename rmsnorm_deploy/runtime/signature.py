"""What the manifest says about a model's inputs and outputs, and the checks that fed arrays must pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.runtime.tensors import DTYPES, Array, describe, dtype_name, is_array

Dim = int | str | None


@dataclass(frozen=True)
class TensorSpec:
    """One tensor input or output: ``name`` in the ONNX file, ``path`` in the bound call, dtype name and shape."""

    name: str
    path: str
    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if dim is None else str(dim) for dim in self.shape)}]"


@dataclass(frozen=True)
class DimRange:
    """The sizes that a named dim may take; None is unbounded."""

    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Signature:
    """How the model is called.

    ``parameters`` are forward()'s names in order; "*rest" and "**rest" stand for variadic ones. It is empty for a model
    that came as an ONNX file: its inputs are then passed by position or name.
    """

    parameters: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    constants: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]
    dims: Mapping[str, DimRange]

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Signature:
        """Read ``manifest["signature"]`` and ``manifest["dims"]``.

        Raises:
            InputError: a part is missing, or a dtype is one that no backend binds.
        """
        try:
            signature = manifest["signature"]
            constants = {item["path"]: item["value"] for item in signature.get("constants", ())}
            dims = manifest.get("dims") or {}
            return cls(
                parameters=tuple(signature["parameters"]),
                inputs=tuple(_spec(item, "input") for item in signature["inputs"]),
                constants=constants,
                outputs=tuple(_spec(item, "output") for item in signature["outputs"]),
                dims={name: DimRange(dim.get("min"), dim.get("max")) for name, dim in dims.items()},
            )
        except KeyError as error:
            raise InputError(f"manifest.json has no {error} in its signature: export the model again") from error


def _spec(item: Mapping[str, Any], kind: str) -> TensorSpec:
    if item["dtype"] not in DTYPES:
        raise InputError(
            f"{kind} {item['name']!r} is {item['dtype']}, which the runtime does not bind: it binds {', '.join(DTYPES)}"
        )
    return TensorSpec(item["name"], item.get("path", item["name"]), item["dtype"], tuple(item.get("shape") or ()))


def check_feeds(signature: Signature, feeds: Mapping[str, Array]) -> None:
    """Check names, dtypes and shapes of arrays fed by input name.

    Raises:
        InputError: names the input, what was expected and what was given.
    """
    if not isinstance(feeds, Mapping):
        names = quoted([spec.name for spec in signature.inputs])
        raise InputError(f"inputs must be a dict from names to arrays ({names}); got a {type(feeds).__name__}")
    _check_names([spec.name for spec in signature.inputs], feeds)
    sizes: dict[str, tuple[int, str]] = {}
    for spec in signature.inputs:
        array = feeds[spec.name]
        _check_dtype(spec, array)
        _check_shape(spec, array)
        _check_named_dims(spec, array, signature.dims, sizes)


def _check_names(expected: Sequence[str], feeds: Mapping[str, Array]) -> None:
    missing = [name for name in expected if name not in feeds]
    unexpected = [name for name in feeds if name not in expected]
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise InputError(
                f"{word} input{'s' * (len(names) > 1)} {quoted(names)}: the model takes {quoted(expected)}"
            )


def _check_dtype(spec: TensorSpec, array: object) -> None:
    if not is_array(array):
        raise InputError(f"input {spec.name!r} is a {type(array).__name__}, expected a tensor or numpy array {spec}")
    if getattr(array, "is_nested", False):
        raise InputError(f"input {spec.name!r} is a nested tensor, expected {spec}: pad it")
    given = dtype_name(array)  # type: ignore[arg-type]
    if given != spec.dtype:
        raise InputError(f"input {spec.name!r} is {given}, expected {spec.dtype}: convert it before the call")


def _check_shape(spec: TensorSpec, array: Array) -> None:
    if len(array.shape) != len(spec.shape):
        raise InputError(
            f"input {spec.name!r} is {describe(array)}, expected {spec}: rank {len(array.shape)}, not {len(spec.shape)}"
        )
    for axis, (size, dim) in enumerate(zip(array.shape, spec.shape, strict=True)):
        if isinstance(dim, int) and size != dim:
            raise InputError(
                f"input {spec.name!r} is {describe(array)}, expected {spec}: axis {axis} was fixed at {dim} "
                "when the model was exported"
            )


def _check_named_dims(
    spec: TensorSpec, array: Array, ranges: Mapping[str, DimRange], sizes: dict[str, tuple[int, str]]
) -> None:
    """A name stands for one size throughout a call. Expressions ("2*seq") are left to the backend."""
    for size, dim in zip(array.shape, spec.shape, strict=True):
        if not isinstance(dim, str) or not dim.isidentifier():
            continue
        first, where = sizes.setdefault(dim, (size, spec.name))
        if first != size:
            raise InputError(f"dim {dim!r} is {first} in input {where!r} and {size} in {spec.name!r}: make them equal")
        _check_range(spec, dim, size, ranges.get(dim, DimRange()))


def _check_range(spec: TensorSpec, dim: str, size: int, bounds: DimRange) -> None:
    too_low = bounds.low is not None and size < bounds.low
    if too_low or (bounds.high is not None and size > bounds.high):
        high = "any" if bounds.high is None else bounds.high
        raise InputError(
            f"dim {dim!r} of input {spec.name!r} is {size}; it was exported for {bounds.low or 0} to {high}"
        )


def quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
