"""The chat page: an answer that streams, and what the cache takes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ..generation.conversation import Message
from ..generation.streaming import CacheSize, StreamEvent
from ..sizing.estimate import MemoryEstimate
from . import panels
from .handbook import chapters
from .panels import Growth, buttons
from .serving import SHOW_SECONDS, Models, Sessions, explain, on_gpu

EXAMPLES = [
    "What should a keeper do if the line on the sheet becomes flat during a storm?",
    "What is the first task of the day?",
    "Why was the station built?",
]
DOCUMENT = chapters(1, 2, 4)
MESSAGE_CHARACTERS = 60_000
WAITING = "Waiting for the model …"
NEW_CHAT = "A new chat: the cache is empty."
BREAK = "\n\n---\n\n"  # between the document and the first question
SHOWN = "shown"  # of a message that holds the document as well: the question alone


@dataclass(frozen=True)
class Answer:
    """An answer so far. Plain data, since it may come from another process.

    Attributes:
        growth: what came since the last `Answer`: tokens in the cache, its bytes, and bytes in bfloat16.
        full: what the cache is going to take when the model's context is full.
        ended: why it is complete: `"end"`, `"length"`, or empty while it is not.
    """

    text: str
    tokens: int
    size: CacheSize
    tokens_per_s: float
    first_token_seconds: float
    growth: Growth
    full: MemoryEstimate | None
    ended: str = ""


class Chat:
    """The page's handlers. Each yields or returns values for `outputs`."""

    def __init__(self, models: Models, sessions: Sessions) -> None:
        self.models, self.sessions = models, sessions
        self.answer = on_gpu(self._answer)

    def _answer(
        self, session_id: str, model: str, preset: str, messages: list[Message], max_new_tokens: int, temperature: float
    ) -> Generator[Answer]:
        loaded = self.models.get(model)
        conversation = self.sessions.get(session_id).conversation_on(loaded, preset)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        asked = [{"role": message["role"], "content": message["content"]} for message in messages]
        with conversation.reply(asked, max_new_tokens, **sampling) as stream:
            prompt, shown = stream.input_ids.shape[1], 0.0
            growth: Growth = []
            event: StreamEvent | None = None
            full = self.models.at_full_context(loaded, preset)

            def so_far(event: StreamEvent, ended: str = "") -> Answer:
                speed = stream.tokens_per_s, stream.first_token_seconds
                return Answer(event.text, event.tokens, event.size, *speed, growth, full, ended)

            for event in stream:
                growth.append((prompt + event.tokens - 1, event.size.nbytes, event.size.bytes_bf16))
                if time.monotonic() - shown > SHOW_SECONDS:
                    shown = time.monotonic()
                    yield so_far(event)
                    growth = []
            if event is not None:
                yield so_far(event, "length" if event.tokens == stream.options["max_new_tokens"] else "end")

    # -- handlers ------------------------------------------------------------------------------------------------------
    def begin(self, text: str, document: str, messages: list[Message], request: gr.Request) -> tuple[Any, ...]:
        """Show the message at once, before it is its turn. Values for box, chat, messages, status, send, stop."""
        text = text.strip()
        if messages and messages[-1]["role"] == "user":
            said = "Wait for the answer, or stop it."
            return gr.skip(), gr.skip(), gr.skip(), panels.status(said), *buttons(True)
        if not text:
            return gr.skip(), gr.skip(), gr.skip(), panels.error("Write a message first."), *buttons(False)
        message = {"role": "user", "content": text}
        if not messages and document.strip():
            message = {"role": "user", "content": f"{document.strip()}{BREAK}{text}", SHOWN: text}
        if (length := len(message["content"])) > MESSAGE_CHARACTERS:
            said = f"This message has {length:,} characters, more than {MESSAGE_CHARACTERS:,}: shorten it."
            return gr.skip(), gr.skip(), gr.skip(), panels.error(said), *buttons(False)
        messages = [*messages, message]
        session = self.sessions.get(str(request.session_hash))
        session.stop.clear()
        session.waiting = messages
        return "", display(messages), messages, panels.status(WAITING), *buttons(True)

    def respond(
        self,
        messages: list[Message],
        growth: Growth,
        model: str,
        preset: str,
        max_new_tokens: int,
        temperature: float,
        request: gr.Request,
    ) -> Iterator[tuple[Any, ...]]:
        """Values for box, chat, messages, growth, meter, chart, status, send, stop."""
        session_id = str(request.session_hash)
        if not messages or messages[-1]["role"] != "user":  # `begin` has refused the message
            yield (gr.skip(),) * 9
            return
        session = self.sessions.get(session_id)
        session.waiting = []
        if len(messages) == 1:
            growth = []
        answer: Answer | None = None
        try:
            # Closed at a stop, which ends the generation wherever it runs.
            with closing(self.answer(session_id, model, preset, messages, int(max_new_tokens), temperature)) as answers:
                for answer in answers if not session.stop.is_set() else ():
                    growth = [*growth, *answer.growth]
                    yield self._shown(messages, growth, preset, answer)
                    if session.stop.is_set():
                        break
        except Exception as error:
            if not session.over:
                said = panels.error(explain(error))
                yield *taken_back(messages), growth, gr.skip(), gr.skip(), said, *buttons(False)
                return
        if session.over:
            yield self._as_it_is(session_id, model, preset)
            return
        if answer is None:
            yield *taken_back(messages), growth, gr.skip(), gr.skip(), panels.status("Stopped."), *buttons(False)
            return
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        why = {"end": "", "length": "The answer reached its token limit. "}.get(answer.ended, "Stopped. ")
        said = panels.status(
            f"{why}{answer.tokens} tokens, the first after {answer.first_token_seconds:.1f} s."
            f" The cache stays: the next turn computes only what is new."
        )
        yield (
            gr.skip(),
            display(messages),
            messages,
            growth,
            *self._meter(growth, preset, answer),
            said,
            *buttons(False),
        )

    def _as_it_is(self, session_id: str, model: str, preset: str) -> tuple[Any, ...]:
        """A new chat has begun meanwhile, and this answer's last words may have been painted over it: paint it again. Its
        first question may be waiting already; messages and growth are its own, and stay."""
        waiting = self.sessions.waiting(session_id)
        said = panels.status(WAITING if waiting else NEW_CHAT)
        meter = self.promise([], model, preset)
        return gr.skip(), display(waiting), gr.skip(), gr.skip(), meter, "", said, *buttons(bool(waiting))

    def _shown(self, messages: list[Message], growth: Growth, preset: str, answer: Answer) -> tuple[Any, ...]:
        chat = display([*messages, {"role": "assistant", "content": answer.text}])
        meter, said = self._meter(growth, preset, answer), panels.status("Writing …")
        return gr.skip(), chat, gr.skip(), gr.skip(), *meter, said, *buttons(True)

    def _meter(self, growth: Growth, preset: str, answer: Answer) -> tuple[str, str]:
        """HTML of the counters and of the chart."""
        tokens = growth[-1][0] if growth else 0
        counters = panels.size_counters(preset, answer.size, tokens, answer.tokens_per_s, answer.full)
        return counters, panels.growth_chart(preset, [(0, 0, 0), *growth])

    def stop(self, request: gr.Request) -> str:
        self.sessions.get(str(request.session_hash)).stop.set()
        return panels.status("Stopping …")

    def promise(self, messages: list[Message], model: str, preset: str) -> Any:
        """HTML of the counters as long as there is nothing to count: what a full context is going to take."""
        if messages or (loaded := self.models.ready(model)) is None:
            return gr.skip() if messages else ""
        full = self.models.at_full_context(loaded, preset)
        return panels.promise(preset, full) if full else ""

    def restart(self, model: str, preset: str, request: gr.Request) -> tuple[Any, ...]:
        """Values for chat, messages, growth, meter, chart, status, send, stop."""
        self.sessions.drop(str(request.session_hash))
        return [], [], [], self.promise([], model, preset), "", panels.status(NEW_CHAT), *buttons(False)


