"""Streams and the demo's pages with the model on a GPU: what a user does, and what is said then."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gradio", reason="the demo needs the extra demo")

from tests.test_demo import CHAT, GROWTH, MESSAGES, METER, SEND, STATUS, ask, visitor
from tests.test_streaming import GREEDY, caches, plain
from tq_hf.demo import chat, memory, serving, side_by_side
from tq_hf.errors import is_out_of_memory
from tq_hf.generation.comparison import cache_nbytes
from tq_hf.generation.conversation import encode_prompt
from tq_hf.generation.streaming import Stream, cache_size
from tq_hf.reporting.memory import tensors_of

pytestmark = [pytest.mark.gpu, pytest.mark.network]
ROOT = Path(__file__).parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU only to try these tests themselves
ON_GPU = DEVICE.type == "cuda"
HANDBOOK = (ROOT / "tq_hf" / "handbook.txt").read_text(encoding="utf-8")
TEXT = HANDBOOK[:2500]  # some 550 tokens: pages are packed
MANY = (HANDBOOK * 9)[:30_000]  # some 7,000
QUESTION = "What is the first task of the day?"


@pytest.fixture(scope="module")
def folder(embedded_folder: Path) -> str:
    return str(embedded_folder)


@pytest.fixture(scope="module")
def models() -> serving.Models:
    return serving.Models(DEVICE)


@pytest.fixture
def page(models: serving.Models, monkeypatch: pytest.MonkeyPatch) -> chat.Chat:
    for module in (chat, side_by_side):
        monkeypatch.setattr(module, "SHOW_SECONDS", 0.0)  # every token is shown
    return chat.Chat(models, serving.Sessions())


def number(html: str, attribute: str) -> int:
    return int(re.search(rf'data-{attribute}="(\d+)"', html)[1])


def require_here(cache: Any) -> None:
    """All that a packed cache holds is on the device, and some of it is packed."""
    assert {tensor.device.type for tensor in tensors_of([layer.tensors() for layer in cache.packed_layers])} == {DEVICE.type}
    size = cache_size(cache)
    assert size.packed_tokens > 300 and 0 < size.nbytes == cache.nbytes < size.bytes_bf16


# -- streams -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [0, 1], ids=["packed", "exact"])
def test_a_stream_is_what_generate_gives_and_can_be_gone_on_with(models: serving.Models, folder: str, kind: int) -> None:
    loaded = models.get(folder)
    ids = encode_prompt(loaded.tokenizer, TEXT).to(DEVICE)
    cache, other = (caches(loaded.model)[kind] for _ in range(2))
    with Stream(loaded.model, loaded.tokenizer, ids, cache, max_new_tokens=60, **GREEDY) as stream:
        for event in stream:
            assert event.size == cache_size(cache) and event.size.nbytes == cache_nbytes(cache)
            if event.tokens == 8:
                stream.stop()
    assert stream.tokens_per_s > 0 and cache.get_seq_length() == len(stream.held) == ids.shape[1] + 7
    whole = torch.tensor([[*stream.held, stream.tokens[-1]]], device=DEVICE)
    with Stream(loaded.model, loaded.tokenizer, whole, cache, max_new_tokens=8, **GREEDY) as more:
        assert len(list(more)) == 8
    assert [*stream.tokens, more.tokens[0]] == plain(loaded.model, ids, other, 9)
    if kind == 0:
        require_here(cache)


# -- the pages -----------------------------------------------------------------------------------------------------------
def test_a_chat_streams_and_its_bytes_are_the_gpus(page: chat.Chat, folder: str) -> None:
    *_, greeted = ask(page, folder, QUESTION, [], [], preset="tq4", document=TEXT)  # compiles, allocates workspaces
    messages = page.begin("And the second?", "", greeted[MESSAGES], visitor())[2]
    conversation = page.sessions.get("v").conversation
    texts = []
    for update in page.respond(messages, greeted[GROWTH], folder, "tq4", 12, 0.0, visitor()):
        texts.append(update[CHAT][-1]["content"])
        assert number(update[METER], "nbytes") == conversation.cache.nbytes  # the cache stands still meanwhile
    assert len(texts) >= 12 and all(now.startswith(before) for before, now in zip(texts, texts[1:])) and texts[-1]
    assert page.sessions.get("v").conversation is conversation and len(conversation.held) == update[GROWTH][-1][0]
    require_here(conversation.cache)
    if ON_GPU:
        gc.collect()
        nbytes, before = conversation.cache.nbytes, torch.cuda.memory_allocated()
        page.restart(folder, "tq4", visitor())
        del conversation
        gc.collect()
        # Each tensor takes whole blocks of 512 bytes.
        assert nbytes <= before - torch.cuda.memory_allocated() <= nbytes + (1 << 20)


def test_a_stop_keeps_what_is_written_and_the_chat_goes_on(page: chat.Chat, folder: str) -> None:
    updates = page.respond(page.begin(TEXT, "", [], visitor())[2], [], folder, "tq2", 400, 0.0, visitor())
    for _ in range(5):
        next(updates)
    page.stop(visitor())
    *_, end = updates
    conversation = page.sessions.get("v").conversation
    held = len(conversation.held)
    assert "Stopped. 5 tokens" in end[STATUS] and held == conversation.cache.get_seq_length() and end[SEND]["visible"]
    *_, more = ask(page, folder, "Go on.", end[MESSAGES], end[GROWTH])
    assert len(more[MESSAGES]) == 4 and page.sessions.get("v").conversation is conversation
    assert len(conversation.held) > held
    require_here(conversation.cache)


def test_side_by_side_counts_and_compares(page: chat.Chat, folder: str) -> None:
    """With a preset that no other test has compiled the kernels of: clocks begin when they are ready."""
    duel = side_by_side.SideBySide(page.models, page.sessions)
    first, *races, last = duel._race(folder, "tq3", TEXT, 24)
    assert (first.note == "Warming up …") == ON_GPU
    exact, packed = last.sides
    for i in (0, 1):
        sizes = [race.sides[i].size.nbytes for race in races]
        assert sizes == sorted(sizes) and len(set(sizes)) > 1 and last.sides[i].tokens_per_s > 0
    assert exact.size.nbytes == exact.size.bytes_bf16 and packed.size.ratio > 1.5 and packed.size.packed_tokens > 300
    assert packed.tokens_per_s > exact.tokens_per_s / 10
    assert len(last.kl) > 100 and 0.5 < last.top1 <= 1 and 0 < sum(value for _, value in last.kl) / len(last.kl) < 1
    texts, growth, divergence = duel._shown("tq3", last)
    parted = side_by_side.first_difference(exact.tokens, packed.tokens)
    assert texts.count("<mark") == (0 if parted is None else 2) and texts.count("tokens/s") == 2
    assert f'data-nbytes="{packed.size.nbytes}"' in texts and "<polyline" in growth and "<polyline" in divergence


@contextlib.contextmanager
def no_memory(model: Any) -> Iterator[None]:
    """The device has no more memory than this process holds already."""
    with pytest.MonkeyPatch.context() as patch:
        if ON_GPU:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
        else:
            patch.setattr(model, "generate", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("2 GiB")))
        try:
            yield
        finally:
            if ON_GPU:
                torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_is_said_and_both_pages_go_on(page: chat.Chat, folder: str) -> None:
    *_, end = ask(page, folder, TEXT, [], [])
    duel = side_by_side.SideBySide(page.models, page.sessions)
    with no_memory(page.models.get(folder).model):
        before = torch.cuda.memory_allocated()
        *_, failed = ask(page, folder, MANY, end[MESSAGES], end[GROWTH])
        held = torch.cuda.memory_allocated() - before
        *_, said = duel.run(folder, "tq2", MANY, 8, visitor())
    assert "Out of memory. The cache was emptied" in failed[STATUS] and failed[MESSAGES] == end[MESSAGES]
    assert held < 1 << 26  # nothing of the failed turn but workspaces
    assert "Out of memory" in said[0]
    *_, again = ask(page, folder, QUESTION, failed[MESSAGES], failed[GROWTH])
    assert len(again[MESSAGES]) == 4
    require_here(page.sessions.get("v").conversation.cache)
    *_, said = duel.run(folder, "tq2", TEXT, 8, visitor())
    assert "times smaller" in said[0]


@pytest.mark.skipif(not ON_GPU, reason="torch keeps the memory of CUDA devices only")
def test_memory_that_torch_keeps_is_free() -> None:
    tensor = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    del tensor
    assert serving.free_bytes(DEVICE) - torch.cuda.mem_get_info()[0] > 1 << 29


@pytest.mark.skipif(not ON_GPU, reason="only CUDA pins memory")
def test_pinned_memory_that_runs_out_is_out_of_memory() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, pin_memory=True)  # more than there are addresses: refused at once
    if "invalid argument" in str(caught.value):
        pytest.skip("this driver takes the size itself for a mistake")
    assert is_out_of_memory(caught.value), str(caught.value)


def test_the_memory_page_counts_the_loaded_models_cache(page: chat.Chat, folder: str) -> None:
    ask(page, folder, TEXT, [], [], preset="tq4")
    cache = page.sessions.get("v").conversation.cache
    gib = torch.cuda.mem_get_info()[1] / 2**30 if ON_GPU else 8.0
    shown = memory.MemoryPage(page.models).show(memory.LOADED, "", folder, "tq4", cache.get_seq_length(), 1, gib, "bf16")
    assert number(shown[0], "nbytes") == pytest.approx(cache.nbytes, rel=0.02)
    weights = sum(parameter.nbytes for parameter in page.models.get(folder).model.parameters())
    assert number(shown[0], "fits") == pytest.approx((gib * 2**30 - weights) / cache.nbytes, rel=0.02)
