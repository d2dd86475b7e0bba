"""Arrays as the runtime sees them: torch tensors and numpy arrays (ml_dtypes too) under one set of dtype names."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from rmsnorm_deploy.errors import InputError

Array = torch.Tensor | np.ndarray[Any, Any]

# name -> (torch dtype, numpy type, ONNX TensorProto.DataType)
DTYPES: dict[str, tuple[torch.dtype, Any, int]] = {
    "float32": (torch.float32, np.float32, 1),
    "uint8": (torch.uint8, np.uint8, 2),
    "int8": (torch.int8, np.int8, 3),
    "uint16": (torch.uint16, np.uint16, 4),
    "int16": (torch.int16, np.int16, 5),
    "int32": (torch.int32, np.int32, 6),
    "int64": (torch.int64, np.int64, 7),
    "bool": (torch.bool, np.bool_, 9),
    "float16": (torch.float16, np.float16, 10),
    "float64": (torch.float64, np.float64, 11),
    "uint32": (torch.uint32, np.uint32, 12),
    "uint64": (torch.uint64, np.uint64, 13),
    "bfloat16": (torch.bfloat16, ml_dtypes.bfloat16, 16),
}

NAME_OF_ONNX = {code: name for name, (_, _, code) in DTYPES.items()}
NAME_OF_TORCH = {dtype: name for name, (dtype, _, _) in DTYPES.items()}


def dtype_name(array: Array) -> str:
    """ "float32", "bfloat16", ...: torch's name of the dtype, for numpy arrays as well."""
    if isinstance(array, torch.Tensor):
        return NAME_OF_TORCH.get(array.dtype) or str(array.dtype).removeprefix("torch.")
    return str(array.dtype.name)


def torch_dtype(name: str) -> torch.dtype:
    return DTYPES[name][0]


def is_array(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, np.generic))


def describe(array: Array) -> str:
    """ "float32[2, 16]", for messages."""
    return f"{dtype_name(array)}[{', '.join(str(size) for size in array.shape)}]"


def plain_numpy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in row-major order and native byte order: itself where it already is. Rank 0 stays rank 0."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy(order="C")


def plain_torch(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor detached, dense and contiguous: a view of itself where it already is.

    Raises:
        InputError: a tensor without memory of its own kind (sparse, quantized, meta, fake).
    """
    fake = isinstance(tensor, FakeTensor)  # says that it is on a device, and has no memory
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta" or fake:
        kind = "fake" if fake else tensor.layout
        raise InputError(f"input {name!r} is a {kind} tensor on {tensor.device}: pass a dense one with data")
    tensor = tensor.detach()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_neg().resolve_conj()
    return tensor.contiguous()


def to_torch(array: Array) -> torch.Tensor:
    """As a torch tensor, sharing memory where torch can (not for read-only arrays, which torch could write to)."""
    if isinstance(array, torch.Tensor):
        return array
    array = plain_numpy(np.asarray(array))
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """As a numpy array (bfloat16 as ml_dtypes.bfloat16), sharing memory with a CPU tensor."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray[Any, Any] = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def ort_value(ort: types.ModuleType, array: np.ndarray[Any, Any]) -> Any:
    """An `onnxruntime.OrtValue` over the memory of ``array``; ``ort`` is the module."""
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), DTYPES["bfloat16"][2])
    return ort.OrtValue.ortvalue_from_numpy(array)


@dataclass(frozen=True)
class Buffer:
    """Memory to bind: address, shape, dtype name, device, and the object that owns the memory."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    device_index: int
    owner: Array


def buffer_of(name: str, array: Array) -> Buffer:
    """The memory of ``array``; a copy's where the array is strided, since an address says nothing about strides."""
    dtype = dtype_name(array)
    if isinstance(array, torch.Tensor):
        tensor = plain_torch(name, array)
        device = tensor.device
        return Buffer(tensor.data_ptr(), tuple(tensor.shape), dtype, device.type, device.index or 0, tensor)
    plain = plain_numpy(np.asarray(array))
    return Buffer(plain.ctypes.data, plain.shape, dtype, "cpu", 0, plain)
