"""Formulas of the operators for torch.utils.flop_counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._flops import all_pairs, operations, visible_pairs
from . import _op  # noqa: F401 - defines the operators
from ._late import when_imported
from ._rule import rule_of

_PLAIN = (Tensor, torch.nn.Parameter)


def _forward(q: Tensor, k: Any, v: Any, *rest: Any, **results: Any) -> Any:
    return _counted(False, q, k, v, *rest[:-1])


def _backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, q: Tensor, k: Any, v: Any, *rest: Any, **results: Any
) -> Any:
    return _counted(True, q, k, v, *rest[:-1])


def _counted(
    backward: bool,
    q: Tensor,
    k: Any,
    v: Any,
    bias: Any,
    slopes: Any,
    sink: Any,
    cu_q: Any,
    cu_k: Any,
    lengths: Any,
    pages: Any,
    tables: list[Tensor],
    names: str,
    rule: str,
    numbers: list[Any],
    align: str,
    layout: str,
    *rest: Any,
) -> Any:
    """Counts all pairs if sizes, lengths or tables are unknown, as in a graph."""
    of_q, of_k, of_v, of_pages = (None if one is None else tuple(one.shape) for one in (q, k, v, pages))
    sizes = [size for shape in (of_q, of_k, of_v) for size in shape or ()]
    read = [*tables, *(one for one in (cu_q, cu_k, lengths, pages) if one is not None)]
    pairs = None
    if all(isinstance(size, int) for size in (*sizes, *numbers)) and all(map(_has_numbers, read)):
        on_cpu = [None if one is None else one.cpu() for one in (cu_q, cu_k, lengths, pages)]
        of_tables = rule_of(rule, names, [table.cpu() for table in tables], numbers)
        try:
            pairs = visible_pairs(of_q, of_k, of_v, of_tables, align, layout, *on_cpu)
        except ValueError:  # lengths out of range, which a GPU clamps
            pass
    if pairs is None:
        pairs = all_pairs(of_q, of_k, layout, of_pages)
    return operations(of_q, of_v, layout, pages is not None, pairs, backward)


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and not tensor.is_meta and not torch._is_functional_tensor(tensor)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.anyflash.attention, get_raw=True)(_forward)
    register_flop_formula(torch.ops.anyflash.attention_backward, get_raw=True)(_backward)


when_imported("torch.utils.flop_counter", _register)
