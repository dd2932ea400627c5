"""Log-probabilities of the tokens of texts, read through a packed cache chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from ..cache import TurboQuantCache
from ..generation.comparison import SLICE_ELEMENTS, cache_argument
from ..layers.plan import decoder_config
from ..layers.rules import is_hybrid
from .mode import ScoringMode, right_padding, tokens_in_pages


@dataclass(frozen=True)
class TokenScores:
    """Next-token scores of right-padded texts. What stands beyond a text's end means nothing.

    Attributes:
        log_probs: [texts, width] on the CPU: log p of the token after position i, in nats.
        greedy: bool [texts, width] on the CPU: whether that token is the likeliest.
        last: [texts, vocabulary] on the model's device: log-probabilities of what may follow each text.
        read_from_pages: tokens that each text's last position read from packed pages, counted in the cache.
    """

    log_probs: Tensor
    greedy: Tensor
    last: Tensor
    read_from_pages: list[int]

    def continuation(self, text: int, length: int, tokens: Sequence[int]) -> tuple[float, bool]:
        """Score the last of a text's tokens and one more.

        Args:
            text: which text.
            length: tokens of the text.
            tokens: a continuation, all but the last token of which the text ends with.

        Returns:
            log p of the continuation, in nats, summed in float64, and whether it is what greedy decoding gives.
        """
        inside = slice(length - len(tokens), length - 1)
        row = self.last[text]
        log_prob = self.log_probs[text, inside].double().sum().item() + row[tokens[-1]].item()
        return log_prob, bool(self.greedy[text, inside].all()) and row.argmax().item() == tokens[-1]


@torch.no_grad()
def score_tokens(
    model: Any, texts: Sequence[Sequence[int]], mode: ScoringMode, cache: TurboQuantCache, dtype: torch.dtype
) -> TokenScores:
    """Feed texts through an empty cache of `mode` and score every next token.

    Texts are padded on the right. Positions before a text's end never read what is behind it, and in `packed`, where pages
    look ahead, a mask keeps padding out of them.

    Args:
        model: a causal language model of transformers.
        texts: token ids, at least one each.
        cache: from `mode.new_cache`.
        dtype: what log-probabilities are computed in.

    Raises:
        ValueError: the model gives logits for other positions than it was given.
    """
    settings = cache.quantization
    lengths = [len(text) for text in texts]
    width = mode.padded_length(max(lengths), settings)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in zip(ids, texts):
        row[: len(text)] = torch.tensor(text)
    ids = ids.to(model.device)
    mask = None
    if mode.kind == "packed" and min(lengths) < width:
        mask = right_padding(torch.tensor(lengths), width).to(model.device)
    following = ids.roll(-1, dims=1)
    argument = cache_argument(model)
    kept: list[tuple[Tensor, Tensor]] = []
    last: list[Tensor | None] = [None] * len(texts)
    read = [0] * len(texts)
    for start, end in mode.chunks(width, model, settings):
        arguments = {} if mask is None else {"attention_mask": mask[:, :end]}
        logits = model(ids[:, start:end], use_cache=True, **{argument: cache}, **arguments).logits
        if logits.shape[1] != end - start:
            raise ValueError(
                f"the model gave logits for {logits.shape[1]} positions where {end - start} tokens were fed: a model with"
                " virtual tokens (prompt tuning) cannot be scored through the cache."
            )
        kept.append(_scores(logits, following[:, start:end].to(logits.device), dtype))
        for row, length in enumerate(lengths):
            if start < length <= end:
                last[row] = F.log_softmax(logits[row, length - 1 - start], dim=-1, dtype=dtype)
                if mode.kind == "packed":
                    read[row] = min(length, tokens_in_pages(cache))
                else:  # the first chunk reads its own exact states
                    read[row] = tokens_in_pages(cache, length) if start else 0
        del logits  # before the next ones are made: they are the largest tensors
    log_probs, greedy = (torch.cat(parts, dim=1).cpu() for parts in zip(*kept))
    return TokenScores(log_probs, greedy, torch.stack([row for row in last if row is not None]), read)


@torch.no_grad()
def goes_on_in_chunks(model: Any, tokens: int = 16) -> bool:
    """Whether a model with recurrent states goes on from a cache with several tokens at once.

    Some (Jamba) forget their states then, and go on right with single tokens only. The two ways are compared with a pass
    over everything, with transformers' own cache; single tokens show how much rounding there is.
    """
    config = decoder_config(model.config)
    if not is_hybrid(config):
        return True
    argument = cache_argument(model)
    ids = torch.arange(1, 2 * tokens + 1, device=model.device)[None]
    whole = model(ids, use_cache=False).logits[:, tokens:].float()

    def error(parts: Sequence[Tensor]) -> float:
        cache = DynamicCache(config=config)
        model(ids[:, :tokens], **{argument: cache})
        logits = torch.cat([model(part, **{argument: cache}).logits for part in parts], dim=1)
        return ((logits.float() - whole).norm() / whole.std()).item()

    rest = ids[:, tokens:]
    return error([rest]) < 4 * error(list(rest.split(1, dim=1))) + 1e-3


def _scores(logits: Tensor, following: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """log p(following) and whether it is the likeliest token, [texts, n], from logits [texts, n, vocabulary].

    A slice of texts and positions at a time: log-probabilities are as large as the logits, or twice.
    """
    log_probs = torch.empty(following.shape, dtype=dtype, device=logits.device)
    greedy = torch.empty(following.shape, dtype=torch.bool, device=logits.device)
    texts = max(1, SLICE_ELEMENTS // logits[0].numel())
    positions = max(1, SLICE_ELEMENTS // logits.shape[2])
    for i in range(0, len(logits), texts):
        for j in range(0, logits.shape[1], positions):
            some = slice(i, i + texts), slice(j, j + positions)
            scores, target = F.log_softmax(logits[some], dim=-1, dtype=dtype), following[some]
            log_probs[some] = scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            greedy[some] = scores.argmax(-1) == target
    return log_probs, greedy
