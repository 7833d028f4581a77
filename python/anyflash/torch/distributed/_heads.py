"""Attention by the exchange of heads (Ulysses, Jacobs et al. 2023): each process gets all entries of a few heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _core
from .._attention import attention, in_memory, once
from ._agree import step, summed
from ._pieces import Pieces, count_of
from ._side import lost


class ToHeads(torch.autograd.Function):
    """q, k and v: (batch, heads, own entries, ...) -> (batch, heads / processes, all entries, ...). And the sink, which
    all processes have: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, splits: Any, group: Any, count: int, sink: Tensor | None, *tensors: Tensor) -> Any:
        ctx.given = splits, group, count
        made = [to_heads(x, pieces, group, inner) for x, (pieces, inner) in zip(tensors, splits)]
        made.append(None if sink is None else sink.view_as(sink))
        wanted = *ctx.needs_input_grad[4:], ctx.needs_input_grad[3]
        ctx.mark_non_differentiable(*(x for x, one in zip(made, wanted) if x is not None and not one))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        splits, group, count = ctx.given
        of_sink, *wanted = ctx.needs_input_grad[3:]
        step(group, f"the end of the backward pass of call {count}")[1]()

        def back(*gradients: Tensor) -> Any:
            made = [
                to_entries(in_memory(gradient), pieces, group, inner) if one else None
                for gradient, (pieces, inner), one in zip(gradients, splits, wanted)
            ]
            return summed(gradients[3], group) if of_sink else None, *made

        return None, None, None, *once(back, *gradients)


class ToEntries(torch.autograd.Function):
    """The way back, of several results: all processes return the gradients of all, also of those that have none."""

    @staticmethod
    def forward(ctx: Any, pieces: tuple[Pieces, ...], group: Any, inner: int, count: int, *results: Tensor) -> Any:
        ctx.split, ctx.count = (pieces, group, inner), count
        made = tuple(to_entries(x, pieces, group, inner) for x in results)
        ctx.differentiable = [x.requires_grad for x in results]
        ctx.mark_non_differentiable(*(one for one, wanted in zip(made, ctx.differentiable) if not wanted))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        step(ctx.split[1], f"the backward pass of call {ctx.count}")[1]()

        def back(*gradients: Tensor) -> Any:
            return tuple(
                to_heads(in_memory(one), *ctx.split) if wanted else None
                for one, wanted in zip(gradients, ctx.differentiable)
            )

        return None, None, None, None, *once(back, *gradients)


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
    q: Tensor, k: Tensor, v: Tensor, rule: Any, layout: Any, group: Any, count: int, sink: Any,
    options: dict[str, Any], lm: bool,
) -> Any:  # fmt: skip
    """(out, lse), or (out, l, m), of the process' queries."""
    ranks, rank = len(layout.queries), dist.get_rank(group)
    inner_q, inner_k = _inner(layout.q_shape), _inner(layout.k_shape)
    splits = (layout.queries, inner_q), (layout.keys, inner_k), (layout.keys, inner_k)
    *flat, sink = ToHeads.apply(splits, group, count, sink, *(x.flatten(2, -2) for x in (q, k, v)))
    shapes = layout.q_shape, layout.k_shape, layout.k_shape
    q_all, k_all, v_all = (x.unflatten(2, shape) for x, shape in zip(flat, shapes))
    options = _of_heads(options, sink, rank, q.shape[1] // ranks)
    made = attention(q_all, k_all, v_all, rule=rule, return_lse="lm" if lm else True, **options)
    out, *rows = ToEntries.apply(layout.queries, group, inner_q, count, made[0].flatten(2, -2), *made[1:])
    return out.unflatten(2, (-1, *layout.q_shape[1:])), *rows


def least_budget(
    q: Tensor, k: Tensor, v: Tensor, rule: Any, layout: Any, rank: int, sink: Any, options: dict[str, Any],
    backward: bool,
) -> int:  # fmt: skip
    """The smallest memory_budget with which the call of this process' heads works."""
    ranks = len(layout.queries)
    shapes = layout.q_shape, layout.k_shape, layout.k_shape
    options = {**_of_heads(options, sink, rank, q.shape[1] // ranks), "rule": rule, "memory_budget": None}
    q, k, v = (
        x.new_empty((*shape, x.shape[0], x.shape[1] // ranks, x.shape[-1])).movedim((-3, -2), (0, 1))
        for x, shape in zip((q, k, v), shapes)
    )
    return _core.torch_least_budget(q, k, v, options, backward)


def _of_heads(options: dict[str, Any], sink: Tensor | None, rank: int, heads: int) -> dict[str, Any]:
    """Those of the heads of one process."""
    options = dict(options)
    if sink is not None:
        options["sink"] = sink.narrow(0, rank * heads, heads)
    if (slopes := options.pop("alibi_slopes", None)) is not None:
        options["alibi_slopes"] = slopes.narrow(-1, rank * heads, heads)
    return options


def _inner(shape: tuple[int, ...]) -> int:
    size = 1
    for one in shape[1:]:
        size *= one
    return size
