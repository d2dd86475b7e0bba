"""Python numbers in float64 models: PyTorch's exporter rounds them to float32 on their way, an epsilon of 1e-6 too."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch


def restore_scalars(model: ir.Model, program: torch.export.ExportedProgram) -> None:
    """Write the numbers of ``program``, which is what was translated, in full where ``model`` has them rounded."""
    numbers = {
        node.name: node.args[0]
        for node in program.graph.nodes
        if node.op == "call_function"
        and node.target is torch.ops.aten.scalar_tensor.default
        and isinstance(node.args[0], float)
        and node.meta["val"].dtype == torch.float64
    }
    for node in list(model.graph.all_nodes()) if numbers else ():
        output = node.outputs[0] if node.outputs else None
        if node.op_type != "Cast" or output is None or output.name not in numbers or output.dtype != ir.DataType.DOUBLE:
            continue
        assert node.graph is not None
        tensor = ir.tensor(np.asarray(numbers[output.name], np.float64))
        constant = ir.node("Constant", [], attributes={"value": tensor})
        exact = constant.outputs[0]
        exact.type, exact.shape = output.type, output.shape
        node.graph.insert_before(node, constant)
        exact.name, output.name = output.name, None
        ir.convenience.replace_all_uses_with(output, exact, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
