"""Calls rmsnorm_cuda of librmsnorm_deploy_cuda.so on torch tensors, and says in float64 what it must give."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import cuda_emulator as emu
import numpy as np
import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@cache
def library() -> ctypes.CDLL:
    """The CUDA library, built for this card where it is not built yet."""
    from rmsnorm_deploy import native, native_build

    if native.find_library("cuda") is None:
        major, minor = torch.cuda.get_device_capability()
        native_build.build(("cuda",), sm=(10 * major + minor,), quiet=True)
    path = native.find_library("cuda")
    assert path is not None
    loaded = ctypes.CDLL(str(path))
    loaded.rmsnorm_cuda_workspace_bytes.restype = ctypes.c_int64
    return loaded


@dataclass
class Norm:
    """One call and its tensors, all on the GPU."""

    case: emu.Case
    x: torch.Tensor
    skip: torch.Tensor | None
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    y: torch.Tensor
    sum: torch.Tensor | None
    workspace: torch.Tensor
    args: emu.Args

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        handle = (stream or torch.cuda.current_stream()).cuda_stream
        status = library().rmsnorm_cuda(ctypes.byref(self.args), ctypes.c_void_p(handle))
        assert status == 0, status


def rows_of(case: emu.Case, dtype: str, name: str, filled: bool) -> torch.Tensor:
    stride = case.width + case.pad
    late = case.misaligned.count(name)
    flat = torch.full(((case.rows - 1) * stride + case.width + late,), float("nan"), dtype=DTYPES[dtype], device="cuda")
    view = flat[late:].as_strided((case.rows, case.width), (stride, 1), late)
    if filled:
        view.copy_(torch.randn(case.rows, case.width, device="cuda") * 2)
    return view


def norm(case: emu.Case) -> Norm:
    torch.manual_seed(case.seed + case.width)
    tensors: dict[str, torch.Tensor] = {"x": rows_of(case, case.x, "x", True), "y": rows_of(case, case.y, "y", False)}
    if case.skip:
        tensors["skip"] = rows_of(case, case.x, "skip", True)
        tensors["sum"] = rows_of(case, case.x, "sum", False)
    for name, kind in (("scale", case.scale), ("bias", case.bias)):
        if kind != "none":
            count = case.width if kind == "full" else 1
            tensors[name] = (1 + 0.5 * torch.randn(count, device="cuda")).to(DTYPES[case.params])
    stride = case.width + case.pad
    args = emu.Args(
        abi=emu.ABI,
        x_dtype=emu.CODES[case.x],
        param_dtype=emu.CODES[case.params],
        y_dtype=emu.CODES[case.y],
        eps_mode=emu.EPS_MODES.index(case.eps_mode),
        scale_order=int(case.before_cast),
        eps=case.eps,
        rows=case.rows,
        width=case.width,
        scale_count=1 if case.scale == "one" else case.width,
        bias_count=1 if case.bias == "one" else case.width,
        **{f"{name}_stride": stride for name in ("x", "skip", "y", "sum")},
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
    given: Any = {name: tensors.get(name) for name in ("x", "skip", "scale", "bias", "y", "sum")}
    size = library().rmsnorm_cuda_workspace_bytes(ctypes.byref(args)) if case.workspace else 0
    workspace = torch.full((size // 4,), float("nan"), device="cuda")
    if size:
        args.workspace, args.workspace_bytes = workspace.data_ptr(), size
    return Norm(case, **given, workspace=workspace, args=args)


def host(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.double().cpu().numpy()


def check(made: Norm) -> None:
    """Every element of y and sum against float64."""
    case = made.case
    expected = emu.truth(case, *(host(t) for t in (made.x, made.skip, made.scale, made.bias)))
    y = host(made.y)
    assert y is not None
    assert (np.isnan(y) == np.isnan(expected.y)).all(), case
    finite = np.isfinite(expected.y)
    assert (np.abs(y - expected.y)[finite] <= np.broadcast_to(expected.slack, y.shape)[finite]).all(), case
    if case.x != "f32":
        share = (np.abs(y - expected.y)[finite] != 0).mean()
        assert share <= 0.02 + 3 / finite.sum(), f"{case}: {share:.1%} of elements are rounded otherwise"
    if made.sum is not None:
        np.testing.assert_array_equal(host(made.sum), expected.sum)
