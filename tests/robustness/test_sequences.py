"""Random sequences of everything a cache offers, against `cache_model.py`, and its pages recounted after every step.

pytest tests/robustness/test_sequences.py --hypothesis-profile=long     some thousand sequences
"""

from __future__ import annotations

import copy
import gc
import pickle
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from tests.robustness.cache_model import CacheModel
from tests.robustness.counts import count
from tests.robustness.invariants import check_invariants, check_pool
from tests.robustness.passes import KINDS, Passes, is_stateful, model_of
from tq_hf import PRESETS, TurboQuantCache
from tq_hf.layers.full import TurboQuantLayer
from tq_hf.pages import pool as page_pool
from tq_hf.pages.pool import NO_PAGE

CPU = torch.device("cpu")
MOST_TOKENS, MOST_ROWS, MOST_CACHES = 420, 4, 5

LONG = settings.get_profile("long")
USUAL = settings(LONG, max_examples=140, stateful_step_count=20, derandomize=True)


# -- the machine -------------------------------------------------------------------------------------------------------
CHUNKS = st.sampled_from([1, 1, 1, 2, 5, 31, 32, 33, 40, 63, 64, 65, 70, 100, 133, 200])
MODES = st.lists(st.sampled_from(["attend", "attend", "dense", "unread"]), min_size=4, max_size=4)
WHICH = st.integers(0, MOST_CACHES - 1)
ROWS = st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=MOST_ROWS)


