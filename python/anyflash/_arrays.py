"""Arrays of frameworks, on the CPU or a GPU: read by DLPack, returned as arrays of the same framework. NumPy arrays
are read elsewhere, by the extension."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from . import _core
from ._frontend import NESTED

_CPU, _CUDA, _PINNED, _MANAGED = 1, 2, 3, 13  # DLDeviceType
_DEVICES = {10: "ROCm", 8: "Metal", 14: "oneAPI"}
_DEFAULT_STREAM = 1  # as DLPack numbers CUDA's default stream
_NO_WAIT = -1  # to DLPack: the consumer orders the work itself
_IMMUTABLE = {"jax": "JAX", "jaxlib": "JAX", "tensorflow": "TensorFlow"}
_BOUNDARY = 64  # bytes; JAX and TensorFlow need no copy of memory that is aligned to it


_frameworks: dict[type, str] = {}  # a cache by class: searching a class's bases takes microseconds


def _framework(array: Any) -> str:
    """The package of the array's class or of one of its bases, if this module treats that package specially; else
    ""."""
    kind = type(array)
    if kind not in _frameworks:
        packages = (base.__module__.partition(".")[0] for base in kind.__mro__ if not issubclass(kind, type))
        known = ("torch", "cupy", *_IMMUTABLE)
        _frameworks[kind] = next((package for package in packages if package in known), "")
    return _frameworks[kind]


def first_line(error: BaseException) -> str:
    return _core.echoed((str(error).splitlines() or [type(error).__name__])[0], 200)


def capsule_of(array: Any, name: str, writable: bool) -> Any:
    """The DLPack capsule of an array; TypeError or ValueError with the argument's name."""
    start = f"{name} " if ":" in name else f"{name}: "
    framework = _framework(array)
    if writable and framework in _IMMUTABLE:
        raise ValueError(f"{start}a {_IMMUTABLE[framework]} array cannot be written into, leave it out")
    if getattr(array, "requires_grad", False) is True:
        if framework == "torch" and not writable and not sys.modules["torch"].is_grad_enabled():
            return capsule_of(array.detach(), name, writable)
        recording = "use anyflash.torch.attention, or " if framework == "torch" else ""
        raise ValueError(
            f"{start}requires a gradient, and this call records none; {recording}pass {name}.detach() and use "
            "attention_backward"
        )
    if framework == "tensorflow":
        array = _tensor_of(array, start)
    if framework in ("jax", "jaxlib") and hasattr(array, "_trace"):
        raise TypeError(f"{start}traced by JAX, expected an array; use anyflash.jax.attention, with tables by name")
    if framework in ("jax", "jaxlib") and array.is_deleted():
        raise ValueError(f"{start}deleted or donated, expected an array with data")
    if framework in ("jax", "jaxlib") and len(array.devices()) > 1:
        raise ValueError(f"{start}on {len(array.devices())} devices, expected one; use anyflash.jax.attention")
    exports = not isinstance(array, type) and hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    if framework != "tensorflow" and not exports:
        kind = _core.echoed(type(array).__name__)
        raise TypeError(f"{start}type {kind}, expected an array (NumPy, or one with __dlpack__)")
    if framework == "torch" and array.is_nested:
        raise ValueError(f"{start}{NESTED}")
    if framework == "torch" and array.layout is not sys.modules["torch"].strided:
        raise ValueError(f"{start}{array.layout}, expected torch.strided")
    if framework == "torch" and array.is_meta:
        raise ValueError(f"{start}on the device meta, expected the CPU or CUDA")
    if framework == "torch" and array.is_neg():  # PyTorch exports such memory without its sign
        raise ValueError(f"{start}negated lazily, expected plain memory; pass {name}.resolve_neg()")
    try:
        if framework == "tensorflow" and not hasattr(array, "__dlpack__"):
            return sys.modules["tensorflow"].experimental.dlpack.to_dlpack(array)
        if framework == "torch" and getattr(array, "is_cuda", False):  # no wait: the call goes to PyTorch's own stream
            return sys.modules["torch"].utils.dlpack.to_dlpack(array)
        device = int(array.__dlpack_device__()[0])
        if device not in (_CPU, _CUDA, _PINNED, _MANAGED):
            kind = _DEVICES.get(device, f"DLPack type {device}")
            raise ValueError(f"{start}on a {kind} device, expected the CPU or CUDA")
        stream = {}
        if device in (_CUDA, _MANAGED):
            stream["stream"] = _NO_WAIT if _own_stream(array) is not None else _DEFAULT_STREAM
        try:
            return array.__dlpack__(max_version=(1, 0), **stream)
        except TypeError:  # an exporter from before DLPack 1.0
            return array.__dlpack__(**stream)
    except Exception as error:
        line = first_line(error)
        raise ValueError(line if line.startswith(start) else f"{start}__dlpack__ failed: {line}") from None


