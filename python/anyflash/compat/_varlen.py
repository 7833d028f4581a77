"""flash_attn_varlen_func: attention within packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._frontend import integer, truth
from ..torch import attention
from ._checks import checked, traced
from ._forward_only import detached, forward_only
from ._rows import in_none, in_rows
from ._shared import check_indices, check_table, check_tensor, moved, options, place_of, with_no_probabilities

_NO_GRADIENT = "block_table: a gradient was asked for, expected forward calls alone; gather the pages into k and v"


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
    channels), cu_seqlens (batch + 1,) int32 their cumulative lengths. Tokens after the last length are in no sequence:
    their out is 0, their lse -inf, their gradients are 0.

    block_table (batch, pages), int32: k and v are (pages, page size, heads of keys, channels). Forward only: a backward
    call raises NotImplementedError.

    max_seqlen_q and max_seqlen_k must be at least the longest lengths. They are used with block_table, or alibi_slopes
    per sequence, if lengths are on a GPU or torch.compile traces the call. Queries (without block_table keys and values
    too) are then copied to padded rows of max_seqlen. If padding would more than quadruple them, lengths on a GPU are
    copied to the CPU, which waits for the GPU and checks them, and each sequence is a call of its own. A stream that is
    being captured always uses padded rows.

    Returns out, shaped as q, or (out, softmax_lse (heads, queries), S_dmask) if return_attn_probs. Differentiable
    without block_table.
    """
    given = (q, k, v, alibi_slopes, softmax_scale, softcap)
    if block_table is not None:
        q, k, v, alibi_slopes, softmax_scale, softcap = detached(*given)
    call = options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    call |= dict(alibi_slopes=alibi_slopes)
    made = attend(
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k),
        (max_seqlen_q, max_seqlen_k),
        block_table,
        truth("return_attn_probs", return_attn_probs),
        call,
    )
    return with_no_probabilities(made if block_table is None else forward_only(made, _NO_GRADIENT, *given))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Any, Any],
    longest: tuple[Any, Any],
    block_table: Any,
    with_lse: bool,
    call: dict[str, Any],
    used: tuple[Any, Any] = (None, None),
) -> Any:
    """out, or (out, lse). call: the options of attention, alibi_slopes among them. used: FlashAttention-3's seqused_q
    and seqused_k, how many tokens of each sequence are in use; the others are in no sequence. Not with block_table."""
    check_tensor("q", q)
    place, slopes = place_of(q, *cu_seqlens, block_table, *used), call["alibi_slopes"]
    pages = moved("block_table", block_table, place)
    _check_tensors(q, k, v, slopes, pages is not None)
    ends = q.shape[0], -1 if pages is not None else k.shape[0]
    in_one_call = pages is None and (slopes is None or slopes.dim() != 2)
    cu_q, cu_k = (
        _integers(f"cu_seqlens_{side}", moved(f"cu_seqlens_{side}", one, place)) for side, one in zip("qk", cu_seqlens)
    )
    if not (in_one_call and used[0] is used[1] is None and _are_whole(cu_q, cu_k, ends)):  # else attention checks them
        cu_q, cu_k = (
            checked(f"cu_seqlens_{side}", one, sizes=(end, -1)) for side, one, end in zip("qk", (cu_q, cu_k), ends)
        )
        _check_entries(cu_q, cu_k, slopes)
        if in_one_call:
            cu_q, cu_k = _whole(*_in_use(cu_q, cu_k, used, place), ends)
    if in_one_call:
        return attention(q, k, v, layout="thd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=with_lse, **call)
    if pages is not None:
        check_table("block_table", pages, cu_q.numel() - 1)
        pages = checked("block_table", pages, cu_k.diff(), sizes=k.shape[:2])
    if place.type == "cpu" and not traced():
        return _one_by_one(q, k, v, cu_q, cu_k, pages, with_lse, call)
    sizes = integer("max_seqlen_q", longest[0]), integer("max_seqlen_k", longest[1])
    for side, size in zip("qk", sizes):
        if size < 0:
            raise ValueError(f"max_seqlen_{side}: {size}, expected 0 or more")
    if place.type == "cpu":
        cu_q, cu_k = (
            checked(f"cu_seqlens_{side}", one, sizes=(-1, size)).to(q.device)
            for side, one, size in zip("qk", (cu_q, cu_k), sizes)
        )
        pages = None if pages is None else pages.to(q.device)
    elif not torch.cuda.is_current_stream_capturing() and any(
        end >= 0 and (cu_q.numel() - 1) * size > 4 * end for size, end in zip(sizes, ends)
    ):
        cu_q, cu_k = (
            checked(f"cu_seqlens_{side}", one.cpu(), sizes=(end, -1))
            for side, one, end in zip("qk", (cu_q, cu_k), ends)
        )
        if pages is not None:
            pages = checked("block_table", pages.cpu(), cu_k.diff(), sizes=k.shape[:2])
        return _one_by_one(q, k, v, cu_q, cu_k, pages, with_lse, call)
    made = in_rows(q, k, v, cu_q, cu_k, sizes, pages, **call)
    return made if with_lse else made[0]


def _check_tensors(q: Tensor, k: Any, v: Any, slopes: Any, paged: bool) -> None:
    of_keys = 4 if paged else 3
    for name, tensor, rank in (("q", q, 3), ("k", k, of_keys), ("v", v, of_keys)):
        check_tensor(name, tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{name}: rank {tensor.dim()}, expected {rank}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"v: {v.shape[0]} {'pages' if paged else 'keys'}, expected {k.shape[0]} as in k")
    if slopes is not None:
        check_tensor("alibi_slopes", slopes)


def _integers(name: str, lengths: Any) -> Any:
    check_indices(name, lengths, 1)
    if not lengths.numel():
        raise ValueError(f"{name}: no numbers, expected sequences + 1")
    return lengths


def _check_entries(cu_q: Tensor, cu_k: Tensor, slopes: Any) -> None:
    entries = cu_q.numel() - 1
    given = {"cu_seqlens_k": cu_k.numel() - 1}
    if slopes is not None and slopes.dim() == 2:
        given["alibi_slopes"] = slopes.shape[0]
    for name, size in given.items():
        if size != entries:
            raise ValueError(f"{name}: {size} sequences, expected {entries} as in cu_seqlens_q")


def _in_use(cu_q: Tensor, cu_k: Tensor, used: tuple[Any, Any], place: torch.device) -> tuple[Tensor, Tensor]:
    """Each sequence as three: its tokens in use, its other queries without keys, its other keys without queries."""
    if used[0] is used[1] is None:
        return cu_q, cu_k
    starts, ends, middles = (cu_q[:-1], cu_k[:-1]), (cu_q[1:], cu_k[1:]), [cu_q[1:], cu_k[1:]]
    for i, (name, numbers) in enumerate(zip(("seqused_q", "seqused_k"), used)):
        if numbers is None:
            continue
        check_indices(name, numbers, 1)
        if numbers.shape[0] != starts[i].shape[0]:
            raise ValueError(f"{name}: {numbers.shape[0]} sequences, expected {starts[i].shape[0]} as in cu_seqlens_q")
        numbers = checked(name, moved(name, numbers, place), (cu_q, cu_k)[i])
        middles[i] = torch.minimum(starts[i] + numbers.clamp(min=0), ends[i])
    of_q = torch.stack((starts[0], middles[0], ends[0]), 1).flatten()
    of_k = torch.stack((starts[1], middles[1], middles[1]), 1).flatten()
    return torch.cat((of_q, cu_q[-1:])), torch.cat((of_k, cu_k[-1:]))


def _are_whole(cu_q: Tensor, cu_k: Tensor, ends: tuple[int, int]) -> bool:
    """The lengths reach all tokens, or are on a GPU, where attention finds the tokens after the last length itself."""
    return cu_q.is_cuda or (not traced() and (cu_q.tolist()[-1], cu_k.tolist()[-1]) == ends)


def _whole(cu_q: Tensor, cu_k: Tensor, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """With two more sequences: the queries after the last one without keys, the keys after it without queries."""
    if _are_whole(cu_q, cu_k, ends):
        return cu_q, cu_k
    queries, keys = cu_q.new_full((1,), ends[0]), cu_k.new_full((1,), ends[1])
    return torch.cat((cu_q, queries, queries)), torch.cat((cu_k, cu_k[-1:], keys))


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, pages: Any, with_lse: bool, call: dict[str, Any]
) -> Any:
    """What one call of layout thd does not offer: slopes of each sequence, pages."""
    parts, slopes = [], call["alibi_slopes"]
    for i in range(cu_q.numel() - 1):
        start, end, first, last = (int(x) for x in (*cu_q[i : i + 2], *cu_k[i : i + 2]))
        own = call | dict(alibi_slopes=slopes[i] if slopes is not None and slopes.dim() == 2 else slopes)
        keys, values = k, v
        if pages is None:
            keys, values = k[None, first:last], v[None, first:last]
        else:
            own |= dict(page_table=pages[i : i + 1], key_lengths=torch.tensor([last - first], device="cpu"))
        out, lse = attention(q[None, start:end], keys, values, layout="bshd", return_lse=True, **own)
        parts.append((out[0], lse[0]))
    if not parts or q.shape[0] > int(cu_q[-1]):
        parts.append(in_none(q, k, v, int(cu_q[-1]), **call))
    out, lse = (torch.cat(one, axis) for axis, one in enumerate(zip(*parts)))
    return (out, lse) if with_lse else out
