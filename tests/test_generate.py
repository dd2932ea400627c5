"""`generate()` and forward passes through the cache, against transformers' own `DynamicCache`.

With preset `raw` the pages hold the model's dtype, so that everything but the quantizer must agree token for token;
every such case also asserts that tokens really went through pages.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.tiny_models import FAMILIES, attentions, prompt, tiny_model
from tq_hf import PRESETS, TurboQuantCache

SMALL = {"page_size": 32, "recent_window": 16}  # pages fall due early, so that short runs cross several of them


def generate(
    model: PreTrainedModel, ids: Tensor, cache: Any, mask: Tensor | None = None, new: int = 24, **options: Any
) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # `past_key_values=` is the name that all releases know
        return model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, min_new_tokens=new,
            do_sample=False, pad_token_id=0, **options,
        )  # fmt: skip


def reference(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Tensor:
    """The same with DynamicCache and the attention that the family supports."""
    used = model.config._attn_implementation
    softcapped = getattr(model.config, "attn_logit_softcapping", None) or model.config.model_type == "gpt_oss"
    model.set_attn_implementation("eager" if softcapped else "sdpa")
    try:
        return generate(model, args[0], DynamicCache(config=model.config), *args[1:], **kwargs)
    finally:
        model.set_attn_implementation(used)


def left_padded(batch: int, length: int, pads: list[int]) -> tuple[Tensor, Tensor]:
    ids, mask = prompt(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask


# Those in which attention itself differs; tests/test_families.py has all of them.
CASES = [(family, attention) for family in list(FAMILIES)[:10] for attention in attentions(family)]


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 140}], ids=["dynamic", "static"])
def test_raw_pages_give_the_reference_tokens(family: str, attention: str, options: dict[str, int]) -> None:
    model = tiny_model(family)
    ids, mask = left_padded(2, 110, [0, 37])  # the third page falls due while decoding
    scored = {"output_logits": True, "return_dict_in_generate": True, "new": 10}
    expected = reference(model, ids, mask, **scored)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, "raw", **SMALL, **options)
    result = generate(model, ids, cache, mask, **scored)
    assert torch.equal(result.sequences, expected.sequences)
    for ours, theirs in zip(result.logits, expected.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)
    report = cache.report()
    assert all(layer.packed_tokens >= 96 for layer in report.layers if layer.kind == "exact pages")
    assert report.packed_tokens > 0


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_a_padded_row_equals_the_row_alone(attention: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    ids, mask = left_padded(2, 120, [70, 0])
    both = generate(model, ids, TurboQuantCache(model.config, "raw", **SMALL), mask)
    alone = generate(model, ids[:1, 70:], TurboQuantCache(model.config, "raw", **SMALL))
    assert torch.equal(both[0, 120:], alone[0, 50:])


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
def test_presets_read_the_same_bytes_whatever_the_attention(preset: str, attention: str) -> None:
    """One decode step through packed pages: all attention functions agree with each other, and roughly with bf16."""
    model = tiny_model(num_hidden_layers=3)
    ids = prompt(2, 131)
    model.set_attn_implementation("sdpa")
    exact = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=exact)
        target = model(ids[:, -1:], past_key_values=exact).logits
        outputs = []
        for name in ("turboquant", attention):
            model.set_attn_implementation(name)
            # Eager attention shows the cache no queries, and without them keys are not balanced.
            options = {"balance_keys": False} if attention == "eager" else {}
            cache = TurboQuantCache(model.config, preset, **SMALL, **options, boundary_layers=0)
            model(ids[:, :-1], past_key_values=cache)
            outputs.append(model(ids[:, -1:], past_key_values=cache).logits)
            assert cache.report().packed_tokens == 3 * 2 * 96
    assert torch.allclose(outputs[0], outputs[1], atol=2e-5)
    error = (outputs[0] - target).norm() / target.norm()
    assert error < (1e-5 if preset == "raw" else 0.2)
    assert preset == "raw" or error > 1e-5  # the quantized bytes were really read


@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
@pytest.mark.parametrize("chunk", [1, 31, 32, 50])
def test_chunked_prefill_equals_prefill_at_once(attention: str, chunk: int) -> None:
    model = tiny_model()
    ids, mask = left_padded(2, 100, [0, 41])
    expected = reference(model, ids, mask)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    assert torch.equal(generate(model, ids, cache, mask, prefill_chunk_size=chunk), expected)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
@pytest.mark.parametrize("pads", [[0, 0], [0, 25]])
def test_two_turns_on_one_cache(attention: str, pads: list[int]) -> None:
    model = tiny_model()
    ids, mask = left_padded(2, 70, pads)
    results = []
    ours = TurboQuantCache(model.config, "raw", **SMALL)
    for cache, name in ((DynamicCache(config=model.config), "sdpa"), (ours, attention)):
        model.set_attn_implementation(name)
        first = generate(model, ids, cache, mask)
        more, hole = left_padded(2, 40, pads[::-1])  # padding in the middle of the history
        turn = torch.cat([first, more], 1)
        seen = torch.cat([mask, torch.ones(2, 24, dtype=torch.long), hole], 1)
        results.append(generate(model, turn, cache, seen))
    assert torch.equal(*results)


def test_a_prompt_shorter_than_the_window_is_bit_exact() -> None:
    model = tiny_model()
    ids = prompt(2, 20)
    exact, ours = DynamicCache(config=model.config), TurboQuantCache(model.config, "tq2", recent_window=32)
    with torch.no_grad():
        a = model(ids, past_key_values=exact).logits
        b = model(ids, past_key_values=ours).logits
        assert torch.equal(a, b)
        a = model(ids[:, :1], past_key_values=exact).logits
        b = model(ids[:, :1], past_key_values=ours).logits
    assert torch.allclose(a, b, atol=1e-5)
    assert ours.report().packed_tokens == 0


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}]
)
def test_decoding_modes(options: dict[str, int]) -> None:
    model = tiny_model()
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    ids = prompt(batch, 60).repeat(1, 2)
    expected = reference(model, ids, **options)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    assert torch.equal(generate(model, ids, cache, **options), expected)
    assert cache.report().packed_tokens > 0


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
def test_static_mode_compiles_to_one_graph(attention: str, padded: bool) -> None:
    from transformers import CompileConfig

    model = tiny_model()
    model.set_attn_implementation(attention)
    ids, mask = left_padded(2, 100, [0, 30 if padded else 0])
    expected = generate(model, ids, TurboQuantCache(model.config, "tq4", **SMALL), mask)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(fullgraph=True, mode="default", backend="eager")
    config._compile_all_devices = True
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=140, **SMALL)
    assert torch.equal(generate(model, ids, cache, mask, compile_config=config), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("attention", ["turboquant", "eager"])
def test_a_compiled_step_writes_to_the_cache_itself(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inductor puts an op that writes ahead of one that reads, it copies the whole cache at every step."""
    from transformers import CompileConfig

    model = tiny_model(num_hidden_layers=1)
    model.set_attn_implementation(attention)
    torch._dynamo.reset()
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=140, **SMALL)
    config = CompileConfig(mode="default", fullgraph=True)
    config._compile_all_devices = True
    expected = generate(model, prompt(1, 100), cache, compile_config=config, new=4)
    (layer,), given = cache.packed_layers, list[dict[str, int]]()

    class Spy:
        """Stands in for an overload of an op, which compiled code looks up at every call."""

        def __init__(self, name: str) -> None:
            self.run, self.default = getattr(torch.ops.tq_hf, name).default, self
            self.names = [argument.name for argument in self.run._schema.arguments if argument.is_write]
            self.places = [i for i, argument in enumerate(self.run._schema.arguments) if argument.is_write]

        def __call__(self, *args: Any) -> Any:
            given.append({name: args[i].data_ptr() for name, i in zip(self.names, self.places)})
            return self.run(*args)

    for name in ("observe", "commit"):
        monkeypatch.setattr(getattr(torch.ops.tq_hf, name), "default", Spy(name))
    cache.reset()
    assert torch.equal(generate(model, prompt(1, 100), cache, compile_config=config, new=4), expected)
    assert len(given) == 2 * 3  # the first token comes from the prompt, which is not compiled
    for call in given:
        assert len(call) in (2, 7) and call == {name: getattr(layer, name).data_ptr() for name in call}


