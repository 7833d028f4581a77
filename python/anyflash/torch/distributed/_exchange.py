"""Keys and values on their way between processes, and gradients on their way back.

Messages are on their way while the process goes on: gloo's threads or a GPU's stream of NCCL carry them. On a GPU they
start when the work that the current stream has so far is done, and `wait` lets that stream wait, not the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._pieces import Pieces, count_of, merged, places
from ._schedule import Schedule, Stage
from ._side import lost, whole_of

# Cycles that the current stream's next kernel waits for NCCL's to begin. If it began first, it would keep all SMs until
# its end, and the exchange would begin then.
_HEAD_START = 12_000

# gloo pairs messages by their tags: above those of others, and of each call its own.
_TAG = 1 << 30
_CALLS, _TAGS_OF_CALL = 1 << 12, 1 << 18

_Pair = tuple[Tensor, Tensor]  # of keys and values


class Pending(NamedTuple):
    """Messages under way."""

    works: list[Any]
    memory: Any  # what they fill
    messages: Any  # whose memory stays alive until they have arrived
    arrived: list[Callable[[], Any]]  # what is left to do then

    def wait(self) -> Any:
        for work in self.works:
            lost(work.wait)
        for one in self.arrived:
            one()
        return self.memory


def as_sent(x: Tensor) -> Tensor:
    """(batch, heads, sequence..., channels) -> (sequence..., batch, heads, channels): a piece of the sequence may be
    contiguous."""
    return x.movedim((0, 1), (-3, -2))


def as_given(x: Tensor) -> Tensor:
    """The way back."""
    return x.movedim((-3, -2), (0, 1))


def new_keys(like: Tensor, count: int) -> Tensor:
    """Memory for `count` entries of the outermost dimension, in the shape of messages."""
    return like.new_empty((count, *like.shape[3:-1], *like.shape[:2], like.shape[-1]))


class Ready(NamedTuple):
    """Messages that nobody has been told of yet."""

    memory: Any
    messages: list[_Message]
    arrived: list[Callable[[], Any]]


class _Message(NamedTuple):
    is_sent: bool  # or received
    tensor: Tensor
    peer: int  # in the group
    tag: int  # the same on both ends: gloo pairs messages by it, NCCL by their order


class Routes(NamedTuple):
    """One process' messages of a stage: (the other process, spans)."""

    sent: list[tuple[int, Pieces]]  # spans of its own keys
    received: list[tuple[int, Pieces]]  # spans of the stage's keys that come to it
    entries: int  # of the stage's keys


def routes_of(stage: Stage, rank: int, own: Pieces) -> Routes:
    wanted = stage.keys(rank)
    sent, received = [], []
    for (sender, to), pieces in stage.transfers.items():
        if sender == rank:
            sent.append((to, merged(places(pieces, own))))
        elif to == rank:
            received.append((sender, merged(places(pieces, wanted))))
    return Routes(sent, received, count_of(wanted))


class Exchange:
    """One process' side of the messages. `own`: the keys that it has. `count`: the number of the call."""

    def __init__(self, group: Any, schedule: Schedule, rank: int, own: Pieces, count: int) -> None:
        self.check: Callable[[], None] | None = None  # whether all take part, asked before the first message
        self.is_agreed = False
        self.group, self.schedule, self.rank, self.own = group, schedule, rank, own
        self.tag = _TAG + count % _CALLS * _TAGS_OF_CALL

    def keys(self, number: int, k: Tensor, v: Tensor) -> Ready:
        """What others see of these keys and values. memory: those that come here, in the order of the sequence. number:
        the stage's."""
        routes = self._routes(number)
        buffers = new_keys(k, routes.entries), new_keys(v, routes.entries)
        messages: list[_Message] = []
        arrived: list[Callable[[], Any]] = []
        for to, spans in routes.sent:
            messages += self._sent(to, self.tag + 4 * number, (as_sent(k), as_sent(v)), spans)
        for sender, spans in routes.received:
            messages += self._received(sender, self.tag + 4 * number, buffers, spans, arrived)
        return Ready((as_given(buffers[0]), as_given(buffers[1])), messages, arrived)

    def agree(self) -> None:
        check, self.check = self.check, None
        if check is not None:
            check()
        self.is_agreed = True

    def start(self, ready: Ready) -> Pending:
        self.agree()
        memory, messages, arrived = ready
        works = self._start(messages)
        if works and messages[0].tensor.is_cuda:
            torch.cuda._sleep(_HEAD_START)
        return Pending(works, memory, messages, arrived)

    def return_gradients(self, number: int, gradients: _Pair) -> Pending:
        """The way back: sends gradients of the stage's keys and values to their processes. memory: what comes here, as
        (spans of the own keys, tensors) in a fixed order."""
        routes, tag = self._routes(number), self.tag + 4 * number + 2
        messages: list[_Message] = []
        arriving = []
        dk, dv = gradients
        for sender, spans in routes.received:
            messages += self._sent(sender, tag, (as_sent(dk), as_sent(dv)), spans)
        for to, spans in routes.sent:
            count = count_of(spans)
            buffers = new_keys(dk, count), new_keys(dv, count)
            messages += self._received(to, tag, buffers, ((0, count),), [])
            arriving.append((spans, (as_given(buffers[0]), as_given(buffers[1]))))
        return self.start(Ready(arriving, messages, []))

    def _routes(self, number: int) -> Routes:
        kept: Routes | None = self.schedule.routes.get((self.rank, number))
        if kept is None:
            kept = routes_of(self.schedule.stages[number], self.rank, self.own)
            self.schedule.routes[self.rank, number] = kept
        return kept

    @staticmethod
    def _sent(peer: int, tag: int, tensors: _Pair, spans: Pieces) -> list[_Message]:
        made = []
        for i, x in enumerate(tensors):
            parts = [x[start : start + count] for start, count in spans]
            x = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts).contiguous()
            made.append(_Message(True, x, peer, tag + i))
        return made

    @staticmethod
    def _received(
        peer: int, tag: int, buffers: _Pair, spans: Pieces, arrived: list[Callable[[], Any]]
    ) -> list[_Message]:
        """Straight to their place if that is one span of the buffers, else to memory of their own before."""
        made = []
        for i, x in enumerate(buffers):
            parts = [x[start : start + count] for start, count in spans]
            to = parts[0] if len(parts) == 1 else x.new_empty((count_of(spans), *x.shape[1:]))
            made.append(_Message(False, to, peer, tag + i))
            if len(parts) > 1:
                counts = [count for _, count in spans]
                arrived.append(partial(torch._foreach_copy_, parts, to.split(counts)))
        return made

    def _start(self, messages: list[_Message]) -> list[Any]:
        """What torch.distributed.batch_isend_irecv does, which takes twice as long to say so."""
        messages = [one for one in messages if one.tensor.numel() > 0]
        return lost(lambda: self._started(messages)) if messages else []

    def _started(self, messages: list[_Message]) -> list[Any]:
        group, device = whole_of(self.group), messages[0].tensor.device
        if device.type == "cuda":
            group._start_coalescing(device)
        works = [(group.send if one.is_sent else group.recv)([one.tensor], one.peer, one.tag) for one in messages]
        return [group._end_coalescing(device)] if device.type == "cuda" else works
