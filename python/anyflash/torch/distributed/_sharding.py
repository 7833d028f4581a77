"""A split of sequences over processes: which entries each has, and what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _core
from ._agree import step
from ._pieces import Piece, Pieces, common, count_of
from ._schedule import Layout, Schedule, schedule_of, unit_of
from ._side import check_device, graph_break, lost

Side = Literal["query", "key"]


class Sharding:
    """Which entries of the queries and keys each process has. Made by plan_sharding.

    ranks, rank     processes, and the number of this one in the group (None without a group)
    q_shape, k_shape
    visible_pairs   pairs of a query and a key that it sees, for each process (estimated from samples)
    imbalance       the largest of them over their mean; 1 is best
    """

    def __init__(self, rule: Any, align: str, layout: Layout, group: Any, rank: int | None, pairs: Sequence[float]):
        self.rule, self.align, self._layout, self.group, self.rank = rule, align, layout, group, rank
        self.ranks, self.q_shape, self.k_shape = len(layout.queries), layout.q_shape, layout.k_shape
        self.visible_pairs = list(pairs)
        self.imbalance = max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0
        self._schedule: Schedule | None = None

    def pieces(self, side: Side = "query", rank: int | None = None) -> list[Piece]:
        """(first, count) of each range of the outermost dimension that a process (this one if not given) has."""
        return list(self._pieces(side)[self._rank(rank)])

    def positions(self, side: Side = "query", rank: int | None = None) -> Tensor:
        """The places in the whole flattened sequence of a process' entries, int64: position ids, for a text."""
        pieces = self._pieces(side)[self._rank(rank)]
        inner = prod(self._shape(side)[1:])
        ranges = [torch.arange(first * inner, (first + count) * inner) for first, count in pieces]
        return torch.cat([torch.empty(0, dtype=torch.int64), *ranges])

    def shard(self, x: Tensor, side: Side = "query", dim: int | None = None) -> Tensor:
        """This process' entries of a whole tensor. dim: the axis of the sequence, of the outermost dimension if there
        are several; not needed where sizes show it. Differentiable."""
        dim, size = self._axis(x, side, dim), self._shape(side)[0]
        if x.shape[dim] != size:
            raise ValueError(f"x: {x.shape[dim]} entries along axis {dim}, expected {size} of the {side} sequence")
        pieces = self._pieces(side)[self._rank(None)]
        if len(pieces) == 1:
            return x.narrow(dim, *pieces[0])
        return torch.cat([x.narrow(dim, *piece) for piece in pieces] or [x.narrow(dim, 0, 0)], dim)

    @graph_break
    def unshard(self, x: Tensor, side: Side = "query", dim: int | None = None) -> Tensor:
        """The whole tensor of all processes' parts, in each process. Every process of the group calls it. No gradient
        passes through it."""
        text, error = "", None
        try:
            own = count_of(self._pieces(side)[self._rank(None)])
            dim = self._axis(x, side, dim, own)
            if x.shape[dim] != own:
                raise ValueError(f"x: {x.shape[dim]} entries along axis {dim}, expected the {own} of this process")
            check_device("x", x, self.group)
            others = *x.shape[:dim], *x.shape[dim + 1 :]
            plan = sha256(repr(self._layout).encode()).hexdigest()[:8]
            text = f"unshard of {side}, {x.dtype} on {x.device.type}, axis {dim}, other sizes {others}, plan {plan}"
        except Exception as caught:
            error = caught
        step(self.group, text, error)[1]()
        assert dim is not None
        every = self._pieces(side)
        most = max(map(count_of, every))
        part = x.detach().movedim(dim, 0)
        padded = part.new_zeros((most, *part.shape[1:]))  # all_gather takes equal sizes
        padded[: len(part)] = part
        gathered = [torch.empty_like(padded) for _ in every]
        lost(lambda: dist.all_gather(gathered, padded, group=self.group))
        whole = part.new_empty((self._shape(side)[0], *part.shape[1:]))
        for pieces, one in zip(every, gathered):
            at = 0
            for first, count in pieces:
                whole[first : first + count] = one[at : at + count]
                at += count
        return whole.movedim(0, dim)

    def traffic(self, *, channels: int = 256, heads: int = 1, bytes_of_number: int = 2) -> dict[str, Any]:
        """Bytes of keys and values that a forward pass moves. channels: of a key and its value together; heads: of the
        keys, times the batch. A backward pass moves as many bytes of gradients, and again those of all stages but the last.

        bytes           received by each process
        least           the same, if each process received exactly the keys that its queries see and others have
        over_least      sum of bytes over sum of least; 1 is best
        gathered        what each process would receive if it gathered all keys
        stages          steps of the exchange; None for over 128 processes, for which they are not listed
        """
        asked = [list(pieces) for pieces in self._layout.queries]

        def received(unit: int) -> list[int]:
            every = _core.seen_keys(self.rule, self.q_shape, self.k_shape, self.align, asked, unit)
            return [count_of(seen) - count_of(common(seen, keys)) for seen, keys in zip(every, self._layout.keys)]

        entry = prod(self.k_shape[1:]) * channels * heads * bytes_of_number
        own = [count_of(pieces) for pieces in self._layout.keys]
        least, moved = received(1), received(unit_of(self.k_shape))
        return {
            "bytes": [count * entry for count in moved],
            "least": [count * entry for count in least],
            "over_least": sum(moved) / sum(least) if sum(least) else 1.0,
            "gathered": [(self.k_shape[0] - count) * entry for count in own],
            "stages": len(self._exchange().stages) if self.ranks <= 128 else None,
        }

    def _exchange(self) -> Schedule:
        if self._schedule is None:
            self._schedule = schedule_of(self.rule, self.align, self._layout)
        return self._schedule

    def _rank(self, rank: int | None) -> int:
        rank = self.rank if rank is None else rank
        if rank is None:
            raise ValueError("rank: not given, expected one for a sharding that was planned without a group")
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank: {rank}, expected 0 to {self.ranks - 1}")
        return rank

    def _shape(self, side: str) -> tuple[int, ...]:
        return self._layout.q_shape if self._check(side) == "query" else self._layout.k_shape

    def _pieces(self, side: str) -> tuple[Pieces, ...]:
        return self._layout.queries if self._check(side) == "query" else self._layout.keys

    @staticmethod
    def _check(side: str) -> str:
        if side not in ("query", "key"):
            raise ValueError(f"side: {_core.echoed(repr(side))}, expected 'query' or 'key'")
        return side

    def _axis(self, x: Tensor, side: Side, dim: int | None, outer: int | None = None) -> int:
        """The axis of the outermost dimension: the only place where the sequence's sizes stand in x's shape."""
        shape = self._shape(side)
        if dim is not None:
            if not -x.dim() <= dim < x.dim():
                raise ValueError(f"dim: {dim}, expected an axis of a tensor of {x.dim()} axes")
            return int(dim % x.dim())
        wanted = (shape[0] if outer is None else outer, *shape[1:])
        found = [i for i in range(x.dim()) if tuple(x.shape[i : i + len(shape)]) == wanted]
        if len(found) != 1:
            sizes = "x".join(map(str, wanted))
            raise ValueError(f"x: {len(found)} places of {sizes} in shape {tuple(x.shape)}, expected 1, or dim")
        return found[0]

    def __repr__(self) -> str:
        return f"<anyflash Sharding of {self.rule}, {self.q_shape} over {self.ranks} processes>"
