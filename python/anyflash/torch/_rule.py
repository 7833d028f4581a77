"""Rules as a PyTorch graph can hold them: a text, and the tables that it names as tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from .. import _core
from .._arrays import first_line, gpu_of
from .._core import Rule
from .._frontend import given_tables, refuse_tables
from ._traced import TracedRule

_Function = TypeVar("_Function", bound=Callable[..., Any])
_of_text: dict[str, Rule] = {}  # a cache of rules without tables
_MOST = 1024  # its maximum size
_NUMBERS = (int, torch.SymInt)


def rule_of(text: str, names: str = "", tables: Sequence[Any] = (), numbers: Sequence[int] = ()) -> Rule:
    """The rule of a text and its tables, names separated by spaces; $i in the text is the i-th number. Raises as
    anyflash.parse_rule does. A rule with tables lives no longer than a call."""
    if numbers:
        text = re.sub(r"\$(\d+)", lambda place: str(numbers[int(place[1])]), text)
    if names:
        return _core.parse_rule(text, dict(zip(names.split(), tables)), True)
    rule = _of_text.get(text)
    if rule is None:
        if len(_of_text) >= _MOST:
            _of_text.clear()
        rule = _of_text[text] = _core.parse_rule(text, None)
    return rule


def given_rule(rule: Any, tables: Mapping[str, Any] | None) -> Any:
    """A call's rule, which may be a text with tables. A rule made from those lives no longer than the call."""
    if isinstance(rule, str):
        given = given_tables(tables)
        return _core.parse_rule(rule, dict(given), True) if given else rule_of(rule)
    refuse_tables(tables)
    _check(rule)
    return rule_of(*parts_of(rule, None)) if isinstance(rule, TracedRule) else rule  # made before a graph break


def _check(rule: Any) -> None:
    if not isinstance(rule, (Rule, TracedRule)):
        raise TypeError(f"rule: type {type(rule).__name__}, expected a rule such as anyflash.causal(), or its text")


def as_tensor(array: Any, name: str) -> torch.Tensor:
    """The array as a tensor that shares its memory where PyTorch can. PyTorch supports neither negative strides nor
    read-only arrays. On a GPU another framework may reuse the memory once it has dropped the array."""
    known = isinstance(array, (torch.Tensor, np.ndarray)) or hasattr(array, "__dlpack__")
    if not known or isinstance(array, type):
        raise TypeError(f"{name}: type {type(array).__name__}, expected a torch.Tensor")
    try:
        if isinstance(array, np.ndarray) and (min(array.strides, default=0) < 0 or not array.flags.writeable):
            own = array[
                tuple(slice(None) if stride else slice(1) for stride in array.strides)
            ]  # repeated tables become one
            return torch.as_tensor(own.copy(), device="cpu").expand(array.shape)
        if isinstance(array, torch.Tensor):
            return array
        if gpu_of(array) is None:
            return torch.as_tensor(array, device="cpu")
        tensor = torch.from_dlpack(array).clone()  # makes PyTorch's stream wait for the array's
        torch.cuda.current_stream(tensor.device).synchronize()
        return tensor
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{name}: {first_line(error)}") from None


def parts_of(rule: Any, tables: Mapping[str, Any] | None) -> tuple[str, str, list[torch.Tensor], list[Any]]:
    """(text, names, tables, numbers) of a call's rule, as rule_of takes them. A Rule's tables are shared, not
    copied."""
    if isinstance(rule, str):
        given = given_tables(tables)
        return rule, " ".join(given), [as_tensor(table, f"tables: {name}") for name, table in given.items()], []
    refuse_tables(tables)
    _check(rule)
    found = _Found([], [])
    text = _written(rule, found)
    return text, " ".join([f"t{i}" for i in range(len(found.tables))]), found.tables, found.numbers


class _Found(NamedTuple):
    """The items of a rule's text: tables as t0, t1, ..., numbers as $0, $1, ..."""

    tables: list[torch.Tensor]
    numbers: list[int | torch.SymInt]


def _written(part: Any, found: _Found) -> str:
    """A rule, or an argument of one, as text. Numbers stay out of it: a number that is symbolic in a graph (a size)
    would become a constant."""
    if isinstance(part, TracedRule):
        texts = [_written(one, found) for one in part.parts]
        if part.name in "&|":
            return f"({texts[0]} {part.name} {texts[1]})"
        return f"{part.name}({', '.join(texts)})"  # also "~(...)"
    if isinstance(part, bool):
        return str(index(part))
    if isinstance(part, _NUMBERS):
        found.numbers.append(part)
        return f"${len(found.numbers) - 1}"
    if isinstance(part, (tuple, list)):
        return f"[{', '.join([_written(one if isinstance(one, _NUMBERS) else index(one), found) for one in part])}]"
    if isinstance(part, (torch.Tensor, np.ndarray)):
        found.tables.append(as_tensor(part, "rule"))
        return f"t{len(found.tables) - 1}"
    text: str = _text(part, len(found.tables))
    found.tables.extend([_table(part, i) for i in range(_count(part))])
    return text


def constant(function: _Function) -> _Function:
    """torch.compile calls it while it traces and keeps what it gave, as long as the rule is the same object. This is
    torch._dynamo.assume_constant_result, of which the import takes seconds."""
    setattr(function, "_dynamo_marked_constant", True)
    return function


def _register() -> None:
    """Before 2.15, torch.compile accepts objects as arguments of a constant function only if they are registered as
    constants and have an equality. Theirs is identity, as before."""
    pytree, version = torch.utils._pytree, tuple(map(int, torch.__version__.split(".")[:2]))
    if version < (2, 15) and hasattr(pytree, "register_constant"):
        setattr(Rule, "__eq__", lambda self, other: self is other)
        setattr(Rule, "__hash__", object.__hash__)
        pytree.register_constant(Rule)


_register()


@constant
def _text(rule: Any, first: int) -> str:
    """The text of a Rule, with its tables named from t<first> on."""
    _check(rule)
    return str(re.sub(r"\bt(\d+)\b", lambda name: f"t{int(name[1]) + first}", rule._parts[0]))


@constant
def _count(rule: Rule) -> int:
    return len(rule._parts[1])


@constant
def _table(rule: Rule, i: int) -> torch.Tensor:
    return as_tensor(rule._parts[1][f"t{i}"], "rule")
