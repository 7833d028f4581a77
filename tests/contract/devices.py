"""Where the calls under test run: ANYFLASH_TEST_DEVICE, cpu if it is not set, cuda or tiles. On cuda the tensors are
PyTorch's, with the strides and the odd offsets of their NumPy originals; lengths and tables of rules stay NumPy's. With
tiles, calls with NumPy's arrays run on a small tile machine."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np

DEVICE = os.environ.get("ANYFLASH_TEST_DEVICE", "cpu")
assert DEVICE in ("cpu", "cuda", "tiles"), f"ANYFLASH_TEST_DEVICE: {DEVICE}, expected cpu, cuda or tiles"
TILES = dict(tiles=12, memory_per_tile=3 << 20)


def require_gpu_of_pytorch():
    """Nothing is skipped where there is no GPU."""
    import torch

    assert torch.cuda.is_available(), "ANYFLASH_TEST_DEVICE is cuda, but PyTorch finds no GPU"


def to_device(array):
    """The array on the device."""
    return array if DEVICE != "cuda" or array is None else as_tensor(array, DEVICE)


def as_tensor(array, device="cpu"):
    """PyTorch's tensor of it, strides and odd offset alike. PyTorch knows no negative steps, so those become
    positive."""
    if array is None:
        return None
    import torch

    steps = tuple(slice(None, None, -1) if stride < 0 else slice(None) for stride in array.strides)
    flipped = array[steps]
    strides = [stride // array.itemsize for stride in flipped.strides]
    extent = 1 + sum((n - 1) * s for n, s in zip(flipped.shape, strides)) if array.size else 0
    offset = flipped.ctypes.data // array.itemsize % 8
    bits = np.dtype(f"i{array.itemsize}")
    flat = np.zeros(offset + extent, bits)
    if extent:
        target = np.lib.stride_tricks.as_strided(flat[offset:], flipped.shape, [s * array.itemsize for s in strides])
        target[...] = array.view(bits) if array.ndim else array[None].view(bits)[0]
    flat = torch.from_numpy(flat).to(device).view(getattr(torch, array.dtype.name))
    return flat.as_strided(flipped.shape, strides, offset)


def from_device(tensor):
    """The NumPy array of a result."""
    if tensor is None or isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
