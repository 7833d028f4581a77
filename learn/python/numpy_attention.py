"""FlashAttention in NumPy: one head, q (queries, d), k and v (keys, d); each function is one step of the way.

Nothing here is fast. It says in one screen each what the kernels compute. A query that sees no key has out 0 and
lse -infinity. causal: query i sees the keys up to i.
"""

import numpy as np

BLOCK = 64


def safe_softmax(x):
    """Three passes over a row: the maximum, the sum, the quotients."""
    p = np.exp(x - x.max())
    return p / p.sum()


def online_softmax(x):
    """Two passes: maximum m and sum l together, then the quotients (Milakov and Gimelshein, 2018)."""
    m, l = -np.inf, 0.0
    for number in x:
        largest = max(m, number)
        l = l * np.exp(m - largest) + np.exp(number - largest)  # the old terms, as if `largest` had been known before
        m = largest
    return np.exp(x - m) / l


def sees(queries, keys, causal):
    """A matrix of booleans for rows and columns of these numbers."""
    return queries[:, None] >= keys[None, :] if causal else np.ones((len(queries), len(keys)), bool)


def divided(o, l):
    return np.where(l[:, None] > 0, o / np.where(l > 0, l, 1)[:, None], 0)


def logarithm(m, l):
    return np.where(l > 0, m + np.log(np.where(l > 0, l, 1)), -np.inf)


def three_passes(q, k, v, causal=False):
    """The textbook: scores, weights, sums; two matrices of queries x keys numbers. Returns out, lse."""
    s = q @ k.T / np.sqrt(q.shape[1])
    s[~sees(np.arange(len(q)), np.arange(len(k)), causal)] = -np.inf
    m = np.maximum(s.max(1, initial=-np.inf), np.finfo(s.dtype).min)
    p = np.exp(s - m[:, None])
    l = p.sum(1)
    return divided(p @ v, l), logarithm(m, l)


def two_passes(q, k, v, causal=False):
    """m and l in one pass over the keys, out in another: no matrix, but every score is computed twice."""
    m, l, rows = np.full(len(q), np.finfo(q.dtype).min), np.zeros(len(q), q.dtype), np.arange(len(q))
    scores = lambda j: np.where(sees(rows, np.array([j]), causal)[:, 0], q @ k[j] / np.sqrt(q.shape[1]), -np.inf)
    for j in range(len(k)):
        s = scores(j)
        largest = np.maximum(m, s)
        l, m = l * np.exp(m - largest) + np.exp(s - largest), largest
    o = np.zeros((len(q), v.shape[1]), q.dtype)
    for j in range(len(k)):
        o += np.exp(scores(j) - m)[:, None] * v[j]
    return divided(o, l), logarithm(m, l)


def one_pass(q, k, v, causal=False):
    """The sum of V's rows is rescaled as l is, so a second pass is not needed."""
    m, l, rows = np.full(len(q), np.finfo(q.dtype).min), np.zeros(len(q), q.dtype), np.arange(len(q))
    o = np.zeros((len(q), v.shape[1]), q.dtype)
    for j in range(len(k)):
        s = np.where(sees(rows, np.array([j]), causal)[:, 0], q @ k[j] / np.sqrt(q.shape[1]), -np.inf)
        largest = np.maximum(m, s)
        f, p = np.exp(m - largest), np.exp(s - largest)
        m, l, o = largest, l * f + p, o * f[:, None] + p[:, None] * v[j]
    return divided(o, l), logarithm(m, l)


def softmax_step(s, visible, m, l):
    """Of a tile of scores: its weights, the factor for what was summed before, and m and l after it."""
    largest = np.maximum(m, np.where(visible, s, -np.inf).max(1, initial=-np.inf))
    p = np.where(visible, np.exp(np.minimum(s - largest[:, None], 0)), 0)
    f = np.exp(m - largest)
    return p, f, largest, l * f + p.sum(1)


def flash1(q, k, v, causal=False, block=BLOCK):
    """FlashAttention-1 (Dao et al., 2022, algorithm 1): key blocks outside; O, l and m of all queries are rescaled in
    memory, and O is divided at every visit."""
    rows = np.arange(len(q))
    m, l = np.full(len(q), np.finfo(q.dtype).min), np.zeros(len(q), q.dtype)
    o = np.zeros((len(q), v.shape[1]), q.dtype)
    for j in range(0, len(k), block):
        keys = np.arange(j, min(j + block, len(k)))
        for i in range(0, len(q), block):
            at = slice(i, i + block)
            visible = sees(rows[at], keys, causal)
            p, f, m[at], after = softmax_step(q[at] @ k[keys].T / np.sqrt(q.shape[1]), visible, m[at], l[at])
            o[at] = divided(o[at] * (l[at] * f)[:, None] + p @ v[keys], after)
            l[at] = after
    return o, logarithm(m, l)


def flash2(q, k, v, causal=False, block=BLOCK):
    """FlashAttention-2 (Dao, 2023): query blocks outside; O stays close and is divided once."""
    out, lse = np.zeros((len(q), v.shape[1]), q.dtype), np.zeros(len(q), q.dtype)
    for i in range(0, len(q), block):
        rows = np.arange(i, min(i + block, len(q)))
        m, l = np.full(len(rows), np.finfo(q.dtype).min), np.zeros(len(rows), q.dtype)
        o = np.zeros((len(rows), v.shape[1]), q.dtype)
        for j in range(0, len(k), block):
            if causal and j > rows[-1]:
                break  # the whole tile is hidden
            keys = np.arange(j, min(j + block, len(k)))
            s = q[rows] @ k[keys].T / np.sqrt(q.shape[1])
            p, f, m, l = softmax_step(s, sees(rows, keys, causal), m, l)
            o = o * f[:, None] + p @ v[keys]
        out[rows], lse[rows] = divided(o, l), logarithm(m, l)
    return out, lse


def backward(q, k, v, out, lse, dout, causal=False, block=BLOCK):
    """dq, dk, dv in tiles, from lse (Dao, 2023, algorithm 2). Five products for each tile."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta, scale = (dout * out).sum(1), 1 / np.sqrt(q.shape[1])
    for j in range(0, len(k), block):
        keys = np.arange(j, min(j + block, len(k)))
        for i in range(j if causal else 0, len(q), block):
            rows = np.arange(i, min(i + block, len(q)))
            s = q[rows] @ k[keys].T * scale
            visible = sees(rows, keys, causal) & np.isfinite(lse[rows])[:, None]
            p = np.where(visible, np.exp(np.where(visible, s - lse[rows][:, None], 0)), 0)
            ds = p * (dout[rows] @ v[keys].T - delta[rows][:, None]) * scale
            dv[keys] += p.T @ dout[rows]
            dk[keys] += ds.T @ q[rows]
            dq[rows] += ds @ k[keys]
    return dq, dk, dv
