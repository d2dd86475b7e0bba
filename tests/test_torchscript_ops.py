"""``torch.rms_norm`` through the TorchScript exporter, against float64."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from rmsnorm_deploy.export.torchscript_ops import register_rms_norm


@pytest.mark.parametrize("how", ["trace", "script"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(("eps", "used"), [(1e-5, 1e-5), (1e-12, 1e-12), (None, None)])
def test_a_scripted_norm_keeps_its_eps_axes_and_weight(
    how: str, dtype: torch.dtype, eps: float | None, used: float | None
) -> None:
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    stash = np.float64 if dtype == torch.float64 else np.float32
    used = float(np.finfo(stash).eps) if used is None else used
    model = nn.RMSNorm((2, 8), eps=eps).to(dtype).eval()
    with torch.no_grad():
        model.weight.uniform_(0.5, 1.5)
    x = torch.randn(3, 2, 8).to(dtype) * torch.tensor([1.0, 1e-3, 0.0]).to(dtype)[:, None, None]
    scripted = torch.jit.trace(model, x) if how == "trace" else torch.jit.script(model)
    register_rms_norm(18)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            scripted,
            (x,),
            buffer,  # type: ignore[arg-type]
            dynamo=False,
            opset_version=18,
            input_names=["x"],
            dynamic_axes={"x": {0: "batch"}},
            do_constant_folding=False,
        )
    got = ort.InferenceSession(buffer.getvalue()).run(None, {"x": x.numpy()})[0]
    v = x.double().numpy()
    want = v / np.sqrt((v * v).mean((-2, -1), keepdims=True) + used) * model.weight.detach().double().numpy()
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    assert got.dtype == x.numpy().dtype
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance * 1e-3)
