"""The frameworks' arrays: in by DLPack, out as the same kind. NumPy's own arrays never come here on the way in."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from . import _core

_CPU = 1  # DLDeviceType: kDLCPU
_DEVICES = {2: "CUDA", 3: "CUDA host", 10: "ROCm", 8: "Metal", 13: "CUDA managed", 14: "oneAPI"}
_IMMUTABLE = {"jax": "JAX", "jaxlib": "JAX", "tensorflow": "TensorFlow"}
_BOUNDARY = 64  # bytes; JAX and TensorFlow take memory that starts on such a boundary without a copy


def _framework(array: Any) -> str:
    """The package that its class, or a class that it is derived from, comes from, if it needs care; else ""."""
    packages = (kind.__module__.partition(".")[0] for kind in type(array).__mro__)
    return next((package for package in packages if package in ("torch", *_IMMUTABLE)), "")


def _first_line(error: BaseException) -> str:
    return _core.echoed((str(error).splitlines() or [type(error).__name__])[0], 200)


def capsule_of(array: Any, name: str, writable: bool) -> Any:
    """The DLPack capsule of a CPU array; TypeError or ValueError with the argument's name."""
    start = f"{name} " if ":" in name else f"{name}: "
    framework = _framework(array)
    if writable and framework in _IMMUTABLE:
        raise ValueError(f"{start}a {_IMMUTABLE[framework]} array cannot be written into, leave it out")
    if getattr(array, "requires_grad", False) is True:
        raise ValueError(
            f"{start}requires a gradient, and this call records none; pass {name}.detach() and use attention_backward"
        )
    if framework == "torch" and array.is_neg():  # PyTorch exports such memory without its sign
        raise ValueError(f"{start}negated lazily, expected plain memory; pass {name}.resolve_neg()")
    if framework == "tensorflow" and not hasattr(array, "__dlpack__"):
        return sys.modules["tensorflow"].experimental.dlpack.to_dlpack(array)
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        kind = _core.echoed(type(array).__name__)
        raise TypeError(f"{start}type {kind}, expected an array (NumPy, or one with __dlpack__)")
    try:
        device = int(array.__dlpack_device__()[0])
        if device != _CPU:
            raise ValueError(f"{start}on a {_DEVICES.get(device, f'DLPack type {device}')} device, expected the CPU")
        try:
            return array.__dlpack__(max_version=(1, 0))
        except TypeError:  # an exporter from before DLPack 1.0
            return array.__dlpack__()
    except Exception as error:
        line = _first_line(error)
        raise ValueError(line if line.startswith(start) else f"{start}__dlpack__ failed: {line}") from None


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array that starts on a 64-byte boundary."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _BOUNDARY, np.uint8)
    start = -memory.ctypes.data % _BOUNDARY
    return memory[start : start + size].view(dtype).reshape(shape)


def same_kind(example: Any, result: np.ndarray[Any, Any]) -> Any:
    """A result as an array of `example`'s framework, without a copy. uint16 stands for bfloat16."""
    is_bfloat16 = result.dtype == np.uint16
    exporter = _core.as_bfloat16(result) if is_bfloat16 else result
    framework = _framework(example)
    if framework == "torch":
        return sys.modules["torch"].from_dlpack(exporter)
    if framework == "tensorflow":
        return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(exporter.__dlpack__())
    namespace = getattr(example, "__array_namespace__", None)  # the array API standard: JAX and others
    if namespace is not None:
        return namespace().from_dlpack(exporter)
    if is_bfloat16:
        import ml_dtypes

        return result.view(ml_dtypes.bfloat16)
    return result
