"""Which models `scripts/ablation` starts windows with BOS for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from eval.bos import starts_with_bos


class Tokenizing:
    """A tokenizer of single characters; `adds` its BOS, 1, or has none."""

    def __init__(self, bos: int | None, adds: bool = False) -> None:
        self.bos_token_id, self.adds = bos, adds

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        start = [1] if self.adds and add_special_tokens else []
        return {"input_ids": start + [2 + ord(letter) % 90 for letter in text]}


class Lost(torch.nn.Module):
    """Predicts the next letter of the alphabet with certainty behind BOS, or always, and nothing otherwise."""

    device = torch.device("cpu")

    def __init__(self, needs_bos: bool) -> None:
        super().__init__()
        self.needs_bos = needs_bos

    def forward(self, ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        knows = not self.needs_bos or ids[0, 0] == 1
        following = F.one_hot((ids + 1).clamp_max(98), 99).float()
        return SimpleNamespace(logits=8 * following * knows)


ALPHABET = "".join(map(chr, range(ord("A"), ord("Z"))))


@pytest.mark.parametrize(
    ("tokenizer", "needs_bos", "choice", "expected"),
    [
        (Tokenizing(1, adds=True), False, "auto", True),  # as most gemma tokenizers
        (Tokenizing(1), True, "auto", True),  # gemma's, converted
        (Tokenizing(1), False, "auto", False),  # SmolLM2's
        (Tokenizing(None), True, "auto", False),  # Qwen's
        (Tokenizing(1, adds=True), True, "never", False),
        (Tokenizing(1), False, "always", True),
    ],
)
def test_bos_is_used_where_the_tokenizer_or_the_model_wants_it(
    tokenizer: Tokenizing, needs_bos: bool, choice: str, expected: bool
) -> None:
    assert starts_with_bos(Lost(needs_bos), tokenizer, ALPHABET, choice) is expected


def test_too_little_text_to_tell_is_no_reason_for_bos() -> None:
    for text in ("", "A"):
        assert starts_with_bos(Lost(True), Tokenizing(1), text, "auto") is False