class CacheMachine(RuleBasedStateMachine):
    """A cache and what becomes of it: forks, copies and files, each with a model of its own."""

    live: list[tuple[TurboQuantCache, CacheModel]]

    def __init__(self) -> None:
        super().__init__()
        self.live = []
        self.tensors: list[weakref.ref[Any]] = []
        count("cache sequences")

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        preset=st.sampled_from(sorted(PRESETS)),
        dims=st.sampled_from([(16, 16), (32, 32), (32, 32), (64, 48), (80, 80)]),
        heads=st.integers(1, 2),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        page=st.sampled_from([32, 32, 64]),
        window=st.sampled_from([0, 0, 7, 16, 33]),
        sinks=st.sampled_from([0, 1, 4]),
        mode=st.sampled_from(["dynamic", "dynamic", "static", "offloading"]),
        seed=st.integers(0, 9999),
    )
    def begin(
        self, kind: str, preset: str, dims: tuple[int, int], heads: int, dtype: torch.dtype, page: int, window: int,
        sinks: int, mode: str, seed: int,
    ) -> None:  # fmt: skip
        if mode == "static" and "window" in kind:
            kind = "full"  # windows of static caches are transformers' own
        options = {"page_size": page, "recent_window": window, "sink_tokens": sinks}
        if mode == "static":
            options["max_cache_len"] = 200 + 37 * (seed % 4)
        elif mode == "offloading":
            options |= {"offloading": True, "offload_only_non_sliding": bool(seed % 2)}
        self.passes = Passes(heads, *dims, dtype, seed)
        self.config = KINDS[kind](dims[0])
        cache = TurboQuantCache(self.config, preset, boundary_layers=1 if kind == "boundary" else 0, **options)
        self.is_static, self.limit = mode == "static", options.get("max_cache_len", MOST_TOKENS)
        self.live.append((cache, model_of(cache, dims[1], dtype)))
        self.rows = 1 + seed % 3  # until a reset, where that may change them

    def pick(self, which: int) -> tuple[TurboQuantCache, CacheModel]:
        return self.live[which % len(self.live)]

    def add(self, cache: TurboQuantCache, model: CacheModel, which: int) -> None:
        """Another cache, in place of one of the others once there are enough."""
        if len(self.live) == MOST_CACHES:
            self.lose(which)
        self.live.append((cache, model))

    def done(self, what: str) -> None:
        count("cache steps")
        count(f"cache steps: {what}")
        self.check()

    def check(self) -> None:
        """After every step, of every cache that there is."""
        for cache, model in self.live:
            check_invariants(cache)
            model.check(cache)
        for pages in {id(table.pages): table.pages for cache, _ in self.live for table in cache.tables}.values():
            mine = {id(table) for cache, _ in self.live for table in cache.tables if table.pages is pages}
            assert {id(table) for table in pages.users} == mine, "pages that belong to no cache any more"

    # -- tokens ----------------------------------------------------------------------------------------------------
    @rule(
        which=WHICH, tokens=CHUNKS, padding=st.lists(st.integers(0, 90), min_size=4, max_size=4), modes=MODES,
        is_padded=st.booleans(), is_attended=st.booleans(), makes_mask=st.booleans(),
    )  # fmt: skip
    def prompt(
        self, which: int, tokens: int, padding: list[int], modes: list[str], is_padded: bool, is_attended: bool,
        makes_mask: bool,
    ) -> None:  # fmt: skip
        """Many tokens, the first ones of rows behind padding."""
        cache, model = self.pick(which)
        hidden = self.room(model, tokens)
        for row, pads in enumerate(padding[: len(hidden)]):
            if is_padded and (not model.rows or bool(model.hidden[row].all())):
                hidden[row, :pads] = True
        if self.take_in(cache, model, hidden, modes, is_attended, makes_mask):
            model.check_content(cache)
            self.done("prompt")

    @rule(which=WHICH, tokens=st.integers(1, 12), modes=MODES, hole=st.integers(-12, 12), makes_mask=st.booleans())
    def decode(self, which: int, tokens: int, modes: list[str], hole: int, makes_mask: bool) -> None:
        """Single tokens. One of a row may be hidden, such as a tool's output that a model must not see."""
        cache, model = self.pick(which)
        for i in range(tokens):
            hidden = self.room(model, 1)
            if i == hole and model.rows:
                hidden[i % model.rows] = True
            if not self.take_in(cache, model, hidden, modes, True, makes_mask):
                return
        self.done("decode")

    def room(self, model: CacheModel, tokens: int) -> Tensor:
        """What is hidden of so many tokens, none yet, or of fewer, where the cache becomes full."""
        return torch.zeros(model.rows or self.rows, max(0, min(tokens, self.limit - model.length)), dtype=torch.bool)

    def take_in(
        self, cache: TurboQuantCache, model: CacheModel, hidden: Tensor, modes: list[str], is_attended: bool, masks: bool
    ) -> bool:
        if hidden.any() and (self.is_static or cache.sliding_tables):  # all layers know of the padding, or none does
            modes = ["attend"] * 4 if is_attended else ["dense", "unread"] * 2
        if hidden.shape[1]:
            self.passes.run(cache, model, hidden, modes, masks)
            count("cache steps: tokens", hidden.shape[1])
        return hidden.shape[1] > 0

    @rule(which=WHICH, tokens=st.sampled_from([0, 1, 1, 2, 5, 31, 33, 64, 90, 200, 999]))
    def crop(self, which: int, tokens: int) -> None:
        cache, model = self.pick(which)
        tokens = min(tokens, model.length)
        if not model.rows or is_stateful(cache) or any(layer.pending for layer in cache.packed_layers):
            return
        windows = [layer.window for layer in model.layers if layer.window is not None]
        try:
            cache.crop(-tokens)
        except RuntimeError as error:
            message = str(error)
            if self.is_static:
                assert "4 times" in message and not self.has_room(cache, model, tokens)
            else:
                assert windows and model.length >= min(windows), message
            self.done("crop, refused")
            return
        if windows and not model.recording:
            assert model.length < min(windows)
        model.crop(tokens)
        self.done("crop")

    def has_room(self, cache: TurboQuantCache, model: CacheModel, tokens: int) -> bool:
        """Whether a static table has entries for what may come after a crop."""
        twin = model.copied()
        twin.crop(tokens)
        needed = -(-max(0, self.limit - model.recent_window - twin.packed_end) // model.page_size)
        return len(twin.spans) == len(model.spans) or needed <= cache.table.static_entries - len(twin.spans)

    # -- rows ------------------------------------------------------------------------------------------------------
    @rule(which=WHICH, rows=ROWS, how=st.sampled_from(["reorder", "select", "mask", "repeat"]))
    def select(self, which: int, rows: list[int], how: str) -> None:
        cache, model = self.pick(which)
        if not model.rows or not (model.length or len(cache.packed_layers) == len(cache.layers)):
            return  # transformers' own layers keep their rows once they are empty
        repeats = min(len(rows), 1 if self.is_static else MOST_ROWS // model.rows)
        rows = [row % model.rows for row in rows]
        if how == "mask":
            rows = sorted(set(rows))
        if self.is_static or how == "reorder":
            rows = (rows * model.rows)[: model.rows]
        if how == "repeat":
            cache.batch_repeat_interleave(repeats)
            rows = [row for row in range(model.rows) for _ in range(repeats)]
        elif how == "reorder":
            cache.reorder_cache(torch.tensor(rows))
        elif how == "mask" and not self.is_static:
            cache.batch_select_indices(torch.tensor([row in rows for row in range(model.rows)]))
        else:
            cache.batch_select_indices(torch.tensor(rows))
        model.select(rows)
        self.done(how)

    # -- copies ----------------------------------------------------------------------------------------------------
    @precondition(lambda self: not self.is_static)
    @rule(which=WHICH, number=st.integers(1, 2))
    def fork(self, which: int, number: int) -> None:
        cache, model = self.pick(which)
        if not model.length:
            return
        forks = cache.fork(number)
        del cache  # it may be dropped for one of these
        while forks:
            self.add(forks.pop(), model.copied(), which + 1)
        self.done("fork")

    @rule(which=WHICH, how=st.sampled_from(["deep copy", "pickle", "save and load"]))
    def copied(self, which: int, how: str) -> None:
        cache, model = self.pick(which)
        if how == "deep copy":
            twin = copy.deepcopy(cache)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(cache))
        else:
            with tempfile.TemporaryDirectory() as folder:
                cache.save(Path(folder) / "cache")
                twin = TurboQuantCache.load(Path(folder) / "cache", self.config if which % 2 else None)
        del cache
        self.add(twin, model.copied(), which + 1)
        self.done(how)

    # -- the rest --------------------------------------------------------------------------------------------------
    @rule(which=WHICH, how=st.sampled_from(["move", "offload", "fetch", "record", "refused", "reset"]), layer=WHICH)
    def aside(self, which: int, how: str, layer: int) -> None:
        getattr(self, f"_{how}")(*self.pick(which), layer)
        self.done(how)

    def _move(self, cache: TurboQuantCache, model: CacheModel, _: int) -> None:
        """What `to` does where the target is another device: here is only one."""
        if layers := cache._settled_layers():
            for table in cache.tables:
                table.moved(CPU)()
            for layer in layers:
                layer.move(CPU, layer.on(CPU))
        assert cache.to("cpu") is cache

    def _offload(self, cache: TurboQuantCache, model: CacheModel, layer: int) -> None:
        if not self.is_static:
            cache.offload(layer % len(cache.layers), only_non_sliding=False)

    def _fetch(self, cache: TurboQuantCache, model: CacheModel, layer: int) -> None:
        if not self.is_static:
            cache.prefetch(layer % len(cache.layers), only_non_sliding=False)

    def _record(self, cache: TurboQuantCache, model: CacheModel, _: int) -> None:
        if not self.is_static and not is_stateful(cache):
            cache.activate_past_recording()
            model.recording = True

    def _refused(self, cache: TurboQuantCache, model: CacheModel, _: int) -> None:
        """What cannot be done changes nothing."""
        for wrong in (
            lambda: cache.reorder_cache(torch.tensor([model.rows] * model.rows)),
            lambda: cache.batch_repeat_interleave(0),
            lambda: cache.crop(1),
            lambda: cache.crop(-model.length - 1),
            lambda: cache.update(torch.zeros(9, 1, 1, 16), torch.zeros(9, 1, 1, 16), len(cache.layers) - 1),
        ):
            if cache.packed_layers and model.rows:
                with pytest.raises((ValueError, RuntimeError)):
                    wrong()

    def _reset(self, cache: TurboQuantCache, model: CacheModel, layer: int) -> None:
        if layer == 0:
            cache.reset()
            model.forget()
            if not self.is_static:
                self.rows = self.rows % 3 + 1

    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        if len(self.live) > 1:
            self.lose(which)
            self.done("drop")

    def lose(self, which: int) -> None:
        cache, model = self.live.pop(which % len(self.live))
        model.check_content(cache)

    def teardown(self) -> None:
        """All content is right to the last, and all of it goes with the caches, without the garbage collector."""
        known: list[weakref.ref[Any]] = []
        for cache, model in self.live:
            model.check_content(cache)
            model.check(cache)
            for layer in cache.packed_layers:
                known += [weakref.ref(layer), weakref.ref(layer.table), weakref.ref(layer.table.pages)]
                known += [weakref.ref(tensor) for tensor in layer.tensors()]
        cache = layer = None
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            while self.live:
                self.live.pop(len(self.live) // 2)
                for cache, _ in self.live:
                    check_pool(cache.table.pages)
                cache = None
            left = [held() for held in known if held() is not None]
        finally:
            if was_enabled:
                gc.enable()
        assert not left, f"{len(left)} objects outlive their caches, such as a {type(left[0]).__name__}"


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is written while another row uses it, or twice in one commit. Pools are renumbered at every opportunity."""
    monkeypatch.setattr(page_pool, "SPARE_PAGES", 1)
    commit = TurboQuantLayer.commit

    def checked(self: TurboQuantLayer, step: Any, mask: Any, query: Any = None) -> None:
        first = int(self.counters[2])
        commit(self, step, mask, query)
        rows = self.table.rows or []
        written = [page for row in rows for page in row[first : int(self.counters[2])] if page != NO_PAGE]
        assert len(written) == len(set(written))
        assert all(self.table.pages.references[page] == 1 for page in written), "a shared page was written"
        count("pages written", len(written))

    monkeypatch.setattr(TurboQuantLayer, "commit", checked)


def test_any_sequence_holds_what_the_model_says() -> None:
    run_state_machine_as_test(CacheMachine, settings=LONG if settings.default == LONG else USUAL)


@pytest.mark.parametrize("kind", ["full", "full and window"])
@pytest.mark.parametrize("order", ["oldest first", "newest first", "from the middle"])
def test_forks_of_forks_to_depth_50(kind: str, order: str) -> None:
    """Each is a fork of the one before and goes on by itself, and so does its parent; all go, one by one."""
    passes = Passes(1, 16, 16, torch.float32, seed=1)
    cache = TurboQuantCache(KINDS[kind](16), "tq3", page_size=32, recent_window=7, sink_tokens=1)
    live = [(cache, model_of(cache, 16, torch.float32))]
    pages = [weakref.ref(table.pages) for table in cache.tables]

    def go_on(cache: TurboQuantCache, model: CacheModel, tokens: int) -> None:
        passes.run(cache, model, torch.zeros(2, tokens, dtype=torch.bool), ["attend"] * 2, makes_mask=False)

    go_on(*live[0], 40)
    for depth in range(1, 51):
        parent, known = live[-1]
        (fork,) = parent.fork(1)
        live.append((fork, known.copied()))
        go_on(*live[-1], 1 + depth * 7 % 40)
        go_on(parent, known, 33 if depth % 3 else 1)
        if depth % 10 == 5 and (kind == "full" or known.length < 130):  # a full window forgets what a crop would show
            parent.crop(-20)
            known.crop(20)
        check_invariants(fork)
        count("forks of forks")
    used = pages[0]().used  # type: ignore[union-attr]
    alone = sum(len(model.spans) * 2 for _, model in live)
    assert used < alone / 5  # of the pages that copies would take
    del cache, parent, fork
    while live:
        for held, model in live[:: max(1, len(live) // 5)]:
            model.check(held)
            check_invariants(held)
        live.pop({"oldest first": 0, "newest first": -1}.get(order, len(live) // 2))
        held = None
    assert not any(pool() for pool in pages)
