"""The contract in plain NumPy, forward and backward, with the whole matrix in memory. It shares no code with the
library.

The same formulas are evaluated in two kinds of arithmetic: exactly enough to be the truth (float64, or longdouble for
float64 inputs), and as a textbook would in the inputs' type, which sets the bar (bar.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np

TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
LEAST_EXPONENT = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}


def statistic_type(name):
    """Of lse, l and m."""
    return "float64" if name == "float64" else "float32"


@dataclass
class Call:
    """One call in canonical form: q (b, hq, n, d_qk), k (b, hk, m, d_qk), v (b, hk, m, d_v), mask (b, hq, n, m), bias
    (b or 1, h or 1, n or 1, m or 1), penalty (b, hq, n, m or None): ALiBi's slope times distance, sink (hq,), dout
    (b, hq, n, d_v), dlse (b, hq, n)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    scale: float
    softcap: float = 0.0
    bias: np.ndarray | None = None
    penalty: np.ndarray | None = None
    sink: np.ndarray | None = None
    dout: np.ndarray | None = None
    dlse: np.ndarray | None = None


@dataclass
class Result:
    out: np.ndarray = None
    lse: np.ndarray = None
    l: np.ndarray = None
    m: np.ndarray = None
    dq: np.ndarray = None
    dk: np.ndarray = None
    dv: np.ndarray = None
    dbias: np.ndarray = None
    dsink: np.ndarray = None

    def items(self):
        return [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) is not None]


class Exact:
    """float64 or longdouble throughout, nothing rounded."""

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)

    def load(self, array):
        return np.asarray(array).astype(self.dtype)

    def keep(self, array):
        return array

    def product(self, a, b):
        return a @ b

    def sum(self, weights):
        return weights.sum(-1)

    def backward_start(self, result, s, p, dp, dout, pairs):
        """P and each row's sum of P dP, which the backward pass starts from."""
        return p, np.where(pairs, p * dp, 0).sum(-1)

    def sink_share(self, logit, safe, result):
        """The sink's P in the backward pass."""
        return np.exp(logit - safe) / result.l


class Textbook(Exact):
    """Three loops: sums (of a row or a product, term after term), scores and elementary functions in the accumulation
    type; what a product reads, P and dS, and results rounded to the inputs' type. Whether the terms come first to last, or
    last to first with multiplication and addition in one rounding (as compilers write it), is chance; where it matters,
    both are tried."""

    def __init__(self, name, fused=False):
        super().__init__(np.float64 if name == "float64" else np.float32)
        self.kept = TYPES[name]
        self.fused = fused
        self.wide = np.longdouble if name == "float64" else np.float64

    def keep(self, array):
        return array if self.kept == self.dtype else array.astype(self.kept).astype(self.dtype)

    def product(self, a, b):
        columns, rows = np.ascontiguousarray(np.moveaxis(a, -1, 0)), np.ascontiguousarray(np.moveaxis(b, -2, 0))
        result = np.zeros(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1]), self.dtype)
        terms = range(a.shape[-1])
        for j in reversed(terms) if self.fused else terms:
            left, right = columns[j][..., :, None], rows[j][..., None, :]
            if self.fused:
                result = (result + left.astype(self.wide) * right).astype(self.dtype)
            else:
                result += left * right
        return result

    def sum(self, weights):
        terms = weights[..., ::-1] if self.fused else weights
        return np.add.accumulate(terms, -1)[..., -1] if weights.shape[-1] else weights.sum(-1)

    def backward_start(self, result, s, p, dp, dout, pairs):
        """A backward call is given out and lse in their own types: P = exp(S - lse), sum of P dP = dO . O."""
        delta = self.product(dout[..., None, :], result.out[..., :, None])[..., 0, 0]
        return self.keep(np.where(pairs, np.exp(s - result.lse[..., None]), 0)), delta

    def sink_share(self, logit, safe, result):
        return np.exp(logit - result.lse)


def exact_for(name):
    return Exact(np.longdouble if name == "float64" else np.float64)


def _sum_products(arithmetic, a, b, pairs):
    """a @ b, where only the terms of `pairs` exist: a is 0 outside them, b may hold NaN and infinities there."""
    if np.isfinite(b).all() and np.isfinite(a).all():
        return arithmetic.product(a, b)
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b, pairs = (np.broadcast_to(x, shape + x.shape[-2:]) for x in (a, b, pairs))
    result = np.zeros(shape + (a.shape[-2], b.shape[-1]), np.result_type(a, b))
    for j in range(a.shape[-1]):
        term = a[..., :, j, None] * b[..., None, j, :]
        result += np.where(pairs[..., :, j, None], term, 0)
    return result


