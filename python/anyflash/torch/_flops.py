"""Formulas of the operators for torch.utils.flop_counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._flops import all_pairs, operations
from ._late import when_imported
from ._op import by_name
from ._rule import rule_of

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "key_lengths", "page_table")
_PLAIN = (Tensor, torch.nn.Parameter)


def _forward(q: Tensor, k: Any, v: Any, *rest: Any, **results: Any) -> Any:
    return _counted(False, q, k, v, *rest[:-1])


def _backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, q: Tensor, k: Any, v: Any, *rest: Any, **results: Any
) -> Any:
    return _counted(True, q, k, v, *rest[:-1])


def _counted(backward: bool, q: Tensor, k: Any, v: Any, *given: Any) -> Any:
    """By all pairs where sizes, lengths or tables are not known, as in a graph."""
    options = by_name(given)
    rule, names, tables, numbers = (options.pop(name) for name in ("rule", "names", "tables", "numbers"))
    layout, pages = options["layout"], options["page_table"]
    of_q, of_k, of_v, of_pages = (None if one is None else tuple(one.shape) for one in (q, k, v, pages))
    sizes = [size for shape in (of_q, of_k, of_v) for size in shape or ()]
    lengths = {name: options[name] for name in _LENGTHS if options[name] is not None}
    pairs = None
    if all(isinstance(size, int) for size in (*sizes, *numbers)) and all(
        map(_has_numbers, (*tables, *lengths.values()))
    ):
        on_cpu: dict[str, Any] = {name: one.cpu() for name, one in lengths.items()}
        on_cpu["rule"] = rule_of(rule, names, [table.cpu() for table in tables], numbers)
        try:
            pairs = _core.visible_pairs(of_q, of_k, of_v, {**on_cpu, "align": options["align"], "layout": layout})
        except ValueError:  # of lengths that a GPU takes for the nearest ones that it can
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
