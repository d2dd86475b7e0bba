"""A model repository for Triton Inference Server: ``python -m rmsnorm_deploy.engine.triton BUNDLE REPOSITORY``."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_deploy.bundle import Bundle, open_bundle
from rmsnorm_deploy.cli import Parser, run_command
from rmsnorm_deploy.errors import EXIT_OK, InputError
from rmsnorm_deploy.runtime.engines import EngineRecord, checked_bytes, read_engines
from rmsnorm_deploy.spoken import forget, speak_of

TYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float64": "TYPE_FP64",
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "int16": "TYPE_INT16",
    "int8": "TYPE_INT8",
    "uint64": "TYPE_UINT64",
    "uint32": "TYPE_UINT32",
    "uint16": "TYPE_UINT16",
    "uint8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
}


def write_repository(bundle: Bundle, repository: Path, name: str, engine: str | None = None) -> list[str]:
    """Write ``repository/name`` with the named engine, or with the ONNX model when None.

    Returns what the server has to be started with, one option a line.

    Raises:
        InputError: no such engine, or a damaged one, a name that is no plain word, or a folder that is there already.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
        raise InputError(f"{name!r} cannot be a model's name: letters, digits, _, . and - are allowed")
    folder = repository / name
    if folder.exists():
        raise InputError(f"{folder} is there already: remove it, or give another --name")
    record = None if engine is None else _engine(bundle, engine)
    plan = None if record is None else checked_bytes(record, bundle.manifest)
    repository.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=repository) as scratch:
        made = Path(scratch) / name  # the server may be watching: the folder appears whole
        speak_of(made, folder)
        version = made / "1"
        version.mkdir(parents=True)
        if plan is None:
            _copy_model(bundle, version)
        else:
            (version / "model.plan").write_bytes(plan)
        (made / "config.pbtxt").write_text(config(bundle.manifest, name, record), encoding="utf-8")
        made.rename(folder)
        forget(made)
    return _server_options(repository, record)


def _engine(bundle: Bundle, name: str) -> EngineRecord:
    records = {record.name: record for record in read_engines(bundle.path / "engines")}
    if name not in records:
        raise InputError(f"{bundle.path} has no engine {name!r}, only {', '.join(records) or 'none'}")
    if records[name].runtime != "tensorrt":
        raise InputError(f"engine {name} is of {records[name].runtime}, and Triton runs engines of tensorrt")
    return records[name]


def _copy_model(bundle: Bundle, version: Path) -> None:
    for file in sorted(bundle.path.iterdir()):
        if file.is_file() and file.name.startswith(bundle.model_path.name):
            shutil.copyfile(file, version / file.name)


def config(manifest: Mapping[str, Any], name: str, record: EngineRecord | None) -> str:
    """The text of config.pbtxt: shapes in full (no batching by the server), -1 for what is dynamic."""
    platform = 'backend: "onnxruntime"' if record is None else 'backend: "tensorrt"'
    lines = [f'name: "{name}"', platform, "max_batch_size: 0"]
    for key in ("inputs", "outputs"):
        tensors = ",\n".join(_tensor(item) for item in manifest["signature"][key])
        lines.append(f"{key[:-1]} [\n{tensors}\n]")
    # Without a word of it, the server uses an engine's first profile alone.
    profiles = [f'"{index}"' for index in range(len(record.profiles))] if record is not None else []
    used = f", profile: [ {', '.join(profiles)} ]" if len(profiles) > 1 else ""
    kind = "KIND_AUTO" if record is None else "KIND_GPU"  # an engine needs a GPU; ONNX Runtime takes what there is
    lines.append(f"instance_group [ {{ kind: {kind}{used} }} ]")
    return "\n".join(lines) + "\n"


def _tensor(item: Mapping[str, Any]) -> str:
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in item["shape"]) or "1"
    scalar = "" if item["shape"] else ", reshape: { shape: [ ] }"
    name = json.dumps(item["name"], ensure_ascii=False)
    return f"  {{ name: {name}, data_type: {TYPES[item['dtype']]}, dims: [ {dims} ]{scalar} }}"


def _server_options(repository: Path, record: EngineRecord | None) -> list[str]:
    options = [f"--model-repository={os.path.abspath(repository)}"]
    if record is not None and record.plugin is not None:
        options.append("--backend-config=tensorrt,version-compatible=true")  # allows code in the engine
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_command(argv, _write)


def _write(argv: list[str]) -> int:
    parser = Parser("python -m rmsnorm_deploy.engine.triton", "Write a Triton model repository folder.")
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that the export left")
    parser.add_argument("repository", metavar="REPOSITORY", type=Path, help="the folder that the server is given")
    parser.add_argument("--engine", metavar="NAME", help="an engine of the bundle; default: the ONNX model")
    parser.add_argument("--name", help="the model's name; default: the bundle's")
    arguments = parser.parse_args(argv)
    bundle = open_bundle(arguments.bundle)
    name = arguments.name or bundle.path.resolve().name.removesuffix(".bundle")
    print("tritonserver " + " ".join(write_repository(bundle, arguments.repository, name, arguments.engine)))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
