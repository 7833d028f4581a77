"""The statistic "flops" of the ops, for tf.compat.v1.profiler."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from .. import _core
from .._flops import all_pairs, operations
from .._options import DEFAULTS

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "key_lengths", "page_table")
_FORWARD = ("AnyflashAttention1D", "AnyflashAttention2D", "AnyflashAttentionLast", "AnyflashAttentionBhds")


def _counted(graph: Any, node: Any) -> Any:
    """Counts all pairs if lengths or tables are not constants of the graph. ValueError, as the profiler expects, if a
    size is unknown."""
    op = graph.get_operation_by_name(node.name)
    call = dict(part.split("=", 1) for part in tf.compat.as_str(op.get_attr("call")).split("; "))
    for tensor in op.inputs[:3]:
        tensor.shape.assert_is_fully_defined()
    shapes = [tuple(tensor.shape) for tensor in op.inputs[:3]]
    layout = call.get("layout", DEFAULTS["layout"])
    if "dimensions" in call:  # any batch shape before the channels and the sequence
        layout, axis = "bhds", -1 - int(call["dimensions"])
        shapes = [(1, math.prod(shape[:axis]), *shape[axis:]) for shape in shapes]
    named = dict(zip(call.get("names", "").split(), op.inputs[3:]))
    tables = {name[1:]: tf.get_static_value(one) for name, one in named.items() if name.startswith("@")}
    lengths = {name: tf.get_static_value(named[name]) for name in _LENGTHS if name in named}
    pages = named["page_table"].shape if "page_table" in named else None
    if all(one is not None for one in (*tables.values(), *lengths.values())):
        options = dict(rule=_core.parse_rule(call["rule"], tables), align=call.get("align", DEFAULTS["align"]))
        pairs = _core.visible_pairs(shapes[0], shapes[1], shapes[2], {**options, **lengths, "layout": layout})
    else:
        if pages is not None:
            pages.assert_is_fully_defined()
        pairs = all_pairs(shapes[0], shapes[1], layout, pages)
    flops = operations(shapes[0], shapes[2], layout, pages is not None, pairs, op.type not in _FORWARD)
    return ops.OpStats("flops", int(flops))


for _name in (*_FORWARD, "AnyflashAttentionBackward"):
    ops.RegisterStatistics(_name, "flops")(_counted)