def display(messages: list[Message]) -> list[Message]:
    """The chat as it is shown: of the first message the question, for the document has its own place."""
    return [{"role": message["role"], "content": message.get(SHOWN, message["content"])} for message in messages]


def taken_back(messages: list[Message]) -> tuple[str, list[Message], list[Message]]:
    """The last question back in its box, and the chat without it: nothing is lost."""
    return display(messages)[-1]["content"], display(messages[:-1]), messages[:-1]


def chat_page(models: Models, sessions: Sessions, model: gr.Textbox, preset: gr.Dropdown) -> None:
    """Lay the page out. `model` and `preset` are shared with the other pages."""
    handlers = Chat(models, sessions)
    messages, growth = gr.State([]), gr.State([])
    meter = gr.HTML(handlers.promise([], model.value, preset.value), elem_id="meter")
    with gr.Row(equal_height=False):
        with gr.Column(scale=3, min_width=320):
            chat = gr.Chatbot(
                label="Chat", height=280, layout="bubble", buttons=["copy"], allow_tags=False, elem_id="chat",
                placeholder="Ask about the handbook of the tide station, or open “The text you talk about” and change it.",
            )  # fmt: skip
            box = gr.Textbox(label="Message", placeholder="Ask something …", lines=1, max_lines=8, elem_id="message")
            with gr.Row(elem_classes="tq-buttons"):
                send = gr.Button("Send", variant="primary", elem_id="send", min_width=90)
                stop = gr.Button("Stop", variant="stop", elem_id="stop", visible=False, min_width=90)
                new = gr.Button("New chat", elem_id="new", min_width=90)
            status = gr.HTML("", elem_id="chat-status")
            gr.Examples(EXAMPLES, box, label="Try")
        with gr.Column(scale=2, min_width=320):
            chart = gr.HTML("", elem_id="chat-growth")
            with gr.Accordion("The text you talk about", open=False):
                document = gr.Textbox(
                    DOCUMENT, label="Text", info="Goes before the first message. May be empty.", lines=8, max_lines=16,
                    elem_id="document",
                )  # fmt: skip
            with gr.Accordion("Generation", open=False):
                limit = gr.Slider(16, 512, 96, step=16, label="New tokens at most", elem_id="limit")
                temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", info="0: always the likeliest token")
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    started = gr.on(
        [send.click, box.submit], handlers.begin,
        [box, document, messages], [box, chat, messages, status, send, stop], queue=False, **quiet,
    )  # fmt: skip
    started.then(
        handlers.respond,
        [messages, growth, model, preset, limit, temperature],
        [box, chat, messages, growth, meter, chart, status, send, stop],
        concurrency_id="model", concurrency_limit=1,
        trigger_mode="multiple",  # the page drops the question of a new chat otherwise while the old answer is ending
        **quiet,
    )  # fmt: skip
    stop.click(handlers.stop, None, status, queue=False, **quiet)
    gr.on(
        [new.click, chat.clear], handlers.restart,
        [model, preset], [chat, messages, growth, meter, chart, status, send, stop], queue=False, **quiet,
    )  # fmt: skip
    preset.change(handlers.promise, [messages, model, preset], meter, queue=False, **quiet)
