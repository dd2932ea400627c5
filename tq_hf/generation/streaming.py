"""One generation, token by token: what is written so far, how fast, and what the cache holds meanwhile.

    with Stream(model, tokenizer, input_ids, cache, max_new_tokens=100) as stream:
        for event in stream:
            print(event.piece, end="", flush=True)

`generate()` runs in a thread of its own and waits while the consumer looks at an event. So the cache stands still then, two
streams can take turns on one machine without slowing each other's clocks, and a stop takes effect at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..cache import TurboQuantCache
from ..compat import reset_cache
from ..reporting.reports import LayerReport, stock_report
from .comparison import cache_argument

# Options of `generate()` that make several tokens at a time.
DRAFTING = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
SEVERAL = ("num_beams", "num_return_sequences")  # and those that make several sequences


@dataclass(frozen=True)
class CacheSize:
    """What a cache holds.

    Attributes:
        nbytes: bytes of all its tensors.
        bytes_bf16: what the same tokens take in bfloat16.
        packed_tokens: tokens that a layer reads from packed pages; of the layer that has most.
    """

    nbytes: int
    bytes_bf16: int
    packed_tokens: int

    @property
    def ratio(self) -> float:
        """`bytes_bf16` over `nbytes`."""
        return self.bytes_bf16 / self.nbytes if self.nbytes else 0.0


def cache_size(cache: Any) -> CacheSize:
    """The size of a `TurboQuantCache`, or of one of transformers' caches."""
    if isinstance(cache, TurboQuantCache):
        report = cache.report()
        layers: Sequence[LayerReport] = report.layers
        nbytes = report.nbytes
    else:
        layers = [stock_report(i, layer) for i, layer in enumerate(cache.layers)]
        nbytes = sum(layer.nbytes for layer in layers)
    packed = max((layer.packed_tokens for layer in layers), default=0)
    return CacheSize(nbytes, sum(layer.bytes_bf16 for layer in layers), packed)


@dataclass(frozen=True)
class StreamEvent:
    """A new token.

    Attributes:
        token: its id.
        piece: what it adds to the text; empty for special tokens, and while a character is incomplete.
        text: all pieces so far.
        tokens: how many new tokens there are now.
        seconds: time that `generate()` has run since it was called, without its waits for the consumer.
        size: what the cache holds now. The newest token is not in it yet.
    """

    token: int
    piece: str
    text: str
    tokens: int
    seconds: float
    size: CacheSize


class _Stopped(Exception):
    """Ends `generate()` from within."""


