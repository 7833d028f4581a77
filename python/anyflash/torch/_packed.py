"""Causal attention on packed q, k and v, whose working memory chunks of queries and keys bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _attention as _plain
from .. import _rules
from .._core import echoed
from .._frontend import integer
from ._attention import attention, cast, check_memory, in_memory, is_direct, once

_CAUSAL = _rules.causal()
_NARROW = (torch.float16, torch.bfloat16)
_TYPES = (*_NARROW, torch.float32, torch.float64)


def flash_attention_qkv_packed(qkv: Tensor, num_chunks_q: int, num_chunks_kv: int) -> Tensor:
    """softmax(Q K^T) V under the causal rule, without a scale.

    qkv: (3, N, L, D), q, k and v of N heads; float16, bfloat16, float32 or float64, on the CPU or a GPU. Returns (N,
    L, D). Differentiable.

    num_chunks_q, num_chunks_kv: positive, each divides L. They bound the memory that a call works in beside its
    tensors to that of the scores of one chunk of queries and one of keys, in all heads: N * (L / num_chunks_q) *
    (L / num_chunks_kv) numbers. The forward pass needs some megabytes whatever they are. The backward pass takes all in
    one call if that fits; else it goes from chunk to chunk, each pair a call of its own, whose tiles are the least it
    needs.

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
    qkv = cast(qkv)[0]  # once, for both passes
    if not (direct and torch.is_grad_enabled() and qkv.requires_grad) or _fits(qkv, num_chunks_q * num_chunks_kv):
        return attention(qkv, rule=_CAUSAL, layout="qkv", scale=1.0)
    return _InChunks.apply(qkv, num_chunks_q, num_chunks_kv)


def _divisor(name: str, chunks: Any, length: int) -> int:
    if isinstance(chunks, bool):
        raise TypeError(f"{name}: type bool, expected an integer")
    number = integer(name, chunks)
    if number < 1 or length % number:
        raise ValueError(f"{name}: {echoed(repr(number))}, expected a positive divisor of the length {length}")
    return number


def _fits(qkv: Tensor, pairs: int) -> bool:
    """The backward pass as one call works in no more memory than the scores of a pair of chunks take."""
    _, heads, length, _ = qkv.shape
    number = 8 if qkv.dtype == torch.float64 else 4
    budget = heads * length * length * number // pairs
    plan = _plain.plan(qkv.detach(), rule=_CAUSAL, layout="qkv", scale=1.0, threads=torch.get_num_threads())
    return bool(plan.backward_workspace <= budget)


def _rule(query: int, key: int) -> Any:
    """Causal between queries from place `query` on and keys from place `key` on."""
    if query >= key:
        return _rules.window(-1, query - key)
    return ~_rules.window(key - query - 1, -1)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, chunks_q: int, chunks_kv: int) -> Tensor:
        out, lse = attention(qkv, rule=_CAUSAL, layout="qkv", scale=1.0, return_lse=True)
        ctx.chunks = chunks_q, chunks_kv
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return once(_gradient, *ctx.saved_tensors, in_memory(dout), *ctx.chunks), None, None


def _gradient(qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor, chunks_q: int, chunks_kv: int) -> Tensor:
    """A pair's gradients are the whole's, summed over its own queries and keys, since lse is the whole row's. The sums
    of 16-bit types are taken in float32, and so are the pairs."""
    qkv, out, lse, dout = (x.detach() for x in (qkv, out, lse, dout))
    length = qkv.shape[2]
    step_q, step_kv = length // chunks_q, length // chunks_kv
    wide = torch.float32 if qkv.dtype in _NARROW else qkv.dtype
    dqkv = torch.zeros_like(qkv, dtype=wide)
    for key in range(0, length, step_kv):
        keys = slice(key, key + step_kv)
        k, v = (x[None, :, keys].to(wide) for x in qkv[1:])
        for query in range(key // step_q * step_q, length, step_q):
            queries = slice(query, query + step_q)
            q, o, do = (x[None, :, queries].to(wide) for x in (qkv[0], out, dout))
            made = _plain.attention_backward(do, q, k, v, o, lse[None, :, queries], rule=_rule(query, key), scale=1.0,
                                             threads=torch.get_num_threads())  # fmt: skip
            for part, (gradient, place) in enumerate(zip(made[:3], (queries, keys, keys))):
                dqkv[part, :, place] += gradient[0]
    return dqkv.to(qkv.dtype)
