"""Edits of a packed layer that a cache makes on all its layers together, after it has edited the block table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..pages.table import BlockTable
from .packed_kv import Step

# A layer's tensors besides its pages: exact tokens and what keys are balanced with, which have a row for each of the batch,
ROW_STATE = ("ring_key", "ring_value", "sink_key", "sink_value")
BALANCE_STATE = ("balance", "query_energy")
# and those that rows share.
OTHER_STATE = ("flags", "counters")
BALANCE_CONSTANTS = ("partner", "partner_share")


class LayerEdits:
    """The part of `TurboQuantLayer` that edits what is there; `BlockTable` has done its part before each of these."""

    table: BlockTable
    config: Any
    device: torch.device
    counters: Tensor
    flags: Tensor
    balance: Tensor | None
    query_energy: Tensor | None
    is_initialized: bool

    def begin(self) -> None:
        """As before the first token."""
        self.is_initialized = False
        self.length = self.packed_end = 0  # host counters, exact in the dynamic mode
        self.is_empty = True
        self.pending: Step | None = None
        self.offload_after_commit = False
        self._valid: tuple[object, ...] | None = None  # what states looked like that were found to fit

    def row_state_names(self) -> tuple[str, ...]:
        return ROW_STATE if self.balance is None else ROW_STATE + BALANCE_STATE

    def state_names(self) -> tuple[str, ...]:
        return self.row_state_names() + OTHER_STATE + (() if self.balance is None else BALANCE_CONSTANTS)

    def mark_static(self) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop every token. The static mode keeps its tensors, whose addresses a compiled graph knows."""
        if self.table.is_static and self.is_initialized:
            self.pending = None
            self.is_empty = True
            self.counters.zero_()
            self.counters[1] = self.config.sink_tokens
            self.flags.zero_()
            self._forget_balance()
            return
        self.begin()
        for name in (*ROW_STATE, *BALANCE_STATE, *OTHER_STATE, *BALANCE_CONSTANTS, "on_device"):
            self.__dict__.pop(name, None)

    def _forget_balance(self) -> None:
        if self.balance is not None and self.query_energy is not None:
            self.balance.zero_()
            self.query_energy.zero_()

    def cut(self, length: int, packed_end: int, used: int, no_page_left: bool) -> None:
        """Forget positions from `length` on, as the table has done (`BlockTable.crop`); factors go with the last page."""
        self.length, self.packed_end = length, packed_end
        self.is_empty = length == 0
        if no_page_left:
            self._forget_balance()
        self.counters.copy_(torch.tensor([length, packed_end, used], dtype=torch.int32, device="cpu"))

    @torch.inference_mode(False)
    def select_rows(self, indices: Tensor) -> None:
        """Copy the exact parts of rows; their pages moved in the table."""
        self._valid = None
        index = indices.to(self.device)
        for name in self.row_state_names():
            rows = getattr(self, name).index_select(0, index)
            if self.table.is_static:
                getattr(self, name).copy_(rows)
            else:
                setattr(self, name, rows)

    @torch.inference_mode(False)
    def fork(self, table: BlockTable) -> Any:
        """A layer with the same tokens whose pages are those of `table`, a fork of this layer's."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.table = table
        if self.is_initialized:
            for name in self.state_names():
                setattr(twin, name, getattr(self, name).clone())
            twin.on_device = table.on(self.device)
        return twin

    @torch.inference_mode(False)
    def move(self, device: torch.device) -> None:
        """Take all but the pages, which the table has moved, to `device`."""
        for name in self.state_names():
            setattr(self, name, getattr(self, name).to(device))
        self.device, self._valid = device, None
        self.on_device = self.table.on(device)
        self.mark_static()

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "the layers of a TurboQuantCache share one block table: call reset, crop, reorder_cache,"
            " batch_repeat_interleave or batch_select_indices on the cache, not on a layer."
        )

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _whole_cache_only
