"""Every model family: which class each layer of its cache has, and the tokens that `DynamicCache` gives."""

from __future__ import annotations

import copy
import inspect
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers as tf
from packaging import version
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from tests.test_generate import generate, left_padded
from tests.tiny_models import (
    EAGER_ONLY,
    FAMILIES,
    NO_SDPA,
    UNPACKED,
    attentions,
    cache_for,
    prompt,
    tiny_model,
    use_attention,
)
from tq_hf import TurboQuantCache
from tq_hf.layers.full import TurboQuantLayer
from tq_hf.layers.hybrid import HybridLayer

SMALL = {"page_size": 32, "recent_window": 0, "sink_tokens": 0}
PROMPT, NEW = 60, 12  # pages fall due in the prompt and on the way


def inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A left-padded batch; an encoder-decoder model gets it as its source, and as long a start of the target."""
    ids, mask = left_padded(2, PROMPT, [0, 25])
    if not model.config.is_encoder_decoder:
        return ids, mask, {}
    start = torch.full((2, 1), model.config.decoder_start_token_id)
    return ids, mask, {"decoder_input_ids": torch.cat([start, prompt(2, PROMPT - 1, seed=2)], 1)}


def run(model: PreTrainedModel, cache: Any, new: int = NEW) -> Any:
    ids, mask, options = inputs(model)
    # Without repeats the tokens of an untrained model vary.
    options |= {"no_repeat_ngram_size": 2, "output_logits": True, "return_dict_in_generate": True}
    return generate(model, ids, cache_for(model, cache), mask, new=new, **options)


@lru_cache(maxsize=1)  # pytest runs a family's cases one after the other
def reference(family: str) -> tuple[PreTrainedModel, Any]:
    model = tiny_model(family)
    if "cache_params" in inspect.signature(model.forward).parameters:
        pytest.skip(f"{type(model).__name__} of transformers {tf.__version__} takes its cache under another name")
    use_attention(model, "sdpa" if "sdpa" in attentions(family) else "eager")
    return model, run(model, DynamicCache(config=model.config))


@pytest.mark.parametrize(("family", "attention"), [(f, a) for f in FAMILIES for a in attentions(f)])
def test_raw_pages_give_the_tokens_of_dynamic_cache(family: str, attention: str) -> None:
    model, expected = reference(family)
    use_attention(model, attention)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    result = run(model, cache)
    assert torch.equal(result.sequences, expected.sequences)
    assert len(result.sequences[0, -NEW:].unique()) > 3
    for ours, theirs in zip(result.logits, expected.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)
    assert bool(cache.packed_layers) == (family not in UNPACKED)
    full = [layer.report(0).packed_tokens for layer in cache.packed_layers if type(layer) in (TurboQuantLayer, HybridLayer)]
    assert full == [2 * 64] * len(full)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in (*UNPACKED, *EAGER_ONLY)])
@torch.no_grad()
def test_packed_attention_equals_attention_over_the_dequantized_bytes(family: str) -> None:
    """One step over one cache and its copy: pages read where they lie, and dequantized for eager attention."""
    model = tiny_model(family)
    ids, mask, options = inputs(model)
    use_attention(model, attentions(family)[0])
    inner = TurboQuantCache(model.config, "tq4", **SMALL)
    cache = cache_for(model, inner)
    target = options.get("decoder_input_ids")
    if target is None:
        given = {"attention_mask": torch.cat([mask, mask.new_ones(2, 1)], 1)}
        model(ids, attention_mask=mask, past_key_values=cache)
    else:
        given = {"encoder_outputs": model.get_encoder()(ids, attention_mask=mask), "attention_mask": mask}
        model(decoder_input_ids=target, past_key_values=cache, **given)
    assert inner.report().packed_tokens > 0
    twin = copy.deepcopy(cache)
    step = {"input_ids" if target is None else "decoder_input_ids": prompt(2, 1, seed=3)}
    packed = model(**step, past_key_values=cache, **given).logits
    use_attention(model, "eager")
    dense = model(**step, past_key_values=twin, **given).logits
    assert torch.allclose(packed, dense, atol=2e-3 * float(dense.abs().max()))


# Whose static cache transformers itself cannot feed, and those whose like is there twice.
NO_STATIC = ("mamba", "falcon_alibi", "llama_mqa_d80", "gemma3_d256", "phi3_d96")


@pytest.mark.parametrize("cache_class", [TurboQuantCache, StaticCache])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NO_STATIC])
def test_static_caches_give_the_tokens_of_dynamic_cache(family: str, cache_class: type) -> None:
    """Ours, and transformers' own under our attention function; the prompt is shorter than the windows and not padded."""
    if family in ("bloom_alibi", "llama4_chunked") and version.parse(tf.__version__) < version.parse("5.24"):
        pytest.skip(f"{family} of transformers {tf.__version__} knows no static cache, or none but transformers' own")
    model = tiny_model(family)
    ids, _, options = inputs(model)
    for config in {id(c): c for c in (model.config, model.config.get_text_config(decoder=True))}.values():
        if getattr(config, "sliding_window", None):
            config.sliding_window = 500
    use_attention(model, "eager" if family in NO_SDPA else "sdpa")
    settings = {"output_logits": True, "return_dict_in_generate": True, "new": 10, **options}
    expected = generate(model, ids, cache_for(model, DynamicCache(config=model.config)), **settings)
    use_attention(model, attentions(family)[0])
    ours = {"preset": "raw", **SMALL} if cache_class is TurboQuantCache else {}
    cache = cache_class(model.config, max_cache_len=80, **ours)
    result = generate(model, ids, cache_for(model, cache), **settings)
    assert torch.equal(result.sequences, expected.sequences)
    for given, wanted in zip(result.logits, expected.logits, strict=True):
        assert torch.allclose(given, wanted, atol=2e-5, rtol=1e-4)
    if cache_class is TurboQuantCache and family not in (*UNPACKED, "mistral_sliding"):
        assert cache.report().packed_tokens >= 2 * 64


