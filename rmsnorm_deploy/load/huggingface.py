"""A Hugging Face directory, or a GGUF file, as a module that maps token ids to one tensor. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.pickles import LOAD_ERRORS
from rmsnorm_deploy.load.quantized import CURE
from rmsnorm_deploy.load.sniff import refuse_foreign
from rmsnorm_deploy.load.specs import TensorSpec

INSTALL = "pip install 'rmsnorm-deploy[hf]'"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
# torch.export takes these with eager attention only (T5: no sdpa mask; gpt-oss: sinks).
_EAGER_ATTENTION = ("t5", "umt5", "mt5", "longt5", "gpt_oss")


class TokenModel(nn.Module):
    """input_ids: int64[batch, seq] -> {"logits": [batch, seq, vocab]} or {"last_hidden_state": [batch, seq, width]}."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output = output_name(model)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's first output, under its name."""
        return {self.output: self.model(input_ids=input_ids, return_dict=False)[0]}


class Seq2SeqModel(nn.Module):
    """input_ids: int64[batch, seq], decoder_input_ids: int64[batch, target] -> {"logits": [batch, target, vocab]}."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.output = output_name(model)

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's first output, under its name."""
        out = self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, return_dict=False)
        return {self.output: out[0]}


def load_huggingface(path: Path, notes: list[str]) -> tuple[nn.Module, list[TensorSpec]]:
    """The model of a directory (config.json with safetensors, .bin or .gguf) or a .gguf file, and its inputs.

    Weights keep their own dtype; GGUF ones become float32. Raises InputError when transformers is not there or does not
    know the architecture, and when weights are missing or damaged.
    """
    transformers = import_transformers(path)
    folder, gguf = (path.parent, path.name) if path.is_file() else (path, None)
    if gguf is None and not (path / "config.json").is_file():
        gguf = next(path.glob("*.gguf")).name
    _check_files(folder, gguf)
    with quiet_transformers():
        config = _config(transformers, folder, gguf)
        model_class = _model_class(transformers, path, config)
        model = _from_pretrained(path, model_class, folder, gguf, config, notes)
    wrapped, specs = wrap(model)
    notes.append(
        f"{type(model).__name__} from {path.name}, {str(model.dtype).removeprefix('torch.')}, "
        f"{model.config._attn_implementation} attention; inputs: {', '.join(map(str, specs))}"
    )
    return wrapped, specs


def wrap(model: Any) -> tuple[nn.Module, list[TensorSpec]]:
    """A transformers model that takes token ids as a module of plain tensors, and its inputs with named dims."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.use_cache = False
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = TensorSpec("input_ids", torch.int64, ("batch", "seq"), vocabulary)
    if (
        getattr(model.config, "is_encoder_decoder", False)
        and model.get_encoder() is not model
        and hasattr(model, "decoder")
    ):
        return Seq2SeqModel(model).eval(), [
            ids,
            TensorSpec("decoder_input_ids", torch.int64, ("batch", "target"), vocabulary),
        ]
    return TokenModel(model).eval(), [ids]


def output_name(model: nn.Module) -> str:
    """What transformers calls the first output: "logits" for a model with a head, else "last_hidden_state"."""
    heads = (
        "ForCausalLM",
        "ForMaskedLM",
        "LMHeadModel",
        "ForConditionalGeneration",
        "Classification",
        "ForPreTraining",
    )
    return "logits" if type(model).__name__.endswith(heads) else "last_hidden_state"


def import_transformers(path: Path | str) -> ModuleType:
    """transformers, or an InputError that says how to get it."""
    try:
        import transformers  # heavy, and needed for Hugging Face models alone
    except ImportError as error:
        raise InputError(f"{path}: a Hugging Face model needs transformers: {INSTALL} ({error})") from None
    return transformers


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars; errors only. What would have been warned of is checked and said by the caller."""
    import transformers.modeling_gguf_pytorch_utils as transformers_gguf
    import transformers.utils.logging as transformers_logging

    gguf: Any = transformers_gguf  # has a tqdm of its own that no setting turns off
    hf_logging: Any = transformers_logging
    accelerate = logging.getLogger("accelerate")
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    accelerate_level = accelerate.level
    tqdm = getattr(gguf, "tqdm", None)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    accelerate.setLevel(logging.ERROR)
    gguf.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        gguf.tqdm = tqdm
        accelerate.setLevel(accelerate_level)
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _check_files(folder: Path, gguf: str | None) -> None:
    """Weights are there, whole, and no pointers; the shards of an index too."""
    files = [folder / gguf] if gguf else [f for pattern in _WEIGHTS for f in sorted(folder.glob(pattern))]
    if not files:
        raise InputError(f"{folder}: config.json but no weights (*.safetensors, pytorch_model.bin, *.gguf)")
    for file in files:
        if file.stat().st_size == 0:
            raise InputError(f"{file}: the file is empty")
        refuse_foreign(file)
    for index in folder.glob("*.index.json"):
        shards = set(_read_json(index).get("weight_map", {}).values())
        lost = sorted(s for s in shards if not (folder / str(s)).is_file())
        if lost:
            raise InputError(f"{folder}: {len(lost)} of {len(shards)} weight files are missing: {', '.join(lost[:3])}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: must hold a JSON object")
    return found


