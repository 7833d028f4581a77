"""Keys and values on their way between processes, and gradients on their way back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ._agree import lost
from ._pieces import Pieces, count_of, places
from ._schedule import Stage


class Pending(NamedTuple):
    """Messages under way, and the memory that they fill."""

    works: list[Any]
    memory: Any
    messages: Any  # whose memory stays alive until they have arrived

    def wait(self) -> Any:
        for work in self.works:
            lost(work.wait)
        return self.memory


def packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values side by side, of (batch, heads, sequence..., channels) each: (sequence..., batch, heads,
    channels), so that a piece of the sequence is contiguous."""
    both = new_packed(k, v, k.shape[2])
    for to, x in zip(unpacked(both, k.shape[-1]), (k, v)):
        to.copy_(x)
    return both


def new_packed(k: Tensor, v: Tensor, count: int) -> Tensor:
    """Memory for `count` entries of the outermost dimension."""
    return k.new_empty((count, *k.shape[3:-1], *k.shape[:2], k.shape[-1] + v.shape[-1]))


def unpacked(both: Tensor, d_qk: int) -> tuple[Tensor, Tensor]:
    """Views of `packed`'s memory as keys and values."""
    n = both.dim() - 3
    both = both.permute(n, n + 1, *range(n), n + 2)
    return both[..., :d_qk], both[..., d_qk:]


class _Message(NamedTuple):
    kind: Any
    part: Tensor
    peer: int
    tag: int


def _messages(kind: Any, peer: int, step: int, parts: list[Tensor]) -> list[_Message]:
    """Tags are the same on both ends: gloo pairs messages by them, NCCL by their order."""
    return [_Message(kind, part, peer, step << 16 | i) for i, part in enumerate(parts)]


class Exchange:
    """One process' side of the messages. `own`: the keys that it has."""

    def __init__(self, group: Any, rank: int, own: Pieces) -> None:
        self.group, self.rank, self.own = group, rank, own

    def send_keys(self, number: int, stage: Stage, k: Tensor, v: Tensor) -> Pending:
        """Sends what others see of these keys and values. memory: the buffer of those that come here, in the order of
        the sequence. number: the stage's."""
        wanted = stage.keys(self.rank)
        buffer = new_packed(k, v, count_of(wanted))
        messages: list[_Message] = []
        for (sender, to), pieces in stage.transfers.items():
            if sender == self.rank:
                messages += _messages(dist.isend, to, 2 * number, self._packed(k, v, pieces))
            elif to == self.rank:
                messages += _messages(dist.irecv, sender, 2 * number, _parts(buffer, pieces, wanted))
        return Pending(self._start(messages), buffer, messages)

    def return_gradients(self, number: int, stage: Stage, gradients: Tensor) -> Pending:
        """The way back: sends gradients of the stage's keys to their processes. memory: what comes here, as
        (pieces, tensor) in a fixed order."""
        wanted = stage.keys(self.rank)
        messages: list[_Message] = []
        arriving = []
        for (sender, to), pieces in stage.transfers.items():
            if to == self.rank:
                messages += _messages(dist.isend, sender, 2 * number + 1, _parts(gradients, pieces, wanted))
            elif sender == self.rank:
                buffer = gradients.new_empty((count_of(pieces), *gradients.shape[1:]))
                messages += _messages(dist.irecv, to, 2 * number + 1, _parts(buffer, pieces, pieces))
                arriving.append((pieces, buffer))
        return Pending(self._start(messages), arriving, messages)

    def _packed(self, k: Tensor, v: Tensor, pieces: Pieces) -> list[Tensor]:
        return [packed(k.narrow(2, *place), v.narrow(2, *place)) for place in places(pieces, self.own)]

    def _start(self, messages: list[_Message]) -> list[Any]:
        world = dist.group.WORLD if self.group is None else self.group
        operations = [
            dist.P2POp(one.kind, one.part, dist.get_global_rank(world, one.peer), self.group, one.tag)
            for one in messages
            if one.part.numel() > 0
        ]
        return lost(lambda: dist.batch_isend_irecv(operations)) if operations else []


def _parts(both: Tensor, pieces: Pieces, of: Pieces) -> list[Tensor]:
    return [both[start : start + count] for start, count in places(pieces, of)]
