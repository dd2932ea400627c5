"""What comes after a forward pass that ended early, by the kinds of layers that it has reached."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.test_cache import states
from tests.tiny_models import COMMON, HEADS, prompt, tiny_model
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.compat import ASKS_BEFORE_WRITING

SIZES = {"page_size": 32, "recent_window": 32, "sink_tokens": 4}
KINDS = {"full": "full_attention", "short": "sliding_attention"}  # the window is too short for pages


def cache_of(*kinds: str, **options: Any) -> TurboQuantCache:
    config = tf.Gemma3TextConfig(
        hidden_size=64, num_hidden_layers=len(kinds), num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        sliding_window=24, layer_types=[KINDS[kind] for kind in kinds],
    )  # fmt: skip
    return TurboQuantCache(config, "tq4", **SIZES, **options)


def feed(cache: TurboQuantCache, tokens: int, layers: int | None = None) -> None:
    """New tokens for the first `layers` layers, or for all."""
    for i in range(len(cache.layers) if layers is None else layers):
        query, key, value = (states(tokens, cache._rows or 1, seed=100 * tokens + i + side) for side in (0, 30, 60))
        turboquant_attention(nn.Module(), query, *cache.update(key, value, i), None)


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("kinds", [["full"] * 3, ["full", "short", "short"], ["short", "full", "full", "short"]])
def test_a_static_pass_that_ended_early_is_refused_on_the_host(kinds: list[str], passes: int) -> None:
    """Behind any layer: what a device-side assertion would say ends the process's use of a GPU."""
    for reached in range(1, len(kinds)):
        cache = cache_of(*kinds, max_cache_len=100)
        for _ in range(passes):
            feed(cache, 5)
        feed(cache, 5, reached)
        named = "layer 0" if reached == 1 else "layers " + ", ".join(map(str, range(reached)))
        for use in (lambda c: c.crop(-1), list, lambda c: feed(c, 5)):
            with pytest.raises(RuntimeError, match=rf"ended early.*only {named} of {len(kinds)} hold.*cache\.reset\(\)"):
                use(cache)
        cache.reset()
        for _ in range(3):
            feed(cache, 5)
        cache.crop(-1) if "short" not in kinds else list(cache)


@pytest.mark.parametrize("sizes", [[20], [20, 1], [20, 3]], ids=str)
def test_a_static_pass_that_ended_between_a_state_and_attention_is_refused_on_the_host(sizes: list[int]) -> None:
    model = tiny_model("falcon_h1")
    for layer in model.model.layers:
        cache = TurboQuantCache(model.config, **SIZES, max_cache_len=100)
        for tokens in sizes[:-1]:
            decode(model, cache, prompt(1, tokens))

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = layer.mamba.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            decode(model, cache, prompt(1, sizes[-1]))
        handle.remove()
        with pytest.raises(RuntimeError, match=r"ended early.*only layers? 0.* of 2 hold its tokens.*cache\.reset\(\)"):
            decode(model, cache, prompt(1, sizes[-1]))


def test_a_static_pass_that_has_changed_nothing_can_be_made_again() -> None:
    cache = cache_of("full", "short", max_cache_len=100)
    feed(cache, 5)
    with pytest.raises(ValueError, match=r"cannot be broadcast|does not fit"):
        key = states(1)
        turboquant_attention(nn.Module(), key, *cache.update(key, key, 0), torch.ones(1, 1, 1, 7, dtype=torch.uint8))
    feed(cache, 1)
    assert int(cache.get_seq_length()) == 6


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 100}], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_layers_that_are_compiled_on_their_own_are_no_early_end(family: str, options: dict[str, Any]) -> None:
    model, ids = tiny_model(family), prompt(1, 40)
    wanted = model.generate(ids, past_key_values=TurboQuantCache(model.config, **SIZES), do_sample=False, max_new_tokens=6)
    model.model.layers[0].compile(backend="eager")
    cache = TurboQuantCache(model.config, **SIZES, **options)
    got = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=6, disable_compile=True)
    assert torch.equal(got, wanted)
    select(cache)


def select(cache: TurboQuantCache) -> None:
    cache.reorder_cache(torch.tensor([0]))


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_edits_between_passes_hide_no_early_end(passes: int) -> None:
    """As beam search makes them. The short window is behind the last packed layer."""
    cache = cache_of("full", "full", "short")
    for _ in range(passes):
        feed(cache, 5)
        select(cache)
    feed(cache, 5, 2)
    for use in (select, lambda c: feed(c, 1)):
        with pytest.raises(RuntimeError, match=r"only layers 0, 1 of 3 hold its tokens\. Layer 0 cannot.*cache\.reset\(\)"):
            use(cache)
    cache.reset()
    for _ in range(2):
        feed(cache, 5)
        select(cache)
    assert cache.get_seq_length() == cache.layers[2].get_seq_length() == 10


def test_attention_that_fails_in_the_first_pass_teaches_nothing_of_later_layers() -> None:
    cache, key = cache_of("full", "short"), states(5)
    handles = cache.update(key, key, 0)
    with pytest.raises(ValueError, match=r"a tensor on meta"):
        turboquant_attention(nn.Module(), key, *handles, torch.ones(1, 1, 1, 5, device="meta", dtype=torch.bool))
    for _ in range(2):
        feed(cache, 5)
    assert cache.get_seq_length() == 10


