"""Formulas of the operators for torch.utils.flop_counter: useful operations, by the pairs of a query and a key that the
call computes with, as anyflash.explain counts them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ._late import when_imported
from ._op import shapes_of_results
from ._rule import rule_of

_PLAIN = (Tensor, torch.nn.Parameter)


def _forward(q: Tensor, k: Any, v: Any, *rest: Any, **results: Any) -> Any:
    d_qk, d_v, pairs = _counted(q, k, v, *rest[:-1])
    return 2 * (d_qk + d_v) * pairs


def _backward(dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, q: Tensor, k: Any, v: Any, *rest: Any,
              **results: Any) -> Any:  # fmt: skip
    d_qk, d_v, pairs = _counted(q, k, v, *rest[:-1])
    return (6 * d_qk + 4 * d_v) * pairs  # S, dP and dV; dQ and dK


def _counted(q: Tensor, k: Any, v: Any, bias: Any, slopes: Any, sink: Any, cu_q: Any, cu_k: Any, lengths: Any,
             pages: Any, tables: list[Tensor], names: str, rule: str, numbers: list[Any], align: str, layout: str,
             *rest: Any) -> tuple[Any, Any, Any]:  # fmt: skip
    """The channels of queries and of values, and the pairs: all of them where sizes, lengths or tables are not known,
    as in a graph."""
    out, rows = shapes_of_results(q, v, layout, pages is not None)
    channel = 2 if layout == "bhds" else -1
    d_qk, d_v = q.shape[channel], out[channel]
    shapes = [None if one is None else tuple(one.shape) for one in (q, k, v)]
    sizes = [size for shape in shapes for size in shape or ()]
    read = [*tables, *(one for one in (cu_q, cu_k, lengths, pages) if one is not None)]
    if all(isinstance(size, int) for size in (*sizes, *numbers)) and all(map(_has_numbers, read)):
        on_cpu = [None if one is None else one.cpu() for one in (cu_q, cu_k, lengths, pages)]
        of_tables = rule_of(rule, names, [table.cpu() for table in tables], numbers)
        try:
            options = (of_tables, align, layout, None, None, 0.0, None, None, False, None, *on_cpu, False, 0, 0)
            return d_qk, d_v, _core.visible_pairs(*shapes, options)
        except ValueError:  # of lengths that a GPU takes for the nearest that does
            pass
    return d_qk, d_v, math.prod(rows) * _keys(q, k, layout, pages)


def _keys(q: Tensor, k: Any, layout: str, pages: Any) -> Any:
    """All that a query may see."""
    if layout == "qkv":
        return q.shape[2]
    if pages is not None:
        return pages.shape[1] * k.shape[1]
    sequence = {"thd": slice(0, 1), "bshd": slice(1, -2), "bhsd": slice(2, -1)}.get(layout, slice(3, None))
    return math.prod(k.shape[sequence])


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and not tensor.is_meta and not torch._is_functional_tensor(tensor)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.anyflash.attention, get_raw=True)(_forward)
    register_flop_formula(torch.ops.anyflash.attention_backward, get_raw=True)(_backward)


when_imported("torch.utils.flop_counter", _register)
