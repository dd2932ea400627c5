"""The chat page: an answer that streams, and what the cache takes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ..conversation import Message
from ..streaming import CacheSize, StreamEvent
from . import panels
from .panels import Growth
from .serving import SHOW_SECONDS, Models, Sessions, explain, on_gpu

EXAMPLES = [
    "Explain in five sentences why the sea has tides.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List ten uses for an old brass clock.",
]
PROMPT_CHARACTERS = 60_000


@dataclass(frozen=True)
class Answer:
    """An answer so far. Plain data, since it may come from another process.

    Attributes:
        growth: what came since the last `Answer`: tokens in the cache, its bytes, and bytes in bfloat16.
        ended: why it is complete: `"end"`, `"length"`, or empty while it is not.
    """

    text: str
    tokens: int
    size: CacheSize
    tokens_per_s: float
    first_token_seconds: float
    growth: Growth
    ended: str = ""


class Chat:
    """The page's handlers. Each yields or returns values for `outputs`."""

    def __init__(self, models: Models, sessions: Sessions) -> None:
        self.models, self.sessions = models, sessions
        self.answer = on_gpu(self._answer)

    def _answer(
        self, session_id: str, model: str, preset: str, messages: list[Message], max_new_tokens: int, temperature: float
    ) -> Iterator[Answer]:
        loaded = self.models.get(model)
        conversation = self.sessions.get(session_id).conversation_on(loaded, preset)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        with conversation.reply(messages, max_new_tokens, **sampling) as stream:
            prompt, growth, event, shown = stream.input_ids.shape[1], [], None, 0.0

            def so_far(event: StreamEvent, ended: str = "") -> Answer:
                return Answer(
                    event.text, event.tokens, event.size, stream.tokens_per_s, stream.first_token_seconds, growth, ended
                )

            for event in stream:
                growth.append((prompt + event.tokens - 1, event.size.nbytes, event.size.bytes_bf16))
                if time.monotonic() - shown > SHOW_SECONDS:
                    shown = time.monotonic()
                    yield so_far(event)
                    growth = []
            if event is not None:
                yield so_far(event, "length" if event.tokens == stream.options["max_new_tokens"] else "end")

    # -- handlers ------------------------------------------------------------------------------------------------------
    def begin(self, text: str, messages: list[Message], request: gr.Request) -> tuple[Any, ...]:
        """Show the message at once, before it is its turn. Values for box, chat, messages, status, send, stop."""
        text = text.strip()
        if not text:
            return gr.skip(), messages, messages, panels.error("Write a message first."), *self._buttons(False)
        if len(text) > PROMPT_CHARACTERS:
            said = f"This message has {len(text):,} characters, more than {PROMPT_CHARACTERS:,}: shorten it."
            return gr.skip(), messages, messages, panels.error(said), *self._buttons(False)
        self.sessions.get(str(request.session_hash)).stop.clear()
        messages = [*messages, {"role": "user", "content": text}]
        return "", messages, messages, panels.status("Waiting for the model …"), *self._buttons(True)

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
        """Values for box, chat, messages, growth, meter, status, send, stop."""
        session_id = str(request.session_hash)
        if not messages or messages[-1]["role"] != "user":  # `begin` has refused the message
            yield (gr.skip(),) * 8
            return
        stop = self.sessions.get(session_id).stop
        if len(messages) == 1:
            growth = []
        answer: Answer | None = None
        try:
            # Closed at a stop, which ends the generation wherever it runs.
            with closing(self.answer(session_id, model, preset, messages, int(max_new_tokens), temperature)) as answers:
                for answer in answers if not stop.is_set() else ():
                    growth = [*growth, *answer.growth]
                    yield self._shown(messages, growth, preset, answer)
                    if stop.is_set():
                        break
        except Exception as error:
            # The question goes back into its box: nothing of the chat is lost.
            said = panels.error(explain(error))
            yield messages[-1]["content"], messages[:-1], messages[:-1], growth, gr.skip(), said, *self._buttons(False)
            return
        if answer is None:
            back = messages[-1]["content"], messages[:-1], messages[:-1]
            yield *back, growth, gr.skip(), panels.status("Stopped."), *self._buttons(False)
            return
        messages = [*messages, {"role": "assistant", "content": answer.text}]
        why = {"end": "", "length": "The answer reached its token limit. "}.get(answer.ended, "Stopped. ")
        said = panels.status(
            f"{why}{answer.tokens} tokens, the first after {answer.first_token_seconds:.1f} s."
            f" The cache stays: the next turn computes only what is new."
        )
        yield gr.skip(), messages, messages, growth, self._meter(growth, preset, answer), said, *self._buttons(False)

    def _shown(self, messages: list[Message], growth: Growth, preset: str, answer: Answer) -> tuple[Any, ...]:
        chat = [*messages, {"role": "assistant", "content": answer.text}]
        said = panels.status("Writing …")
        return gr.skip(), chat, gr.skip(), gr.skip(), self._meter(growth, preset, answer), said, gr.skip(), gr.skip()

    def _meter(self, growth: Growth, preset: str, answer: Answer) -> str:
        tokens = growth[-1][0] if growth else 0
        counters = panels.size_counters(preset, answer.size, tokens, answer.tokens_per_s)
        return counters + panels.growth_chart(preset, [(0, 0, 0), *growth])

    def _buttons(self, running: bool) -> tuple[Any, Any]:
        return gr.update(visible=not running), gr.update(visible=running)

    def stop(self, request: gr.Request) -> str:
        self.sessions.get(str(request.session_hash)).stop.set()
        return panels.status("Stopping …")

    def restart(self, request: gr.Request) -> tuple[Any, ...]:
        """Values for chat, messages, growth, meter, status."""
        self.sessions.drop(str(request.session_hash))
        return [], [], [], EMPTY, panels.status("A new chat: the cache is empty.")


