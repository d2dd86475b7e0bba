"""Weights on disk stay there: fusing a model reads its norms' small constants and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from fusion_graphs import graph
from onnx import TensorProto

BYTES = 300 << 20
SCRIPT = """
import resource, sys
import onnx, onnx_ir as ir
from rmsnorm_deploy.fusion import fuse
from rmsnorm_deploy.benchmark.fusion import synthetic_model
fuse(synthetic_model(3))  # what the libraries need by themselves
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = ir.load(sys.argv[1])
result = fuse(model)
ir.save(model, sys.argv[2])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(result.norms), after - before)
"""


def _external(name: str, shape: list[int], offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    entries = {"location": "weights.bin", "offset": str(offset), "length": str(4 * int(np.prod(shape)))}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _write(folder: Path) -> Path:
    """Two large matrices and a norm between them; the file is sparse, so it takes no room on disk."""
    side = BYTES // 2 // 4 // 12
    body = """e = MatMul(x, up) a = MatMul(e, down) v = Add(wl, one) sq = Mul(a, a) ms = ReduceMean(sq, last)
    me = Add(ms, eps) rt = Sqrt(me) n = Div(a, rt) y = Mul(n, v)"""
    model = graph(body)
    model.graph.initializer.append(_external("up", [12, side], 0))
    model.graph.initializer.append(_external("down", [side, 12], BYTES // 2))
    model.graph.initializer.append(_external("wl", [12], BYTES))
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(BYTES + 48)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_are_loaded_to_be_copied(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(_write(tmp_path)), str(tmp_path / "fused.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    norms, grown = map(int, done.stdout.split())
    assert norms == 1
    assert grown < 30 << 10, f"{grown >> 10} MiB more for {BYTES >> 20} MiB of weights"
    fused = onnx.load(tmp_path / "fused.onnx", load_external_data=False)
    assert {tensor.name for tensor in fused.graph.initializer if tensor.external_data} == {"up", "down"}
