"""Whether windows of text should start with BOS."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

BOS_CHOICES = ("auto", "always", "never")
SAMPLE_TOKENS = 256
NEEDED_NATS = 0.5  # a token. On WikiText-2, Gemma 3 270M loses 1.6 without BOS and SmolLM2-135M 0.0; Qwen2.5 gains 0.5


def starts_with_bos(model: Any, tokenizer: Any, text: str, choice: str) -> bool:
    """Whether to start each window with the tokenizer's BOS token.

    "auto" does as the tokenizer does. But converted tokenizers may have lost the rule that adds BOS, and models that were
    trained with one are useless without. So if the tokenizer has a BOS that it does not add, the exact model decides: BOS
    is used if tokens from the middle of the text, where windows start, are more likely with it by `NEEDED_NATS` each.

    Args:
        model: a causal language model of transformers.
        choice: "always", "never" or "auto".
    """
    bos = tokenizer.bos_token_id
    if choice != "auto" or bos is None:
        return choice == "always"
    if tokenizer("a")["input_ids"][:1] == [bos]:
        return True
    excerpt = text[len(text) // 2 :][: 16 * SAMPLE_TOKENS]
    sample = tokenizer(excerpt, add_special_tokens=False)["input_ids"][:SAMPLE_TOKENS]
    return len(sample) > 1 and _nll(model, sample, []) - _nll(model, sample, [bos]) > NEEDED_NATS


@torch.no_grad()
def _nll(model: Any, sample: list[int], prefix: list[int]) -> float:
    """Nats a token of all but the sample's first token, which only a prefix could predict."""
    ids = torch.tensor([prefix + sample], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prefix) : -1].float()
    return F.cross_entropy(logits, ids[0, len(prefix) + 1 :]).item()
