"""`enable(model)` and `disable(model)`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
    StaticCache,
)

from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache, TurboQuantConfig, disable, enable

SMALL = {"page_size": 32, "recent_window": 0}
STOCK = type(tiny_model())._prepare_cache_for_generation


def run(model: PreTrainedModel, new: int = 12, tokens: int = 70, **options: Any) -> Any:
    """What `generate` returns, as a dictionary with the cache under the name that this release gives it."""
    ids = prompt(options.pop("batch", 1), tokens)
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **{**settings, **options})


def cache_of(output: Any) -> Any:
    return output.get("cache", output.get("past_key_values"))


def test_each_call_builds_a_cache_of_its_own() -> None:
    model = tiny_model()
    expected = run(model)
    assert enable(model, "raw", **SMALL, sink_tokens=0) is model
    first, second = run(model), run(model, tokens=100)
    for output, tokens in ((first, 70), (second, 100)):
        cache = cache_of(output)
        assert type(cache) is TurboQuantCache
        assert cache.get_seq_length() == tokens + 11
        assert cache.report().packed_tokens == 2 * ((tokens + 11) // 32 * 32)
    assert cache_of(first) is not cache_of(second)
    assert torch.equal(first.sequences, expected.sequences)


def test_settings_reach_the_cache() -> None:
    model = enable(tiny_model(), TurboQuantConfig("lloyd_max", 3, "min_max", 2), recent_window=7)
    assert cache_of(run(model)).quantization == TurboQuantConfig("lloyd_max", 3, "min_max", 2, recent_window=7)
    enable(model, "tq2", max_cache_len=96)  # replaces them
    cache = cache_of(run(model))
    assert (cache.preset, cache.get_max_length()) == ("tq2", 96)


def test_the_class_and_other_models_are_left_alone() -> None:
    model, other = tiny_model(), tiny_model()
    enable(model)
    assert type(model)._prepare_cache_for_generation is STOCK
    assert type(cache_of(run(other))) is DynamicCache


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_what_the_call_asks_for_it_gets() -> None:
    model = enable(tiny_model())
    own = DynamicCache(config=model.config)
    assert cache_of(run(model, past_key_values=own)) is own
    assert cache_of(run(model, use_cache=False)) is None
    assert type(cache_of(run(model, cache_implementation="static", disable_compile=True))) is StaticCache
    assert type(cache_of(run(model, cache_implementation="dynamic"))) is DynamicCache
    model.generation_config.use_cache = False
    assert cache_of(run(model)) is None


def test_disable_restores_exactly() -> None:
    model = tiny_model()
    before = dict(vars(model))
    enable(model)
    enable(model, "tq2")
    assert disable(model) is model
    assert vars(model) == before
    assert type(cache_of(run(model))) is DynamicCache


def test_an_override_that_was_there_is_used_and_restored() -> None:
    model, calls = tiny_model(), []

    def override(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        STOCK(model, *args, **kwargs)

    model._prepare_cache_for_generation = override
    enable(enable(model), "tq3")
    assert cache_of(run(model)).preset == "tq3"
    assert len(calls) == 1
    disable(model)
    assert vars(model)["_prepare_cache_for_generation"] is override


def test_bad_models_and_options_are_named_and_change_nothing() -> None:
    model = tiny_model()
    before = dict(vars(model))
    with pytest.raises(ValueError, match=r"preset='tq5'.*tq4"):
        enable(model, "tq5")
    with pytest.raises(ValueError, match="unknown option windw"):
        enable(model, windw=3)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not enabled: call enable\(model\)"):
        disable(model)
    with pytest.raises(ValueError, match="int is not enabled"):
        disable(3)
    assert vars(model) == before
    bert = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    for thing in (bert, model.config, "name"):
        with pytest.raises(ValueError, match=r"has no generate\(\)"):
            enable(thing)
    own_cache = RwkvForCausalLM(RwkvConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2))
    with pytest.raises(ValueError, match="RwkvForCausalLM makes its own kind of cache"):
        enable(own_cache)
    assert "_prepare_cache_for_generation" not in vars(own_cache)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_enabled_by_themselves(copied: Any) -> None:
    model = enable(tiny_model(), "tq2")
    twin = copied(model)
    disable(model)
    assert twin._prepare_cache_for_generation.model is twin
    assert cache_of(run(twin)).preset == "tq2"
    disable(twin)
    assert type(cache_of(run(twin))) is DynamicCache


def test_saving_writes_the_same_model(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "plain")
    enable(model).save_pretrained(tmp_path / "enabled")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "enabled").iterdir())
    assert all((tmp_path / "plain" / f).read_bytes() == (tmp_path / "enabled" / f).read_bytes() for f in files)
    assert type(cache_of(run(type(model).from_pretrained(tmp_path / "enabled")))) is DynamicCache


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2, "batch": 2},
        {"num_beams": 2, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 20},
    ],
    ids=lambda options: next(iter(options)),
)
def test_decoding_modes(options: dict[str, Any]) -> None:
    model = tiny_model()
    torch.manual_seed(5)
    expected = run(model, **options)
    enable(model, "raw", **SMALL)
    torch.manual_seed(5)
    output = run(model, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert cache_of(output).report().packed_tokens > 0


def test_a_model_that_assists_itself_with_its_first_layers() -> None:
    model = tiny_model(num_hidden_layers=3)
    expected = run(model).sequences
    output = run(enable(model, "raw", **SMALL), assistant_early_exit=1)
    assert torch.equal(output.sequences, expected)
    assert len(cache_of(output).packed_layers) == 3


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=lambda o: next(iter(o)))
def test_an_encoder_decoder_model_keeps_its_cross_attention_cache(options: dict[str, int]) -> None:
    model = tiny_model("bart")
    expected = run(model, new=50, **options).sequences
    output = run(enable(model, "raw", **SMALL), new=50, **options)
    assert torch.equal(output.sequences, expected)
    cache = cache_of(output)
    assert type(cache) is EncoderDecoderCache
    assert type(cache.cross_attention_cache) is DynamicCache
    assert cache.self_attention_cache.report().packed_tokens > 0


def test_assisted_decoding_with_both_models_enabled() -> None:
    model, assistant = tiny_model(), tiny_model(seed=1)
    expected = run(model).sequences
    made = []
    for each in (model, assistant):
        enable(each, "raw", **SMALL)
        prepare = each._prepare_cache_for_generation

        def watch(config: Any, kwargs: dict[str, Any], *rest: Any, prepare: Any = prepare, **more: Any) -> None:
            prepare(config, kwargs, *rest, **more)
            made.append(cache_of(kwargs))

        each._prepare_cache_for_generation = watch
    output = run(model, assistant_model=assistant)
    assert torch.equal(output.sequences, expected)
    assert len({id(cache) for cache in made}) == 2
    assert all(cache.report().packed_tokens > 0 for cache in made)
