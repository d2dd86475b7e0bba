"""The precision of an engine is that of its bundle: networks are strongly typed, and run in the dtypes of their model.

Rounding the graph to another dtype here would lose what PyTorch keeps in float32 within a half model: rotary tables,
softmax, the statistics of norms. So another precision is another export.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter

import onnx

from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.errors import InputError

_OF_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_OF_ONNX = {onnx.TensorProto.FLOAT: "fp32", onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}
PRECISIONS = ("keep", *_OF_DTYPE.values())


def bundle_precision(bundle: Bundle) -> str:
    """ "fp32", "fp16" or "bf16": what the bundle was exported in; where dtypes were kept, what its matrices are.

    Vectors say little: a half model may have its norms' weights in float32. Without matrices, it is that of the inputs
    and outputs.
    """
    said = str(bundle.manifest.get("precision", "keep"))
    if said != "keep":
        return said
    counts: Counter[str] = Counter()
    for tensor in onnx.load(str(bundle.model_path), load_external_data=False).graph.initializer:
        if tensor.data_type in _OF_ONNX and len(tensor.dims) > 1:
            counts[_OF_ONNX[tensor.data_type]] += math.prod(tensor.dims)
    signature = bundle.manifest["signature"]
    for item in (*signature["outputs"], *signature["inputs"]):
        if item["dtype"] in _OF_DTYPE:
            counts[_OF_DTYPE[item["dtype"]]] += 1
    return counts.most_common(1)[0][0] if counts else "fp32"


def check_precision(bundle: Bundle, asked: str) -> str:
    """The precision of the engines of ``bundle``, which must be what was asked for, or "keep".

    Raises:
        InputError: another one; says which command makes a bundle of it.
    """
    if asked not in PRECISIONS:
        raise InputError(f"--precision {asked}: choose {', '.join(PRECISIONS)}")
    own = bundle_precision(bundle)
    if asked in ("keep", own):
        return own
    raise InputError(
        f"--precision {asked}: {bundle.path} is {own}, and engines run in its dtypes: {_cure(bundle, asked)}"
    )


def _cure(bundle: Bundle, precision: str) -> str:
    source = bundle.manifest.get("source", {})
    if source.get("kind") not in (None, "module"):
        return f"export the PyTorch model with --precision {precision}; {source['kind']} has its dtypes built in"
    path, recipe = source.get("path"), source.get("recipe")
    if path is None:
        return f'export the model again with export_model(..., precision="{precision}")'
    out = bundle.path.resolve().with_suffix("").name + f"-{precision}.bundle"
    command = ["python", "-m", "rmsnorm_deploy.export", path, "--precision", precision, "--out", out]
    if recipe not in (None, path):
        command += ["--recipe", recipe]
    return shlex.join(command)
