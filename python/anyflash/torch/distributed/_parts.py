"""The local calls of a process: which of its queries work on which of the keys at hand."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ... import _core
from ._pieces import Piece, Pieces, count_of, cut
from ._schedule import Layout

_BLOCKS = 128  # of a process' queries, at most, for each of which it is asked whether it sees a stage's keys
_MOST_CALLS = 4  # for one stage of a text


class Part(NamedTuple):
    """A local call: entries of the queries (rows) and of the keys at hand (columns), with their pieces."""

    rows: Piece
    columns: Piece
    queries: Pieces
    keys: Pieces


def own_parts(layout: Layout, queries: Pieces, keys: Pieces) -> tuple[Part, ...]:
    """The calls of all queries on the keys. One call takes all pieces of a text. In two and three dimensions it takes
    one piece a side."""
    if not queries or not keys or not prod(layout.q_shape[1:]) or not prod(layout.k_shape[1:]):
        return ()
    if len(layout.q_shape) == 1:
        return (Part((0, count_of(queries)), (0, count_of(keys)), queries, keys),)
    made, row = [], 0
    for one in queries:
        column = 0
        for piece in keys:
            made.append(Part((row, one[1]), (column, piece[1]), (one,), (piece,)))
            column += piece[1]
        row += one[1]
    return tuple(made)


def stage_parts(
    rule: Any, align: str, layout: Layout, queries: Pieces, keys: Pieces, lengths: list[int] | None = None
) -> tuple[Part, ...]:
    """The calls on the keys of a stage, each cut to the queries that see them."""
    made: list[Part] = []
    whole = own_parts(layout, queries, keys)
    if not whole:
        return ()
    blocks, q_cuts = _blocks(layout, queries)
    k_cuts = sorted({0, layout.k_shape[0], *(end for first, count in keys for end in (first, first + count))})
    found = _core.seen_blocks(rule, layout.q_shape, layout.k_shape, align, q_cuts, k_cuts, lengths or ())
    seen = np.frombuffer(found, np.uint8).reshape(len(q_cuts) - 1, len(k_cuts) - 1)
    of_blocks = seen[np.searchsorted(q_cuts, [first for first, _ in blocks])]
    ends = np.cumsum([count for _, count in blocks])
    for part in whole:
        columns = [i for first, count in part.keys for i in range(*np.searchsorted(k_cuts, (first, first + count)))]
        inside = (part.rows[0] < ends) & (ends <= sum(part.rows))
        see = np.flatnonzero(inside & of_blocks[:, columns].any(1))
        ranges = [(int(ends[i]) - blocks[i][1], blocks[i][1]) for i in see]
        most = _MOST_CALLS if len(part.queries) > 1 or len(layout.q_shape) == 1 else 1
        for rows in _joined(ranges, most):
            own = cut(part.queries, rows[0] - part.rows[0], rows[1])
            made.append(Part(rows, part.columns, own, part.keys))
    return tuple(made)


def _blocks(layout: Layout, queries: Pieces) -> tuple[list[Piece], list[int]]:
    """The queries in blocks, in their order, and the ends of these in the whole sequence."""
    least = 64 if len(layout.q_shape) == 1 else 1
    size = max(least, -(-count_of(queries) // _BLOCKS))
    blocks = []
    for first, count in queries:
        blocks += [(first + at, min(size, count - at)) for at in range(0, count, size)]
    return blocks, sorted({0, layout.q_shape[0], *(end for first, n in blocks for end in (first, first + n))})


def _joined(ranges: list[Piece], most: int) -> list[Piece]:
    """Ascending ranges, neighbours as one, and across the shortest gaps until there are at most so many."""
    made: list[Piece] = []
    for first, count in ranges:
        if made and sum(made[-1]) == first:
            made[-1] = made[-1][0], made[-1][1] + count
        else:
            made.append((first, count))
    while len(made) > most:
        i = min(range(len(made) - 1), key=lambda i: made[i + 1][0] - sum(made[i]))
        made[i : i + 2] = [(made[i][0], sum(made[i + 1]) - made[i][0])]
    return made
