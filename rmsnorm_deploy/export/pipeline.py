"""The pipeline: trace -> fuse -> lower -> check -> bundle, then parity, benchmark and report on what was written."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from rmsnorm_deploy import __version__
from rmsnorm_deploy.bundle import FORMAT, MODEL, REFERENCE, Bundle, save_program, seal, write_manifest
from rmsnorm_deploy.collector import rare_collections
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.dynamic import by_parameter, keywords_beside, take_names, usual_names
from rmsnorm_deploy.export.foreign import script_leaves
from rmsnorm_deploy.export.onnx_reader import read_onnx
from rmsnorm_deploy.export.outputs import has_named_tuples
from rmsnorm_deploy.export.precision import cast_floats, cast_module
from rmsnorm_deploy.export.quiet import reason
from rmsnorm_deploy.export.trace import trace
from rmsnorm_deploy.export.traced import Traced
from rmsnorm_deploy.export.weights import DATA_FILE, Stored, save_graph, write_weights
from rmsnorm_deploy.fusion import FusionResult, fuse
from rmsnorm_deploy.load import Source, load_source, prepare_module, to_cpu
from rmsnorm_deploy.load.onnx_file import check_in_memory
from rmsnorm_deploy.place import check_place, new_bundle
from rmsnorm_deploy.spoken import spoken

Progress = Callable[[str], AbstractContextManager[object]]
DEFAULT_OPSET = 18
_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "transformers", "numpy")


@dataclass(frozen=True)
class Options:
    """What to make of a source, and where."""

    out_dir: Path
    precision: str = "keep"
    opset: int = DEFAULT_OPSET
    targets: tuple[str, ...] = ()
    check: bool = True
    benchmark: bool = True
    force: bool = False


def export_model(
    model: torch.nn.Module | torch.export.ExportedProgram | torch.jit.ScriptModule | onnx.ModelProto | str | Path,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out_dir: str | Path,
    dynamic_shapes: Any = None,
    opset: int = DEFAULT_OPSET,
    precision: str = "keep",
    check: bool = False,
    benchmark: bool = False,
    force: bool = False,
) -> Bundle:
    """Export a model to a bundle.

    Args:
        model: a module (left exactly as it is), a program, a TorchScript module, an ONNX model, or the path of any file
            that the command takes.
        args, kwargs: an example call. Tensors become inputs; numbers, texts and None are fixed.
        out_dir: the bundle's folder.
        dynamic_shapes: as in ``torch.export.export``, or with names in place of Dims; by default every axis that may be
            a batch or a sequence. Of a TorchScript module, whose axes are dynamic by name alone, those with names.
        opset: ONNX opset of the file, for PyTorch models.
        precision: "keep", "fp32", "fp16" or "bf16", for PyTorch modules.
        check, benchmark: also judge parity, and time the model, as the command does.
        force: replace a bundle that is there.

    Raises:
        InputError: the model can't be exported; the message says why.
    """
    check_place(Path(out_dir), replace=force)
    source = _source(model, tuple(args), dict(kwargs or {}), dynamic_shapes)
    options = Options(Path(out_dir), precision, opset, (), check, benchmark, force)
    bundle = run(source, options, lambda stage: nullcontext())
    if (
        isinstance(model, torch.nn.Module)
        and bundle.eager is not None
        and precision == "keep"
        and _caches(model) == _caches(source.model)
    ):
        bundle.eager = model
    return bundle


def _caches(model: torch.nn.Module) -> bool:
    """Whether a transformers model returns its key-value cache too."""
    return getattr(getattr(model, "config", None), "use_cache", False) is True


def _source(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Source:
    if isinstance(model, str | Path):
        return load_source(Path(model))
    if isinstance(model, onnx.ModelProto):
        check_in_memory(model)
        return Source("onnx", read_onnx(model))
    if isinstance(model, torch.export.ExportedProgram):
        return Source("exported_program", model)
    module, notes = prepare_module(model, args, kwargs)
    args, kwargs = to_cpu(args), to_cpu(kwargs)
    if isinstance(module, torch.jit.ScriptModule):
        source = Source("torchscript", module, args, kwargs, notes=notes)
        call = dict(script_leaves(source))
        source.dims = usual_names(call) if dynamic_shapes is None else take_names(call, dynamic_shapes)[1]
        return source
    shapes, dims = take_names({**by_parameter(module, args), **kwargs}, keywords_beside(module, dynamic_shapes))
    return Source("module", module, args, kwargs, shapes, dims, notes=notes)


def run(source: Source, options: Options, progress: Progress) -> Bundle:
    """Export a loaded source; the bundle is complete when this returns.

    Raises:
        InputError: the source or the options stand in the way; nothing is left under the bundle's name.
    """
    source = in_precision(source, options.precision)
    with new_bundle(options.out_dir, replace=options.force) as folder:
        with rare_collections():
            manifest = _write_model(source, options, folder, progress)
        # the program, and what is read from the bundle, takes dicts in place of named tuples; the module does not
        takes = source.kind in ("module", "torchscript") and not has_named_tuples((source.args, source.kwargs))
        eager = source.model if takes else None
        _judge(Bundle(folder, manifest, eager), options, progress)
        seal(folder, manifest)
    return Bundle(options.out_dir, manifest, eager)


def _write_model(source: Source, options: Options, folder: Path, progress: Progress) -> dict[str, Any]:
    """Both graphs, the weights, the program and the manifest, which is returned."""
    with progress("trace"):
        traced = trace(source, options.opset)
    if options.check and traced.draws is not None:
        raise InputError(
            f"the model draws random numbers ({traced.draws}), so nothing it gives can be compared; draw them outside "
            "and pass them in, give dropout training=self.training, or export it unchecked with --no-check"
        )
    source.notes.extend(traced.notes)
    with progress("weights"):
        stored = write_weights(traced.model, folder)
        save_graph(traced.model, folder / REFERENCE)
        if traced.program is not None:
            _save(traced.program, folder, _places(traced, stored))
    with progress("fuse"):
        fused = fuse(traced.model)
    with progress("write"):
        save_graph(traced.model, folder / MODEL)
    with progress("check"):
        source.notes.extend(check_model(folder / MODEL, folder / REFERENCE))
    manifest = _manifest(source, options, traced, fused)
    write_manifest(folder, manifest)
    return manifest


def _save(program: torch.export.ExportedProgram, folder: Path, places: dict[str, dict[str, Any]]) -> None:
    try:
        save_program(program, folder, places)
    except OSError:
        raise
    except Exception as error:  # torch.export.save has no error of its own for what it can't write
        raise InputError(f"PyTorch can't write the traced program to a file: {reason(error)}") from error


def in_precision(source: Source, precision: str) -> Source:
    """The source with its module and example inputs in another dtype.

    Raises InputError where the dtypes are built in, or a weight would become infinite.
    """
    if precision == "keep":
        return source
    if source.kind != "module":
        what = {"onnx": "an ONNX file", "torchscript": "TorchScript", "exported_program": "a .pt2 program"}[source.kind]
        raise InputError(f"--precision {precision}: {what} has its dtypes built in; export the PyTorch module instead")
    source.model, notes = cast_module(source.model, precision)
    source.notes.extend(notes)
    source.args, source.kwargs = cast_floats(source.args, precision), cast_floats(source.kwargs, precision)
    return source


def check_model(path: Path, before: Path) -> list[str]:
    """ONNX's own checker, by path, so that a model of any size passes through.

    What it finds in ``before``, the same model before fusing, it found in the source: that is noted, and no reason to
    refuse a file that ran. ONNX Runtime's own norm in the standard's domain is one such thing, an input without a rank
    another.

    Raises:
        InputError: fusing made the file invalid: a fault of this package.
    """
    reason = _invalid(path)
    if reason is None:
        return []
    if reason != _invalid(before):
        raise InputError(f"the exported graph is not valid ONNX: {reason}")
    return [f"the source is no valid ONNX, and its export isn't either: {reason}"]


def _invalid(path: Path) -> str | None:
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        return spoken(str(error)).strip().splitlines()[0]
    return None


def _places(traced: Traced, stored: dict[str, Stored]) -> dict[str, dict[str, Any]]:
    """For the program's parameters whose elements are in the data file, where they are: found by their memory."""
    assert traced.program is not None
    tensors = {name: tensor for name, tensor in traced.program.state_dict.items() if tensor.is_contiguous()}
    by_memory = {_memory(tensor): stored[name] for name, tensor in tensors.items() if name in stored}
    return {
        name: {
            "file": DATA_FILE,
            "offset": by_memory[_memory(tensor)].offset,
            "length": by_memory[_memory(tensor)].length,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(by_memory[_memory(tensor)].strides or tensor.stride()),
        }
        for name, tensor in tensors.items()
        if _memory(tensor) in by_memory
    }


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)


