"""Bundles for the tests of parity at the norms, each exported once a session, and a Llama's own norms in float64."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.parity.samples import Sample, make_samples


@functools.cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="parity-bundles-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def bundles() -> Any:
    from rmsnorm_deploy.parity.faults import tiny_bundles

    pytest.importorskip("transformers", reason="the tiny Llama is built by transformers")
    return tiny_bundles(folder())


_MADE: dict[str, Bundle] = {}


def bundle(which: str) -> Bundle:
    """ "float32" or "float16" (a Llama of two layers), or "bias" (two norms with one)."""
    while which not in _MADE:
        title, made = next(bundles())
        _MADE[title.split()[-1]] = made
    return _MADE[which]


def few_samples(made: Bundle, seed: int = 0) -> list[Sample]:
    """Prime sizes and the last adversarial one: enough to see a fault."""
    samples = make_samples(made.manifest, seed=seed)
    return [sample for sample in samples if "prime" in sample.name] + samples[-1:]


def norms_of_the_model(sample: Sample) -> list[np.ndarray[Any, Any]]:
    """What each norm of the Llama gives in float64, by PyTorch alone: the module in double, with hooks."""
    from rmsnorm_deploy.tiny import SIZES, TinyModel

    model = TinyModel("LlamaForCausalLM", "LlamaConfig", {**SIZES, "rms_norm_eps": 1e-5}).build()
    model.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()}, assign=True)
    model.double()
    seen: list[np.ndarray[Any, Any]] = []
    for name, module in model.named_modules():
        if name.split(".")[-1].endswith("norm"):
            module.register_forward_hook(lambda module, args, output: seen.append(output.detach().numpy()))
    with torch.no_grad():
        model(torch.from_numpy(sample.feeds["input_ids"]))
    return seen
