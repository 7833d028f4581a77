"""plan_sharding: blocks of queries are dealt to processes so that all have as many tokens and as much work."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from operator import index
from typing import Any, SupportsIndex

import torch.distributed as dist

from ... import _core
from .._rule import given_rule
from ._schedule import Layout
from ._sharding import Sharding

_MOST_KEPT = 64
_kept: OrderedDict[Any, tuple[Layout, list[float]]] = OrderedDict()
_lock = threading.Lock()
_Shape = SupportsIndex | Sequence[SupportsIndex]


def plan_sharding(
    rule: Any,
    q_shape: _Shape,
    k_shape: _Shape | None = None,
    *,
    group: Any = None,
    align: str = "none_front",
    ranks: int | None = None,
) -> Sharding:
    """Splits sequences of these sizes (1 to 3 numbers, outermost first, or one integer) over the processes of a group.

    All processes get as many entries, within one block. Among such splits the planner takes the one with the least
    work in the busiest process, and little to exchange: contiguous parts for windows, zigzag for causal. k_shape is
    q_shape if not given; keys then lie where their queries lie, else in contiguous parts. ranks: that many processes
    instead of a group, to look at a plan without one.

    The same rule and shapes give the same split in each process; nothing is sent. Plans are cached, except those of
    dense masks. Raises ValueError or TypeError with one line.
    """
    rule = given_rule(rule, None)
    queries = _shape("q_shape", q_shape)
    keys = queries if k_shape is None else _shape("k_shape", k_shape)
    if len(keys) != len(queries):
        raise ValueError(f"k_shape: {len(keys)} sizes, expected {len(queries)} as in q_shape")
    rank = None
    if ranks is None:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError("group: this process is not in it")
    elif not isinstance(ranks, SupportsIndex):
        raise TypeError(f"ranks: type {type(ranks).__name__}, expected an integer")
    elif ranks < 1:
        raise ValueError(f"ranks: {ranks}, expected at least 1")
    key = None
    if "dense(" not in str(rule):
        key = str(rule), _core.rule_hash(rule), queries, keys, align, ranks
    with _lock:
        known = _kept.get(key)
    if known is None:
        known = _plan(rule, queries, keys, align, ranks)
        if key is not None:
            with _lock:
                _kept[key] = known
                while len(_kept) > _MOST_KEPT:
                    _kept.popitem(last=False)
    layout, pairs = known
    return Sharding(rule, align, layout, group, rank, pairs)


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
    except TypeError:
        raise TypeError(f"{name}: type {type(shape).__name__}, expected 1 to 3 integers") from None
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise ValueError(f"{name}: {_core.echoed(repr(shape))}, expected 1 to 3 sizes")
    return sizes


def _plan(rule: Any, q_shape: tuple[int, ...], k_shape: tuple[int, ...], align: str, ranks: int) -> Any:
    queries, keys, pairs = _core.split_sequence(rule, q_shape, k_shape, align, ranks)
    return Layout(q_shape, k_shape, tuple(map(tuple, queries)), tuple(map(tuple, keys))), pairs
