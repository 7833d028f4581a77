"""Griffe's extension of the site: what is laid out in columns or by line in a docstring stays so on its page."""

from __future__ import annotations

import re
from typing import Any

import griffe

_COLUMNS = re.compile(r"\S {3,}\S")
_SECTION = re.compile(r"^-{3,}$", re.M)
_TERMS = re.compile(r"[\w, ]+ : .+\n {4}")
_CALL = re.compile(r"(?<![\w`./(])anyflash\.(?:torch\.)?attention\b(?!`|\.\w)")
_SPECIAL_NAME = re.compile(r"(?<!`)\b__\w+__\b(?!`)")


class Layout(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = kept(obj.docstring.value)

    def on_function(self, *, func: Any, **_: Any) -> None:
        """A default that is a private constant of the module is shown as what it is: full() for _FULL."""
        for parameter in func.parameters:
            constant = func.module.members.get(str(parameter.default))
            if constant is not None and constant.is_attribute and constant.name.startswith("_"):
                parameter.default = str(constant.value)

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """The parameters that **scalars stands for are shown, with their defaults."""
        if "_options" in pkg.members:
            defaults = pkg["_options.DEFAULTS"].value
            named = [(str(name).strip("'\""), str(value)) for name, value in zip(defaults.keys, defaults.values)]
            _show_scalars(pkg, named)


def _show_scalars(module: Any, named: list[tuple[str, str]]) -> None:
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_module:
            _show_scalars(member, named)
        elif member.is_function and "scalars" in member.parameters:
            if member.parameters["scalars"].kind is griffe.ParameterKind.var_keyword:
                del member.parameters["scalars"]
                for name, default in named:
                    member.parameters.add(
                        griffe.Parameter(name, kind=griffe.ParameterKind.keyword_only, default=default)
                    )


def kept(text: str) -> str:
    return "\n\n".join(map(_paragraph, re.split(r"\n{2,}", text)))


def _paragraph(text: str) -> str:
    """Columns become a block of code. Terms, `name : type` and below it what that is, become a list. Sections, which have a
    line of dashes, stay as they are."""
    if text.startswith("    ") and "\n---" not in text:
        return text
    text = _CALL.sub(r"[\g<0>][]", _SPECIAL_NAME.sub(r"`\g<0>`", text))
    if _SECTION.search(text):
        return text
    if _TERMS.match(text):
        text = re.sub(r"^(\S.*?) : (.*)$", r"-   `\1` (\2):", text, flags=re.M)
        return re.sub(r"^(\w.*)$", r"-   `\1`:", text, flags=re.M)
    return f"```text\n{text}\n```" if _COLUMNS.search(text) else text
