"""The block table: what is allocated, shared, cropped and freed, without any model."""

import pytest
import torch

from tq_hf.pages.edits import SPARE_ENTRIES
from tq_hf.pages.pool import NO_PAGE
from tq_hf.pages.table import BlockTable

CPU = torch.device("cpu")


def filled(rows: int = 2, pages: int = 3) -> BlockTable:
    table = BlockTable(page_size=64, sink_tokens=4, recent_window=64)
    table.begin(rows)
    table.on(CPU)
    table.reserve(4 + 64 * pages)
    return table


@pytest.mark.parametrize(
    ("length", "due"), [(0, 0), (131, 0), (132, 1), (195, 1), (196, 2), (4 + 64 + 64 * 10, 10), (4 + 64 + 64 * 10 - 1, 9)]
)
def test_a_page_is_due_when_all_its_tokens_are_older_than_the_window(length: int, due: int) -> None:
    assert BlockTable(64, 4, 64).due(length, packed_end=4) == due


def test_window_zero_packs_every_full_page() -> None:
    assert BlockTable(64, 0, 0).due(64 * 5 + 63, packed_end=0) == 5


def test_rows_get_their_own_pages_and_the_device_sees_them() -> None:
    table = filled()
    device = table.on(CPU)
    assert device.page_ids[:, :3].flatten().unique().numel() == 6
    assert device.entries[:3].tolist() == [[4, 64], [68, 64], [132, 64]]
    assert table.pages.used == table.pages.capacity == 6


def test_the_device_table_grows_past_its_room() -> None:
    table = filled(rows=1, pages=3)
    table.reserve(4 + 64 * 40)
    assert table.on(CPU).entries[39].tolist() == [4 + 64 * 39, 64]
    assert table.on(CPU).page_ids[0, :40].tolist() == table.rows[0]


@pytest.mark.parametrize(
    ("length", "spans", "end"),
    [(196, [(4, 64), (68, 64), (132, 64)], 196), (195, [(4, 64), (68, 64), (132, 63)], 195),
     (132, [(4, 64), (68, 64)], 132), (5, [(4, 1)], 5), (4, [], 4), (2, [], 4), (0, [], 4)],
)  # fmt: skip
def test_crop_shortens_and_frees(length: int, spans: list[tuple[int, int]], end: int) -> None:
    table = filled()
    assert table.crop(length, used=3) == (end, len(spans))
    assert table.spans == spans
    assert table.packed_end == end
    assert table.pages.used == 2 * len(spans)
    table.reserve(end + 64)  # freed pages are used again before new ones
    assert table.pages.capacity == max(6, table.pages.used)
    assert table.on(CPU).entries[len(spans)].tolist() == [end, 64]


def test_rows_share_pages_by_reference() -> None:
    table = filled(rows=2)
    first, second = (list(row) for row in table.rows)
    table.take(table.selected([1, 1, 0]))
    assert table.rows == [second, second, first]
    assert table.pages.used == 6
    table.take(table.selected([0]))  # both copies of row 1, but not row 0
    assert table.pages.used == 3
    assert sorted(table.pages.free) == sorted(first)
    table.crop(0, used=3)
    assert table.pages.used == 0


def test_copies_diverge_on_new_pages_only() -> None:
    table = filled(rows=1)
    table.take(table.selected([0, 0]))
    table.reserve(4 + 64 * 4)
    (a, b) = table.rows
    assert a[:3] == b[:3]
    assert a[3] != b[3]


def test_padding_has_no_pages() -> None:
    table = BlockTable(64, 4, 64)
    table.begin(3)
    table.on(CPU)
    keep = torch.ones(3, 400, dtype=torch.bool)
    keep[1, :150] = False
    keep[2, :] = False
    table.note_padding(keep, 0, 400)
    assert table.row_starts == [0, 150, 400]
    table.reserve(4 + 64 * 5)
    assert [page == NO_PAGE for page in table.rows[0]] == [False] * 5
    assert [page == NO_PAGE for page in table.rows[1]] == [True, True, False, False, False]
    assert all(page == NO_PAGE for page in table.rows[2])
    assert table.packed_tokens(5) == 64 * 8


def test_a_row_of_padding_starts_at_its_first_token() -> None:
    table = BlockTable(64, 4, 64)
    table.begin(2)
    keep = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.uint8)
    table.note_padding(keep, 0, 4)
    table.note_padding(torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]), 4, 2)
    assert table.row_starts == [0, 5]
    table.note_padding(torch.tensor([[1] * 7, [0] * 7]), 6, 1)  # later holes do not move a row's start
    assert table.row_starts == [0, 5]


def test_static_tables_keep_their_addresses_and_have_spare_entries() -> None:
    table = BlockTable(64, 4, 64, max_cache_len=1000)
    table.begin(2)
    device = table.on(CPU)
    before = [t.data_ptr() for t in table.tensors()]
    entries = (1000 - 4 - 64) // 64 + SPARE_ENTRIES
    assert device.page_ids.shape == (2, entries)
    assert table.crop(100, used=5) == (100, 2)
    assert device.entries[:4].tolist() == [[4, 64], [68, 32], [100, 64], [164, 64]]
    table.restart()
    assert device.entries[:3].tolist() == [[4, 64], [68, 64], [132, 64]]
    assert before == [t.data_ptr() for t in table.tensors()]


def test_static_tables_refuse_a_crop_they_have_no_room_for() -> None:
    table = BlockTable(64, 0, 0, max_cache_len=64 * 4)
    table.begin(1)
    table.spans = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 64), (69, 64), (133, 64)]
    with pytest.raises(RuntimeError, match=f"{SPARE_ENTRIES} times"):
        table.crop(6, used=6)
    assert table.spans[0] == (0, 1)
