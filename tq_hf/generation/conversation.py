"""The turns of a chat on one cache: each turn computes only what the cache does not hold yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..commands import RequestError, first_line
from ..compat import reset_cache
from .streaming import Stream

Message = dict[str, str]  # {"role": "user", "content": "..."}, as chat templates take them


def context_length(config: Any) -> int | None:
    """How many tokens the model was made for, prompt and answer together; None if its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> torch.Tensor:
    """The ids of a chat up to where the model answers, int64 [1, tokens], on the CPU.

    Raises:
        RequestError: the tokenizer has no chat template, or it refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "this model's tokenizer has no chat template: choose an instruction-tuned model (names often end in -Instruct"
            " or -it), or let this one continue a text."
        )
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # templates raise what they like
        raise RequestError(f"the model's chat template refuses these messages: {first_line(error)}") from error
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def encode_prompt(tokenizer: Any, prompt: str) -> torch.Tensor:
    """The prompt's ids, int64 [1, tokens], on the CPU; as a user's message where the model has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    ids: torch.Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return ids


def room_for(config: Any, prompt_tokens: int, new_tokens: int) -> int:
    """How many of `new_tokens` the model's context leaves room for after the prompt.

    Raises:
        RequestError: none.
    """
    context = context_length(config)
    if context is None:
        return new_tokens
    if prompt_tokens >= context:
        raise RequestError(
            f"the context is full: {prompt_tokens} tokens, and the model was made for {context}. Start a new chat, or"
            " shorten the text."
        )
    return min(new_tokens, context - prompt_tokens)


class Conversation:
    """A model, its tokenizer and the one cache that grows with a chat.

    Args:
        model, tokenizer: of transformers.
        cache: an empty cache.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: Any) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self._held: list[int] = []
        self._stream: Stream | None = None

    @property
    def held(self) -> list[int]:
        """The ids that the cache holds, once the last stream has ended."""
        if self._stream is not None:
            self._stream.close()
            if self._stream.started:
                self._held = self._stream.held
            self._stream = None
        return self._held

    def reply(self, messages: Sequence[Message], max_new_tokens: int, **options: Any) -> Stream:
        """The model's answer to a whole chat, its newest message last.

        What the cache holds of it already, from earlier turns, is not computed again; what it holds beyond (an answer that
        was taken back, or that the template writes otherwise) is cropped.

        Args:
            messages: the whole chat.
            max_new_tokens: of the answer, at most; fewer where the model's context ends before.
            options: further arguments of `generate()`.

        Raises:
            RequestError: no chat template, or a full context. The cache is unchanged then.
        """
        ids = encode_chat(self.tokenizer, messages).to(self.model.device)
        return self.extend(ids, max_new_tokens, **options)

    def extend(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> Stream:
        """As `reply`, of ids [1, tokens]."""
        room = room_for(self.model.config, ids.shape[1], max_new_tokens)
        stream = Stream(self.model, self.tokenizer, ids, self.cache, max_new_tokens=room, **options)
        self._keep(ids[0].tolist())
        self._stream = stream
        return stream

    def reset(self) -> None:
        """Forget everything."""
        if self._stream is not None:
            self._stream.close()
        self._held, self._stream = [], None
        reset_cache(self.cache)

    def _keep(self, ids: list[int]) -> None:
        """Crop the cache to what it shares with `ids`, of which at least the last is computed again."""
        held = self.held
        same = 0
        for mine, theirs in zip(held, ids[:-1]):
            if mine != theirs:
                break
            same += 1
        if same == len(held):
            return
        try:
            self.cache.crop(same - len(held))
        except RuntimeError:  # a sliding window or a recurrent state has forgotten what came before
            self.reset()
        else:
            self._held = held[:same]
