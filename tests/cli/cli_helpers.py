"""What the tests of the program share: the textbook formula in NumPy, and tensor files of every format."""

import ml_dtypes
import numpy as np
import safetensors.numpy

TYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "boolean": np.bool_,
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
}
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def scores(q, k, scale=None):
    q, k = q.astype(np.float64), k.astype(np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    return (1 / np.sqrt(q.shape[-1]) if scale is None else scale) * q @ k.swapaxes(-1, -2)


def softmax(s, visible=True):
    """P and lse over the visible keys; 0 and -inf for a row without any."""
    s = np.where(visible, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    weight = np.exp(s - np.where(np.isinf(top), 0, top))
    total = weight.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weight / np.where(total == 0, 1, total), (np.log(total) + np.where(np.isinf(top), 0, top))[..., 0]


def attention(q, k, v, visible=True, scale=None, bias=0):
    """(out, lse) in float64; bhsd."""
    p, lse = softmax(scores(q, k, scale) + bias, visible)
    return p @ np.repeat(v.astype(np.float64), q.shape[1] // v.shape[1], 1), lse


def gradients(dout, q, k, v, visible=True, bias=0):
    """(dq, dk, dv, dS) in float64; bhsd, as many key heads as query heads."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    p, _ = softmax(scores(q, k) + bias, visible)
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    scale = 1 / np.sqrt(q.shape[-1])
    return scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout, ds


def save(path, tensors):
    """Writes a dictionary of arrays in the format of the file's extension."""
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    elif path.suffix == ".safetensors":
        safetensors.numpy.save_file(tensors, path)
    else:
        (array,) = tensors.values()
        np.save(path, array)


def load(path, bfloat16=()):
    """Reads a dictionary of arrays; NumPy's formats hold bfloat16 as void, the names of which are given."""
    if path.suffix == ".safetensors":
        return safetensors.numpy.load_file(path)
    if path.suffix == ".npz":
        with np.load(path) as file:
            tensors = dict(file)
    else:
        tensors = {"out": np.load(path)}
    return {name: x.view(ml_dtypes.bfloat16) if name in bfloat16 else x for name, x in tensors.items()}
