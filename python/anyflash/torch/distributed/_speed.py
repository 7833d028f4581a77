"""What a group's exchange costs beside attention, measured once for each group and type. Stages are chosen by it."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._attention import attention
from ._side import gathered, lost, whole_of

_SMALL = 4096  # bytes of a message whose time is latency


class Speed(NamedTuple):
    """The same in all processes: the slowest exchange, and the mean of attention."""

    latency: float  # seconds of a short message
    bytes: float  # a second, into a process that sends as much
    work: float  # visible pairs times channels a second, forward
    call: float  # seconds of a short call


_known: weakref.WeakKeyDictionary[Any, dict[Any, Speed]] = weakref.WeakKeyDictionary()


def speed_of(group: Any, like: torch.Tensor) -> Speed:
    """Of tensors of this type and device. All processes of the group call it for the first time together: it is also
    the first exchange that NCCL asks of a group to be of all."""
    known = _known.setdefault(whole_of(group), {})
    key = like.dtype, like.device
    if key not in known:
        known[key] = _measured(group, like)
    return known[key]


def _measured(group: Any, like: torch.Tensor) -> Speed:
    large = (64 if like.is_cuda else 1) << 20
    latency = min(_seconds(like, lambda: _exchange(group, like, _SMALL)) for _ in range(3))
    moving = min(_seconds(like, lambda: _exchange(group, like, large)) for _ in range(3))
    heads, size, channels = (16, 4096, 128) if like.is_cuda else (1, 512, 64)
    q, few = (like.new_zeros((1, heads, n, channels)) for n in (size, 16))
    with torch.no_grad():
        call = min(_seconds(like, lambda: attention(few, few, few)) for _ in range(3))
        working = min(_seconds(like, lambda: attention(q, q, q)) for _ in range(3))
    rows = gathered(group, [round(1e12 * one) for one in (latency, moving, working, call)])
    latencies, movings, workings, calls = (sorted(one) for one in zip(*rows))
    pairs = heads * size * size * channels
    return Speed(
        1e-12 * latencies[-1], 1e12 * large / movings[-1], 1e12 * pairs / workings[len(rows) // 2], 1e-12 * calls[-1]
    )


def _exchange(group: Any, like: torch.Tensor, size: int) -> None:
    """Each process sends to the next one and receives from the one before."""
    ranks, rank, world = dist.get_world_size(group), dist.get_rank(group), whole_of(group)
    sent, got = (like.new_empty(size // like.element_size()) for _ in range(2))
    operations = [
        dist.P2POp(kind, x, dist.get_global_rank(world, peer % ranks), group, 1 << 20)
        for kind, x, peer in ((dist.isend, sent, rank + 1), (dist.irecv, got, rank - 1))
    ]
    for one in lost(lambda: dist.batch_isend_irecv(operations)):
        lost(one.wait)


def _seconds(like: torch.Tensor, work: Any) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    start = time.perf_counter()
    work()
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return max(time.perf_counter() - start, 1e-9)
