"""Streams and conversations: a stream is `generate()`'s own tokens, and its cache goes on afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests import tiny_models
from tests.word_model import save_word_model, words
from tq_hf import TurboQuantCache
from tq_hf.commands import RequestError
from tq_hf.generation.comparison import cache_argument, cache_nbytes
from tq_hf.generation.conversation import Conversation, encode_chat
from tq_hf.generation.streaming import Stream, cache_size

SMALL = {"page_size": 32, "recent_window": 0, "sink_tokens": 4}
GREEDY = {"do_sample": False, "suppress_tokens": [2]}  # no end before its time


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("words")
    save_word_model(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def prompt(tokens: int = 80, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 60, (1, tokens), generator=torch.Generator().manual_seed(seed))


def caches(model: Any) -> list[Any]:
    return [TurboQuantCache(model.config, "tq4", **SMALL), DynamicCache(config=model.config)]


def plain(model: Any, ids: torch.Tensor, cache: Any, new: int) -> list[int]:
    options = {**GREEDY, "max_new_tokens": new, cache_argument(model): cache}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", [0, 1], ids=["packed", "exact"])
def test_the_stream_is_what_generate_gives(loaded: tuple[Any, Any], kind: int) -> None:
    model, tokenizer = loaded
    ids, cache, other = prompt(), caches(model)[kind], caches(model)[kind]
    with Stream(model, tokenizer, ids, cache, max_new_tokens=30, **GREEDY) as stream:
        seen, held = [], []
        for event in stream:
            seen.append(event)
            assert event.size == cache_size(cache) and event.size.nbytes == cache_nbytes(cache)
            held.append(cache.get_seq_length())
    assert [event.token for event in seen] == stream.tokens == plain(model, ids, other, 30)
    assert "".join(event.piece for event in seen) == seen[-1].text == tokenizer.decode(stream.tokens)
    assert held == list(range(80, 110))
    assert [event.tokens for event in seen] == list(range(1, 31))
    assert seen[-1].size.nbytes == cache_nbytes(other)
    assert seen[-1].size.packed_tokens == (96 if kind == 0 else 0)
    assert 0 < stream.first_token_seconds < seen[-1].seconds and stream.tokens_per_s > 0


def test_sizes_are_those_of_the_tokens(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    packed, exact = caches(model)
    events = [list(Stream(model, tokenizer, prompt(), cache, max_new_tokens=3))[-1] for cache in (packed, exact)]
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert [event.size.bytes_bf16 for event in events] == [82 * per_token] * 2
    assert events[1].size.nbytes == 2 * 82 * per_token  # the model is in float32
    assert events[0].size.nbytes == packed.nbytes and events[0].size.ratio == packed.report().ratio


def test_streams_take_turns_and_wait_for_the_consumer(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    streams = [Stream(model, tokenizer, prompt(), cache, max_new_tokens=12, **GREEDY) for cache in caches(model)]
    for one, other in zip(*streams):
        assert one.tokens == other.tokens
        assert [stream.cache.get_seq_length() for stream in streams] == [79 + one.tokens] * 2
        threading.Event().wait(0.01)
    for stream, cache in zip(streams, caches(model)):
        assert stream.tokens == plain(model, prompt(), cache, 12)
        stream.close()


def test_waits_do_not_count(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    with Stream(model, tokenizer, prompt(8), caches(model)[0], max_new_tokens=6) as stream:
        for _ in stream:
            threading.Event().wait(0.5)
    assert stream.times[-1] < 1.5 < 6 * 0.5


def test_a_stop_ends_it_at_once_and_the_cache_goes_on(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    for kind in (0, 1):
        cache = caches(model)[kind]
        stream = Stream(model, tokenizer, prompt(), cache, max_new_tokens=100, **GREEDY)
        for event in stream:
            if event.tokens == 20:
                stream.stop()
        assert len(stream.tokens) == 20 and stream.stopped
        assert cache.get_seq_length() == len(stream.held) == 99
        going_on = torch.tensor([[*stream.held, stream.tokens[-1]]])
        with Stream(model, tokenizer, going_on, cache, max_new_tokens=10, **GREEDY) as more:
            tokens = [event.token for event in more]
        assert stream.tokens + tokens == plain(model, prompt(), caches(model)[kind], 30)


def test_another_thread_may_stop_it(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    stream = Stream(model, tokenizer, prompt(), caches(model)[0], max_new_tokens=1500, **GREEDY)
    next(stream)
    timer = threading.Timer(0.1, stream.stop)
    timer.start()
    assert len(list(stream)) < 1400
    timer.join()


def test_a_consumer_that_goes_away_ends_the_thread(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    cache = caches(model)[0]
    with pytest.raises(KeyboardInterrupt), Stream(model, tokenizer, prompt(), cache, max_new_tokens=50) as stream:
        next(stream)
        raise KeyboardInterrupt
    assert not any(thread.name == "tq_hf-stream" for thread in threading.enumerate())
    assert cache.get_seq_length() == len(stream.held)
    assert list(stream) == []


def test_a_stream_that_never_started_changes_nothing(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    cache = caches(model)[0]
    with Stream(model, tokenizer, prompt(), cache, max_new_tokens=5) as stream:
        stream.stop()
        assert list(stream) == [] and not stream.started
    assert cache.get_seq_length() == 0


def test_a_stream_that_nobody_holds_ends_and_lets_its_cache_go(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    stream = Stream(model, tokenizer, prompt(), caches(model)[1], max_new_tokens=50, **GREEDY)
    next(stream)
    cache, thread = weakref.ref(stream.cache), stream._thread
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    gc.collect()
    assert cache() is None


def test_a_models_own_wish_for_beams_or_no_cache_is_overruled(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    wanted = plain(model, prompt(), caches(model)[0], 5)
    monkeypatch.setattr(model.generation_config, "num_beams", 4)
    monkeypatch.setattr(model.generation_config, "use_cache", False)
    with Stream(model, tokenizer, prompt(), caches(model)[0], max_new_tokens=5, **GREEDY) as stream:
        assert [event.token for event in stream] == wanted
    assert stream.cache.get_seq_length() == len(stream.held) == 84


def test_a_token_that_cannot_be_decoded_still_counts(loaded: tuple[Any, Any]) -> None:
    class Failing:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            if len(tokens) == 2:
                raise KeyError("no such token")
            return ""

    stream = Stream(loaded[0], Failing(), prompt(), caches(loaded[0])[1], max_new_tokens=9, **GREEDY)
    with pytest.raises(KeyError), stream:
        list(stream)
    assert stream.cache.get_seq_length() == len(stream.held)


def test_an_error_reaches_the_consumer_and_empties_the_cache(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    cache = caches(model)[0]
    stream = Stream(model, tokenizer, prompt(), cache, max_new_tokens=20, **GREEDY)
    next(stream)

    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", no_memory)  # the first layer has taken the token already
        with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
            next(stream)
    assert stream.held == [] and cache.get_seq_length() == 0 and list(stream) == []
    with Stream(model, tokenizer, prompt(), cache, max_new_tokens=5, **GREEDY) as again:
        assert [event.token for event in again][:5] == plain(model, prompt(), caches(model)[0], 30)[:5]


def test_what_a_failed_step_held_is_free_at_once(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After running out of memory, nobody waits for a garbage collection to have the memory back."""
    model, tokenizer = loaded
    held: list[weakref.ref[torch.Tensor]] = []

    def no_memory(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        held.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("2 GiB")

    monkeypatch.setattr(model.model.layers[1], "forward", no_memory)
    gc.disable()
    try:
        with Stream(model, tokenizer, prompt(), caches(model)[0], max_new_tokens=20, **GREEDY) as stream:
            next(stream)
    except torch.OutOfMemoryError:
        pass
    finally:
        gc.enable()
    assert [tensor() for tensor in held] == [None]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.ones(2, 3, dtype=torch.long), {}, r"shape \(2, 3\)"),
        (torch.ones(1, 0, dtype=torch.long), {}, r"shape \(1, 0\)"),
        (prompt(4), {"max_new_tokens": 0}, "max_new_tokens=0"),
        (prompt(4), {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens cannot be streamed"),
        (prompt(4), {"assistant_early_exit": 1}, "assistant_early_exit cannot be streamed"),
        (prompt(4), {"num_beams": 2}, "num_beams cannot be streamed: expected one sequence"),
        (prompt(4), {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences cannot be streamed"),
        (prompt(4), {"use_cache": False}, "use_cache=False cannot be streamed"),
    ],
)
def test_requests_that_cannot_be_streamed(
    loaded: tuple[Any, Any], ids: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Stream(*loaded, ids, caches(loaded[0])[0], **{"max_new_tokens": 5, **options})


class Bytes:
    """A tokenizer of bytes: characters beyond ASCII take several tokens."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def test_pieces_are_whole_characters() -> None:
    text = "a Zürich 東京 🙂 b"
    model = tiny_models.tiny_model(vocab_size=300, bos_token_id=1, eos_token_id=2)
    stream = Stream(model, Bytes(), prompt(4), DynamicCache(config=model.config), max_new_tokens=1)
    pieces = [stream._pieces.add(token) for token in [*text.encode(), 299]]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces) and pieces[-1] == ""


# -- conversations -------------------------------------------------------------------------------------------------------
def turn(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * len(texts), texts)]


def computed(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward computes."""
    counts: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield counts
    hook.remove()


@pytest.fixture
def counts(loaded: tuple[Any, Any]) -> Iterator[list[int]]:
    yield from computed(loaded[0])


def test_a_turn_computes_only_what_is_new(loaded: tuple[Any, Any], counts: list[int]) -> None:
    model, tokenizer = loaded
    talk = Conversation(model, tokenizer, TurboQuantCache(model.config, "tq4", **SMALL))
    long = " ".join(words()[:60])
    with talk.reply(turn(long), 10, do_sample=False) as stream:
        for event in stream:
            if event.tokens == 6:
                stream.stop()  # the text is what has been shown
    first = encode_chat(tokenizer, turn(long)).shape[1]
    assert counts[0] == first
    counts.clear()
    chat = turn(long, stream.text, "Question")
    with talk.reply(chat, 4, do_sample=False) as stream:
        list(stream)
    whole = encode_chat(tokenizer, chat)
    assert counts[0] == whole.shape[1] - (first + 5)  # of six new tokens the last was not in the cache
    assert talk.held[: whole.shape[1]] == whole[0].tolist() and len(talk.held) == talk.cache.get_seq_length()


def test_taken_back_text_is_cropped_and_the_answer_is_that_of_a_fresh_cache(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    texts = words()
    talk = Conversation(model, tokenizer, DynamicCache(config=model.config))
    for chat in (turn(" ".join(texts[:50])), turn(" ".join([*texts[:30], *texts[70:90]])), turn(texts[3])):
        with talk.reply(chat, 6, do_sample=False) as stream:
            tokens = [event.token for event in stream]
        fresh = Conversation(model, tokenizer, DynamicCache(config=model.config))
        with fresh.reply(chat, 6, do_sample=False) as other:
            assert [event.token for event in other] == tokens
        assert talk.cache.get_seq_length() == len(talk.held) == fresh.cache.get_seq_length()


def test_a_window_that_has_forgotten_begins_again() -> None:
    model = tiny_models.tiny_model("mistral_sliding", vocab_size=99, bos_token_id=1, eos_token_id=2)
    talk = Conversation(model, Bytes(), DynamicCache(config=model.config))
    for ids in (prompt(200, seed=1), prompt(200, seed=1)[:, :150]):
        with talk.extend(ids, 3, do_sample=False) as stream:
            tokens = [event.token for event in stream]
    fresh = Stream(model, Bytes(), ids, DynamicCache(config=model.config), max_new_tokens=3, do_sample=False)
    assert [event.token for event in fresh] == tokens


def test_after_an_error_the_next_turn_begins_again(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    talk = Conversation(model, tokenizer, caches(model)[0])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(model.lm_head, "forward", lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
        list(talk.reply(turn("Question"), 4))
    with talk.reply(turn("Question"), 4) as stream:
        assert list(stream)
    assert talk.held == stream.held
    talk.reset()
    assert talk.held == [] and talk.cache.get_seq_length() == 0


def test_a_full_context_and_a_missing_template_are_one_line(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    talk = Conversation(model, tokenizer, caches(model)[0])
    with pytest.raises(RequestError, match=r"the context is full: 20\d\d tokens, and the model was made for 2048"):
        talk.reply(turn(" ".join(["Question"] * 2046)), 4)
    nearly = encode_chat(tokenizer, turn(" ".join(["Question"] * 2000))).shape[1]
    stream = talk.reply(turn(" ".join(["Question"] * 2000)), 100)
    assert stream.options["max_new_tokens"] == 2048 - nearly < 100
    with pytest.raises(RequestError, match="no chat template"):
        encode_chat(object(), turn("Question"))

    class Strict:
        chat_template = "x"

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("roles must alternate\nand more")

    with pytest.raises(RequestError, match=r"refuses these messages: roles must alternate$"):
        encode_chat(Strict(), turn("Question"))
