"""The functions of the flash_attn package on anyflash, on CPUs too: code written for it runs by changing one import.

    from anyflash.compat.flash_attn import flash_attn_func

Signatures and meaning are those of flash_attn 2 (Dao-AILab/flash-attention): tensors are (batch, sequence, heads,
channels); causal and windows are bottom-right aligned, the last query at the last key; a query that sees no key gives
0. Beside its float16 and bfloat16, float32 and float64 work, and head sizes up to 256. Where it differs:

- dropout_p other than 0 raises ValueError;
- softmax_lse of a query that sees no key is -inf;
- S_dmask, the third result with return_attn_probs=True, is empty, as there without dropout;
- num_splits changes nothing: results are repeatable to the bit, but for dq on Hopper GPUs (float32 and float64: up to
  128 channels), which takes deterministic=True for that;
- lengths (cu_seqlens, cache_seqlens) and page tables may be on the CPU beside tensors on a GPU: then they are checked,
  and on Hopper GPUs more kernels serve the call.

On a GPU nobody waits for lengths and tables that are there, and calls with them may be captured in a CUDA graph. Nobody
checks them either: lengths count as the nearest that is possible, new keys beyond a cache go to its last place, and
those of a page that does not exist to the nearest, over what is there: an entry that is not used needs a page of its own.

Wrong input raises ValueError or TypeError with one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._frontend import integer, truth
from ..torch import attention
from ._kvcache import flash_attn_with_kvcache
from ._rows import in_none, in_rows
from ._shared import check_cumulative, check_pages, check_table, check_tensor, moved, options, place_of

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, queries, heads, channels) to k and v (batch, keys, heads of keys, channels).

    causal: query i sees keys up to i + keys - queries. window_size (left, right): and those from i + keys - queries -
    left to i + keys - queries + right, -1 for no bound. alibi_slopes: (heads,) or (batch, heads), float32.

    Returns out as q, or (out, softmax_lse (batch, heads, queries), S_dmask) if return_attn_probs. Differentiable.
    """
    call = options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    return _results(attention(q, k, v, layout="bshd", alibi_slopes=alibi_slopes,
                              return_lse=truth("return_attn_probs", return_attn_probs), **call))  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv (batch, sequence, 3, heads, channels), without copies."""
    q, k, v = _parts(qkv, "qkv", 5, 3)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of q and kv (batch, keys, 2, heads of keys, channels), without copies."""
    k, v = _parts(kv, "kv", 5, 2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                           return_attn_probs)  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention inside sequences that lie end to end: q (queries, heads, channels), k and v (keys, heads of keys,
    channels), cu_seqlens (batch + 1,) int32 their cumulative lengths.

    block_table (batch, pages), int32: k and v are (pages, page size, heads of keys, channels). Forward only.

    max_seqlen_q and max_seqlen_k, no less than the longest sequences, are needed with block_table and with alibi_slopes
    of each sequence, where lengths are on a GPU: queries (without block_table keys and values too) are then copied to
    rows of max_seqlen for the call. Where those would be more than four times as many, the lengths are copied to the
    CPU, which waits for the GPU and checks them, and sequences go one by one; not so in a stream that is captured.

    Returns out as q, or (out, softmax_lse (heads, queries), S_dmask) if return_attn_probs. Differentiable without
    block_table.
    """
    call = options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    with_lse = truth("return_attn_probs", return_attn_probs)
    check_tensor("q", q)
    slopes_by_batch = isinstance(alibi_slopes, Tensor) and alibi_slopes.dim() == 2
    place = place_of(q, cu_seqlens_q, cu_seqlens_k, block_table)
    cu_q, cu_k = moved("cu_seqlens_q", cu_seqlens_q, place), moved("cu_seqlens_k", cu_seqlens_k, place)
    pages = moved("block_table", block_table, place)
    if pages is None and not slopes_by_batch:
        return _results(attention(q, k, v, layout="thd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                                  alibi_slopes=alibi_slopes, return_lse=with_lse, **call))  # fmt: skip
    of_keys = 3 if pages is None else 4
    for name, tensor, rank in (("q", q, 3), ("k", k, of_keys), ("v", v, of_keys)):
        check_tensor(name, tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{name}: rank {tensor.dim()}, expected {rank}")
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
    ends = q.shape[0], k.shape[0] if pages is None else None
    check_cumulative("cu_seqlens_q", cu_q, ends[0])
    check_cumulative("cu_seqlens_k", cu_k, ends[1])
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"v: {v.shape[0]} {'keys' if pages is None else 'pages'}, expected {k.shape[0]} as in k")
    if pages is not None:
        check_table(pages, cu_q.numel() - 1)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("block_table: given where a gradient is recorded, expected none there")
    _check_entries(cu_q, cu_k, alibi_slopes)
    if pages is not None:
        check_pages(pages, cu_k.diff(), k, "block_table")
    if place.type == "cuda":
        sizes = integer("max_seqlen_q", max_seqlen_q), integer("max_seqlen_k", max_seqlen_k)
        for name, size in zip(("max_seqlen_q", "max_seqlen_k"), sizes):
            if size < 0:
                raise ValueError(f"{name}: {size}, expected 0 or more")
        fits = all(end is None or (cu_q.numel() - 1) * size <= 4 * end for size, end in zip(sizes, ends))
        if fits or torch.cuda.is_current_stream_capturing():
            made = in_rows(q, k, v, cu_q, cu_k, sizes, pages, alibi_slopes=alibi_slopes, **call)
            return _results(made) if with_lse else made[0]
        cu_q, cu_k, pages = cu_q.cpu(), cu_k.cpu(), None if pages is None else pages.cpu()
        check_cumulative("cu_seqlens_q", cu_q, ends[0], before=True)
        check_cumulative("cu_seqlens_k", cu_k, ends[1], before=True)
        if pages is not None:
            check_pages(pages, cu_k.diff(), k, "block_table")
    return _one_by_one(q, k, v, cu_q, cu_k, alibi_slopes, pages, with_lse, call)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of qkv (tokens, 3, heads, channels), without copies."""
    q, k, v = _parts(qkv, "qkv", 4, 3)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of q and kv (keys, 2, heads of keys, channels), without copies."""
    k, v = _parts(kv, "kv", 4, 2)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                  dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


def _results(made: Any) -> Any:
    return (*made, made[0].new_empty(0)) if isinstance(made, tuple) else made


def _parts(packed: Tensor, name: str, rank: int, count: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed)
    if packed.dim() != rank or packed.shape[-3] != count:
        raise ValueError(
            f"{name}: shape {tuple(packed.shape)}, expected rank {rank} with {count} at the third axis from the end"
        )
    return tuple(packed.unbind(-3))


def _check_entries(cu_q: Tensor, cu_k: Tensor, slopes: Any) -> None:
    entries = cu_q.numel() - 1
    given = {"cu_seqlens_k": cu_k.numel() - 1}
    if slopes is not None and slopes.dim() == 2:
        given["alibi_slopes"] = slopes.shape[0]
    for name, size in given.items():
        if size != entries:
            raise ValueError(f"{name}: {size} sequences, expected {entries} as in cu_seqlens_q")


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, slopes: Any, pages: Any, with_lse: bool,
                call: dict[str, Any]) -> Any:  # fmt: skip
    """What one call of layout thd does not offer: slopes of each sequence, pages. Tokens behind the last are in none."""
    parts = []
    for i in range(cu_q.numel() - 1):
        start, end, first, last = (int(x) for x in (*cu_q[i : i + 2], *cu_k[i : i + 2]))
        own = dict(alibi_slopes=slopes[i] if slopes is not None and slopes.dim() == 2 else slopes)
        keys, values = k, v
        if pages is None:
            keys, values = k[None, first:last], v[None, first:last]
        else:
            own |= dict(page_table=pages[i : i + 1], key_lengths=torch.tensor([last - first], device="cpu"))
        out, lse = attention(q[None, start:end], keys, values, layout="bshd", return_lse=True, **own, **call)
        parts.append((out[0], lse[0]))
    if not parts or q.shape[0] > int(cu_q[-1]):
        parts.append(in_none(q, k, v, int(cu_q[-1]), slopes, **call))
    out, lse = (torch.cat(one, axis) for axis, one in enumerate(zip(*parts)))
    return _results((out, lse)) if with_lse else out
