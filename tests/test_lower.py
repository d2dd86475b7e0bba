"""What PyTorch's exporter writes and no runtime loads is mended, with the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import rmsnorm_deploy


class Sample(nn.Module):
    """chunk and split, and operators without bfloat16 at opset 18: Sin, Softplus, TopK, Conv."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b, c = x.chunk(3, dim=-1)
        first, rest = a.split([3, 5], dim=-1)
        y = self.conv(self.norm(b).transpose(1, 2)).transpose(1, 2) + torch.nn.functional.softplus(c)
        values, _ = y.topk(3, dim=-1)
        return {"y": torch.sin(y), "top": values, "parts": torch.cat([rest, first], dim=-1), "part": c[..., :2]}


def export(tmp_path: Path, dtype: str) -> rmsnorm_deploy.Bundle:
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    return rmsnorm_deploy.export_model(Sample().eval(), (x,), out_dir=tmp_path / dtype, precision=dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_dtype_gives_a_graph_whose_types_onnx_allows(tmp_path: Path, dtype: str) -> None:
    bundle = export(tmp_path, dtype)
    for path in (bundle.model_path, bundle.reference_path):
        assert path is not None
        onnx.checker.check_model(str(path), full_check=True)
        kinds = [node.op_type for node in onnx.load(path).graph.node]
        assert not {"SplitToSequence", "SequenceAt"} & set(kinds)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_values_are_those_of_the_module(tmp_path: Path, dtype: str) -> None:
    bundle = export(tmp_path, dtype)
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))
    x = x.to({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
    assert bundle.eager is not None
    module = bundle.eager if dtype == "fp32" else bundle.eager.to(x.dtype)
    with torch.no_grad():
        want = module(x)
    from onnx.reference import ReferenceEvaluator

    feed = {"x": x.float().numpy().astype(onnx.helper.tensor_dtype_to_np_dtype(_ONNX[dtype]))}
    got = dict(zip(want, ReferenceEvaluator(str(bundle.model_path)).run(list(want), feed), strict=True))
    for name, tensor in want.items():
        tolerance = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}[dtype]
        assert got[name].dtype == feed["x"].dtype
        np.testing.assert_allclose(got[name].astype(np.float32), tensor.float().numpy(), rtol=tolerance, atol=tolerance)


_ONNX = {"fp32": onnx.TensorProto.FLOAT, "fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}


def test_float32_gets_no_casts(tmp_path: Path) -> None:
    kinds = [node.op_type for node in onnx.load(export(tmp_path, "fp32").model_path).graph.node]
    assert "Cast" not in kinds
