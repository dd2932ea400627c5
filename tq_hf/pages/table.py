"""The block table: which page holds which positions of which row.

Pages never change once written, so rows may share them: edits of the table (crop, reordering, repeating) move page ids
and reference counts, never packed data. All packed layers of a cache advance together, so they share one table.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import Self

from .pool import NO_PAGE, PagePool

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

# Spare entries of a static table: each crop that cuts into a page leaves one entry shorter than a page.
SPARE_ENTRIES = 4


def while_alone(method: Method) -> Method:
    """A method that runs under `alone()` of the block table that it belongs to, or that its layer has."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        table = self if isinstance(self, BlockTable) else self.table
        with table.alone():
            return method(self, *args, **kwargs)

    return cast(Method, locked)


class BlockTable:
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
        self.dense_read_noted = False
        self.slots = 0
        self.rows: list[list[int]] | None = None
        self.clear()

    def add_layer(self) -> int:
        """The slot by which one more layer finds its pages."""
        self.slots += 1
        return self.slots - 1

    @property
    def is_static(self) -> bool:
        return self.max_cache_len is not None

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

    def _start_rows_at(self, positions: list[int]) -> None:
        """Note where rows start, and the latest of these positions: layers ask for it at every step."""
        self.row_starts = positions
        self.latest_start = max(positions, default=0)

    def _use(self, pages: PagePool) -> None:
        self.pages = pages
        pages.users.add(self)

    def _leave(self) -> None:
        pages: PagePool | None = self.__dict__.get("pages")
        if pages is not None:
            with pages.lock:
                self.__del__()
                pages.users.discard(self)

    def __del__(self) -> None:
        """A fork that is dropped gives its pages back. It takes no lock: it may run in the middle of anything."""
        pages: PagePool | None = self.__dict__.get("pages")
        if pages is not None and self.rows:
            pages.release_later(self.rows)

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
                start.copy_(torch.where(start >= length, first.to(start), start))
        elif self._padding_noted != length + new:
            self._padding_noted = length + new
            self._start_rows_at(
                [start if start < length else found for start, found in zip(self.row_starts, first.tolist(), strict=True)]
            )
            for device_table in self._devices.values():
                device_table.row_start.copy_(_int32(self.row_starts))

    @while_alone
    def reserve(self, packed_end: int) -> None:
        """Add entries until pages reach `packed_end` (layers after the first find them there already)."""
        assert self.rows is not None
        if self.packed_end < packed_end:
            self.pages.compact()
        first_new = len(self.spans)
        while self.packed_end < packed_end:
            start, end = self.packed_end, self.packed_end + self.page_size
            self.spans.append((start, self.page_size))
            for row, row_start in zip(self.rows, self.row_starts, strict=True):
                row.append(self.pages.allocate() if self._needs_page(end, row_start) else NO_PAGE)
            self.packed_end = end
        if len(self.spans) > first_new:
            for device_table in self._devices.values():
                device_table.write(self, first_new)

    def _needs_page(self, end: int, row_start: int) -> bool:
        """Whether a page that ends there has anything to hold but padding and sinks."""
        return end > row_start + self.sink_tokens

    def trim(self, length: int) -> None:
        """Forget row starts beyond `length`: such rows have nothing but padding left, and start anew."""
        self._padding_noted = -1
        self._start_rows_at([min(start, length) for start in self.row_starts])
        for device_table in self._devices.values():
            device_table.row_start.clamp_(max=length)

    def is_padding_only(self, length: int) -> bool:
        """Dynamic mode: whether some row has had nothing but padding in its first `length` positions."""
        return self.latest_start >= length

    @while_alone
    def crop(self, length: int, used: int) -> tuple[int, int]:
        """Drop pages that start at `length` or later and shorten the one that crosses it. No page is rewritten.

        Args:
            length: tokens that remain.
            used: entries in use.

        Returns:
            The first position that is in no page any more, and the entries in use.

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
            self.spans = kept + [(end + e * self.page_size, self.page_size) for e in range(room)]
            self._own_entries(len(kept))
            self._rewrite()
            return end, len(kept)
        for row in self.rows or []:
            self.pages.release(row[len(kept) :])
            del row[len(kept) :]
        self.spans, self.packed_end = kept, end
        self.pages.compact()
        self._refresh()
        return end, len(kept)

    def restart(self) -> None:
        """Static mode: as before the first token, every tensor at its address."""
        self._start_rows_at([0] * len(self.row_starts))
        self.spans = [(self.sink_tokens + e * self.page_size, self.page_size) for e in range(len(self.spans))]
        self._own_entries(0)
        self._rewrite()
        for device_table in self._devices.values():
            device_table.row_start.zero_()

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

    @while_alone
    def select_rows(self, indices: Sequence[int]) -> None:
        """Make row i a copy of row `indices[i]`: pages are shared, not copied."""
        assert self.rows is not None
        chosen = [list(self.rows[i]) for i in indices]
        for row in chosen:
            self.pages.share(row)
        for row in self.rows:
            self.pages.release(row)
        self.rows = chosen
        self._start_rows_at([self.row_starts[i] for i in indices])
        self.pages.compact()
        self._refresh()

    def renumber(self, number: Mapping[int, int]) -> None:
        """Use `number[page]` for every page: the pool has moved them."""
        for row in self.rows or []:
            row[:] = [number.get(page, NO_PAGE) for page in row]
        self._refresh()

    # -- static mode -------------------------------------------------------------------------------------------------
    def permute_rows(self, indices: Sequence[int], used: int) -> None:
        """Static mode: make row i a copy of row `indices[i]`, every tensor at its address.

        The `used` entries in use are shared; for those to come, each row keeps pages of its own.
        """
        assert self.rows is not None
        past = [self.rows[i][:used] for i in indices]
        for row in past:
            self.pages.share(row)
        for row, pages in zip(self.rows, past, strict=True):
            self.pages.release(row[:used])
            row[:used] = pages
        self._rewrite()
        for device_table in self._devices.values():
            starts = device_table.row_start
            starts.copy_(starts[torch.tensor(indices, device="cpu").to(starts.device)])

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
                device_table.row_start.copy_(_int32(row_starts))
            return place
        self.pages.references = [0] * pages
        self.rows = [list(row) for row in page_ids]
        for row in self.rows:
            self.pages.share(row)
        self.spans, self.packed_end = list(spans), end
        self._start_rows_at(list(row_starts))
        self._refresh()
        return place

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
            device_table.write(self, 0)

    # -- copies ------------------------------------------------------------------------------------------------------
    @while_alone
    def fork(self) -> Self:
        """A table of the same pages (dynamic mode)."""
        twin = self._twin()
        for row in twin.rows or []:
            self.pages.share(row)
        twin._use(PagePool() if self.rows is None else self.pages)
        return twin

    @while_alone
    def move(self, device: torch.device) -> None:
        """Put the pages and this table's tensors on `device`. Other tables of the pool keep theirs."""
        starts = [device_table.row_start for device_table in self._devices.values()]
        pages, rows = self._copied_pages(device)
        self._leave()
        self.rows = rows
        self._use(pages)
        self._devices = {}
        if starts:
            self.on(device).row_start.copy_(starts[0])

    def _twin(self) -> Self:
        """The same rows and spans, without a pool and without tensors."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        del twin.pages
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

    def __setstate__(self, state: dict[str, Any]) -> None:  # unpickling
        self.__dict__.update(state)
        self._use(self.pages)

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
    def on(self, device: torch.device) -> DeviceTable:
        """The table as tensors on `device`."""
        if device not in self._devices:
            self._devices[device] = DeviceTable(self, device)
        return self._devices[device]

    def _refresh(self) -> None:
        for device_table in self._devices.values():
            device_table.rebuild(self)

    def tensors(self) -> list[Tensor]:
        return [t for d in self._devices.values() for t in (d.page_ids, d.entries, d.row_start)]


def entry_room(entries: int) -> int:
    """How many entries the tensors of a dynamic table have room for when they are made for `entries`."""
    return max(16, 1 << max(0, entries - 1).bit_length())


class DeviceTable:
    """A block table's tensors on one device.

    Attributes:
        page_ids: int32 [B, E], the page of each entry or `NO_PAGE`.
        entries: int32 [E, 2], start and count.
        row_start: int32 [B].
    """

    def __init__(self, table: BlockTable, device: torch.device) -> None:
        self.device = device
        self.rebuild(table)

    @torch.inference_mode(False)
    def rebuild(self, table: BlockTable) -> None:
        assert table.rows is not None
        entries = len(table.spans)
        room = entries if table.is_static else entry_room(entries)
        self.page_ids = torch.full((len(table.rows), room), NO_PAGE, dtype=torch.int32, device=self.device)
        self.entries = torch.zeros((room, 2), dtype=torch.int32, device=self.device)
        self.row_start = _int32(table.row_starts).to(self.device)
        self.write(table, 0)

    def write(self, table: BlockTable, first: int) -> None:
        """Copy entries from `first` on to the device."""
        assert table.rows is not None
        last = len(table.spans)
        if last > self.entries.shape[0]:
            self.rebuild(table)
            return
        if last > first:
            self.page_ids[:, first:last].copy_(_int32([row[first:] for row in table.rows]))
            self.entries[first:last].copy_(_int32(table.spans[first:]))


def _int32(values: Sequence[object]) -> Tensor:
    """Host numbers as a tensor, whatever default device the caller has set."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")
