"""What the TensorRT tests share: the plugin library, one-norm models, bundles made by hand, and a child process."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from rmsnorm_deploy import native, opset
from rmsnorm_deploy.bundle import sha256
from rmsnorm_deploy.engine.architectures import architectures, covers
from rmsnorm_deploy.runtime.cuda import CudaDevice, no_gpu_reason
from rmsnorm_deploy.runtime.engines import EngineRecord, model_identity

ROOT = Path(__file__).resolve().parent.parent
HAS_RTX = importlib.util.find_spec("tensorrt_rtx") is not None
HAS_NVCC = shutil.which("nvcc") is not None
SMS = (80, 86, 89, 120)
NO_RTX = "TensorRT-RTX is not installed: pip install tensorrt-rtx-cu13"
FLOAT, HALF, BFLOAT = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
PAIRS = [(FLOAT, FLOAT), (HALF, HALF), (HALF, FLOAT), (BFLOAT, BFLOAT), (BFLOAT, FLOAT)]


@cache
def plugin_library() -> Path:
    """The plugin library, with code for all cards that the tests build for; skips where it cannot be built."""
    here = () if no_gpu_reason() is not None else (CudaDevice().sm,)
    found = native.find_library("tensorrt")
    if found is None or not all(covers(architectures(found), sm) for sm in (*SMS, *here)):
        if not HAS_NVCC:
            pytest.skip("the TensorRT plugins are not built for these cards, and nvcc is not on this machine")
        from rmsnorm_deploy import native_build

        native_build.build(("tensorrt",), sm=sorted({80, 120, *here}), quiet=True)  # code for 80 runs on 86 and 89
        found = native.find_library("tensorrt")
    assert found is not None
    return found


def norm_model(
    name: str,
    x: ir.DataType = HALF,
    scale: ir.DataType = HALF,
    shape: tuple[Any, ...] = ("batch", "seq", 64),
    scale_shape: tuple[int, ...] | None = None,
    with_function: bool = True,
    version: int = 18,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one op, with dynamic leading axes; ``attributes`` override what the name implies."""
    variant = opset.VARIANT_BY_NAME[name]
    given = dict(opset.ATTRIBUTES)
    given.update(
        epsilon_mode=variant.mode,
        scale_order="before_cast" if variant.before_cast else "after_cast",
        stash_type=11 if variant.double else 1,
    )
    given.update(attributes)
    given = {key: value for key, value in given.items() if value is not None}
    dims = list(scale_shape or shape[int(given.get("axis", -1)) :])
    values = np.linspace(0.5, 1.5, int(np.prod(dims))).astype(np.float32).tolist()
    names = ["x"] + (["skip"] if variant.skip else [])
    inputs = [helper.make_tensor_value_info(n, int(x), list(shape)) for n in names]
    parameters = ["scale"] + (["bias"] if variant.bias else [])
    constants = [helper.make_tensor(n, int(scale), dims, values) for n in parameters]
    y_type = x if variant.before_cast else scale
    outputs = [helper.make_tensor_value_info("y", int(y_type), list(shape))]
    if variant.skip:
        outputs.append(helper.make_tensor_value_info("sum", int(x), list(shape)))
    node = helper.make_node(name, names + parameters, [o.name for o in outputs], "norm", domain=opset.DOMAIN, **given)
    signature = opset.Signature(x, scale, int(given.get("axis", -1)))
    body = ir.to_proto(opset.function_body(variant, frozenset([signature]), version))
    return helper.make_model(
        helper.make_graph([node], "one_norm", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", version), helper.make_opsetid(opset.DOMAIN, 1)],
        functions=[body] if with_function else [],
        ir_version=10,
    )


DTYPE_NAMES = {1: "float32", 10: "float16", 16: "bfloat16", 7: "int64", 11: "float64"}


def bundle_of(model: onnx.ModelProto, folder: Path) -> Path:
    """A bundle around a model, with the manifest that engines need."""
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")

    def tensors(values: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": v.name,
                "path": v.name,
                "dtype": DTYPE_NAMES[v.type.tensor_type.elem_type],
                "shape": [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim],
                "high": None,
            }
            for v in values
        ]

    inputs = tensors(model.graph.input)
    names = {dim for item in inputs for dim in item["shape"] if isinstance(dim, str)}
    norms = [
        {
            "name": node.name,
            "module": None,
            "node": node.name,
            "op": "RMSNorm",
            "op_type": node.op_type,
            "dtype": inputs[0]["dtype"],
            "shape": inputs[0]["shape"],
            "axis": -1,
            "epsilon": 1e-6,
            "epsilon_mode": "inside",
            "scale_order": "after_cast",
            "stash_type": "float32",
            "scale": "scale",
            "scale_dtype": None,
            "bias": None,
            "residual": False,
            "location": None,
            "proof": {},
        }
        for node in model.graph.node
        if node.domain == opset.DOMAIN
    ]
    manifest = {
        "format": 1,
        "precision": "keep",
        "opset": next(item.version for item in model.opset_import if item.domain == ""),
        "signature": {
            "parameters": [item["name"] for item in inputs],
            "inputs": inputs,
            "constants": [],
            "outputs": tensors(model.graph.output),
        },
        "dims": {name: {"example": 4, "min": 0, "max": 16} for name in sorted(names)},
        "norms": norms,
        "left": [],
        "files": {"model.onnx": {"sha256": sha256(folder / "model.onnx")}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def in_child(task: str, *arguments: str) -> Any:
    """Run a task of tests/tensorrt_child.py in a process of its own, since TensorRT may abort; its JSON answer."""
    command = [sys.executable, str(ROOT / "tests" / "tensorrt_child.py"), task, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{task} ended with {done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def engine_record(path: Path, manifest: dict[str, Any]) -> EngineRecord:
    """The description of the bytes at ``path`` as an engine of TensorRT for a bundle's model."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rest: Any = {"runtime": "tensorrt", "runtime_version": "10.14.1", "version_compatible": False, "sm": (89,)}
    rest |= {"precision": "fp16", "plugin": None, "profiles": (), "inputs": {}, "outputs": {}, "milliseconds": None}
    return EngineRecord(path.stem, path, digest, model_identity(manifest), **rest)
