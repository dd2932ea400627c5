"""Edits of a block table: first all is made that takes memory and may fail, then it is put into effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .device import DeviceTable, table_tensors
from .pool import PagePool, while_alone

# Spare entries of a static table: each crop that cuts into a page leaves one entry shorter than a page.
SPARE_ENTRIES = 4


@dataclass(frozen=True)
class Edit:
    """What a dynamic block table is going to be, made with all the memory that it takes: `BlockTable.take` needs none."""

    rows: list[list[int]]
    spans: list[tuple[int, int]]
    row_starts: list[int]
    packed_end: int
    tensors: dict[torch.device, tuple[Tensor, Tensor, Tensor]]  # of each `DeviceTable`


class Crop(NamedTuple):
    """What a crop leaves of a block table.

    Attributes:
        kept: start and count of each entry in use.
        end: the first position that is in no page any more.
        edit: the table then, in the dynamic mode.
    """

    kept: list[tuple[int, int]]
    end: int
    edit: Edit | None


class TableEdits:
    """The part of `BlockTable` that changes what is there.

    Attributes:
        is_torn: whether an edit was interrupted while it was put into effect: then only `clear` and `restart` help.
    """

    is_torn = False
    page_size: int
    sink_tokens: int
    recent_window: int
    max_cache_len: int | None
    pages: PagePool
    rows: list[list[int]] | None
    spans: list[tuple[int, int]]
    row_starts: list[int]
    latest_start: int
    packed_end: int
    _devices: dict[torch.device, DeviceTable]

    def entries_to(self, packed_end: int) -> int:
        """Entries of what is packed before that position."""
        return sum(start < packed_end for start, _ in self.spans)

    @while_alone
    def drop_entries(self, packed_end: int) -> None:
        """Dynamic mode: give back the entries from `packed_end` on, which a forward pass that ended early had reserved."""
        self.take(self.edit(spans=self.spans[: self.entries_to(packed_end)], packed_end=packed_end))

    def crop(self, length: int, used: int) -> tuple[int, int]:
        """`make_crop` of `prepare_crop`, whose arguments these are.

        Returns:
            `Crop.end`, and the entries in use.
        """
        crop = self.prepare_crop(length, used)
        self.make_crop(crop)
        self.pages.compact()
        return crop.end, len(crop.kept)

    def prepare_crop(self, length: int, used: int) -> Crop:
        """Drop pages that start at `length` or later and shorten the one that crosses it. No page is rewritten.

        Args:
            length: tokens that remain.
            used: entries in use.

        Returns:
            What `make_crop` puts into effect; nothing is changed before.

        Raises:
            RuntimeError: a static table has been cropped into its pages more often than it has spare entries.
        """
        kept = [(start, min(count, length - start)) for start, count in self.spans[:used] if start < length]
        end = sum(kept[-1]) if kept else self.sink_tokens
        if self.max_cache_len is not None:
            room = len(self.spans) - len(kept)
            needed = -(-max(0, self.max_cache_len - self.recent_window - end) // self.page_size)
            if needed > room:
                raise RuntimeError(
                    f"a static cache can be cropped into packed pages {SPARE_ENTRIES} times, no more: call cache.reset(),"
                    " or use a cache without max_cache_len."
                )
            return Crop(kept, end, None)
        return Crop(kept, end, self.edit(spans=kept, packed_end=end))

    @while_alone
    def make_crop(self, crop: Crop) -> None:
        if crop.edit is not None:
            self.take(crop.edit)
            return
        with self.tearing():
            room = len(self.spans) - len(crop.kept)
            self.spans = crop.kept + [(crop.end + e * self.page_size, self.page_size) for e in range(room)]
            self._own_entries(len(crop.kept))
            self._rewrite()

    @torch.inference_mode(False)
    def edit(
        self,
        rows: list[list[int]] | None = None,
        spans: list[tuple[int, int]] | None = None,
        row_starts: list[int] | None = None,
        packed_end: int | None = None,
    ) -> Edit:
        """Dynamic mode: prepare other rows, spans, ...; None keeps what is. Nothing changes until `take`.

        Rows lose the entries that have no span.
        """
        spans = self.spans if spans is None else spans
        rows = [row[: len(spans)] for row in rows or self.rows or []]
        row_starts = self.row_starts if row_starts is None else row_starts
        end = self.packed_end if packed_end is None else packed_end
        tensors = {device: table_tensors(device, rows, spans, row_starts) for device in self._devices}
        return Edit(rows, list(spans), list(row_starts), end, tensors)

    @while_alone
    def take(self, edit: Edit) -> None:
        """Put what `edit` has prepared into effect; it allocates no tensor."""
        with self.tearing():
            for row in edit.rows:
                self.pages.share(row)
            for row in self.rows or []:
                self.pages.release(row)
            self.put(edit)

    def put(self, edit: Edit) -> None:
        """As `take`, with the pages counted already."""
        if self.rows is not None:
            self.rows = edit.rows
        self.spans, self.packed_end = edit.spans, edit.packed_end
        self._start_rows_at(edit.row_starts)
        for device, tensors in edit.tensors.items():
            self._devices[device].hold(*tensors)

    @contextmanager
    def tearing(self) -> Iterator[None]:
        """Around what must not end halfway: an interrupt in there leaves `is_torn`."""
        before, self.is_torn = self.is_torn, True
        yield
        self.is_torn = before

    def selected(self, indices: Sequence[int]) -> Edit:
        """The edit that makes row i a copy of row `indices[i]`: pages are shared, not copied."""
        assert self.rows is not None
        return self.edit([list(self.rows[i]) for i in indices], row_starts=[self.row_starts[i] for i in indices])

    def renumbered(self, moves: Mapping[int, int]) -> Edit:
        """The edit after which `moves[page]` stands for each of these pages, for a pool that is going to move them."""
        return self.edit([[moves.get(page, page) for page in row] for row in self.rows or []])

    def permute_rows(self, indices: Sequence[int], used: int) -> None:
        """Static mode: make row i a copy of row `indices[i]`, every tensor at its address.

        The `used` entries in use are shared; for those to come, each row keeps pages of its own.
        """
        assert self.rows is not None
        past = [self.rows[i][:used] for i in indices]
        with self.tearing():
            for row in past:
                self.pages.share(row)
            for row, pages in zip(self.rows, past, strict=True):
                self.pages.release(row[:used])
                row[:used] = pages
            self._rewrite()
            for device_table in self._devices.values():
                starts = device_table.row_start
                starts.copy_(starts[torch.tensor(indices, device="cpu").to(starts.device)])

    def _start_rows_at(self, positions: list[int]) -> None:
        """Note where rows start, and the latest of these positions: layers ask for it at every step."""
        self.row_starts = positions
        self.latest_start = max(positions, default=0)

    def _own_entries(self, used: int) -> None:
        """Static mode: give each row a page of its own for every entry from `used` on, which it is going to write.

        There are as many pages as entries of all rows, so as long as rows share one, another is free.
        """
        for row in self.rows or []:
            for entry in range(used, len(row)):
                if self.pages.references[row[entry]] > 1:
                    self.pages.release(row[entry : entry + 1])
                    row[entry] = self.pages.allocate()

    def _rewrite(self) -> None:
        for device_table in self._devices.values():
            device_table.write(self.rows or [], self.spans, self.row_starts, 0)
