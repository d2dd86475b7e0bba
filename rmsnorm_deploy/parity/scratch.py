"""Models made on the side, run by the backends of a bundle: one that shows more values, one of the norms alone."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.backends import REFERENCE, Backend
from rmsnorm_deploy.parity.evaluator import EvaluatorSession
from rmsnorm_deploy.parity.extract import Graph, ending_at, with_outputs
from rmsnorm_deploy.parity.ort_options import options_with
from rmsnorm_deploy.parity.ulp import Array
from rmsnorm_deploy.runtime.optional import native_library
from rmsnorm_deploy.spoken import forget, speak_of

if TYPE_CHECKING:
    import torch

    from rmsnorm_deploy.runtime.session import Session


class ModelFile:
    """One ONNX file as the bundle that a session wants; ``weights`` are those that its folder does not hold, ``once``
    says that a session of it runs once or twice."""

    def __init__(
        self, path: Path, manifest: Mapping[str, Any], weights: Mapping[str, Array] | None = None, *, once: bool = False
    ) -> None:
        self.model_path, self.path, self.manifest = path, path.parent, manifest
        self.reference_path: Path | None = None
        self.eager: torch.nn.Module | None = None
        self.weights, self._once = weights or {}, once

    def program(self) -> torch.export.ExportedProgram | None:
        return None

    def session(self, backend: str = "onnxruntime", **options: Any) -> Session:
        from rmsnorm_deploy.runtime import open_session

        if self.weights and options.get("custom_ops") == "auto":
            options["custom_ops"] = native_library("ort") is not None
        if options.get("custom_ops") != "auto":
            options["session_options"] = options_with(self.weights, once=self._once)
        return open_session(self, backend, **options)


def stored_weights(model: onnx.ModelProto, folder: Path, files: dict[Path, Array] | None = None) -> dict[str, Array]:
    """The external weights of a model as arrays over their file, of which a page is read when it is used.

    ``files`` are those that are mapped already: models that share one then share its memory. Raises InputError where a
    weight lies outside ``folder`` or is not whole.
    """
    files = {} if files is None else files
    return {
        tensor.name: _mapped(tensor, folder, files)
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


def _mapped(tensor: onnx.TensorProto, folder: Path, files: dict[Path, Array]) -> Array:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location or Path(location).is_absolute() or ".." in Path(location).parts:
        raise InputError(f"{folder}: the weight {tensor.name!r} lies outside the model's folder")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.zeros(shape, dtype)
    path, start = folder / location, int(entries.get("offset", 0))
    try:
        if path not in files:
            files[path] = np.asarray(np.memmap(path, np.uint8, "r"))
        return files[path][start : start + size].view(dtype).reshape(shape)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} does not hold the weight {tensor.name!r}: {error}") from error


class Scratch:
    """A folder that vanishes, for models made on the side. Their sessions live no longer than it does."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rmsnorm_deploy-"))
        speak_of(self.path, "(made on the side)")
        self._count = 0
        self._files: dict[Path, Array] = {}  # sessions read them as long as they live

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if error is None:
            forget(self.path)

    def tapped(self, graph: Graph, manifest: Mapping[str, Any], dtypes: Mapping[str, str]) -> ModelFile:
        """The model of ``graph``, which gives the values named in ``dtypes`` too."""
        signature = manifest["signature"]
        known = {item["name"] for item in signature["outputs"]}
        more = [{"name": name, "dtype": dtype, "shape": []} for name, dtype in dtypes.items() if name not in known]
        signature = {**signature, "outputs": [*signature["outputs"], *more]}
        model = with_outputs(graph.model, dtypes)
        return self._write(model, graph.folder, {**manifest, "signature": signature})

    def shown(self, graph: Graph, manifest: Mapping[str, Any], dtypes: Mapping[str, str]) -> ModelFile:
        """The part of the model of ``graph`` that gives the values named in ``dtypes``, and nothing else."""
        outputs = [{"name": name, "dtype": dtype, "shape": []} for name, dtype in dtypes.items()]
        signature = {**manifest["signature"], "outputs": outputs}
        return self._write(ending_at(graph, dtypes), graph.folder, {**manifest, "signature": signature}, once=True)

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

    def _write(
        self, model: onnx.ModelProto, data: Path | None, manifest: Mapping[str, Any], *, once: bool = False
    ) -> ModelFile:
        self._count += 1
        folder = self.path / str(self._count)
        folder.mkdir()
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        weights = stored_weights(model, data, self._files) if data is not None else {}
        return ModelFile(path, manifest, weights, once=once)


def open_backend(file: ModelFile, backend: Backend) -> Session:
    """A session of ``file`` as ``backend`` opens one."""
    if backend.runtime == REFERENCE:
        return EvaluatorSession(file, None, file.weights)
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
