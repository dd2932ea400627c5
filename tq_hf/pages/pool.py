"""`PagePool`: page ids, how many rows use each, and the tensors that hold the pages.

All packed layers of a cache hand out the same ids: page 7 of every layer's tensor holds the same positions of the same row.
A pool may serve several block tables, those of a cache and of its forks (`cache.fork`). Pages never change once written, so
they are shared by reference and freed when no row of any table uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor

from ..errors import is_out_of_memory

if TYPE_CHECKING:
    from .table import BlockTable

NO_PAGE = -1
# Fewer unused pages than this are not worth a copy of the others.
SPARE_PAGES = 16
# A pool that grows gets room for one of so many more. At 32k tokens that is a copy of the pages every 512 steps, each of
# which reads them all; twice the room would put tq3 above 0.22 of bfloat16's bytes.
SPARE_SHARE = 64


def grown(have: int, pages: int) -> int:
    """The size that a layer's `have` pages get when it needs `pages`: a share more, at least, so that copies stay rare."""
    return have if pages <= have else max(pages, have + have // SPARE_SHARE)


def is_wasteful(used: int, capacity: int, to_come: int | None) -> bool:
    """Whether a pool of `capacity` pages is worth a copy of those in use (`PagePool.compact` explains `to_come`)."""
    if to_come is None:
        return 2 * used < capacity and capacity - used >= SPARE_PAGES
    return 4 * (used + to_come) < 3 * capacity


Method = TypeVar("Method", bound=Callable[..., Any])


def while_alone(method: Method) -> Method:
    """A method that runs under `alone()` of the block table that it belongs to, or that its layer has."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with getattr(self, "table", self).alone():
            return method(self, *args, **kwargs)

    return cast(Method, locked)


class PagePool:
    """Hands out page ids, counts how many rows use each, and takes them back; keeps each layer's pages.

    A layer is known by its slot, its place among the layers that share the ids. Its pages are on its device, or, between
    `offload` and the next use, in host memory.

    Attributes:
        capacity: one more than the largest id handed out so far; a layer has at least so many pages after its next commit.
        users: the block tables whose rows hold ids of this pool.
        lock: held by whoever reads or changes ids or pages, since forks may be used in threads of their own
            (`BlockTable.alone`).
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.references: list[int] = []
        self.free: list[int] = []
        self.users: WeakSet[BlockTable] = WeakSet()
        self._returned: list[list[list[int]] | None] = []
        self._pages: dict[int, Tensor] = {}  # by slot: int32 [pages, H, page_words], where the layer computes
        self._host: dict[int, Tensor] = {}  # by slot: the same in host memory, once offloaded
        self._devices: dict[int, torch.device] = {}
        self._unsaved: set[int] = set()  # slots whose host copy is out of date
        self._arriving: dict[int, torch.cuda.Event] = {}  # slots whose pages may still be on their way from the host

    def __getstate__(self) -> dict[str, Any]:
        self._take_back()
        for slot in list(self._arriving):
            self.of(slot)
        return {name: value for name, value in self.__dict__.items() if name not in ("users", "lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:  # each block table puts itself among the users again
        self.__dict__.update(state, users=WeakSet(), lock=RLock())
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            for held in (self._pages, self._host):
                held.update({slot: pages.clone() for slot, pages in held.items() if pages.is_inference()})

    # -- ids -----------------------------------------------------------------------------------------------------------
    @property
    def capacity(self) -> int:
        return len(self.references)

    @property
    def used(self) -> int:
        """Pages that at least one row uses."""
        self._take_back()
        return len(self.references) - len(self.free)

    def allocate(self) -> int:
        self._take_back()
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

    def release_later(self, rows: list[list[int]] | None) -> None:
        """Release all pages of these rows before ids are next handed out or counted; None: of a table that is torn.

        For finalizers, which the garbage collector may run in the middle of anything.
        """
        self._returned.append(rows)

    def recount(self) -> None:
        """Count again who uses which page: an edit of a table that is no user any more was interrupted."""
        self._returned.clear()  # these are no users either
        self.references = [0] * self.capacity
        for table in list(self.users):
            for row in table.rows or []:
                self.share(row)
        self.free = [page for page, references in enumerate(self.references) if not references]

    def _take_back(self) -> None:
        while self._returned:
            if (rows := self._returned.pop()) is None:
                self.recount()
                return
            for row in rows:
                self.release(row)

    # -- pages ---------------------------------------------------------------------------------------------------------
    def of(self, slot: int) -> Tensor:
        """A layer's pages where it computes, int32 [pages, H, page_words]; fetched if they were offloaded."""
        pages = self._pages.get(slot)
        if pages is not None and not self._arriving:  # as ever in a cache that is not offloaded
            return pages
        self.fetch(slot)
        if slot in self._arriving:
            stream = torch.cuda.current_stream(self._devices[slot])
            stream.wait_event(self._arriving.pop(slot))
            self._pages[slot].record_stream(stream)  # freed, they may go to the stream that fetched them
        return self._pages[slot]

    def put(self, slot: int, pages: Tensor) -> None:
        """Make `pages` the layer's, where it computes."""
        self._pages[slot] = pages
        self._devices[slot] = pages.device
        self.note_written(slot)

    def discard(self, slot: int) -> None:
        """As before `put`."""
        self._pages.pop(slot, None)
        self._devices.pop(slot, None)
        self._unsaved.discard(slot)

    def holds(self, slot: int) -> bool:
        """Whether a layer has its pages here already, those of a fork perhaps."""
        return slot in self._devices

    def tensors(self, slot: int) -> list[Tensor]:
        """Every tensor that holds pages of this layer."""
        return [held[slot] for held in (self._pages, self._host) if slot in held]

    @torch.inference_mode(False)
    def grow(self, slot: int, pages: int) -> None:
        """Make room for `pages` pages of a layer (`grown`)."""
        old = self.of(slot)
        have = old.shape[0]
        if pages <= have:
            return
        new = old.new_zeros((grown(have, pages), *old.shape[1:]))
        new[:have] = old
        self.put(slot, new)

    @torch.inference_mode(False)
    def compact(self, to_come: int | None = None) -> None:
        """Drop the unused pages if they are most of the pool, and renumber the others in all block tables.

        The first reordering of beams leaves one row's pages of many, and so does a fork that outlives the others.

        Layers follow one by one, so that it takes the memory of one besides. Where there is none, they stay large, no
        error.

        Args:
            to_come: pages that are going to be needed besides those in use, if that is known (sliding windows). Then fewer
                unused ones are worth it, a quarter of the pool, and the pool keeps room for these.
        """
        tables = list(self.users)  # none of them may go away while ids change
        used = self.used
        if not is_wasteful(used, self.capacity, to_come):
            return
        kept = [page for page, references in enumerate(self.references) if references]
        holes = [page for page in range(used) if not self.references[page]]
        moves = dict(zip(kept[used - len(holes) :], holes, strict=True))
        try:  # until tables change, only pages that nobody uses are written
            for slot in self._devices:
                self._copy_within(slot, moves)
            edits = [(table, table.renumbered(moves)) for table in tables if table.rows is not None]
        except Exception as error:
            if is_out_of_memory(error):
                return
            raise
        with ExitStack() as all_tables:
            for table, _ in edits:
                all_tables.enter_context(table.tearing())
            for page, hole in moves.items():
                self.references[hole] = self.references[page]
            del self.references[used:]
            self.free = []
            for table, edit in edits:
                table.put(edit)
        for slot in self._devices:
            try:
                self._resize(slot, used + (to_come or 0))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise

    def _copy_within(self, slot: int, moves: Mapping[int, int]) -> None:
        """Copy pages of a layer to other places, as far as it has them (one that lags behind the others has fewer)."""
        if not moves:
            return
        with self._here(slot) as pages:
            ids = [(page, hole) for page, hole in moves.items() if page < pages.shape[0]]
            if ids:
                sources, places = torch.tensor(ids, dtype=torch.int64, device="cpu").T.to(pages.device)
                pages.index_copy_(0, places, pages.index_select(0, sources))
                self.note_written(slot)

    def _resize(self, slot: int, size: int) -> None:
        """Give a layer a tensor of so many pages, with the first ones that it has."""
        with self._here(slot) as pages:
            if size != pages.shape[0]:
                resized = pages.new_zeros((size, *pages.shape[1:]))
                held = min(size, pages.shape[0])
                resized[:held] = pages[:held]
                self.put(slot, resized)

    @contextmanager
    def _here(self, slot: int) -> Iterator[Tensor]:
        """A layer's pages, which go back to host memory afterwards if they were there."""
        was_offloaded = self.is_offloaded(slot)
        try:
            yield self.of(slot)
        finally:
            if was_offloaded:
                self.offload(slot)

    @torch.inference_mode(False)
    def copy(self, kept: Sequence[int], device: torch.device | None = None) -> PagePool:
        """Another pool with these pages only, unused, numbered from 0 in their order.

        Args:
            kept: page ids, each once, ascending.
            device: where the pages go; None leaves each layer's where they are.
        """
        other = PagePool()
        other.references = [0] * len(kept)
        for slot in self._devices:
            is_offloaded = self.is_offloaded(slot)
            pages = _select(self.of(slot), kept)
            other.put(slot, pages if device is None else pages.to(device))
            if is_offloaded:
                self.offload(slot)
                other.offload(slot)
        return other

    # -- host memory ---------------------------------------------------------------------------------------------------
    def note_written(self, slot: int) -> None:
        """A layer's pages have changed: a copy of them in host memory is out of date."""
        self._unsaved.add(slot)

    def is_offloaded(self, slot: int) -> bool:
        return slot not in self._pages

    @torch.inference_mode(False)
    def offload(self, slot: int) -> None:
        """Keep a layer's pages in (pinned) host memory only. They are copied only if they changed since the last time."""
        if slot not in self._pages:
            return
        pages = self.of(slot)
        if slot in self._unsaved:
            host = self._host.get(slot)
            if host is None or host.shape != pages.shape:
                host = torch.empty(pages.shape, dtype=pages.dtype, device="cpu", pin_memory=pages.is_cuda)
            self._host[slot] = host.copy_(pages, non_blocking=True)
            self._unsaved.discard(slot)
        del self._pages[slot]

    @torch.inference_mode(False)
    def fetch(self, slot: int) -> None:
        """Bring offloaded pages back, on the current stream, which need not be the one that reads them (`of`)."""
        if slot in self._pages:
            return
        device = self._devices[slot]
        if device.type != "cuda":
            self._pages[slot] = self._host[slot].to(device, copy=True)
            return
        # On a stream of its own, the copy must not overtake the one out, nor reuse memory that is still read.
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        self._pages[slot] = self._host[slot].to(device, non_blocking=True, copy=True)
        self._arriving[slot] = stream.record_event()


def _select(pages: Tensor, kept: Sequence[int]) -> Tensor:
    """The pages `kept`, as far as this layer has them already (one that lags behind the others has fewer)."""
    index = torch.tensor([page for page in kept if page < pages.shape[0]], dtype=torch.int64, device="cpu")
    return pages.index_select(0, index.to(pages.device))
