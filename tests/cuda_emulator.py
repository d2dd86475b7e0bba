"""The CUDA kernels on the host: builds the emulator, calls it, and knows what float64 says of the same call."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
KERNELS = PLUGINS / "kernels"
BUILD = PLUGINS.parent / "build" / "emulator"

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
CODES = {"f32": 0, "f16": 1, "bf16": 2}
EPS_MODES = ("inside", "outside", "clamp")
ABI = 2
LAYOUTS = ("many", "thin", "thick", "long", "split")
SITES = ("x", "skip", "scale", "bias", "y", "sum", "x_again", "skip_again", "partials")


class Args(ctypes.Structure):
    """rmsnorm_args of rms_norm.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ["abi", "x_dtype", "param_dtype", "y_dtype", "eps_mode", "scale_order", "stash", "_"]
        ),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ["rows", "width", "scale_count", "bias_count"]),
        *((f"{name}_stride", ctypes.c_int64) for name in ("x", "skip", "y", "sum")),
        *((name, ctypes.c_void_p) for name in ["x", "skip", "scale", "bias", "y", "sum"]),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
    ]


class Device(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("compute", "multiprocessors", "shared_bytes", "tactic")]


class Buffer(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("writable", ctypes.c_int32),
        ("_", ctypes.c_int32),
    ]


class Traffic(ctypes.Structure):
    """rmsnorm_emulated_traffic of emulator.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("bytes", "requests", "single_requests", "sectors", "cached_sectors", "least_sectors")
    ]

    @property
    def vector_requests(self) -> int:
        return int(self.requests - self.single_requests)

    @property
    def fetched_sectors(self) -> int:
        """What the first-level cache has to ask for."""
        return int(self.sectors - self.cached_sectors)


class Report(ctypes.Structure):
    _fields_ = [
        ("traffic", Traffic * 9),
        ("barriers", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        *(
            (n, ctypes.c_int32)
            for n in ["layout", "threads", "lanes", "cluster", "kept", "shared_bytes", "tactic_applies", "slices"]
        ),
        ("reason", ctypes.c_char * 192),
        ("fault", ctypes.c_char * 256),
    ]

    def of(self, site: str) -> Traffic:
        return self.traffic[SITES.index(site)]


# The cards that the launch table tells apart: no clusters and little shared memory, no clusters, clusters.
SM75 = Device(75, 40, 65536, 1)
SM80 = Device(80, 108, 166912, 1)
SM90 = Device(90, 132, 232448, 1)


def emulator() -> ctypes.CDLL:
    """The emulator's library, built once for each state of its sources."""
    library, trouble = built()
    assert library is not None, trouble
    return library


