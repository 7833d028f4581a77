"""Attention by the exchange of keys: queries stay where they are, and each process gets the keys that they see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._attention import in_memory, once
from ._agree import any_says, step, summed
from ._exchange import Exchange, Pending, Ready
from ._local import Joined, Local, apart
from ._schedule import Schedule
from ._shares import LargeRows, Rows, Shares, Sums, is_known_late
from ._side import GroupLost


class Call(NamedTuple):
    local: Local
    schedule: Schedule
    group: Any
    rank: int
    shared_bias: bool  # its one row is that of all queries, in all processes
    slopes: Tensor | None
    has_gradient: bool  # under no_grad it has none, whatever its tensors ask for
    needs_lse: bool
    number: int  # of the call in its group

    def exchange(self, count: int) -> Exchange:
        return Exchange(self.group, self.schedule, self.rank, self.local.layout.keys[self.rank], count)

    def ready(self, k: Tensor, v: Tensor) -> Ready | None:
        """The first messages."""
        return self.exchange(self.number).keys(0, k.detach(), v.detach()) if self.stages() else None

    def is_of_all(self, sink: Any) -> bool:
        """Whether a backward pass exchanges anything. The same in all processes."""
        return bool(self.schedule.stages) or sink is not None or self.shared_bias

    def stages(self) -> tuple[Any, ...]:
        """None if this process neither sends nor receives anything."""
        moves = any(self.rank in pair for stage in self.schedule.stages for pair in stage.transfers)
        return self.schedule.stages if moves else ()


class AttentionByKeys(torch.autograd.Function):
    """(out, row_sum, row_max, lse) of the process' queries. q, k and v are (batch, heads, sequence..., channels)."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, sink: Any, call: Call, first: Ready | None) -> Any:
        joined = Joined(q, v.shape[-1], call.local.inner_q, call.has_gradient)
        last: tuple[Tensor, ...] = ()
        exchange, stages = call.exchange(call.number), len(call.stages())
        for number, k_here, v_here in _in_turn(exchange, k, v, stages, (-1, k, v), first):
            last = (k_here, v_here) if number >= 0 else ()
            for one in call.local.calls(number):
                joined.add(one.part.rows, *call.local.forward(one, q, k_here, v_here, bias, call.slopes, sink))
        out, row_sum, row_max = joined.finish(sink)
        lse = row_max + row_sum.log() if call.needs_lse else None
        parts: list[Sums] = []
        ctx.call, ctx.large, ctx.last = call, None, len(last)
        if lse is not None and call.has_gradient and (len(joined.parts) > 1 or (joined.parts and sink is not None)):
            ctx.large = LargeRows(lse, q.dtype)
            # If it is known late, in any case: a checkpoint has to save as much each time.
            parts = joined.parts if is_known_late(lse) or ctx.large.any() else []
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_sum, row_max)
        sums = [x for one in (Sums(row_sum, row_max), *parts) for x in one]
        ctx.save_for_backward(q, k, v, bias, sink, out, lse, *last, *sums)
        return out, row_sum, row_max, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any, __: Any, dlse: Any) -> Any:
        saved = ctx.saved_tensors  # once: a checkpoint unpacks no tensor twice
        q, k, v, bias, sink, out, lse = saved[:7]
        last, sums = saved[7 : 7 + ctx.last], saved[7 + ctx.last :]
        whole, *parts = map(Sums, sums[::2], sums[1::2])
        # Without a gradient too: the others may have one, and wait for this process.
        dout = torch.zeros_like(out) if dout is None else in_memory(dout)
        rows = Rows(dout, None if dlse is None else in_memory(dlse), lse)
        kept = rows, Shares(ctx.large, whole, parts), last
        return *once(_backward, ctx.call, ctx.needs_input_grad, kept, q, k, v, bias, sink, out), None, None


