"""attention for TensorFlow, with all options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from .._core import Rule
from .._frontend import check_return_lse, given_tables, refuse_tables, refuse_tile_machine
from .._options import DEFAULTS, Scalars, check_names, constants, text_of, with_scalars
from .._rules import full
from ._ops import (
    FLOATS,
    INTEGERS,
    TABLES,
    bhds,
    channels_last,
    check_tensors,
    check_type,
    invalid,
    one_line,
    one_of,
    query,
    rows_type,
    tensor,
    word,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FULL = full()
_LAYOUTS = {"bhsd": channels_last, "bshd": channels_last, "thd": channels_last, "bhds": bhds}


@with_scalars
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    rule: Any = _FULL,
    bias: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    return_lse: bool | str = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_lengths: Any = None,
    page_table: Any = None,
    tables: Mapping[str, Any] | None = None,
    **scalars: Unpack[Scalars],
) -> Any:
    """anyflash.attention on TensorFlow's tensors, with gradients of q, k, v, bias and sink, through out and lse.

    It works eagerly, in tf.function and in saved models. There is no plan and no out.

    Parameters not listed here are those of anyflash.attention.

    Parameters
    ----------
    layout : {"bhsd", "bshd", "bhds", "thd"}
        As in anyflash.attention.
    rule : Rule or str
        Which keys a query sees. In tf.function a Rule is a constant, and its tables are copied into the graph.
        anyflash.parse_rule reads a text. For tables that change from call to call: rule="documents(ids, ids)",
        tables={"ids": ids}.
    tables : dict of str to tensor, optional
        The tables that a rule's text names. TensorFlow copies them to the host's memory, as it does cu_seqlens_q,
        cu_seqlens_k, key_lengths and page_table.

    Returns
    -------
    tensor or tuple of tensors
        out, (out, lse) or (out, l, m), as anyflash.attention. No gradient goes through l and m, and none to
        alibi_slopes.

    Raises
    ------
    tf.errors.InvalidArgumentError
        One line: which argument, what was passed, what was expected.
    TypeError
        For an option of another type, and for a value that cannot become a tensor.
    NotImplementedError
        For second derivatives.
    """
    refuse_tile_machine("tensorflow")
    check_names(scalars, attention)
    layout = one_of("layout", scalars.get("layout", DEFAULTS["layout"]), list(_LAYOUTS))
    _checked(check_return_lse, return_lse)
    q = query(q)
    text, of_rule = _parts(rule, tables)
    terms, slopes = _given(FLOATS, bias=bias, sink=sink), _given(FLOATS[2:], alibi_slopes=alibi_slopes)
    others = _given(
        INTEGERS, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, key_lengths=key_lengths, page_table=page_table
    )
    others |= {f"@{name}": _typed(f"tables: {name}", table, TABLES) for name, table in of_rule.items()}
    call = f"rule={word('rule', text)}{_checked(_text, scalars)}"
    if return_lse is True:
        call += "; returns=lse"
    if terms or slopes or others:
        call += f"; names={' '.join([*terms, *slopes, *others])}"
    lists = [list(tensors.values()) for tensors in (terms, slopes, others)]
    try:
        out, rows = _LAYOUTS[layout](q, k, v, *lists, call, 2 if return_lse == "lm" else 1, rows_type(q, k, v))
    except tf.errors.OpError as error:
        raise one_line(error) from None
    except Exception:
        check_tensors(q, k, v)
        raise
    if not tf.executing_eagerly():
        for row in rows:
            row.set_shape(_shape_of_rows(q.shape, layout))
    if return_lse == "lm":
        return out, *map(tf.stop_gradient, rows)
    return (out, rows[0]) if return_lse else out


def _text(scalars: Mapping[str, Any]) -> str:
    return text_of(constants(scalars))


def _checked(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise invalid(str(error)) from None


def _given(types: Any, **tensors: Any) -> dict[str, Any]:
    return {name: _typed(name, one, types) for name, one in tensors.items() if one is not None}


def _typed(name: str, value: Any, types: Any) -> Any:
    made = tensor(name, value)
    check_type(name, made, types)
    return made


def _parts(rule: Any, tables: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    """A rule's text, and the tables that it names."""
    if isinstance(rule, str):
        return rule, _checked(given_tables, tables)
    if not isinstance(rule, Rule):
        raise TypeError(f"rule: type {type(rule).__name__}, expected a rule such as anyflash.causal(), or its text")
    _checked(refuse_tables, tables)
    return rule._parts


def _shape_of_rows(q: Any, layout: str) -> Any:
    """(batch, heads, queries), or (heads, tokens); sizes that q does not tell are None. A wrong rank is an error of the
    op when it runs."""
    if q.rank is None or q.rank < 3:
        return None
    if layout == "thd":
        return (q[1], q[0])
    heads, sequence = {"bhsd": (1, q[2:-1]), "bshd": (-2, q[1:-2]), "bhds": (1, q[3:])}[layout]
    return (q[0], q[heads], sequence.num_elements())
