"""What the tests of the Python package share: the textbook formula, arrays that are not NumPy's, and wrong calls."""

import ctypes

import numpy as np
import pytest

FLOATS = "expected float16, bfloat16, float32 or float64"
INDICES = "expected int32 or int64"


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


q = numbers(1, 2, 4, 6, 8)
k = numbers(2, 2, 2, 5, 8)
v = numbers(3, 2, 2, 5, 8)


def check(call, kind, line):
    """call() raises an error of that class whose text is that line."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value) == line


def unmade(example):
    """An object of its class on which no constructor ran."""
    return type(example).__new__(type(example))


def textbook(q, k, v, mask=True):
    """softmax(q k^T / sqrt(d)) v and its log-sum-exp in float64, for (b, h, s, d) with as many heads in k and v."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.where(mask, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    row_max = scores.max(-1, keepdims=True)
    weights = np.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdims=True)
    return weights / row_sum @ v, (row_max + np.log(row_sum))[..., 0]


def textbook_gradients(dout, q, k, v, mask=True):
    """The derivative of textbook's first result with respect to q, k and v."""
    dout, q, k, v = (np.asarray(x, np.float64) for x in (dout, q, k, v))
    scale = 1 / np.sqrt(q.shape[-1])
    scores = np.where(mask, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    dweights = dout @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (dout * out).sum(-1, keepdims=True)) * scale
    return dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout


class Exporter:
    """An array of some other library: nothing but DLPack, as PyTorch or CuPy would show it."""

    def __init__(self, array, device=(1, 0), versioned=True):
        self.array = array
        self.device = device
        self.versioned = versioned

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


class RawExporter:
    """A DLPack tensor of any shape and type, whose data is never to be read."""

    def __init__(self, shape, code=2, bits=32, lanes=1):
        self.sizes = (ctypes.c_int64 * len(shape))(*shape)
        head = (ctypes.addressof(self.sizes), 1, 0, len(shape), code, bits, lanes)  # data, on the CPU
        self.tensor = _ManagedTensor(*head, ctypes.addressof(self.sizes), None, 0, None, None)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, with the DLTensor's fields in its place."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]
