"""Packed sequences as rows of a batch, from lengths that stay on a GPU. It serves ALiBi slopes per sequence and pages,
which one call with layout thd does not support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch import attention
from ._shared import and_dense


def in_none(
    q: Tensor, k: Tensor, v: Tensor, first: int, alibi_slopes: Tensor | None, **call: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the tokens from `first` on, which are in no sequence: they see no key."""
    k, v = (x[:0].flatten(0, -3)[None] for x in (k, v))
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_slopes = alibi_slopes.new_zeros(alibi_slopes.shape[1])
    out, lse = attention(q[None, first:], k, v, layout="bshd", alibi_slopes=alibi_slopes, return_lse=True, **call)
    return out[0], lse[0]


def in_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sizes: tuple[int, int],
    pages: Tensor | None,
    **call: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of flash_attn_varlen_func. sizes: the most queries and keys of a sequence. Nothing here waits."""
    entries, tokens, size = cu_q.numel() - 1, q.shape[0], sizes[0]
    if entries == 0 or tokens == 0 or size == 0:
        return in_none(q, k, v, 0, **call)
    # Right-aligned: a row's last query is its sequence's last, as none_end requires. Places before its first query are
    # padding.
    own = cu_q[1:, None].long() - size + torch.arange(size, device=q.device)
    before = own < cu_q[:-1, None]
    rows = q[own.clamp(0, tokens - 1)].masked_fill(before[..., None, None], 0)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):  # padding sees no key: else it would count
        call["rule"] = and_dense(call["rule"], ~before[:, None, :, None])  # in gradients of keys that no query sees
    if pages is None:
        theirs = cu_k[:-1, None].long() + torch.arange(sizes[1], device=q.device)
        k, v = (x[theirs.clamp(0, x.shape[0] - 1)] if x.shape[0] else x[None].expand(entries, *x.shape) for x in (k, v))
    out, lse = attention(rows, k, v, layout="bshd", page_table=pages, key_lengths=cu_k.diff(), return_lse=True, **call)
    token = torch.arange(tokens, device=q.device)
    entry = torch.searchsorted(cu_q[1:].long(), token, right=True).clamp(max=entries - 1)
    place = (token - cu_q[1:].long()[entry] + size).clamp(0, size - 1)
    behind = (token >= cu_q[-1])[:, None]  # tokens in no sequence
    return (
        out[entry, place].masked_fill(behind[..., None], 0),
        lse[entry, :, place].masked_fill(behind, float("-inf")).T,
    )
