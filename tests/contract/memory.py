"""Tensors in awkward places: any order of axes in memory, gaps, negative steps, odd offsets; and huge virtual
memory."""

from __future__ import annotations

import mmap

import numpy as np


def restride(a, rng, writable_base=False):
    """A copy of `a` whose axes lie in memory in random order, with gaps and negative steps, at an odd offset; the
    channel axis or the last sequence axis may or may not be contiguous. With writable_base also the flat memory it lies
    in, the rest of which holds a canary."""
    order = rng.permutation(a.ndim)
    steps = rng.choice([1, 1, 1, 2, -1, -2], a.ndim)
    margins = rng.integers(0, 3, a.ndim)
    if a.ndim and rng.random() < 0.7:
        steps[order[-1]] = 1  # the innermost axis is contiguous
    extents = [int(a.shape[axis] * abs(steps[axis]) + margins[axis]) for axis in order]
    offset = int(rng.integers(0, 5))
    flat = np.full(offset + int(np.prod(extents)) + 3, 77, a.dtype)
    box = flat[offset : offset + int(np.prod(extents))].reshape(extents)
    cut = []
    for axis in order:
        step, size = int(steps[axis]), a.shape[axis]
        first = int(margins[axis])
        part = slice(first, first + size * abs(step), abs(step))
        cut.append(part)
    view = box[tuple(cut)]
    view = view[tuple(slice(None, None, -1) if steps[axis] < 0 else slice(None) for axis in order)]
    view = view.transpose(np.argsort(order))
    view[...] = a
    return (view, flat) if writable_base else view


def virtual(shape, strides, dtype):
    """A zeroed tensor with the given strides (in elements) over memory that the system only promises: pages come when
    touched, so tens of gigabytes cost nothing."""
    dtype = np.dtype(dtype)
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python names it from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * dtype.itemsize for s in strides], writeable=True)
