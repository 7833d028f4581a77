"""Shared by the front ends of frameworks: rules given as text, argument checks, and their error messages."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import numpy as np

from ._core import did_you_mean, echoed, on_tiles

_MASK = "rule=anyflash.dense(mask), or bias= for a mask that is added"
_IN_A_RULE = {
    "attn_mask": _MASK,
    "mask": _MASK,
    "causal": "rule=anyflash.causal()",
    "is_causal": "rule=anyflash.causal()",
    "window_size": "rule=anyflash.window(left, right)",
}  # arguments of other libraries
NESTED = "a nested tensor, expected a plain one"


def unexpected(function: str, name: str, known: list[str]) -> TypeError:
    """Of a keyword argument that is none of the known ones: with what it may have meant."""
    line = f"{function}{'() got an ' if function else ''}unexpected keyword argument '{echoed(name)}'"
    if "rule" in known and name in _IN_A_RULE:
        return TypeError(f"{line}, use {_IN_A_RULE[name]}")
    return TypeError(line + did_you_mean(name, known))


def refuse_tables(tables: Mapping[str, Any] | None) -> None:
    """Of a call whose rule is a Rule."""
    check_mapping(tables)
    if tables:
        raise ValueError("tables: given with a Rule, expected with a rule's text alone")


def given_tables(tables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Of a call whose rule is a text."""
    check_mapping(tables)
    for name in tables or ():
        if not isinstance(name, str):
            raise TypeError(f"tables: a name of type {echoed(type(name).__name__)}, expected a word")
        if not name.isidentifier():
            raise ValueError(f"tables: name {echoed(repr(name))}, expected a word")
    return tables or {}


def check_mapping(tables: Any) -> None:
    """Of whatever is given as tables by name: empty ones too."""
    if tables.__class__ is not dict and not isinstance(tables, (Mapping, type(None))):
        raise TypeError(f"tables: type {echoed(type(tables).__name__)}, expected arrays by name")


def refuse_tile_machine(module: str) -> None:
    """Of front ends that do not run on it."""
    if on_tiles():
        raise ValueError(
            f"anyflash.{module}: inside tile_machine.use, expected outside it "
            "(anyflash.attention and anyflash.torch run on the tile machine)"
        )


def refuse_masked(name: str, value: Any) -> None:
    """Refuses NumPy's masked arrays, whose masks frameworks ignore. The message is anyflash.attention's."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: type MaskedArray, expected a plain array (a mask goes into the rule)")


def check_return_lse(return_lse: Any) -> None:
    if not isinstance(return_lse, (bool, str)) or return_lse not in (False, True, "lm"):
        raise ValueError(f"return_lse: {echoed(repr(return_lse))}, expected True, False or 'lm'")


def truth(name: str, value: Any) -> bool:
    """True or False; 1 and 0 are accepted too."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name}: type {echoed(type(value).__name__)}, expected True or False")


def integer(name: str, value: Any) -> int:
    try:
        return index(value)
    except Exception:  # the frameworks' own too, of what is traced
        raise TypeError(f"{name}: type {echoed(type(value).__name__)}, expected an integer") from None


def second_derivative(module: str) -> str:
    return f"anyflash.{module}.attention: a second derivative was asked for, expected first derivatives alone"


def without_gradient(name: str, remedy: str) -> str:
    return f"{name}: requires a gradient, and none is computed; pass {remedy}"
