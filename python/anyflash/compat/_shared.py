"""Shared by the functions of compat.flash_attn: their options translated to those of attention."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from .. import _rules
from .._core import echoed
from .._frontend import truth
from .._options import number
from ..torch._attention import check_memory
from ..torch._traced import TracedRule


def options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    deterministic: bool = False,
) -> dict[str, Any]:
    dropout_p = number("dropout_p", dropout_p)
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p: {dropout_p}, expected 0: dropout is not offered")
    left, right = window_of(window_size)
    if truth("causal", causal):
        right = 0
    rule = _rules.window(left, right) if left >= 0 or right >= 0 else _rules.full()
    if number("softcap", softcap) < 0:
        softcap = 0.0
    return dict(rule=rule, align="none_end", scale=softmax_scale, softcap=softcap, deterministic=deterministic)


def with_no_probabilities(made: Any) -> Any:
    """Adds S_dmask after out and lse: empty, as flash_attn's is without dropout."""
    return (*made, made[0].new_empty(0)) if isinstance(made, tuple) else made


def window_of(window_size: Sequence[int]) -> tuple[int, int]:
    try:
        left, right = map(index, window_size)
    except (TypeError, ValueError):
        given = echoed(repr(window_size))
        raise ValueError(f"window_size: {given}, expected two integers, left and right") from None
    return left, right


def place_of(q: Tensor, *indices: Any) -> torch.device:
    """The device for a call's lengths and tables, which must all be on one device. It is q's GPU, so that nothing
    waits, unless all given ones are on the CPU."""
    on_cpu = [one.is_cpu for one in indices if isinstance(one, Tensor)]
    return torch.device("cpu") if not q.is_cuda or (on_cpu and all(on_cpu)) else q.device


def moved(name: str, indices: Any, place: torch.device) -> Any:
    """The tensor on that device; other values are returned unchanged."""
    if not isinstance(indices, Tensor):
        return indices
    if indices.is_meta:
        raise ValueError(f"{name}: on the device meta, expected the CPU or CUDA")
    return indices.to(place)


def check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: type {type(tensor).__name__}, expected a torch.Tensor")
    check_memory((name,), (tensor,))
    if not torch.compiler.is_compiling() and tensor._is_zerotensor():
        raise ValueError(f"{name}: of zeros without memory, expected plain memory")


def check_indices(name: str, indices: Any, rank: int) -> None:
    """Raises TypeError or ValueError unless these are integers of that rank."""
    check_tensor(name, indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: {indices.dtype}, expected torch.int32 or torch.int64")
    if indices.dim() != rank:
        raise ValueError(f"{name}: rank {indices.dim()}, expected {rank}")


def check_table(name: str, table: Any, entries: int) -> None:
    """Of a table of pages, which has a row for each entry."""
    check_indices(name, table, 2)
    if table.dtype != torch.int32:
        raise TypeError(f"{name}: {table.dtype}, expected torch.int32")
    if table.shape[0] != entries:
        raise ValueError(f"{name}: {table.shape[0]} sequences, expected {entries}")


def and_dense(rule: Any, mask: Tensor) -> TracedRule:
    """The rule & a dense mask, which may be on a GPU, for eager and traced calls."""
    return TracedRule("&", (rule, TracedRule("dense", (mask,))))
