"""`decode_ahead`: `generate()` without a wait for the GPU after every token.

transformers' loop asks after each step whether all rows have ended, and waits for the answer while nothing is queued for the
GPU, which in compiled decoding is idle for a quarter of a step then. Here the answer is read a step later, when the next
one is queued already.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging

logger = logging.get_logger(__name__)

TOKEN_BY_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# The name by which transformers' loop finds what reads its answers a step late. It does so on Apple's GPUs, by itself.
DEFERRED = "DeferredStopCheck"

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def decode_ahead(model: Any, input_ids: Tensor, generation_config: Any, **arguments: Any) -> Any:
    """A decoding method for `generate()`, which queues a step before it knows whether the one before was the last.

        model.generate(**inputs, past_key_values=cache, custom_generate=decode_ahead)

    It is transformers' own loop with another answer to when to stop: tokens, scores and whatever else `generate()` returns
    are the same. Where all rows end before `max_new_tokens`, one step is computed for nothing, which logits processors and
    stopping criteria see too; the cache takes its token back by `crop(-1)`, after which a page that was packed with it stays
    packed, and its query counts in the balance of keys if that is not fixed yet. Where a cache that outlives the call cannot
    take back a token (sliding windows, linear attention, transformers' quantized caches, older releases' `StaticCache`), the
    loop waits as ever. A streamer gets each token a step later. Worth it with a static cache, which `generate()` compiles;
    on a CPU nothing is gained.

    `generate()` finds no tokenizer for `stop_strings` beside a callable `custom_generate`, whichever it is: pass
    `stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`.

    Args:
        model: a model with transformers' own decoding loop.
        input_ids: int64 [rows, tokens].
        generation_config, arguments: what `generate()` hands to a decoding method.

    Returns:
        What `generate()` does without `custom_generate`.

    Raises:
        ValueError: beams, drafts, or another way to decode than token by token.
    """
    given = {name: _given_to_generate(model, name) for name in ("synced_gpus", "assistant_model", "streamer")}
    arguments = model._extract_generation_mode_kwargs(custom_generate=None, kwargs={}, **given) | arguments
    mode = generation_config.get_generation_mode(arguments.pop("assistant_model", None))
    if mode not in TOKEN_BY_TOKEN:
        raise ValueError(
            f"custom_generate=decode_ahead was asked for {mode.value.replace('_', ' ')}: expected greedy decoding or"
            " sampling, one token at a time. Leave custom_generate out."
        )
    loop = type(model)._sample
    if loop is not GenerationMixin._sample or DEFERRED not in loop.__code__.co_names:
        logger.warning_once(f"decode_ahead does not know the decoding loop of {type(model).__name__}, which waits as ever.")
        return loop(model, input_ids, generation_config=generation_config, **arguments)
    stop_check = SamplingStopCheck if generation_config.do_sample else StopCheckBehind
    return _loop_with(loop, stop_check)(model, input_ids, generation_config=generation_config, **arguments)


def _loop_with(loop: Callable[..., Any], stop_check: type[StopCheckBehind]) -> Callable[..., Any]:
    """transformers' loop with that stop check: the same code, of which nobody else sees the change."""
    names = {**loop.__globals__, DEFERRED: stop_check}
    twin = FunctionType(loop.__code__, names, loop.__name__, loop.__defaults__, loop.__closure__)
    twin.__kwdefaults__ = loop.__kwdefaults__
    return twin


