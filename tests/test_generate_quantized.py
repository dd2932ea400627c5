"""Decoding modes with the quantizer on: what they gave by other ways over the same bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.test_generate import generate, left_padded
from tests.tiny_models import prompt
from tq_hf import TurboQuantCache

# Pages fall due at 52, 84, 116, ... tokens. Drafts are shorter than the window: no rejected one is ever in a page.
SMALL = {"page_size": 32, "recent_window": 16, "sink_tokens": 4}
PRESETS = ("tq4", "tq2", "4bit_nc")


def run(model: PreTrainedModel, preset: str, ids: Tensor, new: int, **options: Any) -> tuple[Tensor, int]:
    """The tokens, and how many of them are packed. Some drafts must have been rejected, and some of an assistant's taken."""
    cache, crops = TurboQuantCache(model.config, preset, **SMALL, boundary_layers=0), []
    crop = cache.crop
    cache.crop = lambda removed: crops.append(int(removed)) or crop(removed)  # type: ignore[method-assign,func-returns-value]
    tokens = generate(model, ids, cache, new=new, **options)
    assert any(crops) == bool(options) and ("assistant_model" not in options or len(crops) < new - 1)
    return tokens, cache.report().layers[0].packed_tokens


def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """Right in some of its guesses, of which it makes fewer at a time than the recent window has tokens."""
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = 6
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    with torch.no_grad():
        assistant.lm_head.weight += 0.2 * torch.randn(99, 64, generator=torch.Generator().manual_seed(2))
    return assistant


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_drafts_change_nothing(tiny_model: PreTrainedModel, preset: str, drafts: str) -> None:
    """Where no page falls due under way, drafts read what single tokens read, and what is rejected leaves no trace."""
    ids = prompt(1, 43).repeat(1, 2)
    expected = run(tiny_model, preset, ids, new=22)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 6}
    if drafts == "assistant":
        options = {"assistant_model": assistant_of(tiny_model)}
    tokens, packed = run(tiny_model, preset, ids, new=22, **options)
    assert torch.equal(tokens, expected[0])
    assert packed == expected[1] == 64


@pytest.mark.parametrize("preset", PRESETS)
def test_rejected_drafts_leave_whole_pages(tiny_model: PreTrainedModel, preset: str) -> None:
    """Over the edges of pages as well: no page is cut by a draft that was taken back, so that as many tokens are packed."""
    ids = prompt(1, 43).repeat(1, 2)
    _, expected = run(tiny_model, preset, ids, new=72)
    _, packed = run(tiny_model, preset, ids, new=72, assistant_model=assistant_of(tiny_model))
    assert packed == expected == 4 * 32


@pytest.mark.parametrize("preset", PRESETS)
def test_beams_follow_their_rows(tiny_model: PreTrainedModel, preset: str) -> None:
    """A beam's row of the cache is what its tokens would have made: scored again, one by one, it has the score it got."""
    ids, mask = left_padded(2, 70, [0, 32])  # a row that starts where a page does has the pages that it has alone
    cache = TurboQuantCache(tiny_model.config, preset, **SMALL, boundary_layers=0)
    scored = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0}
    out = generate(tiny_model, ids, cache, mask, new=22, output_scores=True, return_dict_in_generate=True, **scored)
    assert cache.report().packed_tokens > 0
    for i, sequence in enumerate(out.sequences):
        alone = TurboQuantCache(tiny_model.config, preset, **SMALL, boundary_layers=0)
        pad = (0, 32)[i // 3]
        total = 0.0
        with torch.no_grad():
            logits = tiny_model(sequence[None, pad:70], past_key_values=alone).logits
            for token in sequence[70:]:
                total += float(logits[0, -1].log_softmax(-1)[token])
                logits = tiny_model(token.view(1, 1), past_key_values=alone).logits
        assert total == pytest.approx(float(out.sequences_scores[i]), abs=1e-3)
