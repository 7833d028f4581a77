"""The options of a call that are a word, a number or a switch: the schema that all front ends read. C++ has the same
names and defaults (include/anyflash/option_list.h); tests/python/test_python_options.py compares them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar

from . import _core
from ._core import echoed
from ._frontend import integer, truth, unexpected

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Scalars(TypedDict, total=False):
    align: Literal["none_front", "none_end", "scale_front", "scale_end"]
    layout: Literal["bhsd", "bshd", "bhds", "qkv", "thd"]
    scale: float | None
    softcap: float
    deterministic: bool
    allow_tf32: bool
    memory_budget: int | None
    num_chunks_q: int | None
    num_chunks_kv: int | None
    threads: int


DEFAULTS: dict[str, Any] = {
    "align": "none_front",
    "layout": "bhsd",
    "scale": None,
    "softcap": 0.0,
    "deterministic": False,
    "allow_tf32": False,
    "memory_budget": None,
    "num_chunks_q": None,
    "num_chunks_kv": None,
    "threads": 0,
}
TENSORS: tuple[str, ...] = _core.tensor_options  # the other options of all front ends but the rule


def check_names(scalars: Mapping[str, Any], function: Callable[..., Any], called: str = "") -> None:
    """For functions that take them as **scalars; those that are _core.plain_scalars need no check."""
    for name in scalars:
        if name not in DEFAULTS:
            raise unexpected(called or function.__name__, name, [*inspect.signature(function).parameters])


def with_scalars(function: _Function) -> _Function:
    """A function whose last parameter is **scalars, as one that has all of them by name."""
    signature = inspect.signature(function)
    *parameters, _ = signature.parameters.values()
    scalars = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name]) for name in DEFAULTS]
    function.__signature__ = signature.replace(parameters=[*parameters, *scalars])  # type: ignore[attr-defined]
    return function


def number(name: str, value: Any) -> float:
    made = None
    try:
        if hasattr(value, "__float__") and not isinstance(value, str):
            made = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number that float64 holds") from None
    except Exception:  # the frameworks' own: of an array of several, of one that is traced or has no data
        pass
    if type(made) is not float:  # TensorFlow's AutoGraph makes a float of a tensor another tensor
        raise TypeError(f"{name}: type {echoed(type(value).__name__)}, expected a number")
    return made


def integer_of_64_bits(name: str, value: Any) -> int:
    made = integer(name, value)
    if not -(2**63) <= made < 2**63:
        raise ValueError(f"{name}: expected an integer of 64 bits")
    return made


def _word(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: type {echoed(type(value).__name__)}, expected str")
    return value


def _number_or_none(name: str, value: Any) -> float | None:
    return None if value is None else number(name, value)


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else integer_of_64_bits(name, value)


# By the type of an option's default: what checks it, and its type in the schema of an operator of PyTorch.
_KINDS: dict[type, tuple[Callable[[str, Any], Any], str]] = {
    str: (_word, "str"),
    float: (number, "float"),
    type(None): (_integer_or_none, "int?"),
    bool: (truth, "bool"),
    int: (integer_of_64_bits, "int"),
}


def _kind(name: str) -> tuple[Callable[[str, Any], Any], str]:
    return (_number_or_none, "float?") if name == "scale" else _KINDS[type(DEFAULTS[name])]


def constants(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """All of them as Python's own constants, those that are not given too. For what keeps them: graphs and programs.
    TypeError or ValueError with the line of anyflash.attention, but for words, which the library knows."""
    checked = dict(DEFAULTS)
    for name, value in scalars.items():
        checked[name] = _kind(name)[0](name, value)
    return checked


def text_of(checked: Mapping[str, Any]) -> str:
    """What `constants` gave as python/src/call_text.h reads it, "; name=value" for each that is not its default."""
    text = ""
    for name, value in checked.items():
        if value != DEFAULTS[name]:
            if isinstance(value, str) and ";" in value:
                raise ValueError(f"{name}: {echoed(repr(value))}, expected no ';'")
            text += f"; {name}={int(value) if isinstance(value, bool) else value}"
    return text


def torch_schema() -> str:
    """Of these arguments of PyTorch's operators, in the order of the schema."""
    return ", ".join(f"{_kind(name)[1]} {name}" for name in DEFAULTS)