def _given_to_generate(model: Any, name: str) -> Any:
    """An argument of the model's `generate()` that is running, which keeps these from a callable `custom_generate`, though
    it hands them to its own decoding methods: a streamer would never end, and its reader wait for ever."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    # Another model's is one in whose logits processor, say, this model decodes.
    return frame.f_locals.get(name) if frame is not None and frame.f_locals["self"] is model else None


class StopCheckBehind:
    """Says whether to stop, one step late; transformers' loop makes one and calls it after every step.

    Args:
        input_ids: int64 [rows, tokens], the prompt.
        max_length: tokens at which the loop stops in any case, with the prompt; None: nowhere.
        cache: what the model has returned, or None.
        cache_is_returned: whether the cache outlives the loop.
        streamer: gets the new tokens int64 [rows], on the host.
    """

    def __init__(
        self, input_ids: Tensor, max_length: int | None, cache: Cache | None, cache_is_returned: bool, streamer: Any = None
    ) -> None:
        self.max_length, self.streamer = max_length, streamer
        self.cache = cache if cache_is_returned else None
        self.room = _room(cache)
        self.newest, self.before = _Answer(input_ids), _Answer(input_ids)
        self.steps = 0
        self.has_ended = False  # before the newest step

    @staticmethod
    def is_supported(device: torch.device, cache: Cache | None, cache_is_returned: bool, is_assistant: bool) -> bool:
        """Whether the loop may run ahead: the cache is the call's own, or takes a token back."""
        return cache is None or not cache_is_returned or _takes_back(cache)

    def __call__(self, unfinished: Tensor, tokens: Tensor, length: int) -> bool:
        """After a step: `unfinished` (0 or 1) and `tokens` are int64 [rows], `length` counts the tokens of a row."""
        self.newest, self.before = self.before, self.newest
        self.newest.send(unfinished, tokens)
        self.steps += 1
        if self.steps > 1:
            try:
                self.has_ended = self._take(self.before)
            except BaseException:  # the streamer's: it sees the cache as it is at this token in the loop that waits
                self._undo_step()
                raise
        if self.has_ended or (self.max_length is not None and length >= self.max_length):
            return True
        # There may be no room for a step that counts for nothing.
        return self.steps > self.room and self.newest.says_all_ended()

    def finish(self) -> int:
        """Behind the last step.

        Returns:
            How many of the newest steps count for nothing.
        """
        if not self.has_ended:
            self._take(self.newest)
            return 0
        self._undo_step()
        return 1

    def _undo_step(self) -> None:
        """Take the newest step's token out of a cache that outlives the loop."""
        if self.cache is None:
            return
        try:
            self.cache.crop(-1)
        except RuntimeError as error:
            logger.warning(f"After decode_ahead the cache holds the last token too, which generate() leaves out: {error}")

    def _take(self, answer: _Answer) -> bool:
        """Whether all rows had ended after a step. Its tokens go to the streamer."""
        has_ended = answer.says_all_ended()
        if self.streamer is not None:
            self.streamer.put(answer.tokens.clone())
        return has_ended


class SamplingStopCheck(StopCheckBehind):
    """Besides, leaves the caller's RNG as if the step that counts for nothing had drawn no tokens."""

    def __init__(self, input_ids: Tensor, *arguments: Any) -> None:
        super().__init__(input_ids, *arguments)
        device = input_ids.device  # where the loop draws
        self.rng = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator

    def __call__(self, unfinished: Tensor, tokens: Tensor, length: int) -> bool:
        is_last = super().__call__(unfinished, tokens, length)
        if not is_last:
            self.state = self.rng.get_state()
        return is_last

    def finish(self) -> int:
        undone = super().finish()
        if undone:
            self.rng.set_state(self.state)
        return undone


def _takes_back(cache: Cache) -> bool:
    """Whether `crop(-1)` leaves the cache as if its newest token had not come."""
    own = getattr(cache, "self_attention_cache", cache)  # an EncoderDecoderCache crops dynamic ones only
    if own is not cache and not all(isinstance(part, DynamicCache) for part in (own, cache.cross_attention_cache)):
        return False
    return bool(own.is_croppable) and not any(_forgets(layer) for layer in own.layers)


def _forgets(layer: Any) -> bool:
    """Whether a layer that calls itself croppable is not: it has to be told beforehand to remember; or, in older releases,
    it is a quantized one, or one that the model leaves empty."""
    return hasattr(layer, "activate_past_recording") or isinstance(layer, QuantizedLayer) or not layer.is_initialized


def _room(cache: Cache | None) -> float:
    """How many more tokens a static cache has room for; infinite for others."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    sizes = [layer.get_max_length() for layer in layers if not getattr(layer, "is_sliding", False)]
    size = min((size for size in sizes if size > 0), default=None)
    return math.inf if cache is None or size is None else size - int(cache.get_seq_length())


class _Answer:
    """What a step has to say, on its way to the host."""

    def __init__(self, input_ids: Tensor) -> None:
        on_cuda = input_ids.device.type == "cuda"
        self.all_ended = torch.zeros((), dtype=torch.bool, pin_memory=on_cuda)
        self.tokens = torch.zeros(input_ids.shape[0], dtype=torch.int64, pin_memory=on_cuda)
        self.event = torch.cuda.Event() if on_cuda else None

    def send(self, unfinished: Tensor, tokens: Tensor) -> None:
        """Copy it to the host, on CUDA without waiting for it."""
        self.all_ended.copy_(unfinished.max() == 0, non_blocking=self.event is not None)
        self.tokens.copy_(tokens, non_blocking=self.event is not None)
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(tokens.device))

    def says_all_ended(self) -> bool:
        """Wait for it. `tokens` are there then."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.all_ended)
