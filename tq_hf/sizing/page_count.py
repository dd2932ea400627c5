"""How many pages a cache's pools hold after a text of some length: the rules of the block tables, without tensors.

The rows of a batch are alike here (no padding, no beams), so that a few counts stand for all of them, and only those
positions are visited at which a page falls due or leaves a window.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..layers.sliding import SlidingTable
from ..pages.device import entry_room
from ..pages.pool import grown, is_wasteful
from ..pages.table import BlockTable


@dataclass(frozen=True)
class PageCount:
    """What a block table comes to.

    Attributes:
        pages: the pages that each layer's tensor has room for, over all rows.
        packed_tokens: tokens in pages, a row.
        exact_tokens: a row, in the ring and the sinks.
        sinks: exact first tokens a row that there are tensors for.
        table_bytes: bytes of the table's own tensors.
    """

    pages: int
    packed_tokens: int
    exact_tokens: int
    sinks: int
    table_bytes: int


def table_bytes(rows: int, room: int) -> int:
    """Bytes of a `DeviceTable` with room for so many entries: int32 page ids, starts and counts, row starts."""
    return 4 * (rows * room + 2 * room + rows)


def count_pages(table: BlockTable, rows: int, prompt: int, length: int) -> PageCount:
    """After a prompt in one forward pass and `length - prompt` single tokens.

    Args:
        table: an unused table, whose sizes and rules count; it stays unused.
        rows: of the batch.
        prompt: tokens of the prompt, at least 1.
        length: tokens in all, at least `prompt`.
    """
    if isinstance(table, SlidingTable):
        return _Window(table, rows, prompt).after(length)
    packed_end = _packed_end(table, length)
    entries = (packed_end - table.sink_tokens) // table.page_size
    if table.is_static:
        pages, room = rows * table.static_entries, table.static_entries
    else:
        pages = rows * ((_packed_end(table, prompt) - table.sink_tokens) // table.page_size)
        while pages < rows * entries:  # the next growth comes with the first page of each row that has no room
            pages = grown(pages, (pages // rows + 1) * rows)
        room = entry_room(entries)
    packed = packed_end - table.sink_tokens
    return PageCount(pages, packed, length - packed, table.sink_tokens, table_bytes(rows, room))


def _packed_end(table: BlockTable, length: int) -> int:
    return table.sink_tokens + table.due(length, table.sink_tokens) * table.page_size


class _Window:
    """`SlidingTable` in numbers. Positions count from the start of the text; pages over all rows."""

    def __init__(self, table: SlidingTable, rows: int, prompt: int) -> None:
        self.table, self.rows = table, rows
        self.ring = table.recent_window + table.page_size
        self.length = self.origin = 0
        self.sinks = self.packed_end = table.sink_tokens
        self.used = self.capacity = self.pages = 0
        # Entries in the window (where each ends, and whether it has a page), and those that have left it.
        self.held: deque[tuple[int, bool]] = deque()
        self.released: deque[int] = deque()
        self.room = entry_room(0)
        self._commit(prompt)

    def after(self, length: int) -> PageCount:
        while self.length < length:
            self.length = min(max(self.length, self._next_event()), length - 1)
            self._advance()
            self._commit(1)
        packed = self.table.page_size * sum(has_page for _, has_page in self.held)
        exact = self.length - self.packed_end + self.sinks
        return PageCount(self.pages, packed, exact, self.sinks, table_bytes(self.rows, self.room))

    def _next_event(self) -> int:
        """The length at which the next token changes more than the length."""
        table = self.table
        leaves = self.held[0][0] if self.held else self.length + table.window
        moves = self.origin + max(self.ring, self.sinks + 1)
        return min(self.packed_end + self.ring - 1, min(leaves, moves) + table.window - 1)

    def _advance(self) -> None:
        first = self.table.first_seen(self.length)
        leaves = bool(self.held) and self.held[0][0] <= first
        while self.held and self.held[0][0] <= first:
            end, has_page = self.held.popleft()
            self.released.append(end)
            self.used -= self.rows * has_page
        moves = first - self.origin >= max(self.ring, self.sinks + 1)
        if moves:
            self.origin += (first - self.origin) // self.ring * self.ring
            while self.released and self.released[0] <= self.origin:
                self.released.popleft()
            self.sinks = 0
        if leaves or moves:
            self._compact(self.table.pages_to_come(1) * self.rows)
            self.room = entry_room(len(self.released) + len(self.held))

    def _commit(self, new: int) -> None:
        unneeded = self.table.first_seen(self.length if self.table.shares_keys else self.length + new)
        self.length += new
        due = self.table.due(self.length, self.packed_end)
        if not due:
            return
        self._compact(None)
        for _ in range(due):
            self.packed_end += self.table.page_size
            has_page = self.packed_end > unneeded
            self.held.append((self.packed_end, has_page))
            self.used += self.rows * has_page
        self.capacity = max(self.capacity, self.used)
        self.pages = grown(self.pages, self.capacity)
        entries = len(self.released) + len(self.held)
        if entries > self.room:
            self.room = entry_room(entries)

    def _compact(self, to_come: int | None) -> None:
        if is_wasteful(self.used, self.capacity, to_come):
            self.pages, self.capacity = self.used + (to_come or 0), self.used
