"""Work that runs when a PyTorch module is imported: most programs never import it, and importing it takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def when_imported(name: str, work: Callable[[], None]) -> None:
    """Calls work() once the module is imported, or now if it already is."""
    if name in sys.modules:
        work()
    else:
        sys.meta_path.insert(0, _Waiting(name, work))


class _Waiting(MetaPathFinder):
    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.work = work

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self)
        return spec


class _Then(Loader):
    """Loads the module by its own loader, then calls work()."""

    def __init__(self, own: Any, waiting: _Waiting) -> None:
        self.own = own
        self.waiting = waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        module.__loader__ = self.own
        self.own.exec_module(module)
        if self.waiting in sys.meta_path:
            sys.meta_path.remove(self.waiting)
            self.waiting.work()
