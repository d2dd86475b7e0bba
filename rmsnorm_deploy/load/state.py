"""A state dict into a module: found in its container, its prefixes taken off, every key accounted for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rmsnorm_deploy.errors import InputError

Weights = dict[str, torch.Tensor]
# Where trainers put the weights, likeliest first; averaged weights come last, and only --state-key prefers them.
CONTAINERS = (
    *("state_dict", "model_state_dict", "model", "module", "net", "network", "generator", "params", "weights"),
    *("ema", "ema_state_dict", "model_ema", "params_ema", "state_dict_ema"),
)
PREFIXES = ("module.", "_orig_mod.", "model.")
# What wrappers call the module inside of them: torch.compile, DataParallel, FSDP, activation checkpoints, Lightning.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_EXTRA = "_extra_state"  # how a module's own record ends, of which torch.nn.Module knows nothing more
_COUNT = "n_averaged"  # what torch.optim.swa_utils.AveragedModel keeps beside the weights
_SHOWN = 6
_DEPTH = 3  # of entries in entries


def find_state(path: Path, found: Any, key: str | None, notes: list[str]) -> Weights | nn.Module:
    """The state dict (or the module) in what a checkpoint held.

    Raises InputError when there is none, naming what the file does hold.
    """
    if isinstance(found, nn.Module) and key is None:
        return found
    if isinstance(found, Mapping) and not _has_tensors(found):
        found = _as_tensors(found)
    if not isinstance(found, Mapping):
        raise InputError(f"{path}: holds a {type(found).__name__}, neither a module nor a state dict")
    if key is not None:
        entry = _entry(found, key)
        if entry is None:
            raise InputError(f"{path}: has no '{key}' (--state-key); it has {_some(map(str, found))}")
        return _checked(path, entry, f"'{key}'")
    if _is_state(found):
        return _checked(path, found, "the file")
    inside = [name for name in CONTAINERS if _holds_weights(found.get(name))]
    inside = inside or _only_one(path, [str(name) for name in found if _holds_weights(found[name])])
    inside = inside or _only_one(path, list(_deeper(found)))
    if not inside:
        there = _some(map(str, found)) or "nothing"
        raise InputError(
            f"{path}: no state dict (names to tensors) in it, only {there}: torch.save the model's state_dict()"
        )
    others = f" ({', '.join(inside[1:])} in there too: --state-key takes another)" if inside[1:] else ""
    notes.append(f"weights taken from '{inside[0]}' of {path.name}{others}")
    return _checked(path, _entry(found, inside[0]), f"'{inside[0]}'")


def load_state(model: nn.Module, weights: Weights, path: Path, recipe: Path, notes: list[str]) -> None:
    """Copy ``weights`` into ``model``; both must have the same keys and shapes, up to known prefixes.

    Raises InputError naming what is missing, unexpected or of another shape. A key may be missing when the parameter is
    tied to one that is there.
    """
    target = _weights_in(model.state_dict(keep_vars=True))
    unset = [k for k, v in target.items() if v.is_meta]
    if unset:
        raise InputError(f"{recipe}: build() leaves {_some(unset)} on the meta device, where nothing can be loaded")
    if _COUNT in weights and _COUNT not in target:
        weights = {k: v for k, v in weights.items() if k != _COUNT}
        notes.append(f"{_COUNT} of {path.name}, the counter of averaged weights, left out")
    renamed, change = _best_names(weights, target)
    if change:
        notes.append(f"keys of {path.name}: {change}")
    missing = _not_tied([k for k in target if k not in renamed], target, renamed, notes)
    unexpected = [k for k in renamed if k not in target]
    if missing or unexpected:
        _load_by_itself(model, renamed, _unfit(path, recipe, missing, unexpected))
        notes.append(f"keys of {path.name}: fitted by the model's own load_state_dict(), as old names are")
        return
    wrong = [
        f"{k} is {_dims(renamed[k])}, the recipe's is {_dims(target[k])}"
        for k in renamed
        if renamed[k].shape != target[k].shape
    ]
    if wrong:
        raise InputError(f"{path}: {_some(wrong, '; ')} ({recipe})")
    renamed = {name: _plain(path, name, value) for name, value in renamed.items()}
    _refuse_untied(path, recipe, renamed, target)
    _note_dtypes(renamed, target, notes)
    with torch.no_grad():
        for name, value in renamed.items():
            target[name].copy_(value)


def _load_by_itself(model: nn.Module, weights: Weights, unfit: str) -> None:
    """Load weights as the model's classes do, which may know older names of theirs; InputError(unfit) where they don't.

    torch's own do: weight_norm's g and v, a BatchNorm that had no counter yet.
    """
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:  # torch's own list of keys
        raise InputError(unfit) from error
    except Exception as error:  # the model's own code, which may fail in any way on names that it does not know
        said = (str(error).splitlines() or [""])[0]
        raise InputError(f"{unfit} (its load_state_dict() raised {type(error).__name__}: {said})") from error


def _holds_weights(entry: Any) -> bool:
    return isinstance(entry, nn.Module) or _is_state(entry)


def _only_one(path: Path, names: list[str]) -> list[str]:
    """Entries of names that nobody has in common: taken where there is no choice."""
    if len(names) > 1:
        raise InputError(f"{path}: {_some(names)} are all state dicts: choose one with --state-key")
    return names


def _has_tensors(found: Mapping[Any, Any]) -> bool:
    return any(
        isinstance(entry, torch.Tensor) or (isinstance(entry, Mapping) and _has_tensors(entry))
        for entry in found.values()
    )


def _as_tensors(found: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same with numpy's arrays as tensors: the weights of a file that holds no tensors, as detectron2's."""

    def tensor(entry: Any) -> Any:
        if isinstance(entry, np.ndarray) and entry.dtype.kind in "fiub":
            return torch.from_numpy(np.array(entry, entry.dtype.newbyteorder("=")))
        return _as_tensors(entry) if isinstance(entry, Mapping) else entry

    return {name: tensor(entry) for name, entry in found.items()}


