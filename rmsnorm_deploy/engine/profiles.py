"""Optimization profiles: from ``--profile``, or from the dims in the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rmsnorm_deploy.engine.dims import evaluate, learn
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.runtime.profiles import Profile, Shape, ShapeRange

POINTS = ("least", "usual", "greatest")
GROWTH = 8  # a dim without a maximum is taken up to this many times the size it was exported with


def default_profile(manifest: Mapping[str, Any]) -> Profile:
    """One profile over the dims: what the recipe asks for, else from the least allowed (not 0) to the greatest."""
    sizes: list[dict[str, int]] = [{}, {}, {}]
    for name, dim in manifest["dims"].items():
        example = max(int(dim["example"]), 1)
        low = max(int(dim["min"] or 0), 1)
        greatest = dim["max"] or max(GROWTH * example, low)
        wanted = manifest.get("engine_profile", {}).get(name, (low, min(max(example, low), greatest), greatest))
        for point, size in zip(sizes, wanted, strict=True):
            point[name] = int(size)
    return _profile(manifest, {}, sizes)


def parse_profile(text: str, manifest: Mapping[str, Any]) -> Profile:
    """A profile from ``input=1x1:4x128:8x2048``, several inputs separated by commas.

    Inputs that it does not name follow from the dims they share with the named ones.

    Raises:
        InputError: an unknown input, another number of axes, or sizes that do not rise.
    """
    given: dict[str, list[Shape]] = {}
    for part in text.split(","):
        name, _, shapes = part.strip().partition("=")
        given[name] = [_shape(item, text) for item in shapes.split(":")]
        if len(given[name]) == 1:
            given[name] *= 3
        if len(given[name]) != 3:
            raise InputError(f"--profile {text!r}: {name} needs one shape or three, such as 1x1:4x128:8x512")
    inputs = {item["name"]: item["shape"] for item in manifest["signature"]["inputs"]}
    sizes: list[dict[str, int]] = [{}, {}, {}]
    for name, shapes_given in given.items():
        if name not in inputs:
            raise InputError(f"--profile {text!r}: there is no input {name!r}, only {', '.join(inputs)}")
        for point, shape in zip(sizes, shapes_given, strict=True):
            learn(inputs[name], shape, point, name)
    return _profile(manifest, given, sizes)


def _shape(text: str, whole: str) -> Shape:
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise InputError(f"--profile {whole!r}: {text!r} is not a shape such as 4x128") from None


def _profile(
    manifest: Mapping[str, Any], given: Mapping[str, Sequence[Shape]], sizes: Sequence[Mapping[str, int]]
) -> Profile:
    profile = {}
    for item in manifest["signature"]["inputs"]:
        name, shape = item["name"], item["shape"]
        if all(isinstance(dim, int) for dim in shape):
            continue
        shapes = given.get(name) or [_evaluated(name, shape, point) for point in sizes]
        profile[name] = _rising(name, ShapeRange(*(tuple(entry) for entry in shapes)))
    return profile


def _evaluated(name: str, shape: Sequence[int | str], sizes: Mapping[str, int]) -> Shape:
    out = []
    for dim in shape:
        size = evaluate(dim, sizes)
        if size is None:
            raise InputError(
                f"the size of {dim!r} of input {name!r} is not known: give --profile {name}=least:usual:greatest"
            )
        out.append(size)
    return tuple(out)


def _rising(name: str, entry: ShapeRange) -> ShapeRange:
    for axis in zip(entry.low, entry.best, entry.high, strict=True):
        if not axis[0] <= axis[1] <= axis[2]:
            raise InputError(f"profile of {name}: {axis[0]}, {axis[1]}, {axis[2]} must rise from least to greatest")
    return entry


def describe(profile: Profile) -> str:
    """One line, as it is printed before a build."""
    shape_text = {
        name: ":".join("x".join(map(str, shape)) for shape in (entry.low, entry.best, entry.high))
        for name, entry in profile.items()
    }
    return ",".join(f"{name}={text}" for name, text in shape_text.items()) or "all shapes are fixed"


def limits(profile: Profile) -> str:
    """What follows `describe` where nobody gave the profile: that the engine has limits, and how to set others."""
    if not profile:
        return ""
    name, entry = next(iter(profile.items()))
    greatest = "x".join(map(str, entry.high))
    return (
        f" (the engine refuses larger inputs than {name}={greatest}; for others: --profile {name}=LEAST:USUAL:GREATEST)"
    )
