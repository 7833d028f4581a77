"""Sequences that lie end to end as rows of a batch, by lengths that stay on a GPU: for what one call of layout thd does
not offer, slopes of each sequence and pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch import attention


def in_rows(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, sizes: tuple[int, int], pages: Tensor | None,
            **call: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of flash_attn_varlen_func. sizes: the most queries and keys of a sequence. Nothing here waits."""
    entries, tokens, size = cu_q.numel() - 1, q.shape[0], sizes[0]
    if entries == 0 or tokens == 0 or size == 0:
        rows_of = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_zeros((*q.shape[:2], v.shape[-1])), q.new_full((q.shape[1], tokens), float("-inf"), dtype=rows_of)
    # A row's last query is its sequence's, as none_end wants it; what lies before the first is 0.
    own = cu_q[1:, None].long() - size + torch.arange(size, device=q.device)
    rows = q[own.clamp(0, tokens - 1)].masked_fill((own < cu_q[:-1, None])[..., None, None], 0)
    if pages is None:
        theirs = cu_k[:-1, None].long() + torch.arange(sizes[1], device=q.device)
        k, v = (x[theirs.clamp(0, max(x.shape[0] - 1, 0))] if x.shape[0] else x.new_zeros((entries, 0, *x.shape[1:]))
                for x in (k, v))  # fmt: skip
    out, lse = attention(rows, k, v, layout="bshd", page_table=pages, key_lengths=cu_k.diff(), return_lse=True, **call)
    token = torch.arange(tokens, device=q.device)
    entry = torch.searchsorted(cu_q[1:].long(), token, right=True).clamp(max=entries - 1)
    place = (token - cu_q[1:].long()[entry] + size).clamp(0, size - 1)
    behind = (token >= cu_q[-1])[:, None]  # in no sequence
    return (out[entry, place].masked_fill(behind[..., None], 0),
            lse[entry, :, place].masked_fill(behind, float("-inf")).T)  # fmt: skip

