"""`decode_ahead` against `generate()` without it: the same tokens, whatever ends them, and what the caches hold then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers.generation.utils as loops
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache, StoppingCriteria
from transformers.cache_utils import QuantizedLayer
from transformers.generation.streamers import BaseStreamer

from tests import tiny_models
from tests.tiny_models import prompt
from tq_hf import TurboQuantCache, decode_ahead
from tq_hf.generation import ahead

SMALL = {"page_size": 32, "recent_window": 16}
NEW = 40


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.reshape(-1))

    def end(self) -> None:
        self.ends += 1


class StopAt(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.lengths <= input_ids.shape[1]


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """The lengths of what the model is called with."""
    calls: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args, kw: calls.append(kw["input_ids"].shape[1]), with_kwargs=True)
    yield calls
    hook.remove()


def make(kind: str, model: PreTrainedModel, rows: int = 1) -> Any:
    config = model.config
    return {
        "packed": lambda: TurboQuantCache(config, "tq4", **SMALL),
        "packed, static": lambda: TurboQuantCache(config, "tq4", max_cache_len=140, **SMALL),
        "published": lambda: TurboQuantCache(config, "4bit_nc"),
        "dynamic": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config, max_cache_len=140),
    }[kind]()


def run(model: PreTrainedModel, ids: Tensor, cache: Any, is_ahead: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    method = {"custom_generate": decode_ahead} if is_ahead else {}
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW} | options
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, past_key_values=cache, **method, **options)


def both(model: PreTrainedModel, kind: str, ids: Tensor, **options: Any) -> tuple[list[Any], list[Any]]:
    """What `generate()` returns without and with `decode_ahead`, and the caches."""
    caches = [make(kind, model) for _ in range(2)]
    return [run(model, ids, cache, i == 1, **options) for i, cache in enumerate(caches)], caches


KINDS = ("packed", "packed, static", "published", "dynamic", "static")


def test_the_loop_of_this_release_is_known() -> None:
    """Were it not, `decode_ahead` would do nothing, and every other test here would pass."""
    assert ahead.DEFERRED in loops.GenerationMixin._sample.__code__.co_names


@pytest.mark.parametrize("kind", KINDS)
def test_full_length_gives_the_same_and_computes_nothing_more(tiny_model: PreTrainedModel, kind: str) -> None:
    ids = prompt(2, 70)
    (plain, early), caches = both(tiny_model, kind, ids, min_new_tokens=NEW)
    assert torch.equal(plain, early) and plain.shape[1] == 70 + NEW
    assert len({int(cache.get_seq_length()) for cache in caches}) == 1
    with counted(tiny_model) as calls:
        run(tiny_model, ids, make(kind, tiny_model), True, min_new_tokens=NEW)
    assert len(calls) == NEW


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_end_early_cost_one_step_which_leaves_no_trace(tiny_model: PreTrainedModel, kind: str) -> None:
    """Rows of different ends, of which the last decides; the cache goes on as if that step had not been."""
    ids = prompt(3, 70)
    free = run(tiny_model, ids, make(kind, tiny_model), False, min_new_tokens=NEW)
    ends = free[0, 70 + 9].item(), free[1, 70 + 21].item(), free[2, 70 + 4].item()
    with counted(tiny_model) as calls:
        plain_cache, early_cache = make(kind, tiny_model), make(kind, tiny_model)
        plain = run(tiny_model, ids, plain_cache, False, eos_token_id=list(ends))
        steps = len(calls)
        early = run(tiny_model, ids, early_cache, True, eos_token_id=list(ends))
    assert 70 < plain.shape[1] < 70 + NEW and torch.equal(plain, early)
    # StaticCache learnt to crop in a later release.
    assert len(calls) - steps == steps + early_cache.is_croppable and (early_cache.is_croppable or kind == "static")
    assert [int(cache.get_seq_length()) for cache in (plain_cache, early_cache)] == [plain.shape[1] - 1] * 2
    more = torch.cat([plain, prompt(3, 9)], 1)
    plain, early = (run(tiny_model, more, each, each is early_cache) for each in (plain_cache, early_cache))
    assert torch.equal(plain, early)


def test_padded_rows_and_criteria_of_ones_own(tiny_model: PreTrainedModel) -> None:
    ids, mask = prompt(2, 70), torch.ones(2, 70, dtype=torch.long)
    ids[0, :30], mask[0, :30] = 0, 0
    options = {"attention_mask": mask, "stopping_criteria": [StopAt([80, 95])], "eos_token_id": 98}
    (plain, early), _ = both(tiny_model, "packed", ids, **options)
    assert torch.equal(plain, early) and plain.shape[1] == 95


@pytest.mark.parametrize("ends_early", [False, True])
def test_what_generate_returns_besides(tiny_model: PreTrainedModel, ends_early: bool) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options["output_hidden_states"] = True
    if ends_early:
        options["stopping_criteria"] = [StopAt([85])]
    (plain, early), caches = both(tiny_model, "packed", prompt(1, 70), **options)
    count = 15 if ends_early else NEW
    assert torch.equal(plain.sequences, early.sequences)
    for name in ("scores", "logits", "hidden_states"):
        assert len(getattr(plain, name)) == len(getattr(early, name)) == count
    assert all(torch.equal(a, b) for a, b in zip(plain.scores, early.scores))
    assert early.past_key_values is caches[1] and len(caches[1]) == len(caches[0])
    assert caches[1].get_seq_length() == 70 + count - 1


def test_sampling_draws_the_same(tiny_model: PreTrainedModel) -> None:
    options = {"do_sample": True, "top_k": 20, "temperature": 1.5, "stopping_criteria": [StopAt([90])]}
    numbers = []
    for is_ahead in (False, True):
        output = run(tiny_model, prompt(1, 70), make("packed", tiny_model), is_ahead, **options)
        numbers.append((output, torch.rand(9)))  # what comes next, too
    assert all(torch.equal(plain, early) for plain, early in zip(*numbers))


@pytest.mark.parametrize("stop", [71, 72, 90, 200])
def test_a_streamer_gets_every_token_once_in_order(tiny_model: PreTrainedModel, stop: int) -> None:
    streamers = [Collected(), Collected()]
    outputs = [
        run(tiny_model, prompt(1, 70), make("packed", tiny_model), i == 1, streamer=each, stopping_criteria=[StopAt([stop])])
        for i, each in enumerate(streamers)
    ]
    assert torch.equal(*outputs) and outputs[0].shape[1] == min(stop, 70 + NEW)
    assert all(torch.equal(torch.cat(each.tokens), outputs[0][0]) and each.ends == 1 for each in streamers)


class Interrupting(Collected):
    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.tokens) == 6:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["packed", "packed, static", "dynamic"])
def test_a_streamer_that_raises_sees_the_cache_without_its_token(tiny_model: PreTrainedModel, kind: str) -> None:
    for is_ahead in (False, True):
        cache = make(kind, tiny_model)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_model, prompt(1, 70), cache, is_ahead, streamer=Interrupting())
        assert cache.get_seq_length() == 74


def test_a_streamer_is_not_taken_from_another_models_generate(tiny_model: PreTrainedModel) -> None:
    """A logits processor may decode with a model whose `generate()` is its own."""
    other, streamer, found = tiny_models.tiny_model("gpt2"), Collected(), []

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        found.append([ahead._given_to_generate(model, "streamer") for model in (tiny_model, other)])
        return scores

    run(tiny_model, prompt(1, 70), None, True, streamer=streamer, logits_processor=[processor], max_new_tokens=2)
    assert found == [[streamer, None]] * 2 and streamer.ends == 1


@pytest.mark.parametrize("kind", ["packed, static", "static"])
def test_a_full_static_cache_gets_no_step_more(tiny_model: PreTrainedModel, kind: str) -> None:
    options = {"stopping_criteria": [StopAt([141])], "min_new_tokens": 11}
    (plain, early), caches = both(tiny_model, kind, prompt(1, 130), **options)
    assert torch.equal(plain, early) and [int(cache.get_seq_length()) for cache in caches] == [140, 140]


def test_a_cache_that_fails_to_crop_says_so(
    tiny_model: PreTrainedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a static one does whose spare entries are used up."""

    def crop(tokens: int) -> None:
        raise RuntimeError("no more crops")

    cache = make("packed", tiny_model)
    monkeypatch.setattr(cache, "crop", crop)
    monkeypatch.setattr(ahead.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    output = run(tiny_model, prompt(1, 70), cache, True, stopping_criteria=[StopAt([80])])
    assert output.shape[1] == cache.get_seq_length() == 80
    assert "holds the last token too, which generate() leaves out: no more crops" in caplog.text


FORGETFUL = ("gemma3_hybrid", "mistral_sliding", "qwen3_next", "jamba")


@pytest.mark.parametrize("family", FORGETFUL)
@pytest.mark.parametrize("length", [20, 70])
def test_caches_that_forget_are_not_run_ahead_of(family: str, length: int) -> None:
    """With one token more than `generate()` leaves in them, a call with the same ids would read all of them again."""
    model = tiny_models.tiny_model(family)
    ids, outputs = prompt(1, length), []
    caches = [TurboQuantCache(model.config, "raw", **SMALL) for _ in range(2)]
    for i, cache in enumerate(caches):
        with counted(model) as calls:
            outputs.append(run(model, ids, cache, i == 1, stopping_criteria=[StopAt([length + 11])]))
        assert len(calls) == 11 and cache.get_seq_length() == length + 10
    assert torch.equal(*outputs)
    assert torch.equal(*(run(model, outputs[0], cache, i == 1, min_new_tokens=NEW) for i, cache in enumerate(caches)))


@pytest.mark.parametrize("family", FORGETFUL)
def test_caches_that_nobody_sees_are_run_ahead_of(family: str) -> None:
    model, outputs, steps = tiny_models.tiny_model(family), [], []
    for is_ahead in (False, True):
        with counted(model) as calls:
            outputs.append(run(model, prompt(1, 70), None, is_ahead, stopping_criteria=[StopAt([81])]))
        steps.append(len(calls))
    assert torch.equal(*outputs) and steps == [11, 12]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bart", None), ("bart", DynamicCache), ("bart", StaticCache), ("t5_position_bias", DynamicCache)],
)
def test_encoder_decoder_models(family: str, kind: Any) -> None:
    """Of their caches only dynamic ones crop; T5's has layers for its encoder's depth, one of which stays empty."""
    model, outputs = tiny_models.tiny_model(family), []
    for is_ahead in (False, True):
        size = {"max_cache_len": 60} if kind is StaticCache else {}
        cache = kind and EncoderDecoderCache(*(kind(config=model.config, **size) for _ in range(2)))
        outputs.append(run(model, prompt(2, 60), cache, is_ahead, stopping_criteria=[StopAt([9, 12])]))
        assert cache is None or cache.get_seq_length() == 11
    assert torch.equal(*outputs) and outputs[0].shape[1] == 12