def _config(transformers: ModuleType, folder: Path, gguf: str | None) -> Any:
    if gguf is None or (folder / "config.json").is_file():
        plain = _read_json(folder / "config.json")
        if "model_type" not in plain:
            raise InputError(f"{folder / 'config.json'}: no model_type in it, so not a transformers model")
    try:
        extra = {"gguf_file": gguf} if gguf else {}
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **extra)
    except LOAD_ERRORS as error:
        raise InputError(f"{folder / gguf if gguf else folder}: {_why(error)}") from error


def _model_class(transformers: ModuleType, path: Path, config: Any) -> Any:
    names = list(getattr(config, "architectures", None) or [])
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if names and getattr(config, "auto_map", None):
        raise InputError(
            f"{path}: {names[0]} brings its own Python code, which is not run: "
            f"load it yourself and call rmsnorm_deploy.export_model()"
        )
    if names:
        raise InputError(f"{path}: transformers {transformers.__version__} has no {names[0]}")
    return transformers.AutoModelForCausalLM


def _from_pretrained(
    path: Path, model_class: Any, folder: Path, gguf: str | None, config: Any, notes: list[str]
) -> Any:
    options: dict[str, Any] = {"local_files_only": True, "output_loading_info": True, "config": config}
    options["ignore_mismatched_sizes"] = True  # they are reported, and refused below by name
    options["dtype"] = torch.float32 if gguf else "auto"
    if gguf:
        options["gguf_file"] = gguf
    if config.model_type.startswith(_EAGER_ATTENTION):
        options["attn_implementation"] = "eager"
    if _has_experts(config):
        # The eager loop over experts has no static graph.
        options["experts_implementation"] = "batched_mm"
    from safetensors import SafetensorError  # comes with transformers

    try:
        model, info = model_class.from_pretrained(folder, **options)
    except (*LOAD_ERRORS, SafetensorError) as error:
        quantized = gguf is None and getattr(config, "quantization_config", None) is not None
        raise InputError(f"{path}: {_why(error)}{f'; it is quantized: {CURE}' if quantized else ''}") from error
    for key, what in (("missing_keys", "are missing"), ("mismatched_keys", "have another shape than the config says")):
        if info.get(key):
            bad = sorted(map(str, info[key]))
            raise InputError(f"{path}: {len(bad)} weights {what}: {', '.join(bad[:6])}{' ...' if len(bad) > 6 else ''}")
    if info.get("unexpected_keys"):
        extra = sorted(map(str, info["unexpected_keys"]))
        notes.append(
            f"{len(extra)} weights of {path.name} are not used by {model_class.__name__}: {', '.join(extra[:6])}"
        )
    return model.eval()


def _has_experts(config: Any) -> bool:
    text = config.get_text_config()
    return any(
        getattr(text, name, None)
        for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    )


def _why(error: BaseException) -> str:
    if isinstance(error, struct.error):
        return f"the file is cut short or damaged ({error})"
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:240]}" if lines else type(error).__name__