def _deeper(found: Mapping[Any, Any], above: str = "", depth: int = _DEPTH) -> Iterator[str]:
    """State dicts in entries of entries, as ``trainer.model``."""
    for name, entry in found.items():
        if isinstance(name, str) and _holds_weights(entry):
            yield f"{above}{name}"
        elif isinstance(name, str) and isinstance(entry, Mapping) and depth > 1:
            yield from _deeper(entry, f"{above}{name}.", depth - 1)


def _entry(found: Any, key: str) -> Any:
    """What a checkpoint holds under a key, or under keys in each other with dots between; None without it."""
    if not isinstance(found, Mapping) or key in found:
        return found[key] if isinstance(found, Mapping) else None
    heads = [name for name in found if isinstance(name, str) and key.startswith(f"{name}.")]
    entries = (_entry(found[name], key.removeprefix(f"{name}.")) for name in heads)
    return next((entry for entry in entries if entry is not None), None)


def _is_state(found: Any) -> bool:
    return isinstance(found, Mapping) and bool(found) and all(isinstance(k, str) for k in found) and all(
        isinstance(v, torch.Tensor) for k, v in found.items() if not k.endswith(_EXTRA) and k != "_metadata"
    )  # fmt: skip


def _checked(path: Path, found: Any, where: str) -> Weights | nn.Module:
    if isinstance(found, nn.Module):
        return found
    if not _is_state(found):
        raise InputError(f"{path}: {where} is no state dict (names to tensors) but a {type(found).__name__}")
    return _weights_in(found)


def _weights_in(found: Mapping[str, Any]) -> Weights:
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor) and not k.endswith(_EXTRA)}


def _best_names(weights: Weights, target: Mapping[str, Any]) -> tuple[Weights, str]:
    """The renaming with the fewest keys missing or unexpected, and what it does; the plainest of equal ones."""
    best, chosen, fewest = list(weights), "", len(set(weights) ^ set(target))
    for names, change in _renamings(list(weights)):
        off = len(set(names) ^ set(target))
        if off < fewest and len(set(names)) == len(names):
            best, chosen, fewest = names, change, off
    return dict(zip(best, weights.values(), strict=True)), chosen


