"""Models made on the side, run by the backends of a bundle: one that shows more values, one of the norms alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import onnx

from rmsnorm_deploy.parity.backends import Backend
from rmsnorm_deploy.parity.extract import with_outputs
from rmsnorm_deploy.parity.onnx_file import read_model

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.runtime.session import Session


class ModelFile:
    """One ONNX file as the bundle that a session wants."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.model_path, self.path, self.manifest = path, path.parent, manifest
        self.reference_path: Path | None = None
        self.eager: torch.nn.Module | None = None

    def program(self) -> torch.export.ExportedProgram | None:
        return None

    def session(self, backend: str = "onnxruntime", **options: Any) -> Session:
        from rmsnorm_deploy.runtime import open_session

        return open_session(self, backend, **options)


class Scratch:
    """A folder that vanishes, in which files with external data find that data again."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rmsnorm_deploy-"))
        self._count = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def tapped(self, path: Path, manifest: Mapping[str, Any], dtypes: Mapping[str, str]) -> ModelFile:
        """The model at ``path``, which gives the values named in ``dtypes`` too."""
        signature = manifest["signature"]
        known = {item["name"] for item in signature["outputs"]}
        more = [{"name": name, "dtype": dtype, "shape": []} for name, dtype in dtypes.items() if name not in known]
        signature = {**signature, "outputs": [*signature["outputs"], *more]}
        model = with_outputs(read_model(path), dtypes)
        return self._write(model, path.parent, {**manifest, "signature": signature})

    def alone(self, model: onnx.ModelProto, dtypes: Mapping[str, str], ranks: Mapping[str, int]) -> ModelFile:
        """A model that holds its constants; ``dtypes`` are those of its inputs and outputs, ``ranks`` of its inputs."""

        def spec(name: str) -> dict[str, Any]:
            return {"name": name, "path": name, "dtype": dtypes[name], "shape": [None] * ranks.get(name, 0)}

        signature = {
            "parameters": [],
            "constants": [],
            "inputs": [spec(value.name) for value in model.graph.input],
            "outputs": [spec(value.name) for value in model.graph.output],
        }
        return self._write(model, None, {"signature": signature, "dims": {}, "norms": [], "left": []})

    def _write(self, model: onnx.ModelProto, data: Path | None, manifest: Mapping[str, Any]) -> ModelFile:
        self._count += 1
        folder = self.path / str(self._count)
        folder.mkdir()
        if data is not None:
            for name in external_files(model):
                link_or_copy(data / name, folder / name)
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return ModelFile(path, manifest)


def open_backend(file: ModelFile, backend: Backend) -> Session:
    """A session of ``file`` as ``backend`` opens one."""
    return file.session(backend.runtime, **backend.options)


def external_files(model: onnx.ModelProto) -> list[str]:
    """Names of the files in which a model has its weights; those outside its folder are left out."""
    names = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return sorted(name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts)


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name: ONNX Runtime refuses symbolic links to weights."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