@pytest.mark.parametrize("cache_class", [TurboQuantCache, DynamicCache])
@pytest.mark.parametrize("family", [family for family in FAMILIES if "turboquant" in attentions(family)])
@torch.no_grad()
def test_several_queries_behind_a_history_without_padding(family: str, cache_class: type) -> None:
    model = tiny_model(family)
    ids, _, options = inputs(model)
    use_attention(model, "eager" if family in NO_SDPA else "sdpa")
    logits = []
    for attention, ours in ((model.config._attn_implementation, DynamicCache), ("turboquant", cache_class)):
        use_attention(model, attention)
        settings = {"preset": "raw", **SMALL} if ours is TurboQuantCache else {}
        cache = cache_for(model, ours(config=model.config, **settings))
        tokens = options.get("decoder_input_ids", ids)
        name = "decoder_input_ids" if options else "input_ids"
        given = {"encoder_outputs": model.get_encoder()(ids)} if options else {}
        parts = [model(**{name: part}, past_key_values=cache, **given).logits[:, -1] for part in tokens.split([50, 9, 1], 1)]
        logits.append(torch.stack(parts))
    assert torch.allclose(*logits, atol=2e-5, rtol=1e-4)


def kinds(family: str, **options: Any) -> list[str]:
    return [type(layer).__name__ for layer in TurboQuantCache(tiny_model(family).config, **options).layers]


