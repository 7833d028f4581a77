"""Attention by the exchange of heads (Ulysses, Jacobs et al. 2023): each process gets all entries of a few heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._attention import attention, in_memory
from ._agree import summed
from ._pieces import Pieces, count_of
from ._side import lost


class ToHeads(torch.autograd.Function):
    """(batch, heads, own entries, ...) -> (batch, heads / processes, all entries, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: tuple[Pieces, ...], group: Any, inner: int) -> Tensor:
        ctx.split = pieces, group, inner
        return to_heads(x, pieces, group, inner)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return to_entries(in_memory(gradient), *ctx.split), None, None, None


class ToEntries(torch.autograd.Function):
    """The way back, of several results: all processes return the gradients of all, also of those that have none."""

    @staticmethod
    def forward(ctx: Any, pieces: tuple[Pieces, ...], group: Any, inner: int, *results: Tensor) -> Any:
        ctx.split = pieces, group, inner
        made = tuple(to_entries(x, pieces, group, inner) for x in results)
        ctx.differentiable = [x.requires_grad for x in results]
        ctx.mark_non_differentiable(*(one for one, wanted in zip(made, ctx.differentiable) if not wanted))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        made = [
            to_heads(in_memory(one), *ctx.split) if wanted else None
            for one, wanted in zip(gradients, ctx.differentiable)
        ]
        return None, None, None, *made


class Shared(torch.autograd.Function):
    """A tensor that all processes have: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return summed(gradient, ctx.group), None


def to_heads(x: Tensor, pieces: tuple[Pieces, ...], group: Any, inner: int) -> Tensor:
    ranks = len(pieces)
    counts = [count_of(one) * inner for one in pieces]
    parts = x.unflatten(1, (ranks, -1)).movedim(1, 0).movedim(3, 1)  # (process, entries, batch, heads, ...)
    sent = parts.contiguous().flatten(0, 1)
    got = sent.new_empty((sum(counts), *sent.shape[1:]))
    own = x.shape[2]
    lost(lambda: dist.all_to_all_single(got, sent, counts, [own] * ranks, group=group))
    return _reordered(got, pieces, inner, back=False).movedim(0, 2)


def to_entries(x: Tensor, pieces: tuple[Pieces, ...], group: Any, inner: int) -> Tensor:
    ranks = len(pieces)
    counts = [count_of(one) * inner for one in pieces]
    sent = _reordered(x.movedim(2, 0), pieces, inner, back=True).contiguous()
    own = counts[dist.get_rank(group)]
    got = sent.new_empty((ranks * own, *sent.shape[1:]))
    lost(lambda: dist.all_to_all_single(got, sent, [own] * ranks, counts, group=group))
    return got.unflatten(0, (ranks, own)).movedim(1, 3).movedim(0, 1).flatten(1, 2)


def _reordered(x: Tensor, pieces: tuple[Pieces, ...], inner: int, back: bool) -> Tensor:
    """From the order of the processes' pieces to that of the sequence, or back."""
    every = [piece for one in pieces for piece in one]
    if every == sorted(every):
        return x
    made, at = torch.empty_like(x), 0
    for first, count in every:
        whole, own = slice(first * inner, (first + count) * inner), slice(at * inner, (at + count) * inner)
        if back:
            made[own] = x[whole]
        else:
            made[whole] = x[own]
        at += count
    return made


def attention_by_heads(
    q: Tensor, k: Tensor, v: Tensor, rule: Any, layout: Any, group: Any, sink: Any, options: dict[str, Any], lm: bool
) -> Any:
    """(out, lse), or (out, l, m), of the process' queries."""
    ranks, rank = len(layout.queries), dist.get_rank(group)
    inner_q, inner_k = _inner(layout.q_shape), _inner(layout.k_shape)

    def all_entries(x: Tensor, pieces: tuple[Pieces, ...], shape: tuple[int, ...], inner: int) -> Tensor:
        flat: Tensor = ToHeads.apply(x.flatten(2, -2), pieces, group, inner)
        return flat.unflatten(2, shape)

    of = {
        "q": all_entries(q, layout.queries, layout.q_shape, inner_q),
        "k": all_entries(k, layout.keys, layout.k_shape, inner_k),
        "v": all_entries(v, layout.keys, layout.k_shape, inner_k),
    }
    heads = q.shape[1] // ranks
    options = dict(options)
    if sink is not None:
        options["sink"] = Shared.apply(sink, group).narrow(0, rank * heads, heads)
    if (slopes := options.get("alibi_slopes")) is not None:
        options["alibi_slopes"] = slopes.narrow(-1, rank * heads, heads)
    made = attention(of["q"], of["k"], of["v"], rule=rule, return_lse="lm" if lm else True, **options)
    out, *rows = ToEntries.apply(layout.queries, group, inner_q, made[0].flatten(2, -2), *made[1:])
    return out.unflatten(2, (-1, *layout.q_shape[1:])), *rows


def _inner(shape: tuple[int, ...]) -> int:
    size = 1
    for one in shape[1:]:
        size *= one
    return size
