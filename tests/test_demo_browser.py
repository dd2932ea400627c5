"""The demo from end to end, in headless Chromium: what a visitor does, and what the page says then."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("gradio", reason="the demo needs the extra demo")
pytest.importorskip("playwright", reason="driving a browser needs the extra test")

import screenshots  # scripts/screenshots.py
from playwright.sync_api import Browser, Page, expect
from screenshots import message_box

from tests.word_model import save_word_model, words
from tq_hf.demo import app
from tq_hf.demo.serving import EXACT, new_cache
from tq_hf.demo.side_by_side import first_difference
from tq_hf.generation.conversation import encode_chat
from tq_hf.generation.streaming import Stream, cache_size
from tq_hf.sizing.estimate import estimate_memory

pytestmark = pytest.mark.skipif(screenshots.chromium() is None, reason="there is no Chromium: apt install chromium")
CPU = torch.device("cpu")
expect.set_options(timeout=60_000)  # a busy machine
TABS = ("Chat", "Side by side", "Memory")
TEXT = " ".join((words() * 3)[:250])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with screenshots.browser() as started:
        yield started


class Served(SimpleNamespace):
    """A running app: its `address`, and the `models` and `sessions` behind it."""


def served(folder: str) -> Iterator[Served]:
    """The app with what it makes for itself laid open."""
    made: dict[str, Any] = {}

    def keep(name: str, factory: Any) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            made[name] = factory(*args, **options)
            return made[name]

        return make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "Models", keep("models", app.Models))
        patch.setattr(app, "Sessions", keep("sessions", app.Sessions))
        with screenshots.serving(device=CPU, model=folder) as address:
            yield Served(address=address, folder=folder, **made)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("words")
    save_word_model(folder)
    yield from served(str(folder))


def visit(browser: Browser, address: str, width: int = 1280, dark: bool = False) -> Page:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
    page.set_default_timeout(30_000)
    page.goto(address)
    message_box(page).wait_for()
    return page


@pytest.fixture
def page(browser: Browser, demo: Served) -> Iterator[Page]:
    page = visit(browser, demo.address)
    yield page
    page.close()


def number(page: Page, selector: str, attribute: str) -> int:
    return int(page.locator(f"{selector} [{attribute}]").first.get_attribute(attribute))


def only_conversation(demo: Served) -> Any:
    """Of the visitor who came last."""
    *_, session = demo.sessions._sessions.values()
    return session.conversation


def send(page: Page, text: str) -> None:
    """Ask and wait for the answer, as `screenshots.chat` does; the answers of this model are too quick to see Stop."""
    answers = page.locator("#chat .bot.message").count()
    message_box(page).fill(text)
    message_box(page).press("Enter")
    expect(page.locator("#chat .bot.message")).to_have_count(answers + 1)
    expect(page.locator("#chat-status")).to_contain_text("The cache stays")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)], ids=["desktop, dark", "phone, light"])
def test_every_page_fits_and_fetches_nothing_from_elsewhere(browser: Browser, demo: Served, width: int, dark: bool) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light")
    urls, errors = [], []
    page.on("request", lambda request: urls.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(demo.address)
    message_box(page).wait_for()
    send(page, "Question")
    for tab in TABS:
        screenshots.open_tab(page, tab)
        if tab == "Side by side":
            page.get_by_label("Prompt").fill(TEXT)
            page.get_by_role("button", name="Compare").click()
            page.locator("#divergence figure").wait_for()
        if tab == "Memory":
            page.locator("#memory-table table").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
        table = page.locator("#memory-table table")
        if tab == "Memory":
            box = table.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
        unnamed = page.evaluate(
            """[...document.querySelectorAll('input, textarea, button, [role=img]')].filter(e => e.offsetParent)
               .filter(e => !(e.ariaLabel || e.title || e.innerText || (e.labels && e.labels.length)))
               .map(e => e.outerHTML.slice(0, 120))"""
        )
        assert unnamed == [], tab
    # Text and its ground, in light and dark.
    light = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    text = page.evaluate("getComputedStyle(document.querySelector('.tq-head h1')).color.match(/\\d+/g).map(Number)[0]")
    assert (light < 60 and text > 180) if dark else (light > 200 and text < 80)
    elsewhere = [url for url in urls if not url.startswith((demo.address, "data:", "blob:"))]
    assert elsewhere == [] and errors == []
    page.close()


@pytest.mark.parametrize("width", screenshots.WIDTHS.values(), ids=screenshots.WIDTHS)
def test_a_chat_shows_the_bytes_that_its_cache_has(browser: Browser, demo: Served, width: int) -> None:
    page = visit(browser, demo.address, width)
    seen = []
    for question in ("Question", "Answer"):
        send(page, question)
        conversation = only_conversation(demo)
        size = cache_size(conversation.cache)
        assert number(page, "#meter", "data-nbytes") == conversation.cache.nbytes == size.nbytes
        assert number(page, "#meter", "data-bf16") == size.bytes_bf16 > 2 * size.nbytes
        assert number(page, "#meter", "data-tokens") == conversation.cache.get_seq_length() == len(conversation.held)
        seen.append(size.nbytes)
        expect(page.locator("#meter")).to_contain_text(f"{size.ratio:.2f}×")
        expect(page.locator("#chat-growth figure")).to_be_visible()
    assert seen[1] > seen[0]
    assert page.locator("#chat .user.message").first.inner_text().strip() == "Question"  # the text has its own place
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#chat .message")).to_have_count(0)
    expect(page.locator("#meter")).to_contain_text("tq4 cache at 2,048 tokens")
    page.close()


def test_a_new_chat_ends_the_answer_and_begins_at_once(page: Page, demo: Served, slow: SimpleNamespace) -> None:
    message_box(page).fill("Question")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#meter [data-nbytes]")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()  # and the old answer's Stop is gone
    message_box(page).fill("Answer")
    message_box(page).press("Enter")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_contain_text("Stopped.")
    assert [said.inner_text().strip() for said in page.locator("#chat .user.message").all()] in (["Answer"], [])
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_new_chat_while_waiting_can_be_begun_again(browser: Browser, demo: Served, slow: SimpleNamespace) -> None:
    first, second = visit(browser, demo.address), visit(browser, demo.address)
    for page in (first, second):
        message_box(page).fill("Question")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(second.locator("#chat-status")).to_contain_text("Waiting for the model")
    second.get_by_role("button", name="New chat").click()
    expect(second.get_by_role("button", name="Send")).to_be_visible()
    first.get_by_role("button", name="Stop").click()
    slow.seconds = 0
    send(second, "Answer")
    first.close()
    second.close()


@pytest.fixture
def slow(demo: Served) -> Iterator[SimpleNamespace]:
    """A model that takes its time (half a minute an answer), so that there is something to stop on a busy machine too."""
    model = demo.models.get(demo.folder).model
    pace = SimpleNamespace(seconds=0.3)
    hook = model.register_forward_pre_hook(lambda *_: time.sleep(pace.seconds))
    yield pace
    hook.remove()


def test_an_answer_stops_and_the_chat_goes_on(page: Page, demo: Served, slow: SimpleNamespace) -> None:
    message_box(page).fill("Question")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-status")).to_contain_text("Writing")
    expect(page.locator("#meter [data-nbytes]")).to_be_visible()
    early = number(page, "#meter", "data-tokens")
    page.wait_for_function(f"document.querySelector('#meter [data-tokens]').dataset.tokens > {early + 2}")  # it is live
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_contain_text("Stopped.")
    conversation = only_conversation(demo)
    assert number(page, "#meter", "data-nbytes") == conversation.cache.nbytes
    assert not any(thread.name == "tq_hf-stream" for thread in threading.enumerate())
    before = len(conversation.held)
    message_box(page).fill("Answer")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat .bot.message")).to_have_count(2)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_contain_text("Stopped.")
    assert only_conversation(demo) is conversation and len(conversation.held) > before


@pytest.mark.parametrize("width", screenshots.WIDTHS.values(), ids=screenshots.WIDTHS)
def test_side_by_side_is_what_both_caches_write(browser: Browser, demo: Served, width: int) -> None:
    page = visit(browser, demo.address, width)
    page.get_by_label("Cache").click()
    page.get_by_role("option", name=re.compile("^tq2 ")).click()
    screenshots.open_tab(page, "Side by side")
    page.get_by_label("Prompt").fill(TEXT)
    page.get_by_role("button", name="Compare").click()
    page.locator("#divergence figure").wait_for()
    expect(page.locator("#compare-status")).to_contain_text("times smaller")

    loaded = demo.models.get(demo.folder)
    ids = encode_chat(loaded.tokenizer, [{"role": "user", "content": TEXT}])
    streams = []
    for name in (EXACT, "tq2"):
        cache = new_cache(loaded.model, name)
        stream = Stream(loaded.model, loaded.tokenizer, ids, cache, max_new_tokens=48, do_sample=False)
        for _ in stream:
            pass
        streams.append(stream)
        card = page.locator("#texts").get_by_label(name)
        assert int(card.locator("[data-nbytes]").get_attribute("data-nbytes")) == cache_size(cache).nbytes
        assert card.locator("p").inner_text().split() == stream.text.split()
    part = first_difference(streams[0].tokens, streams[1].tokens)
    marks = page.locator("#texts mark")
    assert part is not None and marks.count() == 2
    shown = [mark.inner_text().strip() for mark in marks.all()]
    assert shown == [loaded.tokenizer.decode([stream.tokens[part]]) for stream in streams]
    title = page.locator("#divergence figcaption").inner_text()
    assert re.search(r"KL\(bf16 ‖ tq2\).*mean 0\.[0-9]+", title, flags=re.S)
    page.close()


@pytest.mark.parametrize("width", screenshots.WIDTHS.values(), ids=screenshots.WIDTHS)
def test_the_memory_page_follows_its_fields(browser: Browser, demo: Served, width: int) -> None:
    page = visit(browser, demo.address, width)
    screenshots.memory(page)
    page.get_by_label("Architecture").click()
    page.get_by_role("option", name="The loaded model").click()
    page.get_by_label("Context, tokens").fill("1500")
    page.get_by_label("Sequences").fill("3")
    page.get_by_label("GPU memory, GiB").fill("1")
    made = estimate_memory(demo.models.get(demo.folder).model.config, "tq4", 1500, 3)
    expect(page.locator("#memory-summary [data-nbytes]")).to_have_attribute("data-nbytes", str(made.nbytes))
    expect(page.locator("#memory-bytes")).to_contain_text("3 × 1,500")
    room = 1 - made.weight_bytes / 2**30
    expect(page.locator("#memory-summary [data-fits]")).to_have_attribute("data-fits", str(made.largest_batch(room)))
    assert number(page, "#memory-table", "data-fits") == made.largest_batch(room, dynamic=True)
    page.get_by_label("Sequences").fill("0")
    expect(page.locator("#memory-summary [role=alert]")).to_contain_text("batch: 0 is not possible")
    page.get_by_label("Sequences").fill("3")
    expect(page.locator("#memory-summary [data-nbytes]")).to_have_attribute("data-nbytes", str(made.nbytes))
    page.close()


def test_what_goes_wrong_is_said_and_nothing_is_lost(page: Page, demo: Served) -> None:
    name = "/no/model/<i>${1 + 1}</i>"
    page.get_by_label("Model", exact=True).fill(name)
    message_box(page).fill("<img src=x onerror='window.harmed = 1'> Question")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-status [role=alert]")).to_contain_text(f"the model folder {name} does not exist")
    expect(message_box(page)).to_have_value(re.compile("Question$"))  # to be sent again
    page.get_by_label("Model", exact=True).fill(demo.folder)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-status")).to_contain_text("The cache stays")
    message_box(page).fill("Answer " * 2500)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-status [role=alert]")).to_contain_text("the context is full")
    send(page, "Question")
    expect(page.locator("#chat .bot.message")).to_have_count(2)
    assert page.evaluate("window.harmed") is None


def test_visitors_wait_for_each_other_and_have_their_own_chats(browser: Browser, demo: Served) -> None:
    pages = [visit(browser, demo.address) for _ in range(3)]
    for page, question in zip(pages, ("Question", "Answer", TEXT)):
        message_box(page).fill(question)
    for page in pages:
        page.get_by_role("button", name="Send").click()
    for page, question in zip(pages, ("Question", "Answer", TEXT)):
        expect(page.locator("#chat-status")).to_contain_text("The cache stays")
        expect(page.locator("#chat .user.message")).to_have_count(1)
        assert page.locator("#chat .user.message").inner_text().split() == question.split()
    held = [session.conversation for session in demo.sessions._sessions.values() if session.conversation][-3:]
    sizes = sorted(number(page, "#meter", "data-nbytes") for page in pages)
    assert sizes == sorted(conversation.cache.nbytes for conversation in held)
    assert len({id(conversation.model) for conversation in held}) == 1 and len({id(c.cache) for c in held}) == 3
    kept = len(demo.sessions)
    for page in pages:
        page.close()
    for _ in range(100):  # who leaves takes the cache along
        if len(demo.sessions) <= kept - 3:
            break
        time.sleep(0.1)
    assert len(demo.sessions) <= kept - 3


@pytest.mark.network
def test_the_embedded_model_answers_within_seconds(browser: Browser, embedded_folder: Path) -> None:
    for demo in served(""):
        page = visit(browser, demo.address)
        page.set_default_timeout(120_000)
        page.get_by_role("button", name="Generation").click()
        page.get_by_label("New tokens at most").first.fill("16")
        page.get_by_label("New tokens at most").first.press("Tab")
        send(page, "What is the first task of the day?")
        conversation = only_conversation(demo)
        assert number(page, "#meter", "data-nbytes") == conversation.cache.nbytes
        ratio = number(page, "#meter", "data-bf16") / conversation.cache.nbytes
        assert ratio > 2.5 and conversation.cache.get_seq_length() > 1000
        page.close()
