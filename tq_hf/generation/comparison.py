"""What a packed cache costs and saves on a real model, beside another cache on the same text.

The measurement is made where quantization acts. A prompt's first forward attends to its own exact states, so comparing its
logits says nothing about the cache; here only positions count that read at least one packed page.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import TurboQuantCache
from ..reporting.memory import storage_bytes
from .chunks import text_chunks

Progress = Callable[[int], None]
SLICE_ELEMENTS = 1 << 26  # log-probabilities that are compared at once, in fp32: 256 MB a tensor


@dataclass(frozen=True)
class Generation:
    """One greedy continuation and its speed.

    Attributes:
        tokens: int64 [new_tokens], on the CPU, of the first row.
        first_token_seconds: from the call to the first new token (the prompt's forward).
        step_seconds: how long each new token after the first took.
    """

    tokens: Tensor
    first_token_seconds: float
    step_seconds: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """New tokens of a row after the first, by the time they took; 0 if there is only one."""
        return len(self.step_seconds) / sum(self.step_seconds) if self.step_seconds else 0.0


@dataclass(frozen=True)
class Agreement:
    """How close the logits with the packed cache are to the logits with the exact one, over the same text.

    Attributes:
        kl: mean KL(exact || packed) of the next-token distributions, in nats.
        top1: share of positions where both rank the same token first.
        positions: how many positions counted.
    """

    kl: float
    top1: float
    positions: int


class _Clock:
    """A streamer for `generate()` that notes when each token arrives on the host."""

    def __init__(self, progress: Progress | None) -> None:
        self.times: list[float] = []
        self.progress = progress

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())  # the first call brings the prompt
        if self.progress is not None and len(self.times) > 1:
            self.progress(1)

    def end(self) -> None:
        pass


def cache_argument(model: Any) -> str:
    """What the model's forward calls its cache: `"cache"` since transformers 5.24, where `"past_key_values"` warns.

    Before, models without attention had their own name for it.
    """
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")


def generate_timed(
    model: Any, input_ids: Tensor, cache: Any, max_new_tokens: int, progress: Progress | None = None, **options: Any
) -> Generation:
    """Generate greedily and to full length (the end token is suppressed, so that two caches hold equally many tokens).

    Args:
        model: a causal language model of transformers.
        input_ids: int64 [rows, prompt], on the model's device.
        cache: an empty cache, filled by the call.
        max_new_tokens: how many tokens to generate; at least 1.
        progress: called with 1 at every new token.
        options: what else `generate()` takes.
    """
    clock = _Clock(progress)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        **{cache_argument(model): cache},
        streamer=clock,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        **options,
    )
    start, first, *_ = clock.times
    steps = [end - begin for begin, end in zip(clock.times[1:], clock.times[2:])]
    return Generation(output[0, input_ids.shape[1] :].cpu(), first - start, tuple(steps))


def cache_nbytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds: of a `TurboQuantCache` what it says itself, since its layers share pages."""
    if isinstance(cache, TurboQuantCache):
        return cache.nbytes
    return sum(storage_bytes(vars(layer)) for layer in cache.layers)


@dataclass(frozen=True)
class TextScores:
    """The next-token distributions with an exact and with a packed cache, position by position over the same texts.

    All are fp32 [texts, positions] on the model's device, for the positions that read packed pages. The last position of
    a text has nothing to predict: its `nll_*` are NaN.

    Attributes:
        kl: KL(exact || packed) in nats.
        same: 1 where both rank the same token first, else 0.
        nll_exact, nll_packed: -log p(the text's next token), in nats.
    """

    kl: Tensor
    same: Tensor
    nll_exact: Tensor
    nll_packed: Tensor


@torch.no_grad()
def score_texts(
    model: Any,
    input_ids: Tensor,
    exact: Any,
    packed: Sequence[Any],
    chunks: Sequence[tuple[int, int]],
    progress: Progress | None = None,
) -> list[TextScores]:
    """Feed texts through an exact and several packed caches in lockstep, chunk by chunk, and compare their logits.

    The first chunk is a prompt, whose positions attend to its exact states and do not count. Nothing is read back from
    the device but what the caches read, so the host runs ahead of a GPU.

    Args:
        model: a causal language model of transformers.
        input_ids: int64 [texts, length], on the model's device, without padding.
        exact: an empty cache to compare with, such as `DynamicCache(config=model.config)`.
        packed: empty caches, all of which `chunks` fits. Those with a `report()`, as `TurboQuantCache` has, must have
            packed something after the first chunk.
        chunks: from `text_chunks`.
        progress: called with the number of tokens done, over all texts and packed caches, after each chunk.

    Returns:
        One `TextScores` a packed cache.

    Raises:
        ValueError: there is no chunk after the prompt, or a cache has packed nothing by then.
    """
    rows, length = input_ids.shape
    first = chunks[0][1]
    if len(chunks) < 2:
        raise ValueError(f"a text of {length} tokens reads no packed page: the first page is packed after {first} tokens.")
    argument = cache_argument(model)
    following = input_ids.roll(-1, dims=1)
    scores = [torch.empty(4, rows, length - first, device=input_ids.device) for _ in packed]
    for start, end in chunks:
        chunk = input_ids[:, start:end]
        reference = model(chunk, use_cache=True, **{argument: exact}).logits
        for cache, scored in zip(packed, scores):
            logits = model(chunk, use_cache=True, **{argument: cache}).logits
            if start:
                _compare(reference, logits, following[:, start:end], scored[:, :, start - first : end - first])
            elif hasattr(cache, "report") and not cache.report().packed_tokens:
                raise ValueError(f"no page is packed after {first} tokens: nothing could be measured.")
            del logits  # before the next ones are made: they are the largest tensors
        if progress is not None:
            progress(rows * (end - start) * len(packed))
    for scored in scores:
        scored[2:, :, -1] = torch.nan
    return [TextScores(*scored) for scored in scores]


def _compare(reference: Tensor, logits: Tensor, following: Tensor, out: Tensor) -> None:
    """Write `TextScores` of a chunk, [4, texts, n], from logits [texts, n, vocabulary]; a slice of texts at a time."""
    step = max(1, SLICE_ELEMENTS // reference[0].numel())
    for i in range(0, len(reference), step):
        some = slice(i, i + step)
        p, q = F.log_softmax(reference[some].float(), dim=-1), F.log_softmax(logits[some].float(), dim=-1)
        target = following[some].unsqueeze(-1)
        out[0, some] = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        out[1, some] = reference[some].argmax(-1) == logits[some].argmax(-1)
        out[2, some] = -p.gather(-1, target).squeeze(-1)
        out[3, some] = -q.gather(-1, target).squeeze(-1)


def logit_agreement(
    model: Any,
    input_ids: Tensor,
    exact: Any,
    packed: TurboQuantCache,
    positions: int | None = None,
    progress: Progress | None = None,
) -> Agreement:
    """How far a packed cache's next-token distributions are from an exact one's, over one text: see `score_texts`.

    Args:
        input_ids: int64 [1, length], on the model's device.
        positions: how many positions to compare, at least, at the end of the text; None: as many as there can be.

    Raises:
        ValueError: the text is too short for any position to read a packed page.
    """
    chunks = text_chunks(input_ids.shape[1], packed.quantization, positions)
    (scores,) = score_texts(model, input_ids, exact, [packed], chunks, progress)
    kl = scores.kl.double().mean().item()
    return Agreement(kl=max(kl, 0.0), top1=scores.same.double().mean().item(), positions=scores.kl.numel())