def _manifest(source: Source, options: Options, traced: Traced, fused: FusionResult) -> dict[str, Any]:
    model = traced.model
    return {
        "format": FORMAT,
        "tool": {"name": "rmsnorm_deploy", "version": __version__},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "source": {
            "kind": source.kind,
            "path": str(source.path) if source.path else None,
            "recipe": str(source.recipe) if source.recipe else None,
        },
        "notes": list(source.notes),
        "opset": model.opset_imports.get(""),
        "ir_version": model.ir_version,
        "precision": options.precision,
        "signature": {
            "parameters": traced.parameters,
            "inputs": [
                {**_tensor(v), "path": v.name, "high": traced.high.get(v.name or "")}
                for v in model.graph.inputs
                if not v.is_initializer()  # one that is has a default, which a call leaves in place
            ],
            "constants": traced.constants,
            "outputs": [_tensor(v) for v in model.graph.outputs],
        },
        "dims": traced.dims,
        "engine_profile": {name: list(sizes) for name, sizes in source.engine_profile.items()},
        "norms": [record.to_json() for record in fused.norms],
        "left": [record.to_json() for record in fused.left],
        "versions": _versions(),
    }


def _tensor(value: ir.Value) -> dict[str, Any]:
    names = {"FLOAT": "float32", "DOUBLE": "float64"}
    dtype = value.dtype.name if value.dtype is not None else "FLOAT"
    shape = [
        dim if isinstance(dim, int) else (None if dim.value is None else str(dim.value)) for dim in value.shape or ()
    ]
    return {"name": value.name, "dtype": names.get(dtype, dtype.lower()), "shape": shape}


def _versions() -> dict[str, str]:
    found = {"rmsnorm_deploy": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _judge(bundle: Bundle, options: Options, progress: Progress) -> None:
    """Parity, benchmark and report, each written into the bundle."""
    judged = timed = None
    if options.check:
        from rmsnorm_deploy.parity import run_parity

        with progress("parity"):
            judged = run_parity(bundle, backends=options.targets or None)
        _write_json(bundle.path / "parity.json", judged.to_json())
    if options.benchmark:
        from rmsnorm_deploy.benchmark import run_benchmark

        with progress("benchmark"):
            timed = run_benchmark(bundle)
        _write_json(bundle.path / "benchmark.json", timed.to_json())
    if judged is not None or timed is not None:
        from rmsnorm_deploy.report import write_html

        with progress("report"):
            write_html(bundle, judged, timed, bundle.path / "report.html")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