def _renamings(keys: list[str]) -> Iterator[tuple[list[str], str]]:
    """Prefixes taken off one after another; the same with wrappers' segments gone from inside; 'model.' in front.

    A prefix that all keys have may be of any name: an attribute of whatever trained the model.
    """
    yield from _stripped(keys, [])
    shared = _shared_prefix(keys)
    for end in range(1, len(shared) + 1):
        prefix = ".".join(shared[:end]) + "."
        yield [key.removeprefix(prefix) for key in keys], f"prefix '{prefix}' removed"
    bare = [_without_wrappers(key) for key in keys]
    gone = " and ".join(f"'{name}'" for name in WRAPPERS if any(name in key.split(".") for key in keys)) + " removed"
    yield bare, gone
    yield from _stripped(bare, [gone])
    yield [f"model.{k}" for k in keys], "prefix 'model.' added"


def _stripped(names: list[str], done: list[str]) -> Iterator[tuple[list[str], str]]:
    while prefix := next((p for p in PREFIXES if any(n.startswith(p) for n in names)), None):
        names = [n.removeprefix(prefix) for n in names]
        done = [*done, f"prefix '{prefix}' removed"]
        yield names, ", ".join(done)


def _shared_prefix(keys: list[str]) -> list[str]:
    """The segments that all keys begin with, their last ones excepted."""
    parts = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return [part[0] for part in itertools.takewhile(lambda part: len(set(part)) == 1, parts)]


def _without_wrappers(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _not_tied(missing: list[str], target: Mapping[str, torch.Tensor], given: Weights, notes: list[str]) -> list[str]:
    """Missing keys, without those whose tensor is one that the file does give."""
    there = {target[k].data_ptr(): k for k in given if k in target and target[k].numel()}
    tied = {k: there[target[k].data_ptr()] for k in missing if target[k].numel() and target[k].data_ptr() in there}
    tied = {k: v for k, v in tied.items() if target[k].shape == target[v].shape}
    if tied:
        notes.append("tied weights: " + ", ".join(f"{k} is {v}" for k, v in tied.items()))
    return [k for k in missing if k not in tied]


def _refuse_untied(path: Path, recipe: Path, given: Weights, target: Mapping[str, torch.Tensor]) -> None:
    """One tensor of the model can't hold two weights: whichever came last would be in both places."""
    first: dict[tuple[int, torch.Size], str] = {}
    for name in given:
        if not target[name].numel():
            continue
        other = first.setdefault((target[name].data_ptr(), target[name].shape), name)
        if not _same(given[other], given[name]):
            raise InputError(
                f"{path}: {other} and {name} differ, and {recipe} builds a model in which they are one tensor: "
                "untie them there, or save the file without the one that is not used"
            )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two weights are the same numbers; NaN is NaN, and float8, which torch can't compare, is a float."""
    if a is b or (a.dtype == b.dtype and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))):
        return True
    return a.shape == b.shape and bool(torch.isclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True).all())


def _unfit(path: Path, recipe: Path, missing: list[str], unexpected: list[str]) -> str:
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {_some(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {_some(unexpected)}")
    if any("lora_" in key for key in unexpected):
        problems.append("merge the LoRA adapter (merge_and_unload) and save the whole")
    elif unexpected:
        problems.append("build(weights) of a recipe may rename them, or take out what is not the model's")
    return f"{path}: its keys are not those of the model that {recipe} builds: {'; '.join(problems)}"


def _plain(path: Path, name: str, value: torch.Tensor) -> torch.Tensor:
    """A weight as numbers in a row; InputError for one that has none, or none of a kind that a parameter takes."""
    if value.is_meta:
        raise InputError(f"{path}: {name} is on the meta device, so the file holds its shape and no values")
    if value.is_quantized:
        raise InputError(
            f"{path}: {name} is quantized ({_name(value)}): give the weights from before that, or dequantize() them"
        )
    if value.is_complex():
        raise InputError(f"{path}: {name} is {_name(value)}, and weights are real numbers")
    return value if value.layout == torch.strided else value.to_dense()


def _note_dtypes(given: Weights, target: Mapping[str, torch.Tensor], notes: list[str]) -> None:
    pairs = sorted({(_name(given[k]), _name(target[k])) for k in given if given[k].dtype != target[k].dtype})
    notes.extend(f"{a} weights loaded into a {b} model" for a, b in pairs)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dims(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _some(names: Any, separator: str = ", ") -> str:
    """The first few, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
