"""Causal attention on packed q, k and v, with its workspace bounded by chunks of queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _core, _rules
from .._core import echoed
from .._frontend import integer
from ._attention import attention, cast, check_memory, in_memory, is_direct, once, plain_options
from ._op import stream_of

_CAUSAL = _rules.causal()
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DQ, _DK, _DV = 1, 2, 4  # the extension's bits for gradients
_LEAST = 64  # entries of a block: smaller blocks need as much memory


def flash_attention_qkv_packed(qkv: Tensor, num_chunks_q: int, num_chunks_kv: int) -> Tensor:
    """softmax(Q K^T) V under the causal rule, without a scale.

    qkv: (3, N, L, D), q, k and v of N heads; float16, bfloat16, float32 or float64, on the CPU or a GPU. Returns (N,
    L, D). Differentiable.

    num_chunks_q, num_chunks_kv: positive, each divides L. They bound a call's workspace to the size of the scores of
    one chunk of queries and one of keys, over all heads: N * (L / num_chunks_q) * (L / num_chunks_kv) numbers of
    float32 (float64 for float64). The forward pass always needs some megabytes. The backward pass is one call if that
    fits. Otherwise it computes dQ from the largest blocks of queries that fit, then dK and dV from such blocks of keys,
    in two to three times the time. If not even blocks of 64 in one head fit, it uses those. More chunks never need more
    memory. Each gradient is rounded to its type once.

    Raises ValueError or TypeError with one line.
    """
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv: type {type(qkv).__name__}, expected a torch.Tensor")
    check_memory(("qkv",), (qkv,))
    direct = not torch.compiler.is_compiling() and is_direct(qkv)
    if direct and (qkv.is_neg() or qkv._is_zerotensor()):
        raise ValueError("qkv: negated lazily or of zeros without memory, expected plain memory")
    if qkv.dtype not in _TYPES:
        raise TypeError(f"qkv: type {qkv.dtype}, expected float16, bfloat16, float32 or float64")
    if qkv.dim() != 4 or qkv.shape[0] != 3:
        raise ValueError(f"qkv: shape {tuple(qkv.shape)}, expected (3, heads, length, channels)")
    if not 1 <= qkv.shape[3] <= 256:
        raise ValueError(f"qkv: {qkv.shape[3]} channels, expected 1 to 256")
    num_chunks_q = _divisor("num_chunks_q", num_chunks_q, qkv.shape[2])
    num_chunks_kv = _divisor("num_chunks_kv", num_chunks_kv, qkv.shape[2])
    qkv = cast(qkv)[0]  # cast once for both passes
    if not (direct and torch.is_grad_enabled() and qkv.requires_grad) or _fits(qkv, num_chunks_q * num_chunks_kv):
        return attention(qkv, rule=_CAUSAL, layout="qkv", scale=1.0)
    return _InChunks.apply(qkv, num_chunks_q * num_chunks_kv)


def _divisor(name: str, chunks: Any, length: int) -> int:
    if isinstance(chunks, bool):
        raise TypeError(f"{name}: type bool, expected an integer")
    number = integer(name, chunks)
    if number < 1 or length % number:
        raise ValueError(f"{name}: {echoed(repr(number))}, expected a positive divisor of the length {length}")
    return number


def _budget(qkv: Tensor, pairs: int) -> int:
    """The size in bytes of the scores of `pairs` pairs of chunks, over all heads."""
    _, heads, length, _ = qkv.shape
    return int(heads * length * length * (8 if qkv.dtype == torch.float64 else 4) // pairs)


def _whole(qkv: Tensor) -> int:
    """The workspace in bytes of the backward pass as one call."""
    options = plain_options(_CAUSAL, 1.0, "qkv")
    return _core.torch_backward_workspace(qkv.detach(), None, None, options, _DQ | _DK | _DV)


def _fits(qkv: Tensor, pairs: int) -> bool:
    return _whole(qkv) <= _budget(qkv, pairs)


class _Blocks(NamedTuple):
    """How many entries of how many heads, of queries or keys, one call computes."""

    heads: int
    entries: int


def _bytes(qkv: Tensor, blocks: _Blocks) -> int:
    """The workspace and results in bytes of calls with such blocks."""
    heads, entries = blocks
    q, k, v = (x[None, :heads] for x in qkv.detach())
    last = qkv.shape[2] - entries
    of_queries = plain_options(_rules.window(-1, last), 1.0)
    queries = _core.torch_backward_workspace(q[:, :, last:], k, v, of_queries, _DQ)
    first = slice(0, entries)
    of_keys = plain_options(_CAUSAL, 1.0)
    keys = _core.torch_backward_workspace(q, k[:, :, first], v[:, :, first], of_keys, _DK | _DV)
    one: int = heads * entries * qkv.shape[3] * qkv.element_size()
    return max(queries + one, keys + 2 * one)


def _chosen(qkv: Tensor, budget: int) -> _Blocks | None:
    """The largest blocks that fit the budget, or else the smallest; None: all in one call. Block sizes that need as
    much as a larger size are skipped, so that a smaller budget never uses more."""
    _, heads, length, _ = qkv.shape
    chosen, least = None, _whole(qkv)
    sizes = []
    while length > _LEAST:
        length = max(_LEAST, (length + 1) // 2)
        sizes.append(length)
    for blocks in [_Blocks(h, size) for h in dict.fromkeys((heads, 1)) for size in sizes]:
        if least <= budget:
            break
        if (needed := _bytes(qkv, blocks)) < least:
            chosen, least = blocks, needed
    return chosen


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, pairs: int) -> Tensor:
        out, lse = attention(qkv, rule=_CAUSAL, layout="qkv", scale=1.0, return_lse=True)
        ctx.pairs = pairs
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return once(_gradient, *ctx.saved_tensors, in_memory(dout), ctx.pairs), None


def _gradient(qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, pairs: int) -> Tensor:
    """The gradients of some queries, or of some keys, from one call each. This works because lse covers the whole
    row."""
    qkv, out, lse, dout = (x.detach() for x in (qkv, out, lse, dout))
    blocks = _chosen(qkv, _budget(qkv, pairs))
    if blocks is None:
        return _core.torch_attention_backward(
            dout, qkv, None, None, out, lse, None, plain_options(_CAUSAL, 1.0, "qkv", stream_of(qkv)), _DQ
        )[0]
    dqkv = torch.empty_like(qkv)
    _, heads, length, _ = qkv.shape
    for first in range(0, heads, blocks.heads):
        some = slice(first, first + blocks.heads)
        q, k, v, o, do, rows, dq, dk, dv = (x[None, some] for x in (*qkv, out, dout, lse, *dqkv))
        for start in range(0, length, blocks.entries):
            end = start + blocks.entries
            here, before, behind = slice(start, end), slice(0, end), slice(start, None)
            of_queries = plain_options(_rules.window(-1, start), 1.0, stream=stream_of(q))
            dq[:, :, here] = _core.torch_attention_backward(
                do[:, :, here],
                q[:, :, here],
                k[:, :, before],
                v[:, :, before],
                o[:, :, here],
                rows[:, :, here],
                None,
                of_queries,
                _DQ,
            )[0]
            of_keys = plain_options(_CAUSAL, 1.0, stream=stream_of(q))
            _, dk[:, :, here], dv[:, :, here], *_ = _core.torch_attention_backward(
                do[:, :, behind],
                q[:, :, behind],
                k[:, :, here],
                v[:, :, here],
                o[:, :, behind],
                rows[:, :, behind],
                None,
                of_keys,
                _DK | _DV,
            )
    return dqkv