# -- states that models write in place ---------------------------------------------------------------------------------
def lfm2() -> Any:
    config = tf.Lfm2Config(
        **{**COMMON, "num_hidden_layers": 4}, **HEADS, layer_types=["conv", "conv", "full_attention", "conv"]
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tf.AutoModelForCausalLM.from_config(config).eval()


def qwen3_next() -> Any:
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    return tiny_model("qwen3_next", num_hidden_layers=4, layer_types=kinds)


MODELS: dict[str, Callable[[], Any]] = {"lfm2": lfm2, "qwen3_next": qwen3_next}


def decode(model: Any, cache: TurboQuantCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


@pytest.mark.parametrize("edit", [None, select], ids=["", "edited"])
@pytest.mark.parametrize("sizes", [[20], [20, 1], [20, 1, 1, 3]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_through_states_written_in_place_is_seen(name: str, sizes: list[int], edit: Any) -> None:
    """The last of these passes ends behind each layer but the last."""
    model = MODELS[name]()
    for layer in model.model.layers[:-1]:
        cache = TurboQuantCache(model.config, **SIZES)
        for tokens in sizes[:-1]:
            decode(model, cache, prompt(1, tokens))
            if edit is not None and tokens < sizes[0]:
                edit(cache)

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = layer.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            decode(model, cache, prompt(1, sizes[-1]))
        handle.remove()
        with pytest.raises(RuntimeError, match=r"ended (early|before).*cache\.reset\(\)"):
            decode(model, cache, prompt(1, 1))


@pytest.mark.parametrize("sizes", [[20], [20, 1], [20, 1, 3]], ids=str)
def test_a_pass_that_ended_between_a_state_and_attention_beside_it_is_seen(sizes: list[int]) -> None:
    """The last layer is transformers' own, and tells nothing."""
    config = CONFIG_MAPPING["inkling_text"](
        **COMMON, **HEADS, head_dim=16, sliding_window=24, layer_types=["hybrid", "hybrid_sliding"], n_routed_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=32, n_shared_experts=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
    cache = TurboQuantCache(config, **SIZES)
    for tokens in sizes[:-1]:
        decode(model, cache, prompt(1, tokens))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.v_sconv.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        decode(model, cache, prompt(1, sizes[-1]))
    handle.remove()
    with pytest.raises(RuntimeError, match=r"ended early.*cache\.reset\(\)"):
        decode(model, cache, prompt(1, 1))
    cache.reset()
    for tokens in sizes:
        decode(model, cache, prompt(1, tokens))
    assert cache.get_seq_length() == sum(sizes)


@pytest.mark.parametrize("name", MODELS)
def test_a_look_at_a_state_is_no_update(name: str) -> None:
    model = MODELS[name]()
    looked_at, plain = (TurboQuantCache(model.config, **SIZES) for _ in range(2))

    def look(cache: TurboQuantCache, i: int) -> None:
        if ASKS_BEFORE_WRITING:
            assert cache.has_previous_state(i)
        else:
            assert cache.get_conv_state(i) is not None

    for tokens in (20, 1, 1, 3, 1):
        logits = [decode(model, cache, prompt(1, tokens)) for cache in (looked_at, plain)]
        assert torch.equal(*logits)
        for layers in ([0], [1], [3], [0, 1, 3], [3, 0]):
            for i in layers:
                look(looked_at, i)
            if tokens == 3:
                select(looked_at)


# -- what is no early end ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 100}], ids=["dynamic", "static"])
def test_a_model_of_fewer_layers_than_its_config_is_told_so(options: dict[str, Any]) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    cache = TurboQuantCache(model.config, **SIZES, **options)
    model.model.layers = model.model.layers[:2]
    model.model.config.num_hidden_layers = 2
    decode(model, cache, prompt(1, 10))
    with pytest.raises(RuntimeError, match=r"only layers 0, 1 of 3 hold.*fewer layers than its config.*num_hidden_layers"):
        decode(model, cache, prompt(1, 1))


def test_tokens_that_come_layer_by_layer_are_refused_with_the_order_they_must_have() -> None:
    cache, key = cache_of("full", "full"), states(5)
    cache.update(key, key, 0)
    with pytest.raises(RuntimeError, match=r"only layer 0 of 2 hold.*all layers take a forward pass's tokens before any"):
        cache.update(key, key, 0)


def test_an_encoder_decoder_model_that_tries_again_is_not_taken_for_cross_attention_alone() -> None:
    model, ids = tiny_model("bart"), prompt(1, 20)
    cache = tf.EncoderDecoderCache(TurboQuantCache(model.config, **SIZES), tf.DynamicCache())

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    def step() -> None:
        with torch.no_grad():
            model(ids, decoder_input_ids=ids, past_key_values=cache)

    handle = model.model.decoder.layers[0].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step()
    handle.remove()
    with pytest.raises(ValueError, match=r"twice.*EncoderDecoderCache.*ended early.*reset\(\)") as refusal:
        step()
    assert re.search("layer 0 is updated", str(refusal.value))
    cache.reset()
    step()


@pytest.mark.parametrize("window", [40, 512])
def test_layers_that_a_model_never_updates_are_not_waited_for(window: int, tmp_path: Path) -> None:
    """RecurrentGemma's, which have a place in the caches of older transformers; with the longer window a layer is packed."""
    config = tf.RecurrentGemmaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=1, lru_width=64, attention_window_size=window,
        block_types=["recurrent", "recurrent", "attention"],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
    ids = prompt(2, 150)

    def answers(cache: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(part, past_key_values=cache).logits for part in (ids, ids[:, :1], ids[:, 1:2])], 1)

    cache = TurboQuantCache(config, "raw", **SIZES)
    torch.testing.assert_close(answers(cache), answers(tf.DynamicCache(config=config)))
    assert len(cache.packed_layers) == (window == 512)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.save(tmp_path / "cache")
    for after in (cache, TurboQuantCache.load(tmp_path / "cache", config)):
        assert answers(after).isfinite().all()
