"""The mask rules: which keys a query sees.

x and y are the aligned coordinates of a query and a key (see `align` in attention). order(.) is the row-major index of
a coordinate in the joint shape R_i = max(q_i, k_i). An argument per dimension is one number for all dimensions, or a
tuple with one for each, outermost first. A rule is checked against the shapes when it is used. Rules can be pickled
and copied: a pickle and a deep copy hold copies of the rule's arrays, copy.copy returns the rule itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Protocol, SupportsIndex, TypeVar

from . import _core
from ._core import Rule
from ._frontend import check_mapping, unexpected

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PerDimension = SupportsIndex | Sequence[SupportsIndex]


class _Array(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


def _named(make: _Function) -> _Function:
    """The function, whose error for a misspelt name says what it may have meant, as Python's own does from 3.13 on."""
    if sys.version_info >= (3, 13):
        return make
    known = [*inspect.signature(make).parameters]

    @wraps(make)
    def made(*given: Any, **named: Any) -> Any:
        try:
            return make(*given, **named)
        except TypeError:
            for name in named:
                if name not in known:
                    raise unexpected(make.__name__, name, known) from None
            raise

    return made  # type: ignore[return-value]


def full() -> Rule:
    """Every query sees every key."""
    return _core.full()


def causal() -> Rule:
    """order(x) >= order(y): a query sees the keys up to its own coordinate."""
    return _core.causal()


@_named
def local(window: SupportsIndex, log2_stride: SupportsIndex = 0, causal: bool = False) -> Rule:
    """In every dimension, with s = 2**log2_stride: |x_i - y_i| is a multiple of s and |x_i - y_i| / s < window;
    and order(x) >= order(y) if causal.

    window >= 1, 0 <= log2_stride <= 30. Raises ValueError, or TypeError if they are not integers.
    """
    return _core.local(window, log2_stride, causal)


@_named
def window(left: _PerDimension, right: _PerDimension) -> Rule:
    """In every dimension -left_i <= y_i - x_i <= right_i; a negative bound is unlimited.

    Raises ValueError for more than 3 numbers, TypeError if they are not integers.
    """
    return _core.window(left, right)


@_named
def prefix(n: SupportsIndex) -> Rule:
    """order(y) < n, n >= 0: every query sees the keys of the first n coordinates. Raises ValueError or TypeError."""
    return _core.prefix(n)


@_named
def prefix_queries(n: SupportsIndex) -> Rule:
    """order(x) < n, n >= 0: the queries of the first n coordinates see every key. Raises ValueError or TypeError.

    prefix(n) | prefix_queries(n) makes the first n tokens global: all tokens see them, and they see all tokens.
    """
    return _core.prefix_queries(n)


@_named
def sink(n: SupportsIndex) -> Rule:
    """Every query sees the first n keys in memory order, n >= 0 (StreamingLLM).

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2024). Raises ValueError or
    TypeError.
    """
    return _core.sink(n)


@_named
def documents(ids_q: _Array, ids_k: _Array | None = None) -> Rule:
    """Query and key belong to the same document.

    ids_q: (queries,) or (batch, queries); ids_k: (keys,) or (batch, keys), the same array as ids_q if not given; int32
    or int64 arrays, any values, on the CPU or on the call's GPU. In a 1-dimensional sequence the coordinates restart at
    0 in each document, for every other part of the rule except sink, blocks and dense. The alignment applies within
    each document. In 2 and 3 dimensions the ids are over the flattened sequence and nothing restarts. The arrays are
    kept, not copied.
    Raises ValueError or TypeError.
    """
    return _core.documents(ids_q, ids_q if ids_k is None else ids_k)


@_named
def documents_packed(cu_seqlens_q: _Array, cu_seqlens_k: _Array | None = None) -> Rule:
    """documents from cumulative lengths: (documents + 1,) each, int32 or int64, from 0 to the sequence's length.

    cu_seqlens_k is the same array as cu_seqlens_q if not given. The arrays are kept, not copied.
    Raises ValueError or TypeError.
    """
    return _core.documents_packed(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)


@_named
def tiles(shape: _PerDimension, kernel: _PerDimension) -> Rule:
    """Sliding-tile attention. In each dimension entries are grouped into tiles of `shape` entries. A query in a tile
    sees the `kernel` tiles (odd) centred on that tile. Near an edge the centre is clamped so that the kernel stays
    inside, where it fits.

    Source: Zhang et al., Fast Video Generation with Sliding Tile Attention (2025). Raises ValueError or TypeError.
    """
    return _core.tiles(shape, kernel)


@_named
def neighbourhood(kernel: _PerDimension, dilation: _PerDimension = 1, causal: bool | Sequence[bool] = False) -> Rule:
    """Neighbourhood attention. In each dimension x and y lie in one residue class modulo dilation. Inside the class, of
    length L, x' = x // dilation. y' runs over `kernel` entries from start, which is x' - kernel // 2 clamped to
    0 .. L - kernel. In a causal dimension y' runs from x' - kernel + 1 to x'. A kernel longer than L sees the whole
    class.

    Source: Hassani et al., Neighborhood Attention Transformer (2023), and NATTEN. Raises ValueError or TypeError.
    """
    return _core.neighbourhood(kernel, dilation, causal)


@_named
def blocks(bitmap: _Array, block_q: SupportsIndex, block_k: SupportsIndex) -> Rule:
    """The bitmap's entry for (query // block_q, key // block_k) is set, with queries and keys counted in memory order.

    bitmap: (rows, columns), (heads, rows, columns) or (batch, heads, rows, columns), batch and heads may be 1; bool or
    uint8; rows = ceil(queries / block_q), columns = ceil(keys / block_k). The array is kept, not copied.
    Raises ValueError or TypeError.
    """
    return _core.blocks(bitmap, block_q, block_k)


@_named
def dense(mask: _Array) -> Rule:
    """The mask's entry is True (bool) or not zero (uint8).

    mask: (queries, keys), or (batch, heads, queries, keys), where each size may be 1. The array is kept, not copied.
    This is the slowest rule, and the only one that reads a matrix. Raises ValueError or TypeError.
    """
    return _core.dense(mask)


@_named
def parse_rule(text: str, tables: Mapping[str, _Array] | None = None) -> Rule:
    """Reads a rule from text as str(rule) writes it: calls, & | ~, parentheses, [a, b] for one number per dimension.

    tables: the arrays that the text names, as in parse_rule("documents(ids, ids)", {"ids": ids}). They are kept, not
    copied, and the text must name each. Raises ValueError with the column of the fault, or TypeError.
    """
    check_mapping(tables)
    return _core.parse_rule(text, tables)
