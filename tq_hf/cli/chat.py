"""`tq_hf chat`: a conversation in the terminal, on one cache that grows with it."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SMALLER, RequestError, first_line, is_out_of_memory
from . import options
from .generate import against_bf16
from .output import print_json, print_table, say, size

if TYPE_CHECKING:
    from ..generation.conversation import Conversation, Message
    from ..generation.streaming import Stream

HELP = "/stats shows the cache, /reset starts anew, /exit or Ctrl-D ends; Ctrl-C stops an answer."


def chat(
    model: options.Model = None,
    cache: options.Cache = "tq4",
    system: Annotated[str | None, typer.Option(help="A system message.", show_default="none")] = None,
    max_new_tokens: options.NewTokens = 512,
    set_: options.Set = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = "bfloat16",
    as_json: options.Json = False,
) -> None:
    """Chat with a model. The cache keeps all turns: each computes only what is new.

    In the chat: /stats, /reset, /exit, /help. Ctrl-C stops an answer, Ctrl-D ends. With --json, each answer is one line of
    JSON, which suits questions from a pipe, one a line.

    tq_hf chat --cache tq3

    printf 'Hello\\nAnd in French?\\n' | tq_hf chat --json
    """
    changes = options.changes(set_)
    options.require_cache(cache, changes)
    loaded = options.load_model(model, device, dtype)
    from ..generation.conversation import Conversation, encode_chat

    first = [{"role": "system", "content": system}] if system else []
    # Says now that there is no chat template, or that it takes no system message.
    encode_chat(loaded.tokenizer, [*first, {"role": "user", "content": "."}])
    held = options.new_cache(loaded.model.config, cache, **changes)
    conversation = Conversation(loaded.model, loaded.tokenizer, held)
    how = {"max_new_tokens": max_new_tokens, **options.sampling(temperature, top_p, seed)}
    session = _Session(conversation, cache, first, how, as_json)
    say(f"{loaded.name}, cache {cache}. {HELP}")
    session.run()


class _Session:
    """The loop over a user's lines."""

    def __init__(
        self, conversation: Conversation, cache: str, first: list[Message], how: dict[str, Any], as_json: bool
    ) -> None:
        self.conversation, self.cache, self.first, self.as_json = conversation, cache, first, as_json
        self.how = how  # options of `generate()`
        self.messages = list(first)
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (`input` edits lines with it)

    def run(self) -> None:
        while True:
            try:
                line = input("> " if self.interactive and not self.as_json else "").strip()
            except EOFError:
                if self.interactive:
                    say("")
                return
            except KeyboardInterrupt:
                say("\nCtrl-D or /exit ends the chat.")
                continue
            except UnicodeDecodeError as error:
                raise RequestError(f"standard input is no UTF-8 text: {first_line(error)}.") from error
            if line == "/exit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.answer(line)

    def command(self, line: str) -> None:
        if line == "/reset":
            self.conversation.reset()
            self.messages = list(self.first)
            say("The chat starts anew, with an empty cache.")
        elif line == "/stats":
            self.stats()
        else:
            say(HELP if line == "/help" else f"{line} is unknown. {HELP}")

    def stats(self) -> None:
        from ..generation.streaming import cache_size

        held, taken = len(self.conversation.held), cache_size(self.conversation.cache)
        if self.as_json:
            print_json({"tokens": held, "cache_bytes": taken.nbytes, "cache_bytes_bf16": taken.bytes_bf16})
            return
        print_table(
            f"{held:,} tokens in the cache",
            ["cache", "bytes", "bfloat16", "ratio", "packed tokens"],
            [
                [
                    self.cache,
                    size(taken.nbytes),
                    size(taken.bytes_bf16),
                    f"{taken.ratio:.2f}",
                    f"{taken.packed_tokens:,}",
                ]
            ],
        )

    def answer(self, line: str) -> None:
        """One turn. Whatever goes wrong, the chat is as it was before, or as far as it came."""
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            stream = self.conversation.reply(messages, **self.how)
            stopped = self.show(stream)
        except RequestError as error:
            say(f"{error} (/reset starts a new chat.)")
            return
        except KeyboardInterrupt:
            self.conversation.reset()  # the cache may have been cropped; the next turn fills it again
            say("\nStopped before the answer began: this turn is taken back.")
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            say(f"out of memory ({first_line(error).rstrip('.')}): this turn is taken back; /reset, or {SMALLER}.")
            return
        self.messages = [*messages, {"role": "assistant", "content": stream.text.strip()}]
        self.finish(stream, stopped)

    def show(self, stream: Stream) -> bool:
        """Print an answer as it comes; whether it was stopped."""
        with stream, options.as_requests():
            try:
                for event in stream:
                    if not self.as_json:
                        print(event.piece, end="", flush=True)
            except KeyboardInterrupt:
                _end(stream)
                return True
        return False

    def finish(self, stream: Stream, stopped: bool) -> None:
        from ..generation.streaming import cache_size

        taken = cache_size(self.conversation.cache)
        held = len(self.conversation.held)
        if self.as_json:
            print_json(
                {
                    "text": stream.text.strip(),
                    "new_tokens": len(stream.tokens),
                    "tokens": held,
                    "tokens_per_s": stream.tokens_per_s,
                    "cache_bytes": taken.nbytes,
                    "cache_bytes_bf16": taken.bytes_bf16,
                    "stopped": stopped,
                }
            )
            return
        print(" [stopped]" if stopped else "", flush=True)
        say(f"[{held:,} tokens, {stream.tokens_per_s:.1f} tokens/s; cache {against_bf16(self.cache, taken)}]")


def _end(stream: Stream) -> None:
    """Stop an answer, however often Ctrl-C is pressed until the model has ended its step."""
    while True:
        try:
            stream.close()
            return
        except KeyboardInterrupt:
            say("\nThe answer ends after this step ...")
