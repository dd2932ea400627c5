"""The memory that a call takes for a while, counted at every op on tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tq_hf.reporting.memory import tensors_of


class Peak(TorchDispatchMode):
    """The most bytes at a time that tensors take inside this context.

    Args:
        held: those that are there before, which the call may free or replace.

    Attributes:
        before, peak, after: bytes of the storages that are alive, each counted once.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note(list(held))
        self.before = self.peak = self.after = self._alive()

    def _note(self, made: Any) -> None:
        for tensor in tensors_of(made):
            storage = tensor.untyped_storage()
            known = StorageWeakRef(storage)
            self._storages[known.cdata] = (known, storage.nbytes())

    def _alive(self) -> int:
        self._storages = {at: held for at, held in self._storages.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._note(made)
        self.after = self._alive()
        self.peak = max(self.peak, self.after)
        return made

    @property
    def extra(self) -> int:
        """Bytes that are there for a while only: beyond what is there before and what is there afterwards."""
        return self.peak - max(self.before, self.after)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.after = self._alive()