EMPTY = panels.status("Nothing is cached yet: write a message.")


def chat_page(models: Models, sessions: Sessions, model: gr.Textbox, preset: gr.Dropdown) -> None:
    """Lay the page out. `model` and `preset` are shared with the other pages."""
    handlers = Chat(models, sessions)
    messages, growth = gr.State([]), gr.State([])
    with gr.Row(equal_height=False):
        with gr.Column(scale=3, min_width=320):
            chat = gr.Chatbot(
                label="Chat", height=430, layout="bubble", buttons=["copy"], allow_tags=False, elem_id="chat",
                placeholder="The whole chat lives in one packed KV cache.",
            )  # fmt: skip
            box = gr.Textbox(
                label="Message", placeholder="Ask something …", lines=2, max_lines=8, elem_id="message", autofocus=True
            )
            with gr.Row(elem_classes="tq-buttons"):
                send = gr.Button("Send", variant="primary", elem_id="send", min_width=90)
                stop = gr.Button("Stop", variant="stop", elem_id="stop", visible=False, min_width=90)
                new = gr.Button("New chat", elem_id="new", min_width=90)
            gr.Examples(EXAMPLES, box, label="Try")
        with gr.Column(scale=2, min_width=320):
            status = gr.HTML("", elem_id="chat-status")
            meter = gr.HTML(EMPTY, elem_id="meter")
            with gr.Accordion("Generation", open=False):
                limit = gr.Slider(16, 512, 160, step=16, label="New tokens at most", elem_id="limit")
                temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature", info="0: always the likeliest token")
    started = gr.on(
        [send.click, box.submit], handlers.begin, [box, messages], [box, chat, messages, status, send, stop],
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    started.then(
        handlers.respond,
        [messages, growth, model, preset, limit, temperature],
        [box, chat, messages, growth, meter, status, send, stop],
        concurrency_id="model", concurrency_limit=1, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
    stop.click(handlers.stop, None, status, queue=False, show_progress="hidden", api_visibility="private")
    new.click(
        handlers.restart, None, [chat, messages, growth, meter, status],
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip
