"""How the time to fuse grows with the number of norms: a chain of layers, each its own weight and residual add."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rmsnorm_deploy.cli import Parser, positive, run_command
from rmsnorm_deploy.fusion import fuse

WIDTH = 64
_STATISTIC = ("batch", "seq", 1)
_ROWS = ("batch", "seq", WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    return run_command(argv, _run)


def _run(argv: list[str]) -> int:
    """Time the fusion of synthetic graphs and print a table; 0."""
    parser = Parser("python -m rmsnorm_deploy.benchmark fusion", __doc__)
    parser.add_argument(
        "--norms", type=positive, nargs="+", default=[1000, 10000], metavar="N", help="sizes (1000 10000)"
    )
    parser.add_argument("--repeat", type=positive, default=3, help="runs of each size, of which the best counts (3)")
    parser.add_argument("--json", action="store_true", help="print the timings as JSON")
    options = parser.parse_args(argv)
    rows = [measure(norms, options.repeat) for norms in options.norms]
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{'norms':>8} {'nodes':>8} {'seconds':>9} {'ms a norm':>10}")
    for row in rows:
        print(
            f"{row['norms']:8.0f} {row['nodes']:8.0f} {row['seconds']:9.3f} {1e3 * row['seconds'] / row['norms']:10.3f}"
        )
    return 0


def measure(norms: int, repeat: int) -> dict[str, float]:
    """The best processor time of several, in seconds, to fuse a graph of so many norms.

    Raises:
        AssertionError: not every norm was fused together with its residual add.
    """
    best, nodes = float("inf"), 0
    for _ in range(repeat):
        model = synthetic_model(norms)
        nodes = len(model.graph)
        gc.collect()
        start = time.process_time()
        result = fuse(model)
        best = min(best, time.process_time() - start)
        assert len(result.norms) == norms
        assert sum(record.residual for record in result.norms) == norms - 1
    return {"norms": norms, "nodes": nodes, "seconds": best}


def synthetic_model(norms: int) -> ir.Model:
    """``h = h + sigmoid(rms_norm(h))``, so many times, spelled as PyTorch's exporter does."""
    generator = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(_ROWS), type=ir.TensorType(ir.DataType.FLOAT))
    two, eps = _constant("two", np.float32(2.0)), _constant("eps", np.float32(1e-6))
    axes = _constant("axes", np.array([-1]))
    weights = [_constant(f"w{i}", generator.random(WIDTH, np.float32)) for i in range(norms)]
    nodes: list[ir.Node] = []
    hidden = x
    for i, weight in enumerate(weights):
        square = _node(nodes, i, "Pow", hidden, two)
        mean = _node(nodes, i, "ReduceMean", square, axes)
        inverse = _node(nodes, i, "Reciprocal", _node(nodes, i, "Sqrt", _node(nodes, i, "Add", mean, eps)))
        scaled = _node(nodes, i, "Mul", _node(nodes, i, "Mul", hidden, inverse), weight)
        hidden = _node(nodes, i, "Add", hidden, _node(nodes, i, "Sigmoid", scaled))
    graph = ir.Graph([x], [hidden], nodes=nodes, initializers=[two, eps, axes, *weights], opset_imports={"": 18})
    return ir.Model(graph, ir_version=10)


def _constant(name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] | np.generic) -> ir.Value:
    tensor = ir.tensor(np.asarray(array), name=name)
    shape, dtype = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    return ir.Value(name=name, shape=shape, type=dtype, const_value=tensor)


def _node(nodes: list[ir.Node], layer: int, op_type: str, *inputs: ir.Value) -> ir.Value:
    node = ir.Node("", op_type, inputs, name=f"layer{layer}_{op_type}_{len(nodes)}")
    output = node.outputs[0]
    output.name, output.dtype = f"{node.name}_out", ir.DataType.FLOAT
    output.shape = ir.Shape(_STATISTIC if op_type in ("ReduceMean", "Sqrt", "Reciprocal") else _ROWS)
    nodes.append(node)
    return output
