"""The engines of a bundle: what is written beside each, and which of them runs here.

``BUNDLE/engines/NAME.json`` describes ``BUNDLE/engines/NAME.engine``::

    {"format": 2, "name": "fp16-plugin", "engine": "fp16-plugin.engine", "sha256": "...", "model_sha256": "...",
     "runtime": "tensorrt", "runtime_version": "10.14.1.48", "version_compatible": false,
     "sm": [89], "precision": "fp16", "plugin": "embedded" | null, "plugin_sha256": "..." | null,
     "profiles": [{"x": {"min": [1, 16], "opt": [4, 16], "max": [8, 16]}}],
     "inputs": {"x": "float16"}, "outputs": {"y": "float16"},
     "milliseconds": 0.41 | null, "milliseconds_of_all": {"fp16-plugin": 0.41, "fp16-native": 0.44}}

``sha256`` is that of the engine's file, ``model_sha256`` is `model_identity` of the bundle it was built from; ``sm``
lists the compute capabilities that the engine was built for, or is null for one that runs on any; "embedded" means that
the plugin library is within the engine; ``milliseconds`` is null for an engine never timed, and ``milliseconds_of_all``
has it with those of the engines that it was timed against, of which the slower ones were removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.runtime.profiles import Profile, parse_profiles
from rmsnorm_deploy.runtime.signature import Signature

FORMAT = 2


@dataclass(frozen=True)
class EngineRecord:
    """One engine file and what its metadata say."""

    name: str
    path: Path
    sha256: str
    model_sha256: str
    runtime: str
    runtime_version: str
    version_compatible: bool
    sm: tuple[int, ...] | None
    precision: str
    plugin: str | None
    profiles: tuple[Profile, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    milliseconds: float | None
    milliseconds_of_all: Mapping[str, float] = field(default_factory=dict)


def read_engines(folder: Path) -> list[EngineRecord]:
    """Every engine described in ``folder``, by name; none when there is no such folder.

    Raises:
        InputError: metadata that cannot be read, or name a file that is not there or lies outside the folder.
    """
    return [read_engine(path) for path in sorted(folder.glob("*.json"))]


def read_engine(path: Path) -> EngineRecord:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise InputError(f"{path} is of format {data['format']}, expected {FORMAT}: build the engine again")
        if data["plugin"] not in (None, "embedded"):
            raise ValueError(f"plugin is {data['plugin']!r}")
        return EngineRecord(
            name=data["name"],
            path=_engine_file(path.parent, data["engine"]),
            sha256=str(data["sha256"]),
            model_sha256=str(data["model_sha256"]),
            runtime=data["runtime"],
            runtime_version=data["runtime_version"],
            version_compatible=bool(data.get("version_compatible", False)),
            sm=None if data["sm"] is None else tuple(int(sm) for sm in data["sm"]),
            precision=data["precision"],
            plugin=data["plugin"],
            profiles=parse_profiles(data["profiles"]),
            inputs=dict(data["inputs"]),
            outputs=dict(data["outputs"]),
            milliseconds=data.get("milliseconds"),
            milliseconds_of_all=dict(data.get("milliseconds_of_all", {})),
        )
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is not engine metadata ({type(error).__name__}: {error}): build the engine again"
        ) from error


def _engine_file(folder: Path, name: str) -> Path:
    """The engine's file, which must lie in the folder itself."""
    file = folder / name
    if Path(name).name != name or not file.is_file():
        raise InputError(f"engine file {name!r} is not in {folder}: build the engine again")
    return file


def choose_engine(
    records: Sequence[EngineRecord], runtime: str, version: str, sm: int, bundle: Path, name: str | None = None
) -> EngineRecord:
    """The engine to run: the one named, else the fastest that was timed, else one with our plugin.

    Raises:
        BackendUnavailable: the bundle has no engine for ``runtime``, version and GPU; names both sides.
        InputError: no engine of that name.
    """
    of_runtime = [record for record in records if record.runtime == runtime]
    if not of_runtime:
        raise BackendUnavailable(
            f"{bundle} has no {runtime} engine: python -m rmsnorm_deploy.engine {bundle} --runtime {runtime}"
        )
    if name is not None:
        of_runtime = [record for record in of_runtime if record.name == name]
        if not of_runtime:
            raise InputError(f"{bundle} has no {runtime} engine {name!r}: it has {', '.join(r.name for r in records)}")
    usable = [record for record in of_runtime if mismatch(record, version, sm) is None]
    if not usable:
        reasons = "; ".join(str(mismatch(record, version, sm)) for record in of_runtime)
        raise BackendUnavailable(f"no engine of {bundle} runs here: {reasons}: build one on this machine")
    return min(usable, key=_preference)


