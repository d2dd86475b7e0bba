"""A session on the onnx package's reference evaluator: numpy, an operator at a time, in the dtype that the file says.

Slow, and independent of every runtime. It is the one that runs bfloat16 on any CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.fusion.imports import infer_shapes
from rmsnorm_deploy.parity.onnx_file import all_nodes, read_model
from rmsnorm_deploy.parity.operators import OWN_OPERATORS
from rmsnorm_deploy.parity.result import ASK_EVALUATOR
from rmsnorm_deploy.parity.ulp import Array
from rmsnorm_deploy.runtime.optional import one_line
from rmsnorm_deploy.runtime.session import BundleLike, Session
from rmsnorm_deploy.runtime.tensors import to_numpy, to_torch

if TYPE_CHECKING:
    import torch

MAX_BYTES = 1 << 29  # of weights: it keeps every value that it computes, and takes seconds a layer past that
_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_PROBLEMS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


class EvaluatorSession(Session):
    """The bundle's model.onnx in the onnx package's `ReferenceEvaluator`; ``weights`` are those outside its folder.

    Raises:
        BackendUnavailable: it lacks an operator of the model or computes it wrongly, or the model is larger than
            ``max_bytes``.
        InputError: an output is no tensor, or it does not run an input.
    """

    backend = "onnx-reference"

    def __init__(
        self, bundle: BundleLike, max_bytes: int | None = MAX_BYTES, weights: Mapping[str, Array] | None = None
    ) -> None:
        super().__init__(bundle)
        size = sum(file.stat().st_size for file in bundle.model_path.parent.glob(f"{bundle.model_path.name}*"))
        if max_bytes is not None and size > max_bytes:
            raise BackendUnavailable(
                f"a model of {size / 1e6:.0f} MB takes the onnx package's evaluator long; to run it all the same: "
                + ASK_EVALUATOR
            )
        model = read_model(bundle.model_path)
        for output in model.graph.output:
            kind = output.type.WhichOneof("value") or "tensor_type"
            if kind != "tensor_type":
                raise InputError(
                    f"output {output.name!r} is a {kind.removesuffix('_type')}, and only tensors can be returned"
                )
        if _has_layer_norm_in_float16(model):
            raise BackendUnavailable(
                "the onnx package's evaluator computes LayerNormalization wrongly in float16: its squares overflow"
            )
        try:
            self._evaluator = _evaluator(model if weights else str(bundle.model_path), weights or {})
        except _PROBLEMS as error:
            raise BackendUnavailable(f"the onnx package's evaluator cannot load it: {one_line(error)}") from error

    def _execute(self, feeds: Mapping[str, Any]) -> list[torch.Tensor]:
        arrays = {name: to_numpy(to_torch(array)) for name, array in feeds.items()}
        known = set(self._evaluator.input_names)
        try:
            with np.errstate(all="ignore"):
                values = self._evaluator.run(
                    self.output_names, {name: array for name, array in arrays.items() if name in known}
                )
        except _PROBLEMS as error:
            raise InputError(f"the onnx package's evaluator cannot run the model: {one_line(error)}") from error
        return [to_torch(np.asarray(value)) for value in values]


def _has_layer_norm_in_float16(model: onnx.ModelProto) -> bool:
    """Whether a LayerNormalization reads or writes float16; functions are this package's, and have none."""
    if not any(node.op_type == "LayerNormalization" for node in all_nodes(model.graph)):
        return False
    inferred = ir.from_proto(model)
    infer_shapes(inferred)
    return any(
        value is not None and value.dtype == ir.DataType.FLOAT16
        for node in inferred.graph.all_nodes()
        if (node.domain, node.op_type) == ("", "LayerNormalization")
        for value in (*node.inputs, *node.outputs[:1])
    )


def _evaluator(model: onnx.ModelProto | str, weights: Mapping[str, Array]) -> ReferenceEvaluator:
    """Of a model by its path, or of one whose external weights are given: a path's must lie beside it."""

    class Evaluator(ReferenceEvaluator):
        def retrieve_external_data(self, initializer: onnx.TensorProto) -> Array:
            return weights[initializer.name] if weights else super().retrieve_external_data(initializer)

    return Evaluator(model, new_ops=[*OWN_OPERATORS, MatMul])


class MatMul(OpRun):
    """Half types through single precision: numpy has no fast product for them, and sums no better."""

    op_domain = ""

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        if a.dtype not in _HALVES:
            return (np.matmul(a, b),)
        return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)
