"""Useful operations of a call, for the frameworks' profilers: from the number of visible pairs, as anyflash.explain
counts them."""

from __future__ import annotations

import math
from typing import Any

_Shape = Any  # of sizes, which may be symbols; or None


def operations(q: _Shape, v: _Shape, layout: str, paged: bool, pairs: Any, backward: bool = False) -> Any:
    """The operations of a call of these shapes with `pairs` visible pairs, over all heads and batch entries."""
    d_qk = q[2] if layout == "bhds" else q[-1]
    d_v = d_qk if v is None else v[2] if layout == "bhds" and not paged else v[-1]
    if backward:
        return (6 * d_qk + 4 * d_v) * pairs  # S, dP and dV; dQ and dK
    return (2 * d_qk + 2 * d_v) * pairs


def all_pairs(q: _Shape, k: _Shape, layout: str, page_table: _Shape) -> Any:
    """The number of pairs if every query sees every key, for where only shapes are known. Sizes may be symbolic."""
    if k is None:  # qkv
        return math.prod(q[1:3]) * q[2]
    rows = math.prod([size for axis, size in enumerate(q) if axis != (2 if layout == "bhds" else len(q) - 1)])
    if page_table is not None:
        return rows * page_table[1] * k[1]
    sequence = {"thd": slice(0, 1), "bshd": slice(1, -2), "bhsd": slice(2, -1), "bhds": slice(3, None)}[layout]
    return rows * math.prod(k[sequence])
