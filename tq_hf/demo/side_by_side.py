"""The page that compares: one prompt, transformers' cache and a packed one, token by token."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr
import torch

from ..commands import Loaded
from ..config import PRESETS
from ..generation.chunks import first_page_tokens, text_chunks
from ..generation.comparison import generate_timed, score_texts
from ..generation.conversation import encode_chat, room_for
from ..generation.streaming import CacheSize, Stream
from . import panels
from .charts import Line, line_chart, mib
from .handbook import chapters
from .panels import Growth, buttons
from .serving import EXACT, SHOW_SECONDS, Models, Sessions, explain, new_cache, on_gpu

WARM_UP = 4  # new tokens before the clocks run on a GPU
MEASURING, STILL_MEASURING_S = "Measuring how far the distributions are apart …", 1.0
QUESTION = "In plain words, what should a keeper do if the line on the sheet becomes flat during a storm, and why?"
PROMPT = f"{chapters(1, 4)}\n\n{QUESTION}"


@dataclass(frozen=True)
class Side:
    """One of the two generations so far. Plain data, since it may come from another process.

    Attributes:
        pieces: the text of each new token.
        growth: tokens in the cache, its bytes, and bytes in bfloat16, for every token.
    """

    tokens: list[int]
    pieces: list[str]
    growth: Growth
    size: CacheSize
    tokens_per_s: float


@dataclass(frozen=True)
class Race:
    """Both generations so far, and once they are complete how far the distributions are apart.

    Attributes:
        prompt_tokens: length of the prompt.
        note: why there is no `kl`, or what is going on.
        kl: KL(exact || packed) in nats by position in the text; empty before it is measured.
        top1: share of positions where both rank the same token first.
    """

    prompt_tokens: int
    sides: tuple[Side, Side]
    note: str
    kl: Sequence[tuple[int, float]] = ()
    top1: float = 0.0


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Where two token lists part; None as long as one begins as the other does."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)


def encode(loaded: Loaded, prompt: str) -> torch.Tensor:
    """The prompt as a user's message where the model has a chat template, else as it is. int64 [1, tokens]."""
    if getattr(loaded.tokenizer, "chat_template", None):
        return encode_chat(loaded.tokenizer, [{"role": "user", "content": prompt}])
    ids: torch.Tensor = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    return ids


