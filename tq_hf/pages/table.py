"""The block table: which page holds which positions of which row.

Pages never change once written, so rows may share them: edits of the table (crop, reordering, repeating) move page ids
and reference counts, never packed data. All packed layers of a cache advance together, so they share one table.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from .device import DeviceTable, int32, table_tensors
from .edits import SPARE_ENTRIES, TableEdits
from .pool import NO_PAGE, PagePool, while_alone

logger = logging.getLogger(__name__)


class BlockTable(TableEdits):
    """Which page each entry of each row uses, and which positions an entry covers.

    Two modes. *Dynamic*: the host knows every length; entries are added when a page falls due (`reserve`) and mirrored
    to the devices. *Static* (`max_cache_len` given): every row owns a page for every entry from the start, lengths live
    on the device, and nothing here is called while decoding.

    Args:
        page_size: tokens a page.
        sink_tokens: exact first tokens of a row; pages start at this position.
        recent_window: newest tokens that are never packed.
        max_cache_len: capacity in tokens, for the static mode.
    """

    origin = 0  # the position that all others count from; a table for sliding layers moves it

    def __init__(self, page_size: int, sink_tokens: int, recent_window: int, max_cache_len: int | None = None) -> None:
        self.page_size = page_size
        self.sink_tokens = sink_tokens
        self.recent_window = recent_window
        self.max_cache_len = max_cache_len
        self.is_static = max_cache_len is not None
        self.dense_read_noted = False
        self.slots = 0
        self.rows: list[list[int]] | None = None
        self.clear()

    def add_layer(self) -> int:
        """The slot by which one more layer finds its pages."""
        self.slots += 1
        return self.slots - 1

    def alone(self) -> AbstractContextManager[Any]:
        """Keep forks in other threads from the pages that they share with this table. Static tables share with none."""
        return nullcontext() if self.is_static else self.pages.lock

    @property
    def batch_size(self) -> int | None:
        """Rows of the batch; None before the first token."""
        return None if self.rows is None else len(self.rows)

    @property
    def static_entries(self) -> int:
        """Entries of a static table: the whole pages of `max_cache_len`, and spare ones for crops."""
        assert self.max_cache_len is not None
        packable = max(0, self.max_cache_len - self.sink_tokens - self.recent_window)
        return packable // self.page_size + SPARE_ENTRIES

    def clear(self) -> None:
        """Forget everything, as before the first token. Pages that forks share stay theirs."""
        self._leave()
        self._use(PagePool())
        self.rows = None
        self.spans: list[tuple[int, int]] = []
        self._start_rows_at([])
        self.packed_end = self.sink_tokens
        self._padding_noted = -1
        self._devices: dict[torch.device, DeviceTable] = {}
        self.is_torn = False

    def _use(self, pages: PagePool) -> None:
        self.pages = pages
        pages.users.add(self)

    def _leave(self) -> None:
        pages: PagePool | None = self.__dict__.get("pages")
        if pages is not None:
            with pages.lock:
                pages.users.discard(self)
                self._give_back_pages()

    def __del__(self) -> None:
        """A fork that is dropped gives its pages back. It takes no lock: it may run in the middle of anything."""
        self._give_back_pages()

    def _give_back_pages(self) -> None:
        pages: PagePool | None = self.__dict__.get("pages")
        if pages is not None and self.rows:
            pages.release_later(None if self.is_torn else self.rows)

    def begin(self, batch_size: int) -> None:
        """Set the number of rows at the first token."""
        if self.rows is not None:
            return
        self.rows = [[] for _ in range(batch_size)]
        self._start_rows_at([0] * batch_size)
        if self.is_static:
            for e in range(self.static_entries):
                self.spans.append((self.sink_tokens + e * self.page_size, self.page_size))
                for row in self.rows:
                    row.append(self.pages.allocate())

    # -- dynamic mode ------------------------------------------------------------------------------------------------
    def due(self, length: int, packed_end: int) -> int:
        """Pages that fall due when a layer packed up to `packed_end` holds `length` tokens."""
        return max(0, (length - packed_end - self.recent_window) // self.page_size)

    def note_padding(self, keep: Tensor, length: int | Tensor, new: int) -> None:
        """Find where rows start that had nothing but padding in their first `length` positions.

        Every layer calls this; the first call of a forward pass does the work.

        Args:
            keep: bool or uint8 [B, >= length + new], zero where a position is padding.
            length: positions that were known before (a device scalar in the static mode).
            new: positions that come now.
        """
        kept = keep != 0
        first = torch.where(kept.any(1), kept.int().argmax(1), length + new)  # [B]
        if isinstance(length, Tensor):
            for device_table in self._devices.values():
                start = device_table.row_start
                start.copy_(torch.where(start >= length.to(start.device), first.to(start), start))
        elif self._padding_noted != length + new:
            self._padding_noted = length + new
            self._start_rows_at(
                [start if start < length else found for start, found in zip(self.row_starts, first.tolist(), strict=True)]
            )
            for device_table in self._devices.values():
                device_table.row_start.copy_(int32(self.row_starts), non_blocking=True)

    def note_no_padding(self, length: int) -> None:
        """Let rows start where they do: a layer has taken its tokens up to `length` in without a mask.

        A mask that another layer brings in the same forward pass must not move them any more: first tokens are kept apart.
        """
        self._padding_noted = max(self._padding_noted, length)

    @while_alone
    def reserve(self, packed_end: int) -> None:
        """Add entries until pages reach `packed_end` (layers after the first find them there already)."""
        assert self.rows is not None
        if self.packed_end >= packed_end:
            return
        self.pages.compact()
        first_new, had_end = len(self.spans), self.packed_end
        try:
            while self.packed_end < packed_end:
                start, end = self.packed_end, self.packed_end + self.page_size
                self.spans.append((start, self.page_size))
                for row, row_start in zip(self.rows, self.row_starts, strict=True):
                    row.append(self.pages.allocate() if self._needs_page(end, row_start) else NO_PAGE)
                self.packed_end = end
            for device_table in self._devices.values():
                device_table.write(self.rows, self.spans, self.row_starts, first_new)
        except BaseException:  # the next layer would take them for written
            self.packed_end = had_end
            del self.spans[first_new:]
            for row in self.rows:
                del row[first_new:]
            self.pages.recount()
            raise

    def _needs_page(self, end: int, row_start: int) -> bool:
        """Whether a page that ends there has anything to hold but padding and sinks."""
        return end > row_start + self.sink_tokens

    def trim(self, length: int) -> None:
        """Forget row starts beyond `length`: such rows have nothing but padding left, and start anew."""
        self._padding_noted = -1
        self._start_rows_at([min(start, length) for start in self.row_starts])
        for device_table in self._devices.values():
            device_table.row_start.clamp_(max=length)

    def take_back(self, length: int) -> None:
        """Forget what a forward pass that ended early has announced of the tokens from `length` on."""
        self.trim(length)

    def is_padding_only(self, length: int) -> bool:
        """Dynamic mode: whether some row has had nothing but padding in its first `length` positions."""
        return self.latest_start >= length

    def restart(self) -> None:
        """Static mode: as before the first token, every tensor at its address."""
        if self.is_torn:
            self.pages.recount()
        self._start_rows_at([0] * len(self.row_starts))
        self.spans = [(self.sink_tokens + e * self.page_size, self.page_size) for e in range(len(self.spans))]
        self._own_entries(0)
        self._rewrite()
        for device_table in self._devices.values():
            device_table.row_start.zero_()
        self.is_torn = False

    def note_dense_read(self) -> None:
        """Say once a cache that some attention function reads dequantized copies, and how to avoid it."""
        if not self.dense_read_noted and not torch.compiler.is_compiling():
            self.dense_read_noted = True
            logger.warning(
                "this model's attention function does not read packed pages: TurboQuantCache hands it a dequantized copy"
                " of the history at every step (right, but slow and large). Load the model with"
                " attn_implementation='turboquant', or call model.set_attn_implementation('turboquant'); models that add a"
                " position bias to scores (ALiBi, T5) need the copy anyway."
            )

    def packed_tokens(self, used: int) -> int:
        """Tokens in the first `used` entries, over all rows."""
        counts = [count for _, count in self.spans[:used]]
        return sum(n for row in self.rows or [] for page, n in zip(row, counts, strict=False) if page != NO_PAGE)

    # -- static mode -------------------------------------------------------------------------------------------------
    def restore(
        self, page_ids: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], row_starts: Sequence[int], pages: int
    ) -> list[int]:
        """Hold the rows of a saved table, whose pages are numbered from 0 (`saving.py`), in place of none.

        Returns:
            The page id that each of the `pages` saved ones gets here.
        """
        self.begin(len(row_starts))
        assert self.rows is not None
        place = list(range(pages))
        end = sum(spans[-1]) if spans else self.sink_tokens
        if self.is_static:
            placed: dict[int, int] = {}
            for row, saved in zip(self.rows, page_ids, strict=True):
                for entry, page in enumerate(saved):
                    own = row[entry]
                    row[entry] = placed.setdefault(page, own)
                    if row[entry] != own:
                        self.pages.release([own])
                        self.pages.share([row[entry]])
            place = [placed[page] for page in place]
            room = len(self.spans) - len(spans)
            self.spans = [*spans, *((end + e * self.page_size, self.page_size) for e in range(room))]
            self._rewrite()
            for device_table in self._devices.values():
                device_table.row_start.copy_(int32(row_starts), non_blocking=True)
            return place
        self.pages.references = [0] * pages
        self.rows = [list(row) for row in page_ids]
        for row in self.rows:
            self.pages.share(row)
        self.spans, self.packed_end = list(spans), end
        self._start_rows_at(list(row_starts))
        self._refresh()
        return place

    # -- copies ------------------------------------------------------------------------------------------------------
    @while_alone
    def fork(self) -> Self:
        """A table of the same pages (dynamic mode)."""
        twin = self._twin()
        with twin.tearing():
            twin._use(PagePool() if self.rows is None else self.pages)
            for row in twin.rows or []:
                self.pages.share(row)
        return twin

    @while_alone
    @torch.inference_mode(False)
    def moved(self, device: torch.device) -> Callable[[], None]:
        """Copy the pages and this table's tensors to `device`; what is returned makes the table use the copies.

        Other tables of the pool keep theirs.
        """
        pages, rows = self._copied_pages(device)
        devices: dict[torch.device, DeviceTable] = {}
        for held in list(self._devices.values())[:1]:  # a static table's starts are on the device only
            page_ids, entries, _ = table_tensors(device, rows or [], self.spans, self.row_starts, spare=not self.is_static)
            devices[device] = DeviceTable(device, page_ids, entries, held.row_start.to(device, copy=True))

        def use() -> None:
            self._leave()
            self.rows, self._devices = rows, devices
            self._use(pages)

        return use

    def _twin(self) -> Self:
        """The same rows and spans, without a pool and without tensors."""
        twin = object.__new__(type(self))
        # Never with the pages, not for a moment: ended there, it would give back what it has not shared.
        twin.__dict__.update({name: value for name, value in self.__dict__.items() if name != "pages"})
        twin.rows = None if self.rows is None else [list(row) for row in self.rows]
        twin.spans, twin.row_starts = list(self.spans), list(self.row_starts)
        twin._devices = {}
        return twin

    def _copied_pages(self, device: torch.device | None = None) -> tuple[PagePool, list[list[int]] | None]:
        """A pool with copies of the pages that the rows use, and the rows in its numbers.

        Static mode: of all pages, by the same numbers, since every one is some row's to write.
        """
        rows = self.rows or []
        used = {page for row in rows for page in row} - {NO_PAGE}
        kept = list(range(self.pages.capacity)) if self.is_static else sorted(used)
        pages = self.pages.copy(kept, device)
        number = dict(zip(kept, range(len(kept)), strict=True))
        rows = [[number.get(page, NO_PAGE) for page in row] for row in rows]
        for row in rows:
            pages.share(row)
        pages.free = [page for page, references in enumerate(pages.references) if not references]
        return pages, None if self.rows is None else rows

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: with pages of its own, as in a deep copy. Those of forks that stay behind have no user there."""
        with self.alone():
            pages, rows = self._copied_pages()
            return {**self.__dict__, "pages": pages, "rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:  # unpickling
        self.__dict__.update(state)
        self._use(self.pages)
        if not self.is_static:
            self._refresh()

    @while_alone
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = self._twin()
        pages, twin.rows = self._copied_pages()
        twin._use(pages)
        twin._devices = copy.deepcopy(self._devices, memo)  # layers know these objects too
        if not self.is_static:
            twin._refresh()
        return twin

    # -- device side -------------------------------------------------------------------------------------------------
    @while_alone
    def on(self, device: torch.device) -> DeviceTable:
        """The table as tensors on `device`."""
        if device not in self._devices:
            assert self.rows is not None
            tensors = table_tensors(device, self.rows, self.spans, self.row_starts, spare=not self.is_static)
            self._devices[device] = DeviceTable(device, *tensors)
        return self._devices[device]

    def _refresh(self) -> None:
        for device_table in self._devices.values():
            device_table.hold(*table_tensors(device_table.device, self.rows or [], self.spans, self.row_starts))

    def tensors(self) -> list[Tensor]:
        return [t for d in self._devices.values() for t in (d.page_ids, d.entries, d.row_start)]
