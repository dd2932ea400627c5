"""Edits of a packed layer that a cache makes on all its layers together, after it has edited the block table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import is_out_of_memory
from ..pages.device import int32
from ..pages.table import BlockTable
from .packed_kv import Step

# A layer's tensors besides its pages: exact tokens and what keys are balanced with, which have a row for each of the batch,
RING = ("ring_key", "ring_value")
ROW_STATE = (*RING, "sink_key", "sink_value")
BALANCE_STATE = ("balance", "query_energy")
# and those that rows share.
OTHER_STATE = ("flags", "counters")
BALANCE_CONSTANTS = ("partner", "partner_share")


NOTHING: dict[str, Tensor] = {}


class Before(NamedTuple):
    """What a layer was before the tokens of the forward pass under way, as far as they change it (and but for its flags).

    Of the ring, these are the tokens in no page yet whose slots others take: for a decode step, none.

    Attributes:
        copies: whole tensors, by name.
        overwritten: what was in `slots` of the ring's tensors, by name.
        slots: int64 on the layer's device.
    """

    length: int
    packed_end: int
    is_empty: bool
    copies: dict[str, Tensor] = NOTHING
    overwritten: dict[str, Tensor] = NOTHING
    slots: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.copies.values(), *self.overwritten.values(), *([] if self.slots is None else [self.slots])]


class LayerEdits:
    """The part of `TurboQuantLayer` that edits what is there; `BlockTable` has done its part before each of these."""

    table: BlockTable
    config: Any
    device: torch.device
    counters: Tensor
    flags: Tensor
    balance: Tensor | None
    query_energy: Tensor | None
    ring_key: Tensor
    is_initialized: bool

    def begin(self) -> None:
        """As before the first token."""
        self.is_initialized = False
        self.length = self.packed_end = 0  # host counters, exact in the dynamic mode
        self.is_empty = True
        self.pending: Step | None = None
        self.offload_after_commit = False
        self.reported: list[str] = []  # by `debug.py`
        self._valid: tuple[object, ...] | None = None  # what states looked like that were found to fit
        self.before: Before | None = None  # dynamic mode
        self.is_torn = False  # whether a commit, or attention together with one, has ended halfway

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
            self.is_empty, self.is_torn = True, False
            self.counters.zero_()
            self.counters[1:2].fill_(self.config.sink_tokens)
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

    # -- a forward pass that ended early ---------------------------------------------------------------------------------
    def _as_it_is(self, step: Step, due: int, learns: bool) -> Before:
        """What `take_back` needs to undo the commit of a step that packs `due` pages and may make balance factors."""
        found = self._overwritten(step.new, due)
        if not (found or learns):  # as in most decode steps
            return Before(self.length, self.packed_end, self.is_empty)
        names: tuple[str, ...] = ()
        if learns:
            names = BALANCE_STATE if due else ("query_energy",)  # factors are made with the first page
        with torch.inference_mode(False):
            copies = {name: getattr(self, name).clone() for name in names}
            if not found:
                return Before(self.length, self.packed_end, self.is_empty, copies)
            slots = torch.tensor(found, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)
            overwritten = {name: getattr(self, name).index_select(2, slots) for name in RING}
        return Before(self.length, self.packed_end, self.is_empty, copies, overwritten, slots)

    def _overwritten(self, new: int, due: int) -> list[int]:
        """Slots of the ring that have a token which is in no page, and get another one with `new` tokens and `due` pages."""
        ring, total = self.ring_key.shape[2], self.length + new
        if total - self.packed_end <= ring:
            return []
        stays = max(self.length, self.packed_end + due * self.config.page_size)  # the first of those that stay exact
        taken = {position % ring for position in range(stays, total)}
        return [slot for position in range(self.packed_end, self.length) if (slot := position % ring) in taken]

    def can_take_back(self, length: int) -> bool:
        """Whether `take_back` leaves so many tokens, from the sequence's start."""
        if self.pending is not None and not self.is_torn:
            return self.length + self.table.origin == length
        return self.before is not None and self.before.length + self.table.origin == length

    def take_back(self) -> None:
        """Dynamic mode: be as before the tokens of the newest `update`. The table may keep entries that it reserved."""
        was_committed = self.is_torn or self.pending is None
        self.pending = None
        if not was_committed or self.before is None:
            return
        length, packed_end, self.is_empty, copies, overwritten, slots = self.before
        used = self.table.entries_to(packed_end)
        self.counters.copy_(int32([length, packed_end, used]), non_blocking=True)
        self.length, self.packed_end = length, packed_end
        for name, tensor in copies.items():
            setattr(self, name, tensor)
        for name, tensor in overwritten.items():
            getattr(self, name).index_copy_(2, slots, tensor)
        self.table.take_back(length)
        self.before, self.is_torn = None, False

    # -- edits of a layer at rest ----------------------------------------------------------------------------------------
    def cut(self, length: int, packed_end: int, counters: Tensor, no_page_left: bool) -> None:
        """Forget positions, as the table has done (`BlockTable.crop`); factors go with the last page.

        Args:
            length, packed_end: what remains.
            counters: the same and the entries in use, int32 [3] on the CPU.
        """
        self.length, self.packed_end = length, packed_end
        self.is_empty = self.length == 0
        if no_page_left:
            self._forget_balance()
        self.counters.copy_(counters)

    @torch.inference_mode(False)
    def selected_rows(self, index: Tensor) -> dict[str, Tensor]:
        """Dynamic mode: copies of the exact parts of rows, by name: what `take` puts in their place.

        Args:
            index: int64 on the layer's device, a row for each row to be.
        """
        return {name: getattr(self, name).index_select(0, index) for name in self.row_state_names()}

    def take(self, state: dict[str, Tensor]) -> None:
        """Hold these tensors in place of those of the same names."""
        self._valid = None
        for name, tensor in state.items():
            setattr(self, name, tensor)

    @property
    def largest_row(self) -> int:
        """Bytes that a row takes in the largest tensor of exact parts."""
        return max(held.nbytes // len(held) for held in (getattr(self, name) for name in self.row_state_names()))

    @torch.inference_mode(False)
    def select_rows(self, index: Tensor, spare: Tensor) -> None:
        """As `take` of `selected_rows`, for no more rows than there are, one tensor after the other.

        Where there is no memory for one, it is written in place, by way of `spare`. A layer that had to drop rows so has its
        old memory until its next such edit. The static mode keeps all addresses.

        Args:
            spare: uint8 on the layer's device, `largest_row` bytes or more for each row of `index`.
        """
        self._valid = None
        for name in self.row_state_names():
            held = getattr(self, name)
            try:
                chosen = held.index_select(0, index)
                stays = self.table.is_static
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                shape, stays = (len(index), *held.shape[1:]), True
                chosen = spare[: held.nbytes // len(held) * len(index)].view(held.dtype).view(shape)
                torch.index_select(held, 0, index, out=chosen)
            if stays:
                chosen = (held if len(index) == len(held) else held[: len(index)]).copy_(chosen)
            setattr(self, name, chosen)

    @torch.inference_mode(False)
    def fork(self, table: BlockTable) -> Any:
        """A layer with the same tokens whose pages are those of `table`, a fork of this layer's."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.table, twin.before = table, None
        if self.is_initialized:
            for name in self.state_names():
                setattr(twin, name, getattr(self, name).clone())
            twin.on_device = table.on(self.device)
        return twin

    @torch.inference_mode(False)
    def on(self, device: torch.device) -> dict[str, Tensor]:
        """All tensors but the pages on `device`, by name: what `move` needs."""
        return {name: getattr(self, name).to(device) for name in self.state_names()}

    def move(self, device: torch.device, state: dict[str, Tensor]) -> None:
        """Be on `device`, where the table is already, with the tensors of `on`."""
        for name, tensor in state.items():
            setattr(self, name, tensor)
        self.device, self._valid = device, None
        self.on_device = self.table.on(device)
        self.mark_static()

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "the layers of a TurboQuantCache share one block table: call reset, crop, reorder_cache,"
            " batch_repeat_interleave or batch_select_indices on the cache, not on a layer."
        )

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _whole_cache_only
