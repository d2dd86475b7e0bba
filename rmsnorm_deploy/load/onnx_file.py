"""An .onnx file: readable, not empty, and its external data where it says, inside its own folder."""

from __future__ import annotations

from pathlib import Path

from rmsnorm_deploy.errors import InputError


def check_onnx(path: Path) -> None:
    """Raise InputError for a file that is no ONNX model or whose weights are missing, cut off or outside its folder."""
    import onnx  # the graph alone is parsed here; weights stay on disk
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise InputError(f"{path}: not an ONNX model, or a damaged one ({error})") from None
    if not model.graph.node or not model.graph.output:
        raise InputError(f"{path}: an ONNX model without nodes or outputs")
    folder = path.parent.resolve()
    needed: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            end = (info.offset or 0) + (info.length or 0)
            needed[info.location] = max(needed.get(info.location, 0), end)
    for location, size in needed.items():
        _check_data(path, folder, location, size)


def _check_data(path: Path, folder: Path, location: str, size: int) -> None:
    data = (folder / location).resolve()
    if not data.is_relative_to(folder):
        raise InputError(f"{path}: refused: its weights point outside its folder ({location})")
    if not data.is_file():
        raise InputError(f"{path}: its weights are missing: {location} must lie beside it")
    if data.stat().st_size < size:
        raise InputError(f"{path}: its weights are cut off: {location} has {data.stat().st_size} of {size} bytes")
