"""One module imported after another, whoever imports that one: how `import tq_hf` registers its attention function without
importing torch and transformers, which takes seconds, before anybody needs them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(first: str, then: str) -> None:
    """Import the module `then` after `first`: now if that is there already, else as soon as somebody has imported it."""
    if first in sys.modules:
        importlib.import_module(then)
    elif not any(isinstance(finder, _Waiting) and finder.first == first for finder in sys.meta_path):  # a reload
        sys.meta_path.insert(0, _Waiting(first, then))


class _Waiting(MetaPathFinder):
    """Finds what the other finders find. Gone once `first` is imported; a look at its spec or a failed import leaves it."""

    def __init__(self, first: str, then: str) -> None:
        self.first, self.then = first, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.first:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self)
        return spec


class _Followed(Loader):
    """A loader that imports another module when it is done."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self.loader, self.waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self.waiting)
        if self.waiting.then not in sys.modules:  # else some thread is at it, and may wait for the module just imported
            importlib.import_module(self.waiting.then)
