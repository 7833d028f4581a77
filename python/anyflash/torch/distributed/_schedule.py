"""Which keys go from which process to which, and when."""

from __future__ import annotations

import threading
from collections import OrderedDict
from math import prod
from typing import Any, NamedTuple

from ... import _core
from ._pieces import Pieces, common, count_of, cut, merged

_MOST_KEPT, _MOST_BYTES = 64, 64 << 20  # schedules, and what they hold together
_PIECE_BYTES = 320  # of a piece of keys here, and of those that are made of it: parts and messages
_AT_ONCE = 128 << 20  # bytes of keys and values that a stage may bring although they are more than the own ones
_kept: OrderedDict[Any, Schedule] = OrderedDict()
_lock = threading.Lock()


class Layout(NamedTuple):
    """Whole sequences, and the pieces of the outermost dimension that each process has."""

    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    queries: tuple[Pieces, ...]
    keys: tuple[Pieces, ...]


class Costs(NamedTuple):
    """Seconds."""

    latency: float  # of an exchange
    of_key: float  # more for each key that a process receives, in all heads
    key_bytes: int  # of a key and its value, in all heads
    of_pair: float  # of a visible pair in all heads
    of_stage: float  # of the calls and the join of a stage, beside their pairs


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
    routes: dict[tuple[int, int], Any]  # (rank, stage): the messages, the same
    rule: Any = None  # with tables of its own, so that what is made of it stays right; None: not kept
    bytes: int = 0  # that it holds, about, with what will be added to it

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


def schedule_of(
    rule: Any,
    align: str,
    layout: Layout,
    rule_hash: int | None = None,
    lengths: list[int] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The exchange of a call. The last ones are kept, by the rule, the layout, the keys' lengths and the costs. A dense
    mask is read each time instead. costs: those by which the number of stages is chosen; without them it is the least."""
    entries, key = tuple(lengths or ()), None
    if "dense(" not in str(rule):
        key = str(rule), _core.rule_hash(rule) if rule_hash is None else rule_hash, align, layout, costs, entries
        with _lock:
            if key in _kept:
                _kept.move_to_end(key)
                return _kept[key]
    made = _new_schedule(rule, align, layout, costs, entries)
    if key is not None:
        own = _core.parse_rule(*rule.__reduce__()[1]) if rule._parts[1] else rule
        made = made._replace(rule=own, bytes=_bytes_of(made, own))
        with _lock:
            _kept[key] = made
            while len(_kept) > 1 and (
                len(_kept) > _MOST_KEPT or sum(one.bytes for one in _kept.values()) > _MOST_BYTES
            ):
                _kept.popitem(last=False)
    return made


def _bytes_of(schedule: Schedule, rule: Any) -> int:
    lists = [*schedule.seen, *(pieces for stage in schedule.stages for pieces in stage.transfers.values())]
    tables: int = sum(table.nbytes for table in rule._parts[1].values())
    return _PIECE_BYTES * sum(map(len, lists)) + tables


def _new_schedule(rule: Any, align: str, layout: Layout, costs: Costs | None, lengths: tuple[int, ...]) -> Schedule:
    if not prod(layout.q_shape) or not prod(layout.k_shape):
        return Schedule((), ((),) * len(layout.queries), {}, {})
    asked = [list(pieces) for pieces in layout.queries]
    shapes, unit = (layout.q_shape, layout.k_shape), unit_of(layout.k_shape)
    seen = tuple(map(tuple, _core.seen_keys(rule, *shapes, align, asked, unit, lengths)))
    most = max(map(count_of, layout.keys))
    moved = _transfers(layout, seen)
    stages = _stages(moved, most)
    if costs is None or not stages:
        return Schedule(stages, seen, {}, {})
    pairs = _pairs(rule, align, layout, lengths)
    best = _seconds(stages, layout, seen, pairs, costs)
    entry = costs.key_bytes * prod(layout.k_shape[1:])
    limits = [most * several for several in (2, 4, 8) if most * several * entry <= _AT_ONCE and len(stages) > 1]
    limits += [most // parts for parts in (2, 4, 8) if most // parts >= unit * 2]
    for limit in limits:
        others = _stages(moved, limit)
        seconds = _seconds(others, layout, seen, pairs, costs)
        if seconds < 0.98 * best:  # of nearly equal ones the first
            stages, best = others, seconds
    return Schedule(stages, seen, {}, {})


def _transfers(layout: Layout, seen: tuple[Pieces, ...]) -> list[dict[tuple[int, int], Pieces]]:
    """What moves, by the distance of the processes."""
    ranks, made = len(layout.keys), []
    for distance in range(1, ranks):
        found = {}
        for to in range(ranks):
            sender = (to - distance) % ranks
            if pieces := common(seen[to], layout.keys[sender]):
                found[sender, to] = pieces
        made += [found] if found else []
    return made


def _stages(moved: list[dict[tuple[int, int], Pieces]], limit: int) -> tuple[Stage, ...]:
    """Stages that bring a process at most so many keys."""
    stages: list[Stage] = []
    counts: dict[int, int] = {}
    for found in moved:
        for at in range(0, max(map(count_of, found.values())), limit):
            cuts = {pair: cut(pieces, at, limit) for pair, pieces in found.items()}
            cuts = {pair: pieces for pair, pieces in cuts.items() if pieces}
            more = {to: count_of(pieces) for (_, to), pieces in cuts.items()}
            added = {to: counts.get(to, 0) + more.get(to, 0) for to in counts | more}
            # One stage takes what several neighbours send.
            if stages and max(added.values()) <= limit and not cuts.keys() & stages[-1].transfers.keys():
                stages[-1].transfers.update(cuts)
                counts = added
            else:
                stages.append(Stage(cuts))
                counts = more
    return tuple(stages)


def _pairs(rule: Any, align: str, layout: Layout, lengths: tuple[int, ...]) -> list[float]:
    """The visible pairs of each process' queries, about."""
    owners = sorted((first, count, rank) for rank, pieces in enumerate(layout.queries) for first, count in pieces)
    each = max(1, 256 // len(owners))
    cuts = [0, *[first + count * i // each for first, count, _ in owners for i in range(1, each + 1)]]
    made, samples = [0.0] * len(layout.queries), 1 if lengths else 4
    visible = _core.visible_by_block(rule, layout.q_shape, layout.k_shape, align, cuts, samples, lengths)
    for i, found in enumerate(visible):
        made[owners[i // each][2]] += found
    return made


def _seconds(
    stages: tuple[Stage, ...], layout: Layout, seen: tuple[Pieces, ...], pairs: list[float], costs: Costs
) -> float:
    """The time of a forward pass: in each step the longer of the exchange and of the work on the keys before."""
    each = [found / max(count_of(keys), 1) for found, keys in zip(pairs, seen)]  # pairs of a key
    own = [count_of(common(keys, mine)) for keys, mine in zip(seen, layout.keys)]
    work = [max(one * count for one, count in zip(each, own)) * costs.of_pair + costs.of_stage]
    moving = []
    for stage in stages:
        counts = [0] * len(seen)
        for (_, to), pieces in stage.transfers.items():
            counts[to] += count_of(pieces)
        moving.append(costs.latency + max(counts) * prod(layout.k_shape[1:]) * costs.of_key)
        work.append(max(one * count for one, count in zip(each, counts)) * costs.of_pair + costs.of_stage)
    return sum(max(pair) for pair in zip(work, [*moving, 0.0]))
