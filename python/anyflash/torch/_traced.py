"""Rules that a function makes while torch.compile traces it. Calls of the extension cannot be traced, so such a rule is
kept as a tree from which its text is made later."""

from __future__ import annotations

from typing import Any

import torch

from .. import _core, _rules


class TracedRule:
    """A rule as a tree: a name and its arguments, "&" or "|" and two rules, or "~" and one."""

    def __init__(self, name: str, parts: tuple[Any, ...]) -> None:
        self.name = name
        self.parts = parts

    def __and__(self, other: Any) -> TracedRule:
        return TracedRule("&", (self, other))

    def __or__(self, other: Any) -> TracedRule:
        return TracedRule("|", (self, other))

    def __rand__(self, other: Any) -> TracedRule:
        return TracedRule("&", (other, self))

    def __ror__(self, other: Any) -> TracedRule:
        return TracedRule("|", (other, self))

    def __invert__(self) -> TracedRule:
        return TracedRule("~", (self,))


class _Makers:
    """Replaces the extension in the module of the rules."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_core, name)


def _maker(name: str) -> Any:
    real = getattr(_core, name)

    def make(*parts: Any) -> Any:
        if torch.compiler.is_compiling():
            return TracedRule(name, parts)
        return real(*parts)

    return staticmethod(make)


def _operator(name: str, symbol: str) -> Any:
    real = getattr(_core.Rule, name)

    def combine(*rules: Any) -> Any:
        return TracedRule(symbol, rules) if torch.compiler.is_compiling() else real(*rules)

    return combine


for _name, _symbol in (("__and__", "&"), ("__or__", "|"), ("__invert__", "~")):
    setattr(_core.Rule, _name, _operator(_name, _symbol))
for _name in (
    "full",
    "causal",
    "local",
    "window",
    "prefix",
    "prefix_queries",
    "sink",
    "documents",
    "documents_packed",
    "tiles",
    "neighbourhood",
    "blocks",
    "dense",
):
    setattr(_Makers, _name, _maker(_name))
setattr(_rules, "_core", _Makers())
