"""One module imported after another, whoever imports that one: how `import tq_hf` registers its attention function without
importing torch and transformers, which takes seconds, before anybody needs them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(first: str, then: str) -> None:
    """Import the module `then` after `first`: now if that is there already, else as soon as somebody has imported it."""
    if first in sys.modules:
        importlib.import_module(then)
    else:
        sys.meta_path.insert(0, _Waiting(first, then))


class _Waiting(MetaPathFinder):
    """Finds what the other finders find, and is gone after `first`."""

    def __init__(self, first: str, then: str) -> None:
        self.first, self.then = first, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.first or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self.then)
        return spec


class _Followed(Loader):
    """A loader that imports another module when it is done."""

    def __init__(self, loader: Loader, then: str) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        importlib.import_module(self.then)
