"""An operator that has no float64 definition, run alone by ONNX Runtime in the middle of a model in float64.

Its floats are rounded to the widest dtype that ONNX Runtime has a kernel for, and widened again behind it: everything
else stays in float64, and what this one operator costs is the same before and after fusing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun, RuntimeContextError
from onnx.reference.ops import load_op

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.onnx_file import all_nodes
from rmsnorm_deploy.parity.ort_options import sparing_options
from rmsnorm_deploy.parity.ulp import Array
from rmsnorm_deploy.runtime.optional import load_module, one_line

# attributes that hold an element type
DTYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "stash_type", "softmax_precision")

_TRIED = (TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.FLOAT16)
_INSTALL = "pip install onnxruntime"
# domains whose operators the onnx package defines
_DEFINED = ("ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "experimental")


def stand_ins(model: onnx.ModelProto, known: Iterable[type[OpRun]]) -> list[type[OpRun]]:
    """A class for each operator of ``model`` that neither the reference evaluator nor ``known`` defines, and for which
    ONNX Runtime has a kernel."""
    versions = {item.domain: item.version for item in model.opset_import}
    defined = {(item.op_domain, item.__name__) for item in known}
    defined |= {(function.domain, function.name) for function in model.functions}
    bodies = [model.graph, *(onnx.GraphProto(node=function.node) for function in model.functions)]
    used = {(node.domain, node.op_type) for body in bodies for node in all_nodes(body)}
    lacking = sorted(key for key in used - defined if _lacks(*key, versions.get(key[0])))
    return [
        type(name, (OrtOperator,), {"op_domain": domain, "imports": tuple(model.opset_import)})
        for domain, name in lacking
        if _has_kernel(domain, name)
    ]


def _lacks(domain: str, name: str, version: int | None) -> bool:
    if domain in _DEFINED:
        return False
    if domain:
        return True
    try:
        load_op("", name, version, evaluator_cls=ReferenceEvaluator)
    except RuntimeContextError:  # it is a function that depends on types, which the evaluator knows
        return False
    except (RuntimeError, ValueError):
        return True
    return False


def _has_kernel(domain: str, name: str) -> bool:
    """Whether ONNX Runtime has a kernel on the CPU; where it does not tell, a run will."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError:
        return False
    listed = getattr(state, "get_all_opkernel_def", None)
    if listed is None:
        return True
    mine = (domain, name, "CPUExecutionProvider")
    return any((kernel.domain, kernel.op_name, kernel.provider) == mine for kernel in listed())


class OrtOperator(OpRun):
    """The node alone in ONNX Runtime; floats come and go in float64.

    Raises InputError where ONNX Runtime has it in other dtypes only.
    """

    op_schema = None  # of a namesake in the default domain, whose attributes it does not have
    imports: tuple[onnx.OperatorSetIdProto, ...] = ()

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any], schema: Any = None) -> None:
        super().__init__(onnx_node, run_params, schema)
        self._sessions: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def _run(self, *operands: Any, **attributes: Any) -> tuple[Any, ...]:
        present = {name: array for name, array in zip(self.onnx_node.input, operands, strict=False) if name}
        types = tuple(helper.np_dtype_to_tensor_dtype(array.dtype) for array in present.values())
        if types not in self._sessions:
            self._sessions[types] = self._open(dict(zip(present, types, strict=True)))
        taken, session = self._sessions[types]
        narrow = helper.tensor_dtype_to_np_dtype(taken)
        feeds = {
            name: np.asarray(array.astype(narrow) if array.dtype == np.float64 else array, order="C")
            for name, array in present.items()
        }
        results = iter(session.run(None, feeds))
        return tuple(_widened(next(results)) if name else np.zeros(0) for name in self.onnx_node.output)

    def _open(self, types: dict[str, int]) -> tuple[int, Any]:
        ort = load_module("onnxruntime", _INSTALL)
        for narrow in _TRIED:
            model = self._alone(types, narrow)
            try:
                return narrow, ort.InferenceSession(model, sparing_options(), providers=["CPUExecutionProvider"])
            except Exception as error:  # ONNX Runtime's own have no common base; the last one is told
                problem = one_line(error)
        raise InputError(f"{self.onnx_node.domain}.{self.onnx_node.op_type} runs in no dtype here: {problem}")

    def _alone(self, types: dict[str, int], narrow: int) -> bytes:
        """A model of the node, whose floats are ``narrow``."""
        node = onnx.NodeProto()
        node.CopyFrom(self.onnx_node)
        for attribute in node.attribute:
            if attribute.name in DTYPE_ATTRIBUTES and attribute.i == TensorProto.DOUBLE:
                attribute.i = narrow
        inputs = [
            helper.make_tensor_value_info(name, narrow if dtype == TensorProto.DOUBLE else dtype, None)
            for name, dtype in types.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = helper.make_graph([node], "alone", inputs, outputs)
        return bytes(helper.make_model(graph, opset_imports=self.imports, ir_version=8).SerializeToString())


def _widened(array: Any) -> Array:
    found: Array = np.asarray(array)
    return found.astype(np.float64) if found.dtype in (np.float16, np.float32) else found
