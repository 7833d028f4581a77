"""FlashAttention-2 in Triton: forward and backward, causal or full, any length.

A Triton program is one thread block; `tl.dot` becomes tensor-core instructions, and the compiler chooses who holds what.
Tensors are (heads, sequence, d), contiguous, d a power of two from 16 on. A query that sees no key has out 0, lse
-infinity. With TRITON_INTERPRET=1 it runs on a CPU, slowly, which is how it is tested.
"""

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # not -infinity: a row that sees nothing would give exp(-infinity + infinity), a NaN


@triton.jit
def tile(data, first, count, row, channel, D: tl.constexpr):
    """Rows `row` of the (count, D) matrix at data + first * D, zeros behind the last."""
    return tl.load(data + (first + row)[:, None] * D + channel[None, :], mask=(row < count)[:, None], other=0.0)


@triton.jit
def store_tile(data, values, first, count, row, channel, D: tl.constexpr):
    tl.store(data + (first + row)[:, None] * D + channel[None, :], values, mask=(row < count)[:, None])


@triton.jit
def forward_kernel(q, k, v, out, lse, queries, keys, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """One block of queries of one head: S = Q K^T, the online softmax, O = O f + P V."""
    h = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, D)
    x = tile(q, h * queries, queries, rows, channel, D)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    o = tl.zeros([BLOCK, D], tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BLOCK, keys) if CAUSAL else keys
    for j in range(0, end, BLOCK):
        columns = j + tl.arange(0, BLOCK)
        y = tile(k, h * keys, keys, columns, channel, D)
        s = tl.dot(x, tl.trans(y)) * scale
        sees = (columns < keys)[None, :]
        if CAUSAL:
            sees = sees & (rows[:, None] >= columns[None, :])
        largest = tl.maximum(m, tl.max(tl.where(sees, s, LOWEST), 1))
        p = tl.where(sees, tl.exp(s - largest[:, None]), 0.0)
        f = tl.exp(m - largest)
        l = l * f + tl.sum(p, 1)
        z = tile(v, h * keys, keys, columns, channel, D)
        o = o * f[:, None] + tl.dot(p.to(z.dtype), z)
        m = largest
    nothing = l == 0
    o = tl.where(nothing[:, None], 0.0, o / tl.where(nothing, 1.0, l)[:, None])
    store_tile(out, o.to(x.dtype), h * queries, queries, rows, channel, D)
    tl.store(lse + h * queries + rows, tl.where(nothing, float("-inf"), m + tl.log(l)), mask=rows < queries)


@triton.jit
def weights(x, y, lse, rows, columns, queries, keys, scale, CAUSAL: tl.constexpr):
    """P of a tile, from lse."""
    s = tl.dot(x, tl.trans(y)) * scale
    sees = (rows < queries)[:, None] & (columns < keys)[None, :]
    if CAUSAL:
        sees = sees & (rows[:, None] >= columns[None, :])
    return tl.where(sees, tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[:, None]), 0.0)


@triton.jit
def key_kernel(
    q, k, v, lse, delta, dout, dk, dv, queries, keys, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """dk and dv of one block of keys: all queries that see it pass by."""
    h = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, D)
    y = tile(k, h * keys, keys, columns, channel, D)
    z = tile(v, h * keys, keys, columns, channel, D)
    of_k = tl.zeros([BLOCK, D], tl.float32)
    of_v = tl.zeros([BLOCK, D], tl.float32)
    first = tl.program_id(0) * BLOCK if CAUSAL else 0
    for i in range(first, queries, BLOCK):
        rows = i + tl.arange(0, BLOCK)
        x = tile(q, h * queries, queries, rows, channel, D)
        g = tile(dout, h * queries, queries, rows, channel, D)
        of_row = tl.load(lse + h * queries + rows, mask=rows < queries, other=0.0)
        p = weights(x, y, of_row, rows, columns, queries, keys, scale, CAUSAL)
        of_v += tl.dot(tl.trans(p.to(g.dtype)), g)
        row_delta = tl.load(delta + h * queries + rows, mask=rows < queries, other=0.0)
        ds = p * (tl.dot(g, tl.trans(z)) - row_delta[:, None]) * scale
        of_k += tl.dot(tl.trans(ds.to(x.dtype)), x)
    store_tile(dk, of_k.to(y.dtype), h * keys, keys, columns, channel, D)
    store_tile(dv, of_v.to(z.dtype), h * keys, keys, columns, channel, D)


@triton.jit
def query_kernel(
    q, k, v, lse, delta, dout, dq, queries, keys, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """dq of one block of queries. P and dS are made a second time, so that nothing is added across thread blocks: the
    same bits in every run, for seven products in place of five."""
    h = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, D)
    x = tile(q, h * queries, queries, rows, channel, D)
    g = tile(dout, h * queries, queries, rows, channel, D)
    of_row = tl.load(lse + h * queries + rows, mask=rows < queries, other=0.0)
    row_delta = tl.load(delta + h * queries + rows, mask=rows < queries, other=0.0)
    of_q = tl.zeros([BLOCK, D], tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BLOCK, keys) if CAUSAL else keys
    for j in range(0, end, BLOCK):
        columns = j + tl.arange(0, BLOCK)
        y = tile(k, h * keys, keys, columns, channel, D)
        z = tile(v, h * keys, keys, columns, channel, D)
        p = weights(x, y, of_row, rows, columns, queries, keys, scale, CAUSAL)
        ds = p * (tl.dot(g, tl.trans(z)) - row_delta[:, None]) * scale
        of_q += tl.dot(ds.to(y.dtype), y)
    store_tile(dq, of_q.to(x.dtype), h * queries, queries, rows, channel, D)


def forward(q, k, v, causal=False, block=64):
    """out (heads, queries, d), as q, and lse (heads, queries) in float32."""
    heads, queries, d = q.shape
    out, lse = torch.empty_like(q), torch.empty(heads, queries, dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(queries, block), heads)
    forward_kernel[grid](q, k, v, out, lse, queries, k.shape[1], d**-0.5, CAUSAL=causal, D=d, BLOCK=block)
    return out, lse


def backward(q, k, v, out, lse, dout, causal=False, block=64):
    """dq, dk, dv of a loss whose gradient with respect to out is dout."""
    heads, queries, d = q.shape
    keys, common = k.shape[1], dict(CAUSAL=causal, D=d, BLOCK=block)
    delta = (dout.float() * out.float()).sum(-1)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    sizes = (queries, keys, d**-0.5)
    key_kernel[(triton.cdiv(keys, block), heads)](q, k, v, lse, delta, dout, dk, dv, *sizes, **common)
    query_kernel[(triton.cdiv(queries, block), heads)](q, k, v, lse, delta, dout, dq, *sizes, **common)
    return dq, dk, dv
