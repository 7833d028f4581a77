"""Causal attention on packed q, k and v, with its workspace bounded by chunks of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _core, _rules
from .._core import echoed
from .._frontend import integer
from ._attention import attention, cast, check_memory, is_direct, plain_options

_CAUSAL = _rules.causal()
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def flash_attention_qkv_packed(qkv: Tensor, num_chunks_q: int, num_chunks_kv: int) -> Tensor:
    """softmax(Q K^T) V under the causal rule, without a scale.

    qkv: (3, N, L, D), q, k and v of N heads; float16, bfloat16, float32 or float64, on the CPU or a GPU. Returns (N,
    L, D). Differentiable.

    num_chunks_q, num_chunks_kv: positive, each divides L. They bound the workspace of both passes to the size of the
    scores of one chunk of queries and one of keys, over all heads: N * (L / num_chunks_q) * (L / num_chunks_kv) numbers
    of float32 (float64 for float64), or to the least possible if that is more. A call that fits runs undivided.
    Otherwise it takes fewer heads at once, then chunks of queries and keys. More chunks never need more memory. The
    results on a CPU are the same bits for all numbers of chunks. Each gradient is rounded to its type once.

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
    budget = _budget(qkv, num_chunks_q * num_chunks_kv) if direct else None
    return attention(qkv, rule=_CAUSAL, layout="qkv", scale=1.0, memory_budget=budget)


def _divisor(name: str, chunks: Any, length: int) -> int:
    if isinstance(chunks, bool):
        raise TypeError(f"{name}: type bool, expected an integer")
    number = integer(name, chunks)
    if number < 1 or length % number:
        raise ValueError(f"{name}: {echoed(repr(number))}, expected a positive divisor of the length {length}")
    return number


def _budget(qkv: Tensor, pairs: int) -> int:
    """The size in bytes of the scores of `pairs` pairs of chunks, over all heads; at least what both passes need."""
    _, heads, length, _ = qkv.shape
    bound = heads * length * length * (8 if qkv.dtype == torch.float64 else 4) // pairs
    return max(int(bound), _core.torch_least_budget(qkv.detach(), None, None, plain_options(_CAUSAL, 1.0, "qkv")))