def _preference(record: EngineRecord) -> tuple[bool, float, bool]:
    return record.milliseconds is None, record.milliseconds or 0.0, record.plugin is None


def mismatch(record: EngineRecord, version: str, sm: int) -> str | None:
    """Why the engine cannot run with this library version on a GPU of compute capability ``sm``; None if it can."""
    if not versions_agree(record, version):
        return f"{record.name} was built by {record.runtime} {record.runtime_version}, and {version} is installed"
    if record.sm is not None and sm not in record.sm:
        built = ", ".join(f"SM {item}" for item in record.sm)
        return f"{record.name} was built for {built}, and this GPU is SM {sm}"
    return None


def versions_agree(record: EngineRecord, version: str) -> bool:
    """Engines run with the version that built them: all of it, or its major number where built to be compatible."""
    if record.version_compatible:
        return record.runtime_version.split(".")[0] == version.split(".")[0]
    built, installed = (text.split(".")[:3] for text in (record.runtime_version, version))
    return built == installed


def model_identity(manifest: Mapping[str, Any]) -> str:
    """One SHA-256 for the ONNX model and its weights, from those that the manifest has of their files."""
    files = manifest.get("files", {})
    lines = [f"{name} {files[name]['sha256']}" for name in sorted(files) if name.startswith("model.onnx")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def checked_bytes(record: EngineRecord, manifest: Mapping[str, Any]) -> bytes:
    """The engine's file, after checks that it is the one described, and was built from this bundle's model.

    They find damage and mix-ups. Who can write an engine can write its description too: they are no proof of origin.

    Raises:
        InputError: names the file that is not what it should be.
    """
    if record.model_sha256 != model_identity(manifest):
        raise InputError(f"{record.path} was built from another model than this bundle's: build it again")
    data = record.path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record.sha256:
        described = record.path.with_suffix(".json").name
        raise InputError(f"{record.path} is damaged, or not the engine that {described} describes: build it again")
    return data


def check_tensors(
    record: EngineRecord, signature: Signature, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> None:
    """The engine's own tensors (name to dtype) must be those of the manifest.

    Raises:
        InputError: names the tensor and both dtypes.
    """
    for kind, specs, found in (("input", signature.inputs, inputs), ("output", signature.outputs, outputs)):
        for spec in specs:
            if spec.name not in found:
                raise InputError(f"engine {record.name} has no {kind} {spec.name!r}: build it again from this bundle")
            if found[spec.name] != spec.dtype:
                raise InputError(
                    f"{kind} {spec.name!r} is {found[spec.name]} in engine {record.name} and {spec.dtype} in the "
                    "bundle: build the engine again"
                )
        unknown = sorted(set(found) - {spec.name for spec in specs})
        if unknown:
            raise InputError(f"engine {record.name} has {kind} {unknown[0]!r} and the bundle has not: build it again")


def check_dtypes(signature: Signature, runtime: str) -> None:
    """Refuse models that TensorRT has no types for.

    Raises:
        InputError: a float64 or other unsupported tensor, by name.
    """
    supported = {"float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"}
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype not in supported:
            raise InputError(
                f"{spec.name!r} is {spec.dtype}, which {runtime} has not: export with --precision fp32, fp16, bf16"
            )


def as_metadata(record: EngineRecord, **extra: Any) -> dict[str, Any]:
    """The record as the JSON that `read_engine` reads; ``extra`` adds keys that it does not read."""
    return {
        "format": FORMAT,
        "name": record.name,
        "engine": record.path.name,
        "sha256": record.sha256,
        "model_sha256": record.model_sha256,
        "runtime": record.runtime,
        "runtime_version": record.runtime_version,
        "version_compatible": record.version_compatible,
        "sm": None if record.sm is None else list(record.sm),
        "precision": record.precision,
        "plugin": record.plugin,
        "profiles": [
            {n: {"min": list(r.low), "opt": list(r.best), "max": list(r.high)} for n, r in profile.items()}
            for profile in record.profiles
        ],
        "inputs": dict(record.inputs),
        "outputs": dict(record.outputs),
        "milliseconds": record.milliseconds,
        "milliseconds_of_all": dict(record.milliseconds_of_all),
        **extra,
    }