@cache
def built() -> tuple[ctypes.CDLL | None, str]:
    """The library, or what the compiler said: a build that failed is not tried again by every test."""
    sources = sorted(p for d in ("cuda", "emulator") for p in (KERNELS / d).iterdir() if p.is_file())
    sources += [KERNELS / "rms_norm.h", KERNELS / "cpu" / "check.cpp"]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    library = BUILD / digest / "librmsnorm_deploy_emulator.so"
    if not library.exists():
        shutil.rmtree(BUILD, ignore_errors=True)
        configure = ["cmake", "-S", KERNELS / "emulator", "-B", library.parent, "-DCMAKE_BUILD_TYPE=None"]
        for command in (configure, ["cmake", "--build", library.parent, "--parallel", "2"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return None, done.stdout + done.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.rmsnorm_cuda_workspace_bytes.restype = ctypes.c_int64
    return loaded, ""


@dataclass(frozen=True)
class Case:
    """One norm: what the C header's arguments say, in words."""

    width: int
    rows: int = 3
    x: str = "f32"
    params: str = "f32"
    before_cast: bool = False
    eps_mode: str = "inside"
    eps: float = 1e-6
    scale: str = "full"  # "full", "one", "none"
    bias: str = "none"
    skip: bool = False
    sum_given: bool = True
    pad: int = 0  # elements between rows
    repeat_x: bool = False  # a row stride of 0
    misaligned: tuple[str, ...] = ()  # tensors that start an element late for each time they are named
    in_place: str = ""  # "y=x", "sum=x", "sum=skip"
    workspace: bool = True  # as much as rmsnorm_cuda_workspace_bytes asks for
    device: Any = field(default=SM90)
    seed: int = 0

    @property
    def y(self) -> str:
        has_params = self.scale != "none" or self.bias != "none"
        return self.params if has_params and not self.before_cast else self.x


@dataclass
class Outcome:
    report: Report
    arrays: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]  # views of the rows themselves


def allocate(case: Case, name: str, dtype: str, rows: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """A flat array and its rows' view, aligned as a device allocates it unless the case says otherwise."""
    item = DTYPES[dtype].itemsize
    late = case.misaligned.count(name)
    count = (rows - 1) * stride + case.width
    raw = np.zeros(count * item + 512, dtype=np.uint8)
    start = -raw.ctypes.data % 256 + late * item
    flat = raw[start : start + count * item].view(DTYPES[dtype])
    view = np.lib.stride_tricks.as_strided(flat, (rows, case.width), (stride * item, item))
    return flat, view


def parameter(case: Case, name: str, kind: str, random: np.random.Generator) -> np.ndarray | None:
    if kind == "none":
        return None
    dtype = DTYPES[case.params]
    flat, _ = allocate(replace(case, width=case.width if kind == "full" else 1), name, case.params, 1, case.width)
    flat[:] = (1 + 0.5 * random.standard_normal(flat.size)).astype(dtype)
    return flat


def make(case: Case, values: np.ndarray | None = None) -> tuple[Args, dict[str, np.ndarray], dict[str, np.ndarray]]:
    random = np.random.default_rng(case.seed + case.width)
    stride = case.width + case.pad
    arrays: dict[str, np.ndarray] = {}
    rows: dict[str, np.ndarray] = {}
    given = {"x": case.x, "y": case.y} | ({"skip": case.x} if case.skip else {})
    if case.skip and case.sum_given:
        given["sum"] = case.x
    for name, dtype in given.items():
        one = name == "x" and case.repeat_x
        arrays[name], rows[name] = allocate(case, name, dtype, 1 if one else case.rows, stride)
        if name in ("x", "skip"):
            drawn = random.standard_normal(rows[name].shape) * 2.0 ** random.integers(-3, 4, (len(rows[name]), 1))
            rows[name][:] = (drawn if values is None else values).astype(DTYPES[dtype])
        else:
            arrays[name].view(np.uint8)[:] = 0xFF  # a NaN that no kernel writes
    if case.in_place:
        to, source = case.in_place.split("=")
        arrays[to], rows[to] = arrays[source], rows[source]
    for name, kind in (("scale", case.scale), ("bias", case.bias)):
        drawn_parameter = parameter(case, name, kind, random)
        if drawn_parameter is not None:
            arrays[name] = drawn_parameter
    args = Args(
        abi=ABI,
        x_dtype=CODES[case.x],
        param_dtype=CODES[case.params],
        y_dtype=CODES[case.y],
        eps_mode=EPS_MODES.index(case.eps_mode),
        scale_order=int(case.before_cast),
        eps=case.eps,
        rows=case.rows,
        width=case.width,
        scale_count=1 if case.scale == "one" else case.width,
        bias_count=1 if case.bias == "one" else case.width,
        x_stride=0 if case.repeat_x else stride,
        skip_stride=stride,
        y_stride=stride,
        sum_stride=stride,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    if case.workspace:
        args.workspace_bytes = workspace_bytes(args)
        arrays["workspace"] = np.full(args.workspace_bytes // 4, np.nan, np.float32)
        args.workspace = arrays["workspace"].ctypes.data if args.workspace_bytes else None
    return args, arrays, rows


def workspace_bytes(args: Args) -> int:
    return int(emulator().rmsnorm_cuda_workspace_bytes(ctypes.byref(args)))


def buffers_of(arrays: dict[str, np.ndarray], rows: dict[str, np.ndarray] | None = None) -> list[tuple[int, int, bool]]:
    """What a kernel may touch: all that the case gave it, and write to outputs and the workspace alone.

    With ``rows``, no access may reach from a row into the next one either.
    """
    given = []
    for name, array in arrays.items():
        for part in (rows or {}).get(name, [array]):
            given.append((part.ctypes.data, part.nbytes, name in ("y", "sum", "workspace")))
    return sorted(given, key=lambda buffer: not buffer[2])


def emulate(args: Args, device: Device, buffers: list[tuple[int, int, bool]] | None) -> Report:
    report = Report()
    listed = None if buffers is None else (Buffer * len(buffers))(*(Buffer(b, n, w, 0) for b, n, w in buffers))
    status = emulator().rmsnorm_emulate(
        ctypes.byref(args), ctypes.byref(device), listed, len(buffers or ()), ctypes.byref(report)
    )
    assert status == 0, f"status {status}"
    return report


def run(case: Case, values: np.ndarray | None = None) -> Outcome:
    args, arrays, rows = make(case, values)
    return Outcome(emulate(args, case.device, buffers_of(arrays, rows)), arrays, rows)


def plan(case: Case) -> Report:
    """The launch alone."""
    pointer = 4096
    stride = case.width + case.pad
    half = DTYPES[case.x].itemsize
    names = ["x", "y"] + (["skip", "sum"] if case.skip else [])
    args = Args(
        abi=ABI,
        x_dtype=CODES[case.x],
        param_dtype=CODES[case.params],
        y_dtype=CODES[case.x],
        eps=case.eps,
        rows=case.rows,
        width=case.width,
        **{f"{n}_stride": stride for n in ("x", "skip", "y", "sum")},
        **{n: pointer * (i + 1) + half * case.misaligned.count(n) for i, n in enumerate(names)},
    )
    if case.workspace:
        args.workspace, args.workspace_bytes = pointer * 100, workspace_bytes(args)
    return emulate(args, case.device, None)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(DTYPES[dtype]).astype(np.float64)


@dataclass
class Truth:
    y: np.ndarray  # float64, with the roundings that docs/op-spec.md demands
    slack: np.ndarray  # what float32 statistics and the roundings' ties may move
    sum: np.ndarray | None


def truth(case: Case, x: np.ndarray, skip: np.ndarray | None, scale: Any, bias: Any) -> Truth:
    """What docs/op-spec.md says, in float64. x: the rows before the call."""
    with np.errstate(all="ignore"):
        work = x.astype(np.float64)
        total = None
        if skip is not None:
            total = rounded(work + skip.astype(np.float64), case.x)
            work = total
        eps = float(np.float32(case.eps))
        mean = (work * work).mean(axis=1, keepdims=True)
        root = {
            "inside": lambda: np.sqrt(mean + eps),
            "outside": lambda: np.sqrt(mean) + eps,
            "clamp": lambda: np.maximum(np.sqrt(mean), eps),
        }[case.eps_mode]()
        n = work / root
        gain = np.float64(1) if scale is None else scale.astype(np.float64)
        shift = np.float64(0) if bias is None else bias.astype(np.float64)
        if case.before_cast:
            y = rounded(n * gain + shift, case.x)
            moved = np.zeros_like(n)
        else:
            product = rounded(rounded(n, case.x) * gain, case.y)
            y = rounded(product + shift, case.y) if bias is not None else product
            moved = np.abs(gain) * spacing(n, case.x) + spacing(product, case.y)
        # Each float32 rounding of n, the product and the sum, and the statistics' own error, all relative.
        slack = moved + spacing(y, case.y) + 3e-7 * (np.abs(n * gain) + np.abs(shift)) + 1e-45
        return Truth(y, slack, total)


def spacing(values: np.ndarray, dtype: str) -> np.ndarray:
    """One unit in the last place at each value."""
    digits, least = {"f32": (23, -126), "f16": (10, -14), "bf16": (7, -126)}[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(values), 2.0**least)))
    return np.where(np.isfinite(values), 2.0 ** (np.where(np.isfinite(exponent), exponent, 0) - digits), 0)


def checked(case: Case, values: np.ndarray | None = None) -> Report:
    """Runs a case, and asserts that no access was at fault and every element is what float64 says."""
    args, arrays, rows = make(case, values)
    x, skip = rows["x"].copy(), rows["skip"].copy() if case.skip else None
    report = emulate(args, case.device, buffers_of(arrays, rows if case.rows < 20 else None))
    assert report.fault == b"", f"{case}: {report.fault.decode()}"
    expected = truth(case, x, skip, arrays.get("scale"), arrays.get("bias"))
    if "sum" in rows and case.in_place != "y=x":
        np.testing.assert_array_equal(rows["sum"].astype(np.float64), expected.sum, err_msg=str(case))
    compare(case, rows["y"].astype(np.float64), expected)
    gaps = case.pad and case.rows > 1 and not case.in_place
    if gaps:  # what lies between rows is still what it was
        between = np.lib.stride_tricks.as_strided(
            arrays["y"][case.width :].view(np.uint8),
            (case.rows - 1, case.pad * arrays["y"].itemsize),
            ((case.width + case.pad) * arrays["y"].itemsize, 1),
        )
        assert (between == 0xFF).all(), case
    return report


def compare(case: Case, y: np.ndarray, expected: Truth) -> None:
    same_kind = (np.isnan(y) == np.isnan(expected.y)) & (np.isinf(y) == np.isinf(expected.y))
    assert same_kind.all(), case
    finite = np.isfinite(expected.y)
    error = np.abs(y - np.where(finite, expected.y, 0))
    assert (error[finite] <= np.broadcast_to(expected.slack, y.shape)[finite]).all(), case
    if case.x != "f32" and finite.any():
        # Statistics in float32 move a rounding now and then. A wrong order of roundings moves far more.
        share = (error[finite] != 0).mean()
        assert share <= 0.02 + 3 / finite.sum(), f"{case}: {share:.1%} of elements are rounded otherwise"