@pytest.mark.parametrize(
    ("family", "dynamic", "static"),
    [
        (
            "llama4_chunked",
            ["DynamicSlidingWindowLayer", "TurboQuantLayer"],
            ["StaticSlidingWindowLayer", "TurboQuantLayer"],
        ),
        ("qwen3_next", ["LinearAttentionLayer", "TurboQuantLayer"], ["LinearAttentionLayer", "TurboQuantLayer"]),
        ("falcon_h1", ["HybridLayer"] * 2, ["HybridLayer"] * 2),
        ("zamba2", ["LinearAttentionLayer"] + ["HybridLayer"] * 2, ["LinearAttentionLayer"] + ["HybridLayer"] * 2),
        ("deepseek_v3_mla", ["DynamicLayer"] * 2, ["StaticLayer"] * 2),
        ("gemma4_d512", ["DynamicSlidingWindowLayer", "DynamicLayer"], ["StaticSlidingWindowLayer", "StaticLayer"]),
        ("t5_position_bias", ["TurboQuantLayer"] * 2, ["TurboQuantLayer"] * 2),  # beside an encoder of three layers
        ("bart", ["TurboQuantLayer"] * 2, ["TurboQuantLayer"] * 2),
    ],
)
def test_which_class_a_layer_gets(family: str, dynamic: list[str], static: list[str]) -> None:
    assert kinds(family) == dynamic
    assert kinds(family, max_cache_len=128) == static


def test_layers_of_one_model_may_differ_in_head_dim() -> None:
    """Only the layer of 512 stays exact; a preset's boundary layers are counted among all."""
    model = tiny_model("gemma4_d512", layer_types=["full_attention"] * 8, num_hidden_layers=8)
    model.config.per_layer_config = {i: {"head_dim": 512 if i == 4 else 64} for i in range(8)}
    cache = TurboQuantCache(model.config, "4bit_nc")
    assert [i for i, layer in enumerate(cache.layers) if type(layer).__name__ == "DynamicLayer"] == [4]
    assert [layer.config.key_format for layer in cache.packed_layers] == ["raw"] * 2 + ["lloyd_max"] * 3 + ["raw"] * 2


@pytest.mark.parametrize("family", UNPACKED)
def test_a_cache_that_packs_nothing_says_why_once(family: str, caplog: pytest.LogCaptureFixture) -> None:
    tf.utils.logging.warning_once.cache_clear()  # said once a process
    config = tiny_model(family).config
    caches = [TurboQuantCache(config) for _ in range(2)]
    assert caplog.text.count("packs none of the 2 layers") == 1 and UNPACKED[family] in caplog.text
    assert not caches[0].packed_layers and caches[0].report().packed_tokens == 0


@pytest.mark.parametrize("family", ["bart", "t5_position_bias"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 128}], ids=["dynamic", "static"])
def test_a_bare_cache_refuses_cross_attention(family: str, options: dict[str, int]) -> None:
    model = tiny_model(family)
    ids, mask, _ = inputs(model)
    with pytest.raises(ValueError, match=r"pass EncoderDecoderCache\(TurboQuantCache\(model.config\), DynamicCache\(\)\)"):
        generate(model, ids, TurboQuantCache(model.config, **SMALL, **options), mask, new=4)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"prefill_chunk_size": 20}]
)
@pytest.mark.parametrize("family", ["falcon_h1", "zamba2"])
def test_states_beside_pages_follow_the_rows(family: str, options: dict[str, int]) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(2, PROMPT, [0, 25])
    expected = generate(model, ids, DynamicCache(config=model.config), mask, **options)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    assert torch.equal(generate(model, ids, cache, mask, **options), expected)
    assert cache.report().packed_tokens > 0


@pytest.mark.parametrize("family", ["bart", "t5_position_bias"])
def test_beams_of_encoder_decoder_models(family: str) -> None:
    model = tiny_model(family)
    ids, mask, options = inputs(model)
    expected = generate(model, ids, cache_for(model, DynamicCache(config=model.config)), mask, num_beams=3, **options)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    assert torch.equal(generate(model, ids, cache_for(model, cache), mask, num_beams=3, **options), expected)
    assert cache.report().packed_tokens > 0