class SideBySide:
    """The page's handlers."""

    def __init__(self, models: Models, sessions: Sessions) -> None:
        self.models, self.sessions = models, sessions
        self.race = on_gpu(self._race)

    def _race(self, model: str, preset: str, prompt: str, new_tokens: int) -> Generator[Race]:
        loaded = self.models.get(model)
        ids = encode(loaded, prompt).to(loaded.model.device)
        new_tokens = room_for(loaded.model.config, ids.shape[1], new_tokens)
        length, shown = ids.shape[1], 0.0
        sides = [Side([], [], [], CacheSize(0, 0, 0), 0.0)] * 2
        if loaded.model.device.type == "cuda":  # kernels are compiled at their first call, and only the packed side has many
            yield Race(length, (sides[0], sides[1]), "Warming up …")
            for name in (EXACT, preset):
                generate_timed(loaded.model, ids, new_cache(loaded.model, name), min(WARM_UP, new_tokens))
        caches = [new_cache(loaded.model, EXACT), new_cache(loaded.model, preset)]
        streams = [
            Stream(loaded.model, loaded.tokenizer, ids, cache, max_new_tokens=new_tokens, do_sample=False)
            for cache in caches
        ]
        with streams[0], streams[1]:
            waiting = [0, 1]
            while waiting:
                for i in list(waiting):  # in turns, so that neither slows the other's clock
                    if (event := next(streams[i], None)) is None:
                        waiting.remove(i)
                        continue
                    held = (length + event.tokens - 1, event.size.nbytes, event.size.bytes_bf16)
                    sides[i] = Side(
                        [*sides[i].tokens, event.token],
                        [*sides[i].pieces, event.piece],
                        [*sides[i].growth, held],
                        event.size,
                        streams[i].tokens_per_s,
                    )
                if time.monotonic() - shown > SHOW_SECONDS or not waiting:
                    shown = time.monotonic()
                    note = "Writing …" if waiting else MEASURING
                    yield Race(length, (sides[0], sides[1]), note)
        text = torch.tensor([[*ids[0].tolist(), *sides[0].tokens]], device=ids.device)
        yield from self._measured(loaded, preset, text, length, (sides[0], sides[1]))

    def _measured(
        self, loaded: Loaded, preset: str, text: torch.Tensor, length: int, sides: tuple[Side, Side]
    ) -> Iterator[Race]:
        """The distributions along the exact cache's text, with both caches. Until they are there, it says every second that
        they are being measured, which is where a visitor's stop takes effect."""
        config = PRESETS[preset]
        needed = first_page_tokens(config)
        if text.shape[1] <= needed:
            note = (
                f"No page is packed in {text.shape[1]} tokens: {preset} packs the first one after {needed}. A longer text"
                " shows what packing changes."
            )
            yield Race(length, sides, note)
            return
        caches = new_cache(loaded.model, EXACT), [new_cache(loaded.model, preset)]
        is_left = threading.Event()

        def between_chunks(tokens: int) -> None:
            if is_left.is_set():
                raise CancelledError

        with ThreadPoolExecutor(1) as thread:
            arguments = loaded.model, text, *caches, text_chunks(text.shape[1], config), between_chunks
            measuring = thread.submit(score_texts, *arguments)
            try:
                while wait([measuring], timeout=STILL_MEASURING_S).not_done:
                    yield Race(length, sides, MEASURING)
            finally:
                is_left.set()
            try:
                (scores,) = measuring.result()
            except ValueError as error:  # a model none of whose layers is packed
                yield Race(length, sides, explain(error))
                return
        first = text.shape[1] - scores.kl.shape[1]
        kl = [(first + i, max(value, 0.0)) for i, value in enumerate(scores.kl[0].tolist())]
        yield Race(length, sides, "", kl, scores.same.mean().item())

    # -- handlers ------------------------------------------------------------------------------------------------------
    def begin(self, prompt: str, request: gr.Request) -> tuple[Any, ...]:
        """Values for status, run, stop."""
        self._stop_of(request).clear()
        return panels.status("Waiting for the model …"), *buttons(bool(prompt.strip()))

    def run(self, model: str, preset: str, prompt: str, new_tokens: int, request: gr.Request) -> Iterator[tuple[Any, ...]]:
        """Values for status, texts, growth, divergence, run, stop."""
        stop = self._stop_of(request)
        keep, done = gr.skip(), buttons(False)
        if not prompt.strip():
            yield panels.error("Write a prompt first."), keep, keep, keep, *done
            return
        if preset == EXACT:
            yield panels.error("Choose a packed preset: bf16 is what it is compared with."), keep, keep, keep, *done
            return
        race: Race | None = None
        try:
            with closing(self.race(model, preset, prompt.strip(), int(new_tokens))) as races:
                for race in races if not stop.is_set() else ():
                    yield panels.status(race.note), *self._shown(preset, race), keep, keep
                    if stop.is_set():
                        break
        except Exception as error:
            yield panels.error(explain(error)), keep, keep, keep, *done
            return
        if race is None or stop.is_set():
            yield panels.status("Stopped."), keep, keep, keep, *done
            return
        yield panels.status(race.note or verdict(preset, race)), keep, keep, keep, *done

    def _shown(self, preset: str, race: Race) -> tuple[str, str, str]:
        """HTML of the texts, the growth of both caches, and the plot of the divergence."""
        part = first_difference(race.sides[0].tokens, race.sides[1].tokens)
        cards = "".join(
            _card(name, css, side, part) for name, css, side in zip((EXACT, preset), ("tq-exact", "tq-packed"), race.sides)
        )
        lines = [
            Line(name, css, [(0, 0), *((tokens, nbytes) for tokens, nbytes, _ in side.growth)])
            for name, css, side in zip((EXACT, preset), ("tq-exact", "tq-packed"), race.sides)
        ]
        growth = line_chart("Cache memory as the text grows", lines, "tokens", mib)
        divergence = ""
        if race.kl:
            mean = sum(value for _, value in race.kl) / len(race.kl)
            divergence = line_chart(
                f"KL(bf16 ‖ {preset}) of the next-token distributions, nats: mean {mean:.4f},"
                f" same first choice at {race.top1:.1%} of {len(race.kl)} positions",
                [Line("", "tq-packed", race.kl)],
                "position in the text",
                lambda value: f"{value:.3g}",
                mark=(race.prompt_tokens, "answer"),
            )
        return f'<div class="tq-cards">{cards}</div>', growth, divergence

    def _stop_of(self, request: gr.Request) -> threading.Event:
        """Of this page alone: a chat that runs meanwhile has its own."""
        return self.sessions.get(f"{request.session_hash} side by side").stop

    def stop(self, request: gr.Request) -> str:
        self._stop_of(request).set()
        return panels.status("Stopping …")