def _tensor_of(array: Any, start: str) -> Any:
    """An eager TensorFlow tensor of numbers, or a variable as a tensor. TensorFlow's own export ends the process for
    other tensors."""
    tf = sys.modules["tensorflow"]
    if hasattr(array, "assign"):  # a variable
        array = tf.convert_to_tensor(array)
    if hasattr(array, "graph"):
        raise TypeError(f"{start}traced by TensorFlow, expected an array; use anyflash.tensorflow.attention")
    if not isinstance(array, tf.Tensor):
        raise TypeError(f"{start}type {_core.echoed(type(array).__name__)}, expected an array")
    if array.dtype in (tf.string, tf.variant, tf.resource):
        raise TypeError(f"{start}type {array.dtype.name}, expected numbers")
    return array


def _own_stream(array: Any) -> int | None:
    """The stream on which the array's framework works now; None if the framework does not tell."""
    framework = _framework(array)
    if framework == "torch":
        return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    if framework == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream(array.device.id).ptr)
    return None


def gpu_of(array: Any) -> int | None:
    """The number of the GPU that the array is on; None if it is not on a GPU."""
    if _framework(array) == "torch":
        return int(array.get_device()) if getattr(array, "is_cuda", False) else None
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return None
    try:
        kind, index = map(int, array.__dlpack_device__())
    except Exception:
        return None  # the call itself raises, naming the argument
    return index if kind in (_CUDA, _MANAGED) else None


def _meets_others(array: Any, others: tuple[Any, ...]) -> bool:
    """Whether `array` is on a GPU together with arrays of another framework. Each framework frees memory and orders
    work on its own streams only."""
    own = _framework(array)
    return any(
        one is not None and not isinstance(one, np.ndarray) and _framework(one) != own and gpu_of(one) is not None
        for one in others
    )


def stream_of(array: Any, *others: Any) -> int:
    """The stream of a call on this array and others. It is 0, CUDA's default stream, without a GPU, without a better
    stream, or where frameworks meet. In the last case the work on the frameworks' own streams has been waited for."""
    if isinstance(array, np.ndarray) or gpu_of(array) is None:
        return 0
    if not _meets_others(array, others):
        return _own_stream(array) or 0
    for one in (array, *others):
        gpu = gpu_of(one)
        stream = None if gpu is None else _own_stream(one)
        if gpu is not None and stream:
            _core.synchronize(gpu, stream)
    return 0


def settle(array: Any, *others: Any) -> None:
    """Waits for our stream after a call on arrays of several frameworks, or of one that does not know this stream.
    Otherwise the frameworks could reuse the arrays' memory before the call is done."""
    gpu = gpu_of(array)
    if gpu is not None and (_own_stream(array) is None or _meets_others(array, others)):
        _core.synchronize(gpu, 0)


def device_empty(name: str, example: Any, index: int, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised array of the example's framework on its GPU."""
    framework = _framework(example)
    try:
        if framework == "torch":
            torch = sys.modules["torch"]
            return torch.empty(shape, dtype=getattr(torch, dtype), device=torch.device("cuda", index))
        if framework == "cupy":
            with sys.modules["cupy"].cuda.Device(index):
                return sys.modules["cupy"].empty(shape, dtype=np.dtype(dtype) if dtype != "bfloat16" else example.dtype)
        if framework in ("jax", "jaxlib"):  # it is written before anything else can read it
            jax = sys.modules["jax"]
            return jax.numpy.empty(shape, dtype=dtype, device=next(iter(example.devices()))).block_until_ready()
    except Exception as error:
        raise MemoryError(f"{name}: no memory for {dtype} of shape {shape}: {first_line(error)}") from None
    kind = _core.echoed(type(example).__name__)
    raise TypeError(f"{name}: cannot be made as a {kind} on a GPU, expected arrays of PyTorch, CuPy or JAX")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array that starts on a 64-byte boundary."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _BOUNDARY, np.uint8)
    start = -memory.ctypes.data % _BOUNDARY
    return memory[start : start + size].view(dtype).reshape(shape)


def same_kind(example: Any, result: Any) -> Any:
    """A result as an array of `example`'s framework, without a copy. uint16 stands for bfloat16. Results on a GPU are
    already such arrays."""
    if not isinstance(result, np.ndarray):
        return result
    is_bfloat16 = result.dtype == np.uint16
    exporter = _core.as_bfloat16(result) if is_bfloat16 else result
    framework = _framework(example)
    if framework == "torch":
        return sys.modules["torch"].from_dlpack(exporter)
    if framework == "tensorflow":
        return sys.modules["tensorflow"].experimental.dlpack.from_dlpack(exporter.__dlpack__())
    namespace = getattr(example, "__array_namespace__", None)  # the array API standard: JAX and others
    if namespace is not None:
        made = namespace().from_dlpack(exporter)
        if framework in ("jax", "jaxlib") and made.devices() != example.devices():  # the CPU can be several devices
            return sys.modules["jax"].device_put(made, next(iter(example.devices())))
        return made
    if is_bfloat16:
        import ml_dtypes

        return result.view(ml_dtypes.bfloat16)
    return result
