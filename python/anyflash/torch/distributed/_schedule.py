"""Which keys go from which process to which, and when."""

from __future__ import annotations

import threading
from collections import OrderedDict
from math import prod
from typing import Any, NamedTuple

from ... import _core
from ._pieces import Pieces, common, count_of, merged

_MOST_KEPT = 64
_kept: OrderedDict[Any, Schedule] = OrderedDict()
_lock = threading.Lock()


class Layout(NamedTuple):
    """Whole sequences, and the pieces of the outermost dimension that each process has."""

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    queries: tuple[Pieces, ...]
    keys: tuple[Pieces, ...]


class Stage(NamedTuple):
    """One step of the exchange. Transfers are the same in all processes, so each knows what the others do."""

    transfers: dict[tuple[int, int], Pieces]  # (from, to): keys

    def keys(self, rank: int) -> Pieces:
        """What a process receives, in the order of the sequence."""
        return merged(piece for (_, to), pieces in self.transfers.items() if to == rank for piece in pieces)


class Schedule(NamedTuple):
    stages: tuple[Stage, ...]
    seen: tuple[Pieces, ...]  # the keys that each process' queries see
    parts: dict[tuple[int, int], Any]  # (rank, stage): the local calls, as they are asked for

    def most_received(self) -> int:
        """Keys of the process that receives most."""
        counts: dict[int, int] = {}
        for stage in self.stages:
            for (_, to), pieces in stage.transfers.items():
                counts[to] = counts.get(to, 0) + count_of(pieces)
        return max(counts.values(), default=0)


def unit_of(k_shape: tuple[int, ...]) -> int:
    """Keys are sent in units of this many entries. In a text that is 64, a key block, or less if it is short."""
    return 1 if len(k_shape) > 1 else max(1, min(64, k_shape[0] // 1024))


def schedule_of(rule: Any, align: str, layout: Layout, rule_hash: int | None = None) -> Schedule:
    """The exchange of a call, cached by the rule and the layout. A dense mask is read each time instead."""
    key = None
    if "dense(" not in str(rule):
        key = str(rule), _core.rule_hash(rule) if rule_hash is None else rule_hash, align, layout
        with _lock:
            if key in _kept:
                _kept.move_to_end(key)
                return _kept[key]
    made = _new_schedule(rule, align, layout)
    if key is not None:
        with _lock:
            _kept[key] = made
            while len(_kept) > _MOST_KEPT:
                _kept.popitem(last=False)
    return made


def _new_schedule(rule: Any, align: str, layout: Layout) -> Schedule:
    if not prod(layout.q_shape) or not prod(layout.k_shape):
        return Schedule((), ((),) * len(layout.queries), {})
    asked = [list(pieces) for pieces in layout.queries]
    seen = _core.seen_keys(rule, layout.q_shape, layout.k_shape, align, asked, unit_of(layout.k_shape))
    ranks = len(layout.keys)
    most = max(map(count_of, layout.keys))
    stages: list[Stage] = []
    counts = [0] * ranks
    for distance in range(1, ranks):
        found = {}
        for to in range(ranks):
            sender = (to - distance) % ranks
            if pieces := common(seen[to], layout.keys[sender]):
                found[sender, to] = pieces
        if not found:
            continue
        added = list(counts)
        for (_, to), pieces in found.items():
            added[to] += count_of(pieces)
        # One stage takes what several neighbours send, until it is as many keys as a process has.
        if stages and max(added) <= most:
            stages[-1].transfers.update(found)
            counts = added
        else:
            stages.append(Stage(found))
            counts = [new - old for new, old in zip(added, counts)]
    return Schedule(tuple(stages), tuple(map(tuple, seen)), {})