def verdict(preset: str, race: Race) -> str:
    exact, packed = race.sides
    part = first_difference(exact.tokens, packed.tokens)
    ratio = exact.size.nbytes / packed.size.nbytes if packed.size.nbytes else 0.0
    same = f"all {len(exact.tokens)} tokens are the same"
    if part is not None:
        same = f"token {part + 1} is the first that differs"
    return f"{preset}: a cache {ratio:.2f} times smaller, {same}."


def _card(name: str, css: str, side: Side, part: int | None) -> str:
    pieces = [escape(piece) for piece in side.pieces]
    if part is not None and part < len(pieces):
        title = f"the first different token, number {part + 1}"
        # A character of several tokens is whole only with the last of them.
        at = next((i for i in range(part, len(pieces)) if pieces[i]), part)
        word = pieces[at].lstrip() or "∅"  # the end, or nothing but space
        space = pieces[at].removesuffix(word)
        pieces[at] = f'{space}<mark title="{title}">{word}</mark>'
    tokens = side.growth[-1][0] if side.growth else 0
    speed = f"{side.tokens_per_s:.1f} tokens/s" if side.tokens_per_s else "–"
    held = f'<b data-nbytes="{side.size.nbytes}" data-tokens="{tokens}">{mib(side.size.nbytes)}</b>'
    return (
        f'<section class="tq-card {css}" aria-label="{escape(name)}"><header><h3>{escape(name)}</h3>'
        f"{held}<span>{speed}</span></header>"
        f'<p dir="auto">{"".join(pieces)}</p></section>'
    )


def side_by_side_page(models: Models, sessions: Sessions, model: gr.Textbox, preset: gr.Dropdown) -> None:
    """Lay the page out. `model` and `preset` are shared with the other pages."""
    handlers = SideBySide(models, sessions)
    prompt = gr.Textbox(PROMPT, label="Prompt", lines=4, max_lines=8, elem_id="prompt")
    with gr.Row(elem_classes="tq-buttons"):
        new_tokens = gr.Slider(8, 256, 48, step=8, label="New tokens", elem_id="new-tokens", min_width=240)
        run = gr.Button("Compare", variant="primary", elem_id="compare", min_width=120)
        stop = gr.Button("Stop", variant="stop", elem_id="compare-stop", visible=False, min_width=120)
    status = gr.HTML("", elem_id="compare-status")
    texts = gr.HTML("", elem_id="texts")
    with gr.Row():
        with gr.Column(min_width=320):
            growth = gr.HTML("", elem_id="growth")
        with gr.Column(min_width=320):
            divergence = gr.HTML("", elem_id="divergence")
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    started = run.click(handlers.begin, prompt, [status, run, stop], queue=False, **quiet)
    started.then(
        handlers.run, [model, preset, prompt, new_tokens], [status, texts, growth, divergence, run, stop],
        concurrency_id="model", concurrency_limit=1, **quiet,
    )  # fmt: skip
    stop.click(handlers.stop, None, status, queue=False, **quiet)
