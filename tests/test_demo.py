"""The demo without a browser: what its pages say, and the models and sessions behind them."""

from __future__ import annotations

import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("gradio", reason="the demo needs the extra demo")

from tests.word_model import save_word_model, words
from tq_hf import TurboQuantCache
from tq_hf.commands import RequestError
from tq_hf.demo import charts, chat, handbook, panels, serving, side_by_side
from tq_hf.generation.streaming import CacheSize, cache_size
from tq_hf.sizing.estimate import estimate_memory

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
TEXT = " ".join((words() * 3)[:220])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("words")
    save_word_model(path)
    return str(path)


@pytest.fixture(scope="module")
def models(folder: str) -> serving.Models:
    return serving.Models(CPU)


def visitor(name: str = "v") -> Any:
    return SimpleNamespace(session_hash=name)


# -- charts --------------------------------------------------------------------------------------------------------------
def test_thinning_keeps_ends_and_peaks() -> None:
    points = [(float(i), 9.0 if i == 777 else 1.0) for i in range(2001)]
    few = charts.thin(points, most=50)
    assert len(few) <= 53 and few[0] == points[0] and few[-1] == points[-1] and (777.0, 9.0) in few
    assert charts.thin(points[:1]) == points[:1] and charts.thin([]) == [] and charts.thin(points[:3]) == points[:3]


def test_a_line_is_drawn_where_its_points_are() -> None:
    line = charts.Line("<b>", "c", [(0, 0), (50, 2), (100, 4)])
    html = charts.line_chart("T & t", [line], "x", str, mark=(50, "half"))
    assert '<polyline class="c" points="0.0,300.0 500.0,150.0 1000.0,0.0"/>' in html
    assert "&lt;b&gt;" in html and "T &amp; t" in html and "left:50.0%" in html
    assert charts.line_chart("nothing", [], "x", str) == ""


def test_a_single_point_is_a_level_that_can_be_seen() -> None:
    html = charts.line_chart("t", [charts.Line("", "c", [(131, 0.5)])], "x", str)
    assert '<polyline class="c" points="0.0,0.0 1000.0,0.0"/>' in html


def test_bars_are_as_long_as_their_values() -> None:
    bars = [charts.Bar("a", "", 4, "4"), charts.Bar("b", "", 1, "1"), charts.Bar("c", "", 0, "0")]
    assert re.findall(r"width:([\d.]+)%", charts.bar_chart("t", bars)) == ["100.00", "25.00", "0.40"]


def test_sizes_are_written_in_binary_units() -> None:
    assert (charts.mib(3 << 19), charts.mib(5 << 30)) == ("1.50 MiB", "5.00 GiB")


# -- models and sessions -------------------------------------------------------------------------------------------------
def test_models_are_loaded_once_and_the_embedded_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = []

    def loader(name: str | None, device: torch.device) -> Any:
        calls.append(name)
        return SimpleNamespace(name=name)

    gone: list[str | None] = []
    monkeypatch.setattr(serving.Models, "_require_memory", lambda *_: None)
    models = serving.Models(CPU, loader, dropped=lambda loaded: gone.append(loaded.name))
    assert models.ready("") is None
    threads = [threading.Thread(target=models.get, args=("",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [None]
    for name in ("a", " a ", "b", "", "SmolLM2-135M-Instruct", "a"):
        models.get(name)
    assert calls == [None, "a", "b", "a"]  # b took the place of a
    assert gone == ["a", "b"] and models.ready("a").name == "a"


def test_a_model_that_has_to_go_is_kept_by_no_conversation(models: serving.Models, folder: str) -> None:
    sessions, loaded = serving.Sessions(), models.get(folder)
    kept = sessions.get("a").conversation_on(loaded, "tq4")
    sessions.get("b")
    sessions.forget(SimpleNamespace(model=object()))
    assert sessions.get("a").conversation is kept
    sessions.forget(loaded)
    assert sessions.get("a").conversation is None


def test_strangers_get_no_folders_no_pickles_and_no_code(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = serving.Models(CPU, own=folder, public=True)
    assert models.get(folder).name == folder  # whoever serves the page has chosen it
    for name in (folder + "/", "/etc", "/no/such", "tests", "../x", "a/b/c"):
        with pytest.raises(RequestError, match=r" is no hub id: expected one such as .* Leave the field empty"):
            models.get(name)

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(serving.PretrainedConfig, "get_config_dict", lambda name, **_: ({"num_labels": 3}, {}))
    monkeypatch.setattr(
        serving.AutoConfig, "from_pretrained", lambda name, **trust: asked.append(trust) or LlamaConfig(num_hidden_layers=1)
    )
    models = serving.Models(CPU, lambda name, device, **trust: asked.append(trust), public=True)
    models.get("some/model")
    assert asked == [{"trust_remote_code": False, "use_safetensors": True, "token": False}] * 2
    monkeypatch.setattr(serving.PretrainedConfig, "get_config_dict", lambda name, **_: ({"num_labels": 10**9}, {}))
    with pytest.raises(RequestError, match=r"no model could be loaded from a/bomb: num_labels is 1e\+09"):
        models.get("a/bomb")


def test_an_unknown_model_is_one_line_that_offers_the_embedded_one(
    models: serving.Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"folder /no/such/model does not exist\. Leave the field empty for SmolLM2"):
        models.get("/no/such/model")

    def unreachable(name: str) -> None:
        raise OSError(f"We couldn't connect to the hub to load {name}.\nCheck your connection.")

    monkeypatch.setattr(serving.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(RequestError, match=r"loaded from some/model: We couldn't connect .* some/model\. Leave the field"):
        models.get("some/model")


def test_a_model_too_large_is_refused_before_it_is_loaded(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(RequestError, match=r"GiB of weights, too much for this machine"):
        serving.Models(CPU, loader=lambda *_: pytest.fail("loaded")).get(folder)


def test_sessions_are_limited_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_SESSIONS", 2)
    sessions = serving.Sessions()
    first = sessions.get("a")
    assert sessions.get("a") is first and sessions.get("b") is not first
    sessions.get("a")
    sessions.get("c")  # takes the place of b, which was seen longest ago
    assert sessions.get("a") is first and len(sessions) == 2
    sessions.drop("a")
    sessions.drop("unknown")
    assert first.stop.is_set() and sessions.get("a") is not first


def test_a_conversation_is_kept_until_model_or_preset_change(models: serving.Models, folder: str) -> None:
    session, loaded = serving.Session(threading.Event()), models.get(folder)
    first = session.conversation_on(loaded, "tq4")
    assert session.conversation_on(loaded, "tq4") is first
    other = session.conversation_on(loaded, "tq2")
    assert other is not first and other.cache.preset == "tq2"
    assert not isinstance(session.conversation_on(loaded, serving.EXACT).cache, TurboQuantCache)
    with pytest.raises(RequestError, match="preset='tq9' is unknown"):
        session.conversation_on(loaded, "tq9")


def test_errors_are_lines_for_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.explain(RequestError("too long")) == "too long"
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        assert serving.explain(error).startswith("Out of memory. The cache was emptied")
    assert capsys.readouterr().err == ""
    assert serving.explain(KeyError("odd")) == "KeyError: 'odd'"
    assert "KeyError" in capsys.readouterr().err  # the log has the whole of it


def test_zero_gpu_wraps_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain() -> None: ...

    wrapped = []
    monkeypatch.setitem(sys.modules, "spaces", None)
    assert serving.on_gpu(plain) is plain
    spaces = SimpleNamespace(GPU=lambda duration: lambda function: wrapped.append((duration, function)) or "wrapped")
    monkeypatch.setitem(sys.modules, "spaces", spaces)
    assert serving.on_gpu(plain) == "wrapped" and wrapped == [(120, plain)]


# -- the chat ------------------------------------------------------------------------------------------------------------
BOX, CHAT, MESSAGES, GROWTH, METER, CHART, STATUS, SEND, STOP = range(9)


def ask(page: chat.Chat, folder: str, text: str, messages: list[Any], growth: list[Any], **changes: Any) -> list[tuple]:
    """Every update of one turn."""
    settings = {"preset": "tq2", "max_new_tokens": 12, "temperature": 0.0, "document": "", **changes}
    document = settings.pop("document")
    begun = page.begin(text, document, messages, visitor())
    messages = begun[2] if isinstance(begun[2], list) else messages
    return list(page.respond(messages, growth, folder, request=visitor(), **settings))


@pytest.fixture
def page(models: serving.Models) -> Iterator[chat.Chat]:
    yield chat.Chat(models, serving.Sessions())


def test_a_chat_counts_the_bytes_of_its_one_cache(page: chat.Chat, folder: str) -> None:
    *during, end = ask(page, folder, "Question", [], [], document=TEXT)
    session = page.sessions.get("v")
    size = cache_size(session.conversation.cache)
    assert f'data-nbytes="{size.nbytes}"' in end[METER] and f'data-bf16="{size.bytes_bf16}"' in end[METER]
    assert size.nbytes == session.conversation.cache.nbytes and size.packed_tokens > 0
    tokens = session.conversation.cache.get_seq_length()
    assert f'data-tokens="{tokens}"' in end[METER] and end[GROWTH][-1] == (tokens, size.nbytes, size.bytes_bf16)
    assert len(during) >= 1 and "Writing" in during[0][STATUS]
    assert [m["role"] for m in end[MESSAGES]] == ["user", "assistant"]
    assert end[MESSAGES][0]["content"].startswith(TEXT) and end[CHAT][0]["content"] == "Question"
    assert end[SEND]["visible"] and not end[STOP]["visible"]
    # At the model's 2,048 tokens, as the estimate says.
    full = estimate_memory(page.models.get(folder).model.config, "tq2", 2048)
    assert f"at 2,048 tokens</span><b >{full.ratio:.2f}×" in end[METER]

    *_, second = ask(page, folder, "Answer", end[MESSAGES], end[GROWTH])
    assert page.sessions.get("v") is session and len(second[MESSAGES]) == 4
    assert second[GROWTH][: len(end[GROWTH])] == end[GROWTH] and second[GROWTH][-1][0] > tokens


def test_answers_can_come_from_another_process(page: chat.Chat, folder: str) -> None:
    messages = [{"role": "user", "content": TEXT}]
    *_, last = page._answer("v", folder, "tq2", messages, 4, 0.0)
    assert pickle.loads(pickle.dumps(last)).growth == last.growth
    *_, race = side_by_side.SideBySide(page.models, page.sessions)._race(folder, "tq2", TEXT, 4)
    assert pickle.loads(pickle.dumps(race)) == race


def test_another_preset_goes_on_with_the_same_chat(page: chat.Chat, folder: str) -> None:
    *_, end = ask(page, folder, TEXT, [], [])
    *_, other = ask(page, folder, "Answer", end[MESSAGES], end[GROWTH], preset=serving.EXACT)
    assert len(other[MESSAGES]) == 4 and "bf16 cache" in other[METER] and "1.00×" in other[METER]


def test_a_stop_keeps_what_is_written(page: chat.Chat, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SHOW_SECONDS", 0.0)
    messages = page.begin("Question", "", [], visitor())[2]
    updates = page.respond(messages, [], folder, "tq2", 400, 0.0, visitor())
    for _ in range(3):
        next(updates)
    assert "Stopping" in page.stop(visitor())
    *_, end = updates
    conversation = page.sessions.get("v").conversation
    assert end[STATUS].count("Stopped. ") == 1 and end[MESSAGES][-1]["role"] == "assistant"
    assert len(conversation.held) == conversation.cache.get_seq_length() < 100
    assert not any(thread.name == "tq_hf-stream" for thread in threading.enumerate())
    *_, more = ask(page, folder, "Answer", end[MESSAGES], end[GROWTH])
    assert len(more[MESSAGES]) == 4


def test_a_stop_before_its_turn_gives_the_question_back(page: chat.Chat, folder: str) -> None:
    messages = page.begin("Question", "", [], visitor())[2]
    page.stop(visitor())
    (end,) = page.respond(messages, [], folder, "tq2", 40, 0.0, visitor())
    assert end[BOX] == "Question" and end[MESSAGES] == [] and "Stopped" in end[STATUS]


def test_what_cannot_be_answered_is_said_and_the_chat_goes_on(
    page: chat.Chat, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, end = ask(page, folder, "Question", [], [])
    (full,) = ask(page, folder, "Answer " * 3000, end[MESSAGES], end[GROWTH])
    assert "the context is full" in full[STATUS] and full[BOX].startswith("Answer Answer")
    assert full[MESSAGES] == end[MESSAGES] and full[SEND]["visible"]
    model = page.models.get(folder).model
    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("2 GiB")))
        (failed,) = ask(page, folder, "Answer", end[MESSAGES], end[GROWTH])
    assert "Out of memory" in failed[STATUS] and failed[BOX] == "Answer"
    *_, again = ask(page, folder, "Answer", failed[MESSAGES], failed[GROWTH])
    assert len(again[MESSAGES]) == 4
    (unknown,) = ask(page, "/no/model", "Answer", [], [])
    assert "does not exist" in unknown[STATUS] and 'role="alert"' in unknown[STATUS]


@pytest.mark.parametrize(("text", "said"), [("  ", "Write a message first"), ("x" * 60_001, "60,001 characters")])
def test_messages_that_are_refused_at_once(page: chat.Chat, folder: str, text: str, said: str) -> None:
    begun = page.begin(text, "", [], visitor())
    assert said in begun[3] and begun[4]["visible"]
    (nothing,) = page.respond([], [], folder, "tq2", 12, 0.0, visitor())
    assert nothing == ({"__type__": "update"},) * 9


def test_a_new_chat_drops_the_cache(page: chat.Chat, folder: str) -> None:
    ask(page, folder, "Question", [], [])
    session = page.sessions.get("v")
    chat, messages, growth, meter, chart, _, send, stop = page.restart(folder, "tq2", visitor())
    assert chat == messages == growth == [] and chart == ""
    assert send["visible"] and not stop["visible"]  # also where the question was still waiting for its turn
    assert page.sessions.get("v") is not session
    full = estimate_memory(page.models.get(folder).model.config, "tq2", 2048)
    assert meter == page.promise([], folder, "tq2") and f"{full.ratio:.2f}×" in meter
    assert page.promise([], "not/loaded", "tq2") == page.promise([], folder, serving.EXACT) == ""


def test_a_rule_in_the_question_is_part_of_it(page: chat.Chat) -> None:
    begun = page.begin("one\n\n---\n\ntwo", "the text", [], visitor())
    assert begun[2][0]["content"] == "the text\n\n---\n\none\n\n---\n\ntwo"
    assert begun[1] == [{"role": "user", "content": "one\n\n---\n\ntwo"}]
    assert chat.taken_back(begun[2])[0] == "one\n\n---\n\ntwo"


def test_a_new_chat_ends_the_answer_that_is_being_written(
    page: chat.Chat, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SHOW_SECONDS", 0.0)
    messages = page.begin("Question", "", [], visitor())[2]
    updates = page.respond(messages, [], folder, "tq2", 400, 0.0, visitor())
    next(updates)
    meter = page.restart(folder, "tq2", visitor())[3]
    *_, end = updates
    assert end[CHAT] == [] and end[METER] == meter and end[SEND]["visible"]
    assert end[MESSAGES] == end[GROWTH] == {"__type__": "update"}  # they are the new chat's
    assert not any(thread.name == "tq_hf-stream" for thread in threading.enumerate())


def test_the_end_of_an_old_answer_leaves_a_new_chats_question_on_the_page(
    page: chat.Chat, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SHOW_SECONDS", 0.0)
    old = page.respond(page.begin("Question", "", [], visitor())[2], [], folder, "tq2", 400, 0.0, visitor())
    next(old)
    page.restart(folder, "tq2", visitor())
    asked = page.begin("Answer", "", [], visitor())[2]
    *_, end = old
    assert end[CHAT] == [{"role": "user", "content": "Answer"}] and chat.WAITING in end[STATUS]
    assert end[STOP]["visible"] and not end[SEND]["visible"]
    assert end[MESSAGES] == end[GROWTH] == {"__type__": "update"}
    *_, end = page.respond(asked, [], folder, "tq2", 12, 0.0, visitor())
    assert [said["role"] for said in end[MESSAGES]] == ["user", "assistant"] and end[SEND]["visible"]
    assert page.sessions.waiting("v") == page.sessions.waiting("nobody") == []


def test_one_question_at_a_time(page: chat.Chat) -> None:
    asked = page.begin("Question", "", [], visitor())[2]
    refused = page.begin("Answer", "", asked, visitor())
    assert "Wait for the answer" in refused[3] and refused[2] == {"__type__": "update"} and refused[5]["visible"]


def test_the_handbook_begins_with_its_title() -> None:
    text = handbook.chapters(1, 4)
    assert text.startswith("This is the handbook") and re.findall(r"^\d", text, flags=re.M) == ["1", "4"]
    assert "Here ends" not in handbook.chapters(1, 2, 3, 4, 5)


# -- side by side --------------------------------------------------------------------------------------------------------
@pytest.fixture
def duel(models: serving.Models) -> side_by_side.SideBySide:
    return side_by_side.SideBySide(models, serving.Sessions())


def test_both_caches_write_the_same_prompt(
    duel: side_by_side.SideBySide, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "SHOW_SECONDS", 0.0)
    *races, last = duel._race(folder, "tq2", TEXT, 20)
    exact, packed = last.sides
    for race in races:
        assert abs(len(race.sides[0].tokens) - len(race.sides[1].tokens)) <= 1 or not race.note.startswith("Writing")
    assert [nbytes for _, nbytes, _ in exact.growth] == [in_bf16 for _, _, in_bf16 in exact.growth]
    assert packed.size.nbytes < exact.size.nbytes == exact.size.bytes_bf16
    assert last.kl[-1][0] == last.prompt_tokens + len(exact.tokens) - 1
    assert all(value >= 0 for _, value in last.kl) and max(value for _, value in last.kl) > 0 and 0 < last.top1 <= 1
    texts, growth, divergence = duel._shown("tq2", last)
    assert f'data-nbytes="{packed.size.nbytes}"' in texts and f'data-nbytes="{exact.size.nbytes}"' in texts
    assert "KL(bf16 ‖ tq2)" in divergence and "answer" in divergence and "tokens" in growth


def test_the_first_difference_is_marked_in_both_texts(duel: side_by_side.SideBySide) -> None:
    size = CacheSize(100, 400, 0)
    one = side_by_side.Side([1, 2, 3], ["a", " <b>", " c"], [(9, 400, 400)], CacheSize(400, 400, 0), 1.0)
    other = side_by_side.Side([1, 7], ["a", " x"], [(9, 100, 400)], size, 1.0)
    race = side_by_side.Race(8, (one, other), "")
    assert re.findall(r"<mark title=\"[^\"]*number 2\">(.*?)</mark>", duel._shown("tq4", race)[0]) == [
        "&lt;b&gt;",
        "x",
    ]
    # Half of a character is no text yet: the mark is where it is whole. The end is a mark of its own.
    parts = side_by_side.Side([1, 7, 8], ["a", "", "🙂"], [], size, 1.0), side_by_side.Side([1, 2], ["a", ""], [], size, 1.0)
    shown = duel._shown("tq4", side_by_side.Race(8, parts, ""))[0]
    assert re.findall(r"<mark [^>]*>(.*?)</mark>", shown) == ["🙂", "∅"]
    assert side_by_side.verdict("tq4", race) == "tq4: a cache 4.00 times smaller, token 2 is the first that differs."
    assert side_by_side.first_difference([1, 2], [1, 2, 3]) is None


def test_requests_that_side_by_side_refuses(duel: side_by_side.SideBySide, folder: str) -> None:
    def said(model: str, preset: str, prompt: str) -> str:
        return list(duel.run(model, preset, prompt, 8, visitor()))[-1][0]

    assert "Write a prompt" in said(folder, "tq4", " ")
    assert "bf16 is what it is compared with" in said(folder, serving.EXACT, TEXT)
    assert "does not exist" in said("/no/model", "tq4", TEXT)
    assert "the context is full" in said(folder, "tq4", "Answer " * 3000)
    assert "No page is packed in" in said(folder, "tq4", "Question")


def test_side_by_side_stops(duel: side_by_side.SideBySide, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "SHOW_SECONDS", 0.0)
    duel.begin(TEXT, visitor())
    updates = duel.run(folder, "tq2", TEXT, 200, visitor())
    next(updates)
    duel.stop(visitor())
    *_, end = updates
    assert "Stopped" in end[0] and end[4]["visible"] and not end[5]["visible"]
    assert not any(thread.name == "tq_hf-stream" for thread in threading.enumerate())


def test_side_by_side_stops_while_it_measures(
    duel: side_by_side.SideBySide, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def endless(*arguments: Any) -> None:
        begun.set()
        while True:
            arguments[-1](1)
            time.sleep(0.01)

    monkeypatch.setattr(side_by_side, "score_texts", endless)
    monkeypatch.setattr(side_by_side, "STILL_MEASURING_S", 0.05)
    duel.begin(TEXT, visitor())
    said = []
    for status, *_ in duel.run(folder, "tq2", TEXT, 4, visitor()):
        said.append(status)
        if begun.is_set():
            duel.stop(visitor())
    assert "Stopped" in said[-1]


# -- panels --------------------------------------------------------------------------------------------------------------
def test_panels_escape_what_they_show() -> None:
    assert panels.error("<script>") == '<div class="tq-error" role="alert">&lt;script&gt;</div>'
    assert "&lt;b&gt;" in panels.counter("<b>", "1", "<i>") and "<i>" not in panels.counter("<b>", "1", "<i>")