def test_more_tokens_than_a_static_cache_holds_is_an_error() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="max_cache_len=64"):
        generate(model, prompt(1, 60), TurboQuantCache(model.config, max_cache_len=64))


def test_other_attention_functions_are_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    cache = TurboQuantCache(model.config, **SMALL)
    model(prompt(1, 60), past_key_values=cache)
    model(prompt(1, 1), past_key_values=cache)
    assert caplog.text.count("attn_implementation='turboquant'") == 1


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_no_note_where_pages_are_read(attention: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    ids, mask = left_padded(2, 80, [0, 20])
    generate(model, ids, TurboQuantCache(model.config, **SMALL), mask)
    generate(model, ids, TurboQuantCache(model.config, **SMALL, max_cache_len=128), mask)
    assert "packed pages" not in caplog.text


@pytest.mark.parametrize("kwarg", ["indices", "head_mask"])
def test_attention_arguments_with_meaning_are_not_swallowed(kwarg: str) -> None:
    from tq_hf.attention import turboquant_attention

    q = torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match=kwarg):
        turboquant_attention(torch.nn.Module(), q, q, q, None, **{kwarg: torch.zeros(1)})


def test_an_additive_float_mask_still_gives_the_right_result() -> None:
    model = tiny_model()
    ids = prompt(1, 100)
    outputs = []
    for cache in (DynamicCache(config=model.config), TurboQuantCache(model.config, "raw", **SMALL)):
        with torch.no_grad():
            model(ids[:, :-2], past_key_values=cache)
            bias = torch.zeros(1, 1, 2, 100)
            bias[..., 10:30] = -3.0
            bias[..., 0, 99] = torch.finfo(torch.float32).min
            outputs.append(model(ids[:, -2:], attention_mask=bias, past_key_values=cache).logits)
    assert torch.allclose(*outputs, atol=1e-5)


