"""A block table as tensors, one set a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pool import NO_PAGE


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

    def __init__(self, device: torch.device, page_ids: Tensor, entries: Tensor, row_start: Tensor) -> None:
        self.device = device
        self.hold(page_ids, entries, row_start)

    def hold(self, page_ids: Tensor, entries: Tensor, row_start: Tensor) -> None:
        self.page_ids, self.entries, self.row_start = page_ids, entries, row_start

    def write(
        self, rows: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], row_starts: Sequence[int], first: int
    ) -> None:
        """Copy a table's entries from `first` on to the device."""
        last = len(spans)
        if last > self.entries.shape[0]:
            self.hold(*table_tensors(self.device, rows, spans, row_starts))
        elif last > first:
            self.page_ids[:, first:last].copy_(int32([row[first:] for row in rows]), non_blocking=True)
            self.entries[first:last].copy_(int32(spans[first:]), non_blocking=True)


@torch.inference_mode(False)
def table_tensors(
    device: torch.device,
    rows: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    row_starts: Sequence[int],
    spare: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`DeviceTable.page_ids`, `entries` and `row_start` of these, with room for more entries if `spare`."""
    used = len(spans)
    room = entry_room(used) if spare else used
    page_ids = torch.full((len(rows), room), NO_PAGE, dtype=torch.int32, device=device)
    entries = torch.zeros((room, 2), dtype=torch.int32, device=device)
    if used:
        page_ids[:, :used].copy_(int32(rows), non_blocking=True)
        entries[:used].copy_(int32(spans), non_blocking=True)
    return page_ids, entries, int32(row_starts).to(device, non_blocking=True)


def int32(values: Sequence[object]) -> Tensor:
    """Host numbers as a tensor, whatever default device the caller has set."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")