class Requantized(QuantizedLayer):
    """Without the packages that transformers' own need."""

    def __init__(self) -> None:
        super().__init__(axis_key=0, axis_value=0, q_group_size=16, residual_length=8)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.clone()

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor


def test_transformers_quantized_caches_are_not_run_ahead_of(tiny_model: PreTrainedModel) -> None:
    caches = [Cache(layers=[Requantized() for _ in range(tiny_model.config.num_hidden_layers)]) for _ in range(2)]
    outputs = [
        run(tiny_model, prompt(1, 70), cache, i == 1, stopping_criteria=[StopAt([80])]) for i, cache in enumerate(caches)
    ]
    assert torch.equal(*outputs) and [cache.get_seq_length() for cache in caches] == [79, 79]


def test_without_a_cache_of_ones_own(tiny_model: PreTrainedModel) -> None:
    (plain, early) = (run(tiny_model, prompt(2, 70), None, is_ahead) for is_ahead in (False, True))
    assert torch.equal(plain, early)


@pytest.mark.parametrize(
    ("options", "named"), [({"num_beams": 2}, "beam search"), ({"prompt_lookup_num_tokens": 3}, "assisted generation")]
)
def test_other_ways_to_decode_are_refused(tiny_model: PreTrainedModel, options: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"asked for {named}: expected greedy decoding or sampling"):
        run(tiny_model, prompt(1, 70), make("packed", tiny_model), True, **options)


def test_an_assistant_is_refused(tiny_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="asked for assisted generation"):
        run(tiny_model, prompt(1, 70), make("packed", tiny_model), True, assistant_model=tiny_model)


def test_nothing_of_transformers_is_changed(tiny_model: PreTrainedModel) -> None:
    before = dict(vars(loops))
    run(tiny_model, prompt(1, 70), make("packed", tiny_model), True)
    assert vars(loops) == before


def test_an_unknown_loop_decodes_as_it_does(tiny_model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    class Own(type(tiny_model)):  # type: ignore[misc]
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    plain = run(tiny_model, prompt(1, 70), make("packed", tiny_model), False)
    tiny_model.__class__ = Own
    with counted(tiny_model) as calls:
        early = run(tiny_model, prompt(1, 70), make("packed", tiny_model), True, stopping_criteria=[StopAt([90])])
    assert torch.equal(plain[:, :90], early) and len(calls) == 20
