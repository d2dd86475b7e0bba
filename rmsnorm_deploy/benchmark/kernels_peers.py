"""Who takes part in the comparison of the CPU kernels: each makes a call for each set of a case's tensors."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from rmsnorm_deploy import ckernel
from rmsnorm_deploy.benchmark.kernels_cases import BARE, COPY, EPSILON, Buffers, Case
from rmsnorm_deploy.benchmark.kernels_openvino import openvino_calls
from rmsnorm_deploy.benchmark.kernels_ort import NORM_OPS, SKIP_OPS, ort_calls
from rmsnorm_deploy.benchmark.timing import Call
from rmsnorm_deploy.errors import BackendUnavailable


def bare_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """Our kernel with nothing around it but ctypes."""
    library = ckernel.cpu_library()
    if library is None:
        raise BackendUnavailable("not built: run python -m rmsnorm_deploy.native build")
    pool = library.rmsnorm_cpu_pool(case.threads)
    return [_bare_call(library, _arguments(case, item, scale), pool, item) for item in sets]


def _bare_call(library: ctypes.CDLL, args: ckernel.Args, pool: int | None, keep: Buffers) -> Call:
    pointer = ctypes.byref(args)

    def call(keep: Buffers = keep) -> object:
        return library.rmsnorm_cpu(pointer, pool)

    return call


def _arguments(case: Case, item: Buffers, scale: torch.Tensor) -> ckernel.Args:
    number = ckernel.DTYPES[case.dtype]
    strides = dict.fromkeys(("x_stride", "skip_stride", "y_stride", "sum_stride"), case.width)
    return ckernel.Args(
        x_dtype=number,
        param_dtype=number,
        y_dtype=number,
        eps=EPSILON,
        rows=case.rows,
        width=case.width,
        scale_count=case.width,
        **strides,
        x=item.x.data_ptr(),
        skip=item.skip.data_ptr() if case.skip else None,
        scale=scale.data_ptr(),
        y=item.y.data_ptr(),
        sum=item.total.data_ptr() if case.skip else None,
    )


def copy_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """A copy of as many bytes as the op reads: memcpy, on one thread whatever the case has."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return [_copy_call(copy, item, case.skip) for item in sets]


def _copy_call(copy: Any, item: Buffers, skip: bool) -> Call:
    x, y, size = item.x.data_ptr(), item.y.data_ptr(), item.x.numel() * item.x.element_size()
    if not skip:
        return lambda: copy(y, x, size)
    z, total = item.skip.data_ptr(), item.total.data_ptr()
    return lambda: (copy(y, x, size), copy(total, z, size))


def torch_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """PyTorch's own op."""

    def call(item: Buffers) -> object:
        x = item.x + item.skip if case.skip else item.x
        return F.rms_norm(x, [case.width], scale, EPSILON)

    return [lambda item=item: call(item) for item in sets]  # type: ignore[misc]


def compiled_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """What torch.compile makes of PyTorch's own op."""

    def norm(x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + skip if case.skip else x
        return F.rms_norm(total, [case.width], scale, EPSILON), total

    torch.compiler.reset()  # each case is compiled for itself, and only so many are remembered
    compiled = torch.compile(norm, fullgraph=True, dynamic=False)
    try:
        with torch.no_grad():
            compiled(sets[0].x, sets[0].skip)
    except RuntimeError as error:  # no C++ compiler, for one
        raise BackendUnavailable(f"torch.compile: {' '.join(str(error).split())[:200]}") from error

    def call(item: Buffers) -> object:
        with torch.no_grad():
            return compiled(item.x, item.skip)

    return [lambda item=item: call(item) for item in sets]  # type: ignore[misc]


def layer_norm_calls(case: Case, sets: list[Buffers], scale: torch.Tensor) -> list[Call]:
    """PyTorch's LayerNorm, for scale."""

    def call(item: Buffers) -> object:
        x = item.x + item.skip if case.skip else item.x
        return F.layer_norm(x, [case.width], scale, None, EPSILON)

    return [lambda item=item: call(item) for item in sets]  # type: ignore[misc]


def contestants(case: Case, compiled: bool = False) -> dict[str, Callable[[list[Buffers], torch.Tensor], list[Call]]]:
    """Name -> what makes the calls, one for each set of buffers."""
    table: dict[str, Callable[[list[Buffers], torch.Tensor], list[Call]]] = {}
    for name, op in (SKIP_OPS if case.skip else NORM_OPS).items():
        table[name] = lambda sets, scale, op=op: ort_calls(op, case, sets, scale)  # type: ignore[misc]
    table[BARE] = lambda sets, scale: bare_calls(case, sets, scale)
    table["torch rms_norm"] = lambda sets, scale: torch_calls(case, sets, scale)
    table["torch layer_norm"] = lambda sets, scale: layer_norm_calls(case, sets, scale)
    if compiled:
        table["torch.compile rms_norm"] = lambda sets, scale: compiled_calls(case, sets, scale)
    if installed("openvino"):
        table["openvino RMSNormalization"] = lambda sets, scale: openvino_calls(case, sets, scale)
    table[COPY] = lambda sets, scale: copy_calls(case, sets, scale)
    return table


def installed(package: str) -> str | None:
    """The version of a package, or None where there is none of that name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
