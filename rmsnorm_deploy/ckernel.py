"""`plugins/kernels/rms_norm.h` through ctypes: the structure, its enums, and one call for each device."""

from __future__ import annotations

import ctypes
import functools

from rmsnorm_deploy import native
from rmsnorm_deploy.errors import DeployError

ABI = 2
OK, UNSUPPORTED = 0, 3
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}
EPSILON_MODES = {"inside": 0, "outside": 1, "clamp": 2}
SCALE_ORDERS = {"after_cast": 0, "before_cast": 1}


class Args(ctypes.Structure):
    """``rmsnorm_args``; the header says what each field means. Fresh ones have the ABI set, zeros elsewhere."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("abi", "x_dtype", "param_dtype", "y_dtype", "eps_mode", "scale_order")),
        ("stash", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("rows", "width", "scale_count", "bias_count")),
        *((name, ctypes.c_int64) for name in ("x_stride", "skip_stride", "y_stride", "sum_stride")),
        *((name, ctypes.c_void_p) for name in ("x", "skip", "scale", "bias", "y", "sum", "workspace")),
        ("workspace_bytes", ctypes.c_int64),
    )

    def __init__(self, **fields: float | None) -> None:
        super().__init__(abi=ABI, **fields)


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The CPU kernels with their functions' types set, or None where they are not built."""
    library = native.load("cpu")
    if library is not None:
        library.rmsnorm_cpu.argtypes = [ctypes.POINTER(Args), ctypes.c_void_p]
        library.rmsnorm_check.argtypes = [ctypes.POINTER(Args)]
        library.rmsnorm_cpu_pool.argtypes = [ctypes.c_int32]
        library.rmsnorm_cpu_pool.restype = ctypes.c_void_p
        library.rmsnorm_cpu_isa.restype = ctypes.c_char_p
        library.rmsnorm_cpu_set_isa.argtypes = [ctypes.c_char_p]
        library.rmsnorm_status_string.restype = ctypes.c_char_p
    return library


@functools.cache
def cuda_library() -> ctypes.CDLL | None:
    """The CUDA kernels with their functions' types set, or None where they are not built."""
    library = native.load("cuda")
    if library is not None:
        library.rmsnorm_cuda.argtypes = [ctypes.POINTER(Args), ctypes.c_void_p]
        library.rmsnorm_cuda_workspace_bytes.argtypes = [ctypes.POINTER(Args)]
        library.rmsnorm_cuda_workspace_bytes.restype = ctypes.c_int64
        library.rmsnorm_status_string.restype = ctypes.c_char_p
    return library


@functools.cache
def _pool(threads: int) -> int | None:
    library = cpu_library()
    pool: int | None = library.rmsnorm_cpu_pool(threads) if library else None
    return pool


def run_cpu(args: Args, threads: int) -> bool:
    """Run on the host with that many threads; False where the library is not there or has no such kernel.

    Raises:
        DeployError: the library refuses the arguments, and says why.
    """
    library = cpu_library()
    if library is None:
        return False
    return _done(library, library.rmsnorm_cpu(ctypes.byref(args), _pool(threads)))


def cuda_workspace_bytes(args: Args) -> int:
    """How much ``args.workspace`` should be for few long rows to be shared out; 0 where that changes nothing."""
    library = cuda_library()
    return int(library.rmsnorm_cuda_workspace_bytes(ctypes.byref(args))) if library else 0


def run_cuda(args: Args, stream: int) -> bool:
    """Queue on that ``cudaStream_t`` of the current device; returns and raises as `run_cpu`."""
    library = cuda_library()
    if library is None:
        return False
    return _done(library, library.rmsnorm_cuda(ctypes.byref(args), stream))


def _done(library: ctypes.CDLL, status: int) -> bool:
    if status in (OK, UNSUPPORTED):
        return status == OK
    raise DeployError(f"the RMSNorm kernel refused its arguments: {library.rmsnorm_status_string(status).decode()}")
