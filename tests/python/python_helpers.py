"""What the tests of the Python package share: the textbook formula, and arrays that are not NumPy's."""

import numpy as np


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


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