def _stages_back(
    exchange: Exchange, stages: int, k: Tensor, v: Tensor, last: tuple[Tensor, ...]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The keys of stages by their numbers, the own ones under -1. The last stage comes first, whose keys the forward pass
    has left, and the own keys at the end: so there is work beside the first message and beside the last."""
    if stages:
        yield from _in_turn(exchange, k, v, stages - 1, (stages - 1, *last))
    yield -1, k, v


def _in_turn(
    exchange: Exchange, k: Tensor, v: Tensor, stages: int, at_hand: Any, first: Ready | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What needs no message, then so many stages. While one is worked on, the next is under way. first: the messages of
    the first one, if they are ready."""

    def send(i: int, ready: Ready | None = None) -> Pending | None:
        return exchange.start(ready or exchange.keys(i, k, v)) if i < stages else None

    pending = send(0, first)
    yield at_hand
    for i in range(stages):
        after = send(i + 1)
        assert pending is not None
        arrived = pending.wait()
        pending = after
        yield i, *arrived


class _Sum:
    """A gradient, summed over parts in their order: in float32, or float64 for float64, where an entry is in more than
    two. Of two, one sum is as exact."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.kind = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.first: Tensor | None = None  # of all entries
        self.second: list[tuple[tuple[int, int], Tensor]] = []  # of other entries each
        self.total: Tensor | None = None

    def add(self, rows: tuple[int, int], gradient: Tensor) -> None:
        if self.total is None and self.first is None and rows == (0, self.like.shape[2]):
            self.first = gradient
        elif self.total is None and apart(rows, [one for one, _ in self.second]):
            self.second.append((rows, gradient))
        else:
            self.sum().narrow(2, *rows).add_(gradient)

    def sum(self) -> Tensor:
        """The sum so far, for adding in place."""
        if self.total is None:
            like = self.like if self.first is None else self.first
            self.total = torch.zeros_like(like, dtype=self.kind) if self.first is None else like.to(self.kind)
            for rows, gradient in self.second:
                self.total.narrow(2, *rows).add_(gradient)
            self.first, self.second = None, []
        return self.total

    def finish(self) -> Tensor:
        if self.first is None:
            some = self.total is not None or self.second
            return self.sum().to(self.like.dtype) if some else torch.zeros_like(self.like)
        for rows, gradient in self.second:
            self.first.narrow(2, *rows).add_(gradient)
        return self.first


_Kept = tuple[Rows, Shares, tuple[Tensor, ...]]  # and the last stage's keys and values


def _backward(call: Call, wanted: Any, kept: _Kept, q: Any, k: Any, v: Any, bias: Any, sink: Any, out: Any) -> Any:
    """A GPU works as if there were no large rows, as long as that is not known. If a process then finds some, all make
    their gradients again."""
    rows, shares, _ = kept
    large = shares.large
    weighs = large is not None and large.known() and large.any()
    given = kept, q, k, v, bias, sink, out
    exchange = _begin(call, sink)
    if not is_known_late(rows.lse):
        return _gradients(call, exchange, wanted, weighs, *given)
    made, again = None, False
    try:
        made = _gradients(call, exchange, wanted, weighs, *given)
        again = large is not None and not weighs and large.any()
    except Exception as error:
        if call.is_of_all(sink):
            _tell(call, exchange, error)
        raise
    if call.is_of_all(sink):
        again = any_says(call.group, _end_of(call), again)
    if again:
        made = None  # its memory is free for the second pass
        weighs = large is not None and large.any()
        made = _gradients(call, _begin(call, sink), wanted, weighs, *given)
    return made


def _begin(call: Call, sink: Any) -> Exchange:
    """The exchange of a backward pass, in which all processes take part."""
    count, check = 0, None
    if call.is_of_all(sink):
        count, check = step(call.group, f"the backward pass of call {call.number}")
    exchange = call.exchange(count)
    exchange.check = check
    return exchange


def _end_of(call: Call) -> str:
    return f"the end of the backward pass of call {call.number}"


def _tell(call: Call, exchange: Exchange, error: Exception) -> None:
    """Tells an error of this process to the others, which ask at the end of their pass whether all make it again."""
    if exchange.check is not None:
        try:
            exchange.agree()  # the others have this process' answer, and went on
        except Exception:
            return  # this process' own error says more
    if exchange.is_agreed and not isinstance(error, GroupLost):
        try:
            any_says(call.group, _end_of(call), False, error)
        except GroupLost:
            pass  # they wait for a message of this pass


def _gradients(
    call: Call, exchange: Exchange, wanted: Any, weighs: bool, kept: _Kept, q: Tensor, k: Tensor, v: Tensor, bias: Any,
    sink: Any, out: Tensor,
) -> Any:  # fmt: skip
    rows, shares, last = kept
    local, stages = call.local, len(call.stages())
    of_keys = wanted[1] or wanted[2]
    bits = bool(wanted[0]) | 6 * of_keys | bool(wanted[3]) << 3
    dq, dbias = _Sum(q), None if bias is None else _Sum(bias)
    own = [_Sum(k), _Sum(v)]
    returning: Pending | None = None
    for number, k_here, v_here in _stages_back(exchange, stages, k, v, last):
        of_stage = own if number < 0 else [_Sum(k_here), _Sum(v_here)]
        for i, one in enumerate(local.calls(number)):
            part = one.part
            given = rows, (q, bias, out), k_here, v_here, call.slopes, shares if weighs else None
            made = local.backward(number, i, bits, *given)
            if wanted[0]:
                dq.add(part.rows, made[0])
            for total, gradient in zip(of_stage if of_keys else [], made[1:3]):
                total.add(part.columns, gradient)
            if wanted[3] and dbias is not None:
                local.add_bias_gradient(part, made[3], dbias.sum())
        if of_keys and number >= 0:
            gradients = of_stage[0].finish(), of_stage[1].finish()
            _add_returned(own, returning)  # of the stage before: only one is under way
            returning = exchange.return_gradients(number, gradients)
    _add_returned(own, returning)
    exchange.agree()
    made_bias = None
    if wanted[3] and dbias is not None:
        made_bias = summed(dbias.sum(), call.group).to(bias.dtype) if call.shared_bias else dbias.finish()
    dsink = _sink_gradient(call, sink, rows, shares.whole, out) if wanted[4] else None
    dk, dv = (total.finish() if wanted[i + 1] else None for i, total in enumerate(own))
    return dq.finish() if wanted[0] else None, dk, dv, made_bias, dsink


def _add_returned(own: list[_Sum], returning: Pending | None) -> None:
    """Adds gradients of own keys that other processes have sent."""
    for spans, gradients in returning.wait() if returning else ():
        at = 0
        for start, count in spans:
            for total, gradient in zip(own, gradients):
                total.add((start, count), gradient.narrow(2, at, count))
            at += count


def _sink_gradient(call: Call, sink: Tensor, rows: Rows, whole: Sums, out: Tensor) -> Tensor:
    """The sink has no value: more of its weight means less of out, and a greater lse. Summed over all processes."""
    dout, dlse, lse = rows
    share = (sink.to(lse.dtype)[:, None] - whole.row_max).exp() / whole.row_sum
    change = -(dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).reshape(lse.shape)
    if dlse is not None:
        change = change + dlse
    terms = torch.where(lse == -torch.inf, 0.0, share * change)  # a row without keys, whatever it holds
    return summed(terms.double().sum((0, 2)), call.group).to(sink.dtype)