def logits_after(
    cache: Any, model: PreTrainedModel, steps: list[tuple[Tensor, Tensor | None]], crops: dict[int, int]
) -> Tensor:
    """Logits of the last step, after feeding the steps and cropping before those in `crops`."""
    for i, (ids, mask) in enumerate(steps):
        if i in crops:
            cache.crop(-crops[i])
        out = model(ids, attention_mask=mask, past_key_values=cache).logits
    return out[:, -1]


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 140}], ids=["dynamic", "static"])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("removed", [90, 80, 60, 30])
@pytest.mark.parametrize("sinks", [0, 4])
@torch.no_grad()
def test_crop_of_a_padded_batch(options: dict[str, int], attention: str, removed: int, sinks: int) -> None:
    """Into the padding, into pages, to nothing; then go on without and with padding."""
    model = tiny_model()
    ids, mask = left_padded(2, 90, [20, 0])
    left = 90 - removed
    more, hole = left_padded(2, 40, [0, 15] if left == 0 else [0, 0])
    seen = torch.cat([mask[:, :left], hole], 1)
    last = torch.cat([seen, torch.ones(2, 1, dtype=torch.long)], 1)
    steps = [(ids, mask), (more, seen), (more[:, :1], last)]
    model.set_attn_implementation("sdpa")
    expected = logits_after(DynamicCache(config=model.config), model, steps, {1: removed})
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, "raw", page_size=32, recent_window=8, sink_tokens=sinks, **options)
    assert torch.allclose(logits_after(cache, model, steps, {1: removed}), expected, atol=1e-5)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@torch.no_grad()
