"""Weights in a safetensors file, or in several with an index that says which weight is in which."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.sniff import SHARD_INDEX, refuse_foreign


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name. Raises InputError for a damaged one, and without the safetensors package."""
    try:
        from safetensors import SafetensorError  # optional, and needed for this one kind of file
        from safetensors.torch import load_file
    except ImportError:
        raise InputError(f"{path}: needs the safetensors package: pip install safetensors") from None
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: a damaged or cut-off safetensors file: {error}") from None


def read_shards(path: Path) -> dict[str, torch.Tensor]:
    """The tensors that an index names, from the files beside it; ``path`` is the index, or the folder that has one.

    Raises InputError for an index that is none, and for files that are missing, damaged or without a weight that they
    should hold.
    """
    index = next(path.glob(f"*{SHARD_INDEX}")) if path.is_dir() else path
    places = _places(index)
    shards = sorted(set(places.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise InputError(f"{index}: {len(missing)} of {len(shards)} files are missing: {', '.join(missing[:3])}")
    weights: dict[str, torch.Tensor] = {}
    for shard in shards:
        file = index.parent / shard
        refuse_foreign(file)
        found = read_safetensors(file)
        wanted = [name for name, place in places.items() if place == shard]
        lost = [name for name in wanted if name not in found]
        if lost:
            raise InputError(f"{file}: lacks {lost[0]}, which {index.name} says it holds: download both again")
        weights |= {name: found[name] for name in wanted}
    return weights


def _places(index: Path) -> dict[str, str]:
    """Weights' names to files' names, none of which leads out of the folder."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        places = {str(name): str(shard) for name, shard in places.items()}
    except (ValueError, OSError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{index}: no index of safetensors files ({type(error).__name__}: {error})") from None
    outside = [shard for shard in places.values() if shard != Path(shard).name or shard in ("", "..")]
    if outside:
        raise InputError(f"{index}: refused: it points outside its folder ({outside[0]})")
    return places
