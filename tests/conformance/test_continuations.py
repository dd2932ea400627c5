"""What one cache is used for over several calls, as transformers allows it: every way of going on gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.modes import left_padded
from tests.conformance.subjects import Packed, Stock, Subject
from tests.tiny_models import attentions, prompt

FAMILIES = ("llama", "gemma3_hybrid", "jamba")
CASES = [(family, name) for family in FAMILIES for name in attentions(family)[:2]]


def both(family: str, attention: str) -> list[Subject]:
    return [Stock(family), Packed(family, attention)]


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_more_padding_in_front_changes_nothing(family: str, attention: str) -> None:
    """Even pages that hold nothing else."""
    ids, mask = left_padded()
    blank = torch.zeros(2, 70, dtype=torch.long)
    with Packed(family, attention) as subject:
        short = subject.generate(subject.inputs(ids, mask), subject.cache())
        inputs = subject.inputs(torch.cat([blank, ids], 1), torch.cat([blank, mask], 1))
        long = subject.generate(inputs, subject.cache())
    assert torch.equal(short, long[:, 70:])
    assert all(tokens > 0 for tokens in subject.packed_tokens())


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_going_on_with_the_new_tokens_only(family: str, attention: str) -> None:
    ids, mask = left_padded()
    more = prompt(2, 15, seed=2)
    outcomes = []
    for subject in both(family, attention):
        with subject:
            cache = subject.cache()
            subject.read(subject.inputs(ids, mask), cache)
            seen = torch.cat([mask, torch.ones_like(more)], 1)
            outcomes.append(subject.generate({"input_ids": more, "attention_mask": seen}, cache))
    assert torch.equal(*outcomes)


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.newest  # 5.17's own sliding layers, while they record, refuse several tokens
def test_many_turns(family: str, attention: str) -> None:
    """Five on one cache, short and long ones; before the last two the newest tokens are taken back."""
    outcomes = []
    for subject in both(family, attention):
        with subject:
            cache, said = subject.cache(), prompt(2, 40)
            cache.activate_past_recording()
            for turn, (more, removed) in enumerate(((0, 0), (3, 0), (41, 0), (32, 7), (1, 2))):
                if removed and family != "jamba":  # whose recurrent state cannot be taken back
                    cache.crop(-removed)
                    said = said[:, :-removed]
                said = subject.generate(torch.cat([said, prompt(2, more, seed=turn)], 1), cache, new=9)
            outcomes.append(said)
    assert torch.equal(*outcomes)
    assert min(subject.packed_tokens()) > 0


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_going_on_with_embeddings(family: str, attention: str) -> None:
    ids = prompt(2, 75)
    outcomes = []
    for subject in both(family, attention):
        with subject:
            cache = subject.cache()
            subject.read(ids[:, :60], cache)
            embeds = subject.model.get_input_embeddings()(ids).detach()
            inputs = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids)}
            outcomes.append(subject.generate(inputs, cache))
    assert torch.equal(*outcomes)


def logits(subject: Subject, ids: Tensor, cache: Any, chunk: int) -> Tensor:
    steps = range(0, ids.shape[1], chunk)
    with torch.no_grad():
        return torch.cat([subject.forward(ids[:, i : i + chunk], None, cache, i) for i in steps], 1)


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("chunk", [1, 23])
def test_a_text_in_steps(family: str, attention: str, chunk: int) -> None:
    outcomes = []
    for subject in both(family, attention):
        with subject:
            outcomes.append(logits(subject, prompt(2, 80), subject.cache(), chunk))
    torch.testing.assert_close(*outcomes, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_two_conversations_on_one_model_do_not_mix(family: str, attention: str) -> None:
    texts = [prompt(1, 100, seed) for seed in (1, 2)]
    with Packed(family, attention) as subject:
        apart = [logits(subject, text, subject.cache(), 20) for text in texts]
        caches = [subject.cache(), subject.cache()]
        mixed: list[list[Tensor]] = [[], []]
        with torch.no_grad():
            for start in range(0, 100, 20):
                for one in (0, 1):
                    mixed[one].append(subject.forward(texts[one][:, start : start + 20], None, caches[one], start))
    assert all(torch.equal(torch.cat(mixed[i], 1), apart[i]) for i in (0, 1))


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 120}], ids=["dynamic", "static"])
def test_a_reset_cache_is_like_a_new_one(family: str, attention: str, options: dict[str, int]) -> None:
    with Packed(family, attention) as subject:
        cache = subject.cache(**options)
        subject.generate(prompt(2, 90, seed=7), cache)
        cache.reset()
        reused = subject.generate(prompt(2, 60), cache)
        assert torch.equal(reused, subject.generate(prompt(2, 60), subject.cache(**options)))
    assert cache.report().packed_tokens > 0


def test_the_cache_that_was_passed_comes_back() -> None:
    with Packed("llama", "sdpa") as subject:
        cache = subject.cache()
        out = subject.generate(prompt(1, 60), cache, return_dict_in_generate=True)
    assert out.get("cache", out.get("past_key_values")) is cache
    assert cache.get_seq_length() == 65
