"""One norm of a model as a file of its own, with an input on which it is wrong: what a bug report needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.extract import assemble
from rmsnorm_deploy.parity.normcheck import NormChecks
from rmsnorm_deploy.parity.sites import ONNX_OF, Site, op_piece
from rmsnorm_deploy.parity.ulp import Array

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def save_norm(checks: NormChecks, site: Site, values: Mapping[str, Array], rule: str, folder: Path) -> tuple[str, ...]:
    """Write ``NAME.onnx`` (the op, its function body, its scale and bias), ``NAME.npz`` (its input: what it read in the
    running model or, if it is right there, rows that tell it apart) and ``NAME.expected.npz`` (float64 truth).

    Nothing is written for an op that is not there or is wired to other values. bfloat16 is stored as float32, and the
    file casts it. Returns the names of the files. Raises InputError when they cannot be written.
    """
    if site not in checks.usable:
        return ()
    here = all(name in values for name in (*site.inputs, *site.outputs)) and rule != "norm-isolated"
    inputs = {name: values[name] if here else checks.rows[site.depth][name] for name in site.inputs}
    truth = checks.formula_of(site, inputs)
    names = _plain_names(site)
    model = _model(checks, site, names, {name: array.ndim for name, array in (*inputs.items(), *truth.items())})
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", site.name)
    files = (f"{stem}.onnx", f"{stem}.npz", f"{stem}.expected.npz")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files[0]).write_bytes(model.SerializeToString())
        _save(folder / files[1], {names[name]: _storable(array) for name, array in inputs.items()})
        _save(folder / files[2], {names[name]: array for name, array in truth.items()})
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from error
    return files


def snippet(folder: Path, files: tuple[str, ...]) -> str:
    """Three lines of Python that run a saved norm."""
    return (
        "import numpy as np, onnxruntime as ort\n"
        f"feeds, want = dict(np.load({str(folder / files[1])!r})), np.load({str(folder / files[2])!r})\n"
        f"print(ort.InferenceSession({str(folder / files[0])!r}).run(['Y'], feeds)[0], want['Y'])"
    )


def _plain_names(site: Site) -> dict[str, str]:
    names = {site.y: "Y", **({site.activation: "scale"} if site.activation else {})}
    if site.addends:
        return {**names, site.x: "sum", site.addends[1]: "skip", site.addends[0]: "X"}
    return {**names, site.x: "X"}


def _model(checks: NormChecks, site: Site, names: Mapping[str, str], ranks: Mapping[str, int]) -> onnx.ModelProto:
    piece = op_piece(site, checks.sites.model)
    model = assemble(checks.sites.model, [piece])
    plain = {f"{piece.prefix}/{name}": short for name, short in names.items()}
    for node in model.graph.node:
        for used in (node.input, node.output):
            renamed = [plain.get(name, name) for name in used]
            del used[:]
            used.extend(renamed)
    for value in (*model.graph.input, *model.graph.output):
        name = value.name.removeprefix(f"{piece.prefix}/")
        shape = [f"{names[name]}_{axis}" for axis in range(ranks[name])]
        typed = onnx.helper.make_tensor_value_info(names[name], ONNX_OF[site.dtype_of(name)], shape)
        value.CopyFrom(typed)
    used_ops = {node.op_type for node in model.graph.node}
    kept = [function for function in model.functions if function.name in used_ops]
    del model.functions[:]
    model.functions.extend(kept)
    _widen_bfloat16(model)
    return model


def _widen_bfloat16(model: onnx.ModelProto) -> None:
    """Let numpy, which has no bfloat16, feed and read the file: casts in front and behind."""
    bfloat16, single = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    halves = [value.name for value in model.graph.input if value.type.tensor_type.elem_type == bfloat16]
    if not halves:
        return
    ends = [value.name for value in model.graph.output if value.type.tensor_type.elem_type == bfloat16]
    inner = {name: f"{name}_bfloat16" for name in (*halves, *ends)}
    for node in model.graph.node:
        for used in (node.input, node.output):
            renamed = [inner.get(name, name) for name in used]
            del used[:]
            used.extend(renamed)
    casts = [onnx.helper.make_node("Cast", [name], [inner[name]], to=bfloat16) for name in halves]
    back = [onnx.helper.make_node("Cast", [inner[name]], [name], to=single) for name in ends]
    nodes = [*casts, *model.graph.node, *back]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == bfloat16:
            value.type.tensor_type.elem_type = single


def _save(path: Path, arrays: Mapping[str, Array]) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def _storable(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == _BFLOAT16 else array
