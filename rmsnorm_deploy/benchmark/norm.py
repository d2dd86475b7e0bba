"""A single norm at the model's own width: the op against LayerNorm and against a copy of the same bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from rmsnorm_deploy.benchmark.contestants import onnxruntime_call
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.opset import ATTRIBUTES, DOMAIN, VERSION, Signature, Variant, function_body
from rmsnorm_deploy.parity.samples import dim_size

_TYPES: dict[str, tuple[int, Any]] = {
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "float32": (TensorProto.FLOAT, np.float32),
    "float64": (TensorProto.DOUBLE, np.float64),
}


@dataclass(frozen=True)
class NormCase:
    """The norm that stands for the model's: without a residual, its rows at the example's shape.

    ``sites`` counts the model's norms that are of this kind, those with a residual too.
    """

    rows: int
    row: list[int]
    dtype: str
    scale_dtype: str
    epsilon: float
    epsilon_mode: str
    scale_order: str
    stash_type: str
    opset: int
    ir_version: int
    sites: int = 1

    @property
    def shape(self) -> list[int]:
        return [self.rows, *self.row]

    @property
    def before_cast(self) -> bool:
        return self.scale_order == "before_cast"

    @property
    def variant(self) -> Variant:
        return Variant(
            mode=self.epsilon_mode,
            before_cast=self.before_cast,
            double=_TYPES[self.stash_type][0] == TensorProto.DOUBLE,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def typical_norm(manifest: Mapping[str, Any], dims: Mapping[str, int]) -> NormCase | None:
    """The kind of norm that the model has most of, at ``dims``; None where no row has a fixed size."""
    limits = manifest.get("dims") or {}
    found = [_case(manifest, record, dims, limits) for record in manifest["norms"] if _fixed_row(record)]
    if not found:
        return None
    kinds = Counter(repr(case) for case in found)
    most, sites = kinds.most_common(1)[0]
    return replace(next(case for case in found if repr(case) == most), sites=sites)


def _fixed_row(record: Mapping[str, Any]) -> list[int] | None:
    row = list(record["shape"][record["axis"] :])
    return row if row and all(isinstance(size, int) for size in row) else None


def _case(
    manifest: Mapping[str, Any], record: Mapping[str, Any], dims: Mapping[str, int], limits: Mapping[str, Any]
) -> NormCase:
    rows = math.prod(dim_size(dim, dims, limits) for dim in record["shape"][: record["axis"]])
    names = ("dtype", "scale_dtype", "epsilon", "epsilon_mode", "scale_order", "stash_type")
    return NormCase(
        rows=max(rows, 1),
        row=_fixed_row(record) or [],
        opset=max(int(manifest["opset"]), 17),
        ir_version=int(manifest["ir_version"]),
        **{name: record[name] for name in names},
    )


def norm_calls(
    case: NormCase, threads: int, library: Callable[[], Path], widen_bfloat16: bool = False
) -> dict[str, Callable[[], Call]]:
    """What makes each contestant's call, by name. ``library`` gives the custom ops or raises."""
    x = np.random.default_rng(0).standard_normal(case.shape).astype(_TYPES[case.dtype][1])

    def onnxruntime(model: bytes, custom_ops: Path | None = None) -> Call:
        return onnxruntime_call(
            model, Path(), {"x": x}, threads=threads, library=custom_ops, widen_bfloat16=widen_bfloat16
        )

    return {
        "norm-copy": lambda: _torch(case, x, "copy"),
        "norm-pytorch": lambda: _torch(case, x, "rms_norm"),
        "norm-pytorch-layernorm": lambda: _torch(case, x, "layer_norm"),
        "norm-onnxruntime": lambda: onnxruntime(fused_model(case)),
        "norm-onnxruntime-kernels": lambda: onnxruntime(fused_model(case), library()),
        "norm-onnxruntime-layernorm": lambda: onnxruntime(layer_norm_model(case)),
    }


def fused_model(case: NormCase) -> bytes:
    """The op alone, with its function body, as the exporter writes it."""
    attributes: dict[str, Any] = {
        **ATTRIBUTES,
        "axis": -len(case.row),
        "epsilon": case.epsilon,
        "epsilon_mode": case.epsilon_mode,
        "scale_order": case.scale_order,
        "stash_type": int(_TYPES[case.stash_type][0]),
    }
    node = helper.make_node(case.variant.name, ["x", "scale"], ["y"], domain=DOMAIN, **attributes)
    types = [ir.DataType(_TYPES[name][0]) for name in (case.dtype, case.scale_dtype)]
    body = function_body(case.variant, frozenset({Signature(types[0], types[1], -len(case.row))}), case.opset)
    return _model(case, node, {"scale": _filled(case, case.scale_dtype, 1.0)}, [ir.to_proto(body)])


def layer_norm_model(case: NormCase) -> bytes:
    """LayerNormalization alone, with a bias of zeros."""
    node = helper.make_node(
        "LayerNormalization", ["x", "scale", "bias"], ["y"], axis=-len(case.row), epsilon=case.epsilon
    )
    weights = {"scale": _filled(case, case.dtype, 1.0), "bias": _filled(case, case.dtype, 0.0)}
    return _model(replace(case, scale_dtype=case.dtype), node, weights, [])


def _filled(case: NormCase, dtype: str, value: float) -> np.ndarray[Any, Any]:
    return np.full(case.row, value).astype(_TYPES[dtype][1])


def _model(
    case: NormCase,
    node: onnx.NodeProto,
    weights: dict[str, np.ndarray[Any, Any]],
    functions: list[onnx.FunctionProto],
) -> bytes:
    result = case.dtype if case.before_cast else case.scale_dtype  # "after_cast" is as wide as the wider of the two
    graph = helper.make_graph(
        [node],
        "norm",
        [helper.make_tensor_value_info("x", _TYPES[case.dtype][0], case.shape)],
        [helper.make_tensor_value_info("y", _TYPES[result][0], case.shape)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid(DOMAIN, VERSION)]
    made = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=case.ir_version)
    return bytes(made.SerializeToString())


def _torch(case: NormCase, x: np.ndarray[Any, Any], kind: str) -> Call:
    import torch
    import torch.nn.functional as F

    from rmsnorm_deploy.runtime.tensors import to_torch

    rows = to_torch(x)
    scale = torch.ones(case.row, dtype=rows.dtype)
    target = torch.empty_like(rows)
    eps = case.epsilon

    def copy() -> None:
        target.copy_(rows)

    def rms_norm() -> None:
        with torch.no_grad():
            F.rms_norm(rows, case.row, scale, eps)

    def layer_norm() -> None:
        with torch.no_grad():
            F.layer_norm(rows, case.row, scale, None, eps)

    return {"copy": copy, "rms_norm": rms_norm, "layer_norm": layer_norm}[kind]