def test_states_beside_pages_compile_to_one_graph() -> None:
    model = tiny_model("falcon_h1")
    model.set_attn_implementation("turboquant")
    ids, mask = left_padded(2, PROMPT, [0, 25])
    expected = generate(model, ids, TurboQuantCache(model.config, "tq4", **SMALL), mask)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = tf.CompileConfig(fullgraph=True, mode="default", backend="eager")
    config._compile_all_devices = True
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=100, **SMALL)
    assert torch.equal(generate(model, ids, cache, mask, compile_config=config), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_edits_of_a_cache_with_states_beside_pages() -> None:
    model = tiny_model("falcon_h1")
    ids = prompt(2, 70)
    plain = model(ids, use_cache=False).logits[:, -1:]
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    model(ids[:, :-1], past_key_values=cache)
    twin = copy.deepcopy(cache)
    twin.reorder_cache(torch.tensor([1, 0]))
    swapped = model(ids[[1, 0], -1:], past_key_values=twin).logits
    assert torch.allclose(swapped, plain[[1, 0]], atol=1e-5)
    assert torch.allclose(model(ids[:, -1:], past_key_values=cache).logits, plain, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.has_previous_state()
    assert torch.allclose(model(ids, past_key_values=cache).logits[:, -1:], plain, atol=1e-5)
    layer = cache.layers[0]
    assert isinstance(layer, HybridLayer)
    assert cache.report().layers[0].nbytes == layer.nbytes > sum(t.nbytes for t in layer.tensors())
    assert not cache.is_croppable and not DynamicCache(config=model.config).is_croppable
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)


def pixels(family: str) -> dict[str, Tensor]:
    ids = prompt(1, PROMPT, vocab=94)
    ids[0, 10:14] = 95  # four image tokens
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "gemma3_vision":
        return given | {"pixel_values": torch.randn(1, 3, 16, 16), "token_type_ids": (ids == 95).long()}
    grid = torch.tensor([[1, 4, 4]])
    ids[0, 9] = 97
    return given | {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == 95).int(),
    }


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("family", ["gemma3_vision", "qwen2_vl"])
def test_images_in_the_prompt(family: str, attention: str) -> None:
    model = tiny_model(family)
    given = pixels(family)
    options = {
        "max_new_tokens": 40,
        "min_new_tokens": 40,
        "do_sample": False,
        "pad_token_id": 0,
        "no_repeat_ngram_size": 2,
    }
    expected = model.generate(**given, past_key_values=DynamicCache(config=model.config), **options)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    assert torch.equal(model.generate(**given, past_key_values=cache, **options), expected)
    assert cache.report().packed_tokens >= 96
    blind = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"], **options)
    assert not torch.equal(blind, expected)


@pytest.mark.parametrize("family", ["falcon_alibi", "bloom_alibi"])
def test_models_with_their_own_attention_are_told_once(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(family)
    generate(model, prompt(1, PROMPT), TurboQuantCache(model.config, **SMALL), new=4)
    assert caplog.text.count("does not read packed pages") == 1


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_a_prompt_of_which_the_last_queries_alone_reach_some_layers(attention: str) -> None:
    """Gemma 4 drops the others where layers share keys; prompt lookup keeps several."""
    model = tiny_model("gemma4_shared")
    ids = prompt(1, 35).repeat(1, 2)
    model.set_attn_implementation("sdpa")
    caches = DynamicCache(config=model.config), TurboQuantCache(model.config, "raw", **SMALL)
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits[:, -4:]]
        expected += [model(ids[:, :4], past_key_values=filled(model, ids, caches[0])).logits]
        model.set_attn_implementation(attention)
        given = [model(ids, past_key_values=caches[1], logits_to_keep=4).logits]
        given += [model(ids[:, :4], past_key_values=caches[1]).logits]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(given, expected, strict=True))


def filled(model: PreTrainedModel, ids: Tensor, cache: Any) -> Any:
    model(ids, past_key_values=cache)
    return cache
