"""Attention by the exchange of keys: queries stay where they are, and each process gets the keys that they see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._attention import in_memory, once
from ._agree import summed
from ._exchange import Exchange, Pending, packed, unpacked
from ._local import Joined, Local
from ._pieces import Pieces
from ._schedule import Schedule


class Call(NamedTuple):
    local: Local
    schedule: Schedule
    group: Any
    rank: int
    shared_bias: bool  # its one row is that of all queries, in all processes

    @property
    def keys(self) -> Pieces:
        return self.local.layout.keys[self.rank]

    def exchange(self) -> Exchange:
        return Exchange(self.group, self.rank, self.keys)

    def moves(self) -> bool:
        """Whether this process sends or receives anything."""
        return any(self.rank in pair for stage in self.schedule.stages for pair in stage.transfers)


class AttentionByKeys(torch.autograd.Function):
    """(out, row_sum, row_max, lse) of the process' queries. q, k and v are (batch, heads, sequence..., channels)."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, sink: Any, call: Call) -> Any:
        joined = Joined(q, v.shape[-1], call.local.inner_q)
        for keys, k_here, v_here in _stages(call, k, v):
            for part in call.local.parts(keys):
                joined.add(part.rows, *call.local.forward(part, q, k_here, v_here, bias))
        out, row_sum, row_max = joined.finish(sink)
        lse = row_max + row_sum.log()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row_sum, row_max)
        ctx.save_for_backward(q, k, v, bias, sink, out, lse)
        return out, row_sum, row_max, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any, __: Any, dlse: Any) -> Any:
        out = ctx.saved_tensors[5]
        # Without a gradient too: the others may have one, and wait for this process.
        dout = torch.zeros_like(out) if dout is None else in_memory(dout)
        dlse = None if dlse is None else in_memory(dlse)
        wanted = ctx.needs_input_grad
        return *once(_backward, ctx.call, wanted, dout, dlse, *ctx.saved_tensors), None


def _stages(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[Pieces, Tensor, Tensor]]:
    """The own keys, then those of each stage. While one stage is worked on, the next is under way."""
    stages, exchange = call.schedule.stages, call.exchange()
    both = packed(k, v) if call.moves() else None
    pending = exchange.send_keys(0, stages[0], both) if stages and both is not None else None
    yield call.keys, k, v
    for i, stage in enumerate(stages):
        if pending is None or both is None:
            return
        after = exchange.send_keys(i + 1, stages[i + 1], both) if i + 1 < len(stages) else None
        buffer, _ = pending.wait()
        pending = after
        yield stage.keys(call.rank), *unpacked(buffer, k.shape[-1])


class _Sums:
    """Gradients of several parts, summed in float32 (float64 for float64) in the order of the parts."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.total = like, None
        self.kind = torch.float64 if like.dtype == torch.float64 else torch.float32

    def sum(self) -> Tensor:
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=self.kind)
        return self.total

    def finish(self) -> Tensor:
        return self.sum().to(self.like.dtype)


def _backward(
    call: Call, wanted: Any, dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any,
    out: Tensor, lse: Tensor,
) -> Any:  # fmt: skip
    local, exchange = call.local, call.exchange()
    of_keys = wanted[1] or wanted[2]
    bits = bool(wanted[0]) | 6 * of_keys | bool(wanted[3]) << 3
    dq, dbias = _Sums(q), _Sums(bias) if bias is not None else None
    own: Tensor | None = None
    returning: list[Pending] = []
    for i, (keys, k_here, v_here) in enumerate(_stages(call, k, v)):
        # (sequence..., batch, heads, channels): as keys and values came
        shape = *k_here.shape[2:-1], *k_here.shape[:2], k.shape[-1] + v.shape[-1]
        kind = dq.kind if i == 0 else k.dtype
        gradients = k.new_zeros(shape, dtype=kind) if of_keys else None
        for part in local.parts(keys):
            made = local.backward(part, bits, dout, dlse, (q, bias, out, lse), k_here, v_here)
            if wanted[0]:
                dq.sum().narrow(2, *part.rows).add_(made[0])
            if gradients is not None:
                dk, dv = unpacked(gradients.narrow(0, *part.columns), k.shape[-1])
                dk.add_(made[1])
                dv.add_(made[2])
            if wanted[3] and dbias is not None:
                local.add_bias_gradient(part, made[3], dbias.sum())
        if i == 0:
            own = gradients
        elif gradients is not None:
            returning.append(exchange.return_gradients(i - 1, call.schedule.stages[i - 1], gradients))
    for pending in returning:
        arrived, _ = pending.wait()
        if own is not None:
            exchange.add(arrived, own)
    dk = dv = None
    if own is not None:
        dk, dv = (one.to(k.dtype) for one in unpacked(own, k.shape[-1]))
    made_bias = None
    if wanted[3] and dbias is not None:
        made_bias = summed(dbias.sum(), call.group).to(bias.dtype) if call.shared_bias else dbias.finish()
    dsink = _sink_gradient(call, sink, dout, dlse, out, lse) if wanted[4] else None
    return dq.finish() if wanted[0] else None, dk, dv, made_bias, dsink


def _sink_gradient(call: Call, sink: Tensor, dout: Tensor, dlse: Any, out: Tensor, lse: Tensor) -> Tensor:
    """The sink has no value: more of its weight means less of out, and a greater lse. Summed over all processes."""
    share = torch.where(lse > -torch.inf, (sink.to(lse.dtype)[:, None] - lse).exp(), 0.0)
    change = -(dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).reshape(lse.shape)
    if dlse is not None:
        change = change + dlse
    return summed((share * change).double().sum((0, 2)), call.group).to(sink.dtype)
