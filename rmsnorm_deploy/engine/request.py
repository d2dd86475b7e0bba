"""What the parent process asks of the one that builds an engine, and what that one answers: JSON both ways."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MODULES = {
    "tensorrt": ("tensorrt", "pip install tensorrt"),
    "tensorrt-rtx": ("tensorrt_rtx", "pip install tensorrt-rtx-cu13"),
}


@dataclass(frozen=True)
class BuildRequest:
    """One engine. ``plugin`` is the library, or None for the variant that runs on function bodies.

    ``norms`` are the names of the nodes that must become plugin layers, ``opset`` is the model's.
    """

    model: str
    engine: str
    answer: str
    runtime: str
    sms: list[int]
    profiles: list[dict[str, dict[str, list[int]]]]
    plugin: str | None
    norms: list[str]
    opset: int
    timing_cache: str | None = None
    verbose: bool = False
    progress: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> BuildRequest:
        return BuildRequest(**json.loads(path.read_text(encoding="utf-8")))


@dataclass
class BuildAnswer:
    """``error``: one line, and then nothing else counts. ``kind``: "input" or "backend", the refusal it is."""

    error: str | None = None
    kind: str = "input"
    version: str = ""
    plugin_layers: int = 0
    layers: int = 0
    io: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> BuildAnswer:
        return BuildAnswer(**json.loads(path.read_text(encoding="utf-8")))


def partial(path: Path) -> Path:
    """Where a file is written before it takes its name ``path``, whole."""
    return path.with_suffix(".partial")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    partial(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(partial(path), path)
