"""What the functions of compat.flash_attn share: their options as those of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import _rules


def options(dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Sequence[int], softcap: float,
            deterministic: bool = False) -> dict[str, Any]:  # fmt: skip
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: {dropout_p}, expected 0: dropout is not offered")
    left, right = window_of(window_size)
    rule = _rules.window(left, 0 if causal else right) if causal or left >= 0 or right >= 0 else _rules.full()
    return dict(rule=rule, align="none_end", scale=softmax_scale, softcap=softcap, deterministic=deterministic)


def window_of(window_size: Sequence[int]) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size: {window_size!r}, expected two integers, left and right") from None
    return left, right


def host(indices: Tensor | None) -> Tensor | None:
    """Lengths and page tables where the library reads them."""
    return indices.cpu() if isinstance(indices, Tensor) else indices
