"""One norm of a model, or what lies between two, as a file with an input on which it is wrong: for a bug report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.extract import Part, Piece, assemble, read_by
from rmsnorm_deploy.parity.lift_onnx import OnnxProgram
from rmsnorm_deploy.parity.normcheck import NormChecks
from rmsnorm_deploy.parity.sites import ONNX_OF, Site, op_piece
from rmsnorm_deploy.parity.ulp import Array

MAX_BYTES = 1 << 30  # of weights in a file: protobuf holds two gigabytes
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def save_norm(
    checks: NormChecks, site: Site, values: Mapping[str, Array], rule: str, folder: Path, stem: str
) -> tuple[str, ...]:
    """Write ``STEM.onnx`` (the op, its function body, its scale and bias), ``STEM.npz`` (its input: what it read in the
    running model or, if it is right there, rows that tell it apart) and ``STEM.expected.npz`` (float64 truth).

    Nothing is written for an op that is not there or is wired to other values. bfloat16 is stored as float32, and the
    file casts it. Returns the names of the files. Raises InputError when they cannot be written.
    """
    if site not in checks.usable:
        return ()
    here = all(name in values for name in (*site.inputs, *site.outputs)) and rule != "norm-isolated"
    inputs = {name: values[name] if here else checks.rows[site.depth][name] for name in site.inputs}
    truth = checks.formula_of(site, inputs)
    names = _plain_names(site)
    piece = op_piece(site, checks.sites.model)
    model = assemble(checks.sites.model, [piece])
    ranks = {name: array.ndim for name, array in (*inputs.items(), *truth.items())}
    _finish(model, piece.prefix, names, {name: ONNX_OF[site.dtype_of(name)] for name in names}, ranks)
    expected = {names[name]: array for name, array in truth.items()}
    return _write(folder, stem, model, {names[name]: array for name, array in inputs.items()}, expected)


def _write(
    folder: Path, name: str, model: onnx.ModelProto, inputs: Mapping[str, Array], expected: Mapping[str, Array]
) -> tuple[str, ...]:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name)
    files = (f"{stem}.onnx", f"{stem}.npz", f"{stem}.expected.npz")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files[0]).write_bytes(model.SerializeToString())
        _save(folder / files[1], {name: _storable(array) for name, array in inputs.items()})
        _save(folder / files[2], expected)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from error
    return files


def snippet(folder: Path, files: tuple[str, ...]) -> str:
    """Three lines of Python that run a saved norm, or what was saved of a span."""
    return (
        "import numpy as np, onnxruntime as ort\n"
        f"feeds, want = dict(np.load({str(folder / files[1])!r})), np.load({str(folder / files[2])!r})\n"
        f"print(ort.InferenceSession({str(folder / files[0])!r}).run(['Y'], feeds)[0], want['Y'])"
    )


def save_span(checks: NormChecks, end: str, values: Mapping[str, Array], folder: Path, stem: str) -> tuple[str, ...]:
    """Write the same three files for the part of the model that computes the value ``end`` from the norms before it
    (and from the model's inputs), which ``values`` has as they were read in the running model.

    The truth is what that part is in the graph before fusing, in float64, on those very inputs. Nothing is written for
    a part that cannot be cut out, or has more than ``MAX_BYTES`` of weights. Raises InputError when they cannot be
    written.
    """
    graph, reference = checks.sites.model, checks.sites.reference
    known = {name for site in checks.sites.sites for name in site.outputs if name in values and name != end}
    part = graph.between(known, [end], len(graph.model.graph.node), shapes=True)
    truth_part = reference.between(known, [end], len(reference.model.graph.node), shapes=True)
    starts = [name for name in _read(part, truth_part) if name in known or name in graph.inputs]
    weights = sum(graph.size_of(name) for name in part.constants)
    if not set(part.open) | set(truth_part.open) <= set(values) or weights > MAX_BYTES:
        return ()
    inputs = {name: values[name] for name in starts}
    dtypes = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    wanted = assemble(reference, [Piece("span", truth_part, dtypes, (end,))])
    assert checks.bundle.reference_path is not None
    program = OnnxProgram(checks.bundle.reference_path, wanted)
    truth = program.run({f"span/{name}": array for name, array in inputs.items()})[0]
    model = assemble(graph, [Piece("span", part, dtypes, (end,))])
    names = {**{name: f"X{number}" for number, name in enumerate(starts)}, end: "Y"}
    dtypes[end] = onnx.helper.np_dtype_to_tensor_dtype(values[end].dtype)
    ranks = {name: values[name].ndim for name in (*starts, end)}
    _finish(model, "span", names, dtypes, ranks)
    return _write(folder, stem, model, {names[name]: array for name, array in inputs.items()}, {"Y": truth})


def _read(*parts: Part) -> list[str]:
    """Names of all values that the nodes of parts read, once."""
    return list(dict.fromkeys(name for part in parts for node in part.nodes for name in read_by(node)))


def _plain_names(site: Site) -> dict[str, str]:
    names = {site.y: "Y", **({site.activation: "scale"} if site.activation else {})}
    if site.addends:
        return {**names, site.x: "sum", site.addends[1]: "skip", site.addends[0]: "X"}
    return {**names, site.x: "X"}


def _finish(
    model: onnx.ModelProto, prefix: str, names: Mapping[str, str], dtypes: Mapping[str, int], ranks: Mapping[str, int]
) -> None:
    """Give an assembled part the plain ``names``, with types and ranks, and drop the functions it does not call."""
    plain = {f"{prefix}/{name}": short for name, short in names.items()}
    for node in model.graph.node:
        for used in (node.input, node.output):
            renamed = [plain.get(name, name) for name in used]
            del used[:]
            used.extend(renamed)
    for value in (*model.graph.input, *model.graph.output):
        name = value.name.removeprefix(f"{prefix}/")
        shape = [f"{names[name]}_{axis}" for axis in range(ranks[name])]
        typed = onnx.helper.make_tensor_value_info(names[name], dtypes[name], shape)
        value.CopyFrom(typed)
    used_ops = {node.op_type for node in model.graph.node}
    kept = [function for function in model.functions if function.name in used_ops]
    del model.functions[:]
    model.functions.extend(kept)
    _widen_bfloat16(model)


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