class Stream(Iterator[StreamEvent]):
    """An iterator of `StreamEvent` over one call of `model.generate()`, which starts with the first `next()`.

    When it has ended, or was stopped, the cache holds the prompt and all new tokens but the newest, and a further call with
    all ids (the prompt's, the new ones, and what follows) goes on from there. After an error it is empty. A stream that
    nobody refers to any more ends, and lets go of its cache.

    Args:
        model: a causal language model of transformers.
        tokenizer: turns ids into text.
        input_ids: int64 [1, prompt], on the model's device: all ids, those that the cache holds already included.
        cache: a `TurboQuantCache`, or any cache that `generate()` takes.
        max_new_tokens: how many tokens to generate at most.
        options: further arguments of `generate()`, e.g. `do_sample`.

    Raises:
        ValueError: not one row of ids with at least one token, `max_new_tokens` below 1, an option that makes several
            tokens at a time or several sequences, or `use_cache=False`. Whatever `generate()` raises is raised by `next()`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, input_ids: Tensor, cache: Any, *, max_new_tokens: int, **options: Any
    ) -> None:
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: expected [1, tokens], at least one token.")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} is not possible: expected at least 1.")
        several = [name for name in DRAFTING if options.get(name)]
        if several := several + [name for name in SEVERAL if (options.get(name) or 1) > 1]:
            raise ValueError(f"{', '.join(several)} cannot be streamed: expected one sequence, a token at a time.")
        if not options.get("use_cache", True):
            raise ValueError("use_cache=False cannot be streamed: expected that the cache is used.")
        self.model, self.input_ids, self.cache = model, input_ids, cache
        # A model's own generation config may ask for beams, or for no cache (it was saved after training).
        self.options = {"num_beams": 1, "use_cache": True, "max_new_tokens": max_new_tokens, **options}
        self.text = ""
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._pieces = _Pieces(tokenizer)
        self._run = _Run()
        self._thread: threading.Thread | None = None
        self._ended = self._failed = False
        weakref.finalize(self, self._run.stop).atexit = False

    def __next__(self) -> StreamEvent:
        if self._ended or (self._thread is None and self.stopped):
            raise StopIteration
        if self._thread is None:
            arguments = self.model, self.input_ids, self.cache, self.options
            self._thread = threading.Thread(target=self._run.generate, args=arguments, name="tq_hf-stream", daemon=True)
            self._thread.start()
        else:
            self._run.go.release()
        arrived = self._run.arrived.get()
        if not isinstance(arrived, tuple):
            self._ended, self._failed = True, arrived is not None
            self._thread.join()
            try:
                raise StopIteration if arrived is None else arrived
            finally:
                del arrived  # as in `_Run.generate`
        token, seconds = arrived
        self.tokens.append(token)  # before anything that may fail: `held` counts on it
        self.times.append(seconds)
        piece = self._pieces.add(token)
        self.text += piece
        return StreamEvent(token, piece, self.text, len(self.tokens), seconds, cache_size(self.cache))

    def stop(self) -> None:
        """No more tokens after the one that is being computed, if any. May be called from any thread."""
        self._run.stopped.set()

    def close(self) -> None:
        """Stop, and wait until `generate()` has ended, whatever it raises."""
        self.stop()
        while self.started and not self._ended:
            with contextlib.suppress(Exception):
                next(self)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def started(self) -> bool:
        """Whether the cache may have changed."""
        return self._thread is not None

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for a stop."""
        return self._run.stopped.is_set()

    @property
    def held(self) -> list[int]:
        """The ids that the cache holds when a started stream has ended: the prompt's and all new ones but the newest."""
        return [] if self._failed else [*self.input_ids[0].tolist(), *self.tokens[:-1]]

    @property
    def first_token_seconds(self) -> float:
        """From the call to the first new token; 0 before it."""
        return self.times[0] if self.times else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens after the first, by the time they took; 0 if there are none."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0]) if len(self.times) > 1 else 0.0


class _Run:
    """The thread's side of a stream. It does not refer to the `Stream`, so that an abandoned one can end."""

    def __init__(self) -> None:
        self.arrived: queue.SimpleQueue[tuple[int, float] | BaseException | None] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)
        self.stopped = threading.Event()
        self._prompt_seen = False
        self._seconds = self._since = 0.0

    def stop(self) -> None:
        """End without waiting for the consumer."""
        self.stopped.set()
        self.go.release()

    def generate(self, model: Any, input_ids: Tensor, cache: Any, options: dict[str, Any]) -> None:
        self._since = time.perf_counter()
        error: BaseException | None = None
        try:
            model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                **{cache_argument(model): cache},
                streamer=self,
                **options,
            )
        except _Stopped:
            pass
        except BaseException as raised:
            reset_cache(cache)  # its layers may have been left with unequal lengths
            error = raised
        self.arrived.put(error)
        del error  # its traceback holds this frame, and with it the failed step's tensors until a garbage collection

    def put(self, tokens: Tensor) -> None:
        """New ids, from `generate()`: the prompt first, then one at a time."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._seconds += time.perf_counter() - self._since
        self.arrived.put((int(tokens), self._seconds))
        self.go.acquire()
        if self.stopped.is_set():
            raise _Stopped
        self._since = time.perf_counter()

    def end(self) -> None:
        """Called by `generate()` when it is done."""


class _Pieces:
    """What each new token adds to the text. A window of tokens is decoded, so that the cost does not grow with the text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.start = self.shown = 0  # tokens before `shown` are in the text; decoding begins at `start`, for its spaces

    def add(self, token: int) -> str:
        self.tokens.append(token)
        before = self._decode(self.start, self.shown)
        now = self._decode(self.start, len(self.tokens))
        if len(now) <= len(before) or now.endswith("�"):  # an incomplete character
            return ""
        self.start, self.shown = self.shown, len(self.tokens)
        return now[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return str(self.tokenizer.decode(self.tokens[start:end], skip_special_tokens=True))
