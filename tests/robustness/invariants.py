"""What must be true of a cache's pages at any time, whatever they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from tq_hf.pages.pool import NO_PAGE, PagePool
from tq_hf.pages.table import BlockTable


def check_invariants(cache: Any) -> None:
    """Assert that block tables, reference counts, free lists, tensors and counters of a cache, and of all forks that share
    its pages, agree."""
    for table in cache.tables:
        layers = [layer for layer in cache.packed_layers if layer.table is table]
        assert table in table.pages.users
        check_pool(table.pages)
        _check_table(table, layers)
        _check_layers(table, [layer for layer in layers if layer.is_initialized and layer.pending is None])


def check_pool(pages: PagePool, tables: Iterable[BlockTable] | None = None) -> None:
    """Recount who uses each page, from the rows of these block tables: by default all that say they use the pool."""
    used = pages.used  # takes back what dropped forks have left
    counts: Counter[int] = Counter()
    holds: dict[int, int] = {}  # page: the position where it starts
    for table in pages.users if tables is None else tables:
        for row in table.rows or []:
            own = [page for page in row if page != NO_PAGE]
            assert len(own) == len(set(own)), f"a row has a page twice: {row}"
            counts.update(own)
            for page, (start, _) in zip(row, table.spans, strict=True):
                if page != NO_PAGE and not table.is_static:
                    assert holds.setdefault(page, start + table.origin) == start + table.origin, f"page {page} twice"
    assert pages.references == [counts[page] for page in range(pages.capacity)]
    assert sorted(pages.free) == [page for page in range(pages.capacity) if not counts[page]]
    assert used == len(counts)


def _check_table(table: BlockTable, layers: list[Any]) -> None:
    if table.rows is None:
        assert not table.spans and not table.row_starts and not any(layer.is_initialized for layer in layers)
        return
    assert all(len(row) == len(table.spans) for row in table.rows)
    assert len(table.row_starts) == len(table.rows) and table.latest_start == max(table.row_starts)
    for (start, count), (following, _) in zip(table.spans, table.spans[1:]):
        assert 0 < count <= table.page_size and start + count == following
    if not table.is_static:
        assert table.packed_end == (sum(table.spans[-1]) if table.spans else table.packed_end)
    check_device_tables(table)


def check_device_tables(table: BlockTable) -> None:
    """A block table on each device is the host's."""
    for on_device in table._devices.values():
        entries = len(table.spans)
        assert on_device.page_ids[:, :entries].tolist() == table.rows
        assert on_device.entries[:entries].tolist() == [list(span) for span in table.spans]
        if not table.is_static:
            assert on_device.row_start.tolist() == table.row_starts


def _check_layers(table: BlockTable, layers: list[Any]) -> None:
    """Of layers that have taken their tokens in."""
    for layer in layers:
        length, packed_end, used = layer.counters.tolist()
        assert layer.on_device is table.on(layer.device)
        if not table.is_static:
            assert (layer.length, layer.packed_end) == (length, packed_end)
            assert packed_end == table.packed_end and used == len(table.spans)
        assert table.rows is not None
        most = max((page for row in table.rows for page in row), default=-1)
        pages, slot = table.pages, layer.slot
        assert slot in pages._pages or slot not in pages._unsaved, "offloaded pages that are out of date"
        held = pages._pages if slot in pages._pages else pages._host
        assert held[slot].shape[0] > most, "a page beyond its tensor"
        for name in layer.row_state_names():
            assert getattr(layer, name).shape[0] == len(table.rows)
            assert not torch.is_inference(getattr(layer, name))
        if table.is_static:
            to_come = [page for row in table.rows for page in row[used:]]
            assert all(table.pages.references[page] == 1 for page in to_come), "a shared page is going to be written"
    if layers:
        assert len({tuple(layer.counters.tolist()) for layer in layers}) == 1