def _fold(gradient, shape):
    """Sums a gradient over the axes along which its tensor is broadcast."""
    axes = tuple(i for i, (full, own) in enumerate(zip(gradient.shape, shape)) if own == 1 and full != 1)
    return gradient.sum(axis=axes, keepdims=True) if axes else gradient


def _fold_heads(gradient, heads):
    """Sums over the query heads that share a key head."""
    b, hq, m, d = gradient.shape
    return gradient.reshape(b, heads, hq // heads, m, d).sum(2) if heads else gradient


@np.errstate(all="ignore")
def attention(call, arithmetic):
    """Everything the library may be asked for; gradients where call.dout is given."""
    load, keep = arithmetic.load, arithmetic.keep
    q, k, v = load(call.q), load(call.k), load(call.v)
    heads = k.shape[1]
    group = q.shape[1] // heads if heads else 1
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    seen = call.mask.any(-2)[..., None]  # a key that nobody sees has no term in any sum, whatever it holds
    k, v = np.where(seen, k, 0), np.where(seen, v, 0)

    scale = arithmetic.dtype.type(call.scale)
    raw = _dot(arithmetic, q, k) * scale
    cap = arithmetic.dtype.type(call.softcap)
    capped = cap * np.tanh(raw / cap) if call.softcap > 0 else raw
    s = capped
    if call.bias is not None:
        s = s + load(call.bias)
    if call.penalty is not None:
        s = s - load(call.penalty)

    s = np.where(call.mask, s, -np.inf)
    top = s.max(-1, initial=-np.inf)
    if call.sink is not None:
        logit = load(call.sink)[None, :, None]
        top = np.where(call.mask.any(-1), np.maximum(top, logit), -np.inf)
    dead = top == -np.inf  # sees no key, or only such with a score of -inf, and no sink above it
    pairs = call.mask & ~dead[..., None]
    safe = np.where(dead, 0, top)
    weight = np.where(pairs, np.exp(s - safe[..., None]), 0)
    total = arithmetic.sum(weight)
    if call.sink is not None:
        total = total + np.exp(logit - safe)
    total = np.where(dead, 0, total)
    p = keep(np.where(pairs, weight / np.where(dead, 1, total)[..., None], 0))

    result = Result()
    result.out = keep(_sum_products(arithmetic, p, v, pairs))
    result.m = np.where(dead, -np.inf, top)
    result.l = total
    result.lse = np.where(dead, -np.inf, top + np.log(np.where(dead, 1, total)))
    if call.dout is None:
        return result

    dout = load(call.dout)
    dp = np.where(pairs, _dot(arithmetic, dout, v), 0)
    p, delta = arithmetic.backward_start(result, s, p, dp, dout, pairs)
    dlse = load(call.dlse) if call.dlse is not None else np.zeros(delta.shape, arithmetic.dtype)
    ds = keep(np.where(pairs, p * (dp - delta[..., None] + dlse[..., None]), 0))
    if call.bias is not None:
        result.dbias = _fold(ds, call.bias.shape)
    if call.sink is not None:
        share = arithmetic.sink_share(logit, safe, result)
        result.dsink = np.where(dead, 0, share * (dlse - delta)).sum((0, 2))
    draw = ds
    if call.softcap > 0:
        slope = 1 - (capped / cap) ** 2
        draw = keep(np.where(pairs, ds * slope, 0))
    transposed = pairs.swapaxes(-1, -2)
    result.dq = keep(scale * _sum_products(arithmetic, draw, k, pairs))
    result.dk = keep(_fold_heads(scale * _sum_products(arithmetic, draw.swapaxes(-1, -2), q, transposed), heads))
    result.dv = keep(_fold_heads(_sum_products(arithmetic, p.swapaxes(-1, -2), dout, transposed), heads))
    return result


def _dot(arithmetic, a, b):
    """a @ b^T, each entry from its own two rows alone."""
    if np.isfinite(a).all() and np.isfinite(b).all():
        return arithmetic.product(a, b.swapaxes(-1, -2))
    return (a[..., :, None, :] * b[..., None, :, :]).sum(-1)