def test_what_one_mask_hides_a_later_one_may_show(attention: str) -> None:
    """Packed while hidden: by every query of a step, and by the last query of a first prompt."""
    model = tiny_model()
    ids = prompt(1, 100)
    hidden = torch.ones(1, 101, dtype=torch.long)
    hidden[:, 30:60] = 0
    tree = torch.ones(100, 100, dtype=torch.bool).tril()[None, None].clone()
    tree[..., -1, 10:20] = False
    steps = [(ids, tree), (ids[:, :1], hidden), (ids[:, :30], None), (ids[:, :1], None)]
    model.set_attn_implementation("sdpa")
    expected = logits_after(DynamicCache(config=model.config), model, steps, {})
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, "raw", **SMALL)
    assert torch.allclose(logits_after(cache, model, steps, {}), expected, atol=1e-5)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("shape", [(1, 1, 10, 65), (1, 1, 3, 65), (1, 1, 5, 70), (1, 1, 5, 64), (3, 1, 5, 65)])
@torch.no_grad()
def test_masks_that_do_not_fit_are_refused_and_nothing_changes(attention: str, shape: tuple[int, ...]) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, **SMALL)
    model(prompt(1, 60), past_key_values=cache)
    with pytest.raises((ValueError, RuntimeError)):
        model(prompt(1, 5), attention_mask=torch.ones(shape, dtype=torch.bool), past_key_values=cache)
    assert cache.get_seq_length() == 60


@torch.no_grad()
def test_a_users_complete_mask_in_bytes_is_complete() -> None:
    model = tiny_model()
    model.set_attn_implementation("turboquant")
    ids, both_ways = prompt(1, 80), torch.ones(1, 1, 80, 80, dtype=torch.bool)
    outputs = [
        model(ids, attention_mask=mask, past_key_values=TurboQuantCache(model.config, **SMALL)).logits
        for mask in (both_ways, both_ways.to(torch.uint8))
    ]
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa", "eager"])
def test_autocast(attention: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attention)
    ids = prompt(2, 100)
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(model, ids, DynamicCache(config=model.config), new=6)
        assert torch.equal(generate(model, ids, TurboQuantCache(model.config, "raw", **SMALL), new=6), expected)


def test_rows_start_where_their_tokens_start_even_in_chunks_of_one() -> None:
    model = tiny_model()
    model.set_attn_implementation("turboquant")
    ids, mask = left_padded(2, 60, [35, 0])
    cache = TurboQuantCache(model.config, **SMALL)
    generate(model, ids, cache, mask, new=2, prefill_chunk_size=1)
    assert cache.table.row_starts == [35, 0]


def test_missing_attention_weights_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.set_attn_implementation("turboquant")
    model(prompt(1, 5), output_attentions=True)
    assert "no attention weights" in caplog.text


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 1, 2, 40), (3, 1, 1, 40)])
def test_masks_of_plain_tensors_must_fit_too(shape: tuple[int, ...]) -> None:
    from tq_hf.attention import turboquant_attention

    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 40, 16)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match="does not fit 1 rows with 1 queries over 40 keys"):
        turboquant_attention(torch.nn.Module(), query, key, key, mask, softcap=5.0)


def test_turboquant_attention_without_our_cache_is_plain_attention() -> None:
    model = tiny_model()
    ids, mask = left_padded(2, 50, [0, 20])
    expected = generate(model, ids, DynamicCache(config=model.config), mask)
    model.set_attn_implementation("turboquant")
    assert torch.equal(generate(model, ids, DynamicCache(config=model.config), mask), expected)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("sdpa")
        assert torch.allclose(plain[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()], atol=1e-5)
