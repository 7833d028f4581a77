"""plan_sharding: blocks of queries are dealt to processes so that all have as many tokens and as much work."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import prod
from operator import index
from typing import Any, SupportsIndex

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ... import _core
from .._rule import given_rule
from ._pieces import Pieces, merged
from ._schedule import Layout
from ._sharding import Sharding

# Receiving one key costs as much time as this many visible pairs of one head. On an H100 a pair of 128 channels takes
# about 1.3 ps and a key and its value (512 bytes) about 2.5 ns of NVLink; most of it is hidden behind the work.
_PAIRS_OF_A_KEY = 200
_BLOCKS = 512  # at most; 32 for each process if these are fewer
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
    cuts, k_cuts = _cuts(q_shape, ranks), _cuts(k_shape, ranks)
    visible = np.array(_core.visible_by_block(rule, q_shape, k_shape, align, cuts, 4))
    seen = np.frombuffer(_core.seen_blocks(rule, q_shape, k_shape, align, cuts, k_cuts), np.uint8)
    seen = seen.reshape(len(cuts) - 1, len(k_cuts) - 1).astype(bool)
    key_counts = np.diff(k_cuts) * prod(k_shape[1:])
    own_keys = _contiguous(len(k_cuts) - 1, ranks)
    best, least = _contiguous(len(visible), ranks), np.inf
    for owners in _candidates(visible, ranks):
        of_keys = owners if q_shape == k_shape else own_keys
        received = [key_counts[seen[owners == rank].any(0) & (of_keys != rank)].sum() for rank in range(ranks)]
        cost = np.bincount(owners, visible, ranks).max() + _PAIRS_OF_A_KEY * max(received)
        if cost < 0.99 * least:  # of nearly equal ones the first, which has the fewest pieces
            best, least = owners, cost
    queries = _pieces(best, cuts, ranks)
    keys = queries if q_shape == k_shape else _pieces(own_keys, k_cuts, ranks)
    return Layout(q_shape, k_shape, queries, keys), np.bincount(best, visible, ranks).tolist()


def _cuts(shape: tuple[int, ...], ranks: int) -> list[int]:
    """Ends of equal blocks, the same even number for each process: in a text on multiples of 64, a key block."""
    size, each = shape[0], 2
    grain = 64 if len(shape) == 1 else 1
    most = 32 if len(shape) == 1 else 16  # counting takes longer in two and three dimensions
    while 2 * each * ranks <= max(_BLOCKS, 2 * ranks) and each < most and size // (2 * each * ranks) >= grain:
        each *= 2
    blocks = each * ranks
    if size // blocks < grain:
        grain = 1
    return [i * size // blocks // grain * grain for i in range(blocks)] + [size]


def _contiguous(blocks: int, ranks: int) -> NDArray[np.int64]:
    return np.repeat(np.arange(ranks), blocks // ranks)


def _candidates(visible: NDArray[np.float64], ranks: int) -> Iterator[NDArray[np.int64]]:
    """Owners of the blocks, those with the fewest pieces first."""
    blocks = len(visible)
    yield _contiguous(blocks, ranks)
    if ranks == 1:
        return
    yield np.repeat(np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]]), blocks // (2 * ranks))
    each = 2
    while each * ranks <= blocks:
        chunks = each * ranks
        dealt = _dealt(visible.reshape(chunks, -1).sum(1), ranks)
        yield np.repeat(dealt, blocks // chunks)
        each *= 2


def _dealt(work: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Longest first, each to the process with the least work that still lacks chunks; all get as many."""
    owners = np.empty(len(work), np.int64)
    load, left = np.zeros(ranks), np.full(ranks, len(work) // ranks)
    for chunk in np.argsort(-work, kind="stable"):
        rank = int(np.argmin(np.where(left > 0, load, np.inf)))
        owners[chunk] = rank
        load[rank] += work[chunk]
        left[rank] -= 1
    return owners


def _pieces(owners: NDArray[np.int64], cuts: list[int], ranks: int) -> tuple[Pieces, ...]:
    return tuple(
        merged((cuts[i], cuts[i + 1] - cuts[i]) for i in np.flatnonzero(owners == rank)) for rank in range(ranks)
    )
