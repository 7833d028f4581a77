"""Pieces of a sequence: (first, count) of entries of its outermost dimension, ascending and apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Piece = tuple[int, int]
Pieces = tuple[Piece, ...]


def count_of(pieces: Iterable[Piece]) -> int:
    return sum(count for _, count in pieces)


def merged(pieces: Iterable[Piece]) -> Pieces:
    """Ascending, neighbours as one."""
    made: list[Piece] = []
    for first, count in sorted(pieces):
        if made and made[-1][0] + made[-1][1] == first:
            made[-1] = made[-1][0], made[-1][1] + count
        elif count > 0:
            made.append((first, count))
    return tuple(made)


def common(a: Sequence[Piece], b: Sequence[Piece]) -> Pieces:
    """The entries that both have."""
    made, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        first, end = max(a[i][0], b[j][0]), min(sum(a[i]), sum(b[j]))
        if first < end:
            made.append((first, end - first))
        if sum(a[i]) < sum(b[j]):
            i += 1
        else:
            j += 1
    return tuple(made)


def places(inner: Sequence[Piece], outer: Sequence[Piece]) -> list[Piece]:
    """Where pieces lie among the entries of others, which hold them all and follow each other: (start, count), one for
    each part that is contiguous there."""
    made, before, i = [], 0, 0
    for first, count in inner:
        end = first + count
        while first < end:
            while sum(outer[i]) <= first:
                before += outer[i][1]
                i += 1
            until = min(end, sum(outer[i]))
            made.append((before + first - outer[i][0], until - first))
            first = until
    return made


def contiguous(lengths: Iterable[int]) -> list[Pieces]:
    """The parts of these lengths, one after the other."""
    made: list[Pieces] = []
    first = 0
    for length in lengths:
        made.append(((first, length),) if length else ())
        first += length
    return made


def before(pieces: Iterable[Piece], end: int) -> int:
    """How many entries of the pieces come before entry `end`."""
    return sum(min(max(end - first, 0), count) for first, count in pieces)


def cut(pieces: Iterable[Piece], start: int, count: int) -> Pieces:
    """`count` of the pieces' entries, in their order, from their entry `start` on."""
    made = []
    for first, entries in pieces:
        skipped = min(start, entries)
        taken = min(count, entries - skipped)
        if taken > 0:
            made.append((first + skipped, taken))
        start, count = start - skipped, count - taken
    return tuple(made)
