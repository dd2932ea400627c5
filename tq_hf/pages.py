"""Pages and the block table: which page holds which positions of which row.

Pages never change once written, so rows may share them: edits of the table (crop, reordering, repeating) move page ids
and reference counts, never packed data. All packed layers of a cache advance together, so they share one table: page 7
of layer 0 and page 7 of layer 5 hold the same positions of the same row, each in its own layer's pool.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

NO_PAGE = -1
# Spare entries of a static table: each crop that cuts into a page leaves one entry shorter than a page.
SPARE_ENTRIES = 4


class PageAllocator:
    """Hands out page ids, counts how many rows use each, and takes them back.

    Attributes:
        capacity: one more than the largest id handed out so far; a layer's pool has at least so many pages.
    """

    def __init__(self) -> None:
        self.references: list[int] = []
        self.free: list[int] = []

    @property
    def capacity(self) -> int:
        return len(self.references)

    @property
    def used(self) -> int:
        """Pages that at least one row uses."""
        return len(self.references) - len(self.free)

    def allocate(self) -> int:
        page = self.free.pop() if self.free else len(self.references)
        if page == len(self.references):
            self.references.append(0)
        self.references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != NO_PAGE:
                self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page == NO_PAGE:
                continue
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)


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
        self.clear()

    @property
    def is_static(self) -> bool:
        return self.max_cache_len is not None

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
        """Forget everything, as before the first token."""
        self.pages = PageAllocator()
        self.rows: list[list[int]] | None = None
        self.spans: list[tuple[int, int]] = []
        self.row_starts: list[int] = []
        self.packed_end = self.sink_tokens
        self._padding_noted = -1
        self._devices: dict[torch.device, DeviceTable] = {}

    def begin(self, batch_size: int) -> None:
        """Set the number of rows at the first token."""
        if self.rows is not None:
            return
        self.rows = [[] for _ in range(batch_size)]
        self.row_starts = [0] * batch_size
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
            self.row_starts = [
                start if start < length else found for start, found in zip(self.row_starts, first.tolist(), strict=True)
            ]
            for device_table in self._devices.values():
                device_table.row_start.copy_(_int32(self.row_starts))

    def reserve(self, packed_end: int) -> None:
        """Add entries until pages reach `packed_end` (layers after the first find them there already)."""
        assert self.rows is not None
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
        self.row_starts = [min(start, length) for start in self.row_starts]
        for device_table in self._devices.values():
            device_table.row_start.clamp_(max=length)

    def is_padding_only(self, length: int) -> bool:
        """Dynamic mode: whether some row has had nothing but padding in its first `length` positions."""
        return any(start >= length for start in self.row_starts)

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
            for device_table in self._devices.values():
                device_table.write_spans(self)
            return end, len(kept)
        for row in self.rows or []:
            self.pages.release(row[len(kept) :])
            del row[len(kept) :]
        self.spans, self.packed_end = kept, end
        self._refresh()
        return end, len(kept)

    def restart(self) -> None:
        """Static mode: as before the first token, every tensor at its address."""
        self.row_starts = [0] * len(self.row_starts)
        self.spans = [(self.sink_tokens + e * self.page_size, self.page_size) for e in range(len(self.spans))]
        for device_table in self._devices.values():
            device_table.write_spans(self)
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

    def select_rows(self, indices: Sequence[int]) -> None:
        """Make row i a copy of row `indices[i]`: pages are shared, not copied."""
        assert self.rows is not None
        chosen = [list(self.rows[i]) for i in indices]
        for row in chosen:
            self.pages.share(row)
        for row in self.rows:
            self.pages.release(row)
        self.rows = chosen
        self.row_starts = [self.row_starts[i] for i in indices]
        self._refresh()

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
        room = entries if table.is_static else max(16, 1 << max(0, entries - 1).bit_length())
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

    def write_spans(self, table: BlockTable) -> None:
        """Write all spans in place, for a table whose addresses must not move."""
        self.entries.copy_(_int32(table.spans))


def _int32(values: Sequence[object]) -> Tensor:
    """Host numbers as a tensor, whatever default device the caller has set."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")
