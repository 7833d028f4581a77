"""Modules under the names of flash_attn's packages, where those are not installed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

VERSION = "2.8.3"  # the version of flash_attn whose signatures these are; version 3 has no version number in its module
_COMPAT = __name__.rpartition(".")[0]
_MODULES = {
    "flash_attn": "flash_attn",
    "flash_attn.flash_attn_interface": "flash_attn",
    "flash_attn.bert_padding": "bert_padding",
    "flash_attn_interface": "flash_attn_interface",
}


class _Finder(MetaPathFinder, Loader):
    """Of those names, once install() has added them. Others of the packages are not found, as Python says it."""

    def __init__(self) -> None:
        self.paths: dict[str, list[str]] = {}  # by added package: search paths of its other parts

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in self.paths or name not in _MODULES:
            return None
        spec = ModuleSpec(name, self, origin=_COMPAT)
        if name == "flash_attn":
            spec.submodule_search_locations = self.paths[name]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        ours = import_module(f"{_COMPAT}.{_MODULES[module.__name__]}")
        module.__doc__ = ours.__doc__
        for name in ours.__all__:
            if name != "install":
                setattr(module, name, getattr(ours, name))
        if module.__name__ == "flash_attn":
            module.__dict__["__version__"] = VERSION


_finder = _Finder()


def install() -> tuple[str, ...]:
    """After this call `import flash_attn` and `import flash_attn_interface` (of version 3) import anyflash, each only
    if that package is not installed.

    Returns the names that now import anyflash. The modules are flash_attn, flash_attn.flash_attn_interface,
    flash_attn.bert_padding and flash_attn_interface. Importing any other module of these packages (flash_attn.ops,
    flash_attn.layers, flash_attn.losses) raises ModuleNotFoundError as before. A second call changes nothing.
    """
    for name in ("flash_attn", "flash_attn_interface"):
        if name in _finder.paths:
            continue
        try:
            spec = find_spec(name)
        except ValueError:  # a module without a specification, added by other code
            continue
        if spec is None or spec.origin is None:  # flash_attn may be a namespace package of other versions
            _finder.paths[name] = list((spec and spec.submodule_search_locations) or ())
            sys.modules.pop(name, None)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return tuple(_finder.paths)
