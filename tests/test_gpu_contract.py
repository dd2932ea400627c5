"""The cache contract and sliding windows on a GPU: what tests/test_cache_*.py and tests/test_*_sliding.py show in the torch
reference, through the kernels, on streams of their own and in captured graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from tests.test_cache_save import bits
from tests.test_generate import generate, left_padded
from tests.test_generate_sliding import logits_after, sliding_model
from tests.test_gpu_generate import assert_same_until_a_close_call
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache, attention
from tq_hf.attention import turboquant_attention
from tq_hf.layers.packed_kv import PackedKV
from tq_hf.layers.sliding import SlidingLayer

pytestmark = [pytest.mark.gpu]
DEVICE = "cuda"
WINDOW, PAGE, RECENT, SINKS = 96, 32, 8, 4
SIZES: dict[str, Any] = {"page_size": PAGE, "recent_window": RECENT, "sink_tokens": SINKS, "boundary_layers": 0}
TOLERANCE = 2e-3
# Rounding decides a code here and there otherwise, which weighs less than this share of what quantizing changes.
CODES = 0.25


def model_of(family: str, dtype: torch.dtype = torch.float16, device: str = DEVICE) -> PreTrainedModel:
    """A family of `test_generate_sliding` with a window that packs, or "llama" with three layers of full attention."""
    if family == "llama":
        model = tiny_model(num_hidden_layers=3, head_dim=64)
        model.set_attn_implementation("turboquant")
    else:
        model = sliding_model(family, head_dim=64, sliding_window=WINDOW)
    return model.to(device, dtype)


def cache_of(model: PreTrainedModel, preset: str = "tq4", **options: Any) -> TurboQuantCache:
    return TurboQuantCache(model.config, preset, **{**SIZES, **options})


def ids_of(batch: int, length: int, seed: int = 1) -> Tensor:
    return prompt(batch, length, seed=seed).to(DEVICE)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def read(family: str, sizes: list[int], batch: int = 1, **options: Any) -> tuple[PreTrainedModel, TurboQuantCache]:
    """A model and a cache that has read chunks of these sizes."""
    model = model_of(family)
    cache = cache_of(model, **options)
    logits_after(model, cache, ids_of(batch, sum(sizes)), sizes)
    assert cache.report().packed_tokens > 0
    return model, cache


GOES_ON = [40, 3, *[1] * 37]  # two pages fall due at least, and as many leave a window


def goes_on_as(model: PreTrainedModel, ours: TurboQuantCache, theirs: TurboQuantCache, seed: int = 2) -> bool:
    """Whether two caches go on to the same logits and states, bit for bit."""
    ids = ids_of(ours.batch_size, sum(GOES_ON), seed)
    logits = [logits_after(model, cache, ids, GOES_ON) for cache in (ours, theirs)]
    assert logits[0].isfinite().all()
    equal = [torch.equal(a, b) for a, b in zip(bits(ours), bits(theirs), strict=True)]
    return torch.equal(*logits) and all(equal)


# -- copies, files, devices --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_forks_share_pages_and_go_on_apart(family: str) -> None:
    model, cache = read(family, [150, 37], batch=2)
    apart = [copy.deepcopy(cache) for _ in range(3)]
    used = [table.pages.used for table in cache.tables]
    forks = [cache, *cache.fork(2)]
    assert [table.pages.used for table in cache.tables] == used
    for layers in zip(*(fork.packed_layers for fork in forks), strict=True):
        assert len({layer.pool.data_ptr() for layer in layers}) == 1
    for i in (1, 0, 2):  # the order decides who gets which page of the pool, and nothing else
        assert goes_on_as(model, forks[i], apart[i], seed=20 + i)
    first = forks.pop(1)
    del cache, forks, layers
    first.reorder_cache(torch.tensor([1, 0]))  # the pool is compacted, under the one that is left
    apart[1].reorder_cache(torch.tensor([1, 0]))
    assert goes_on_as(model, first, apart[1])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_file_goes_on_bit_for_bit(family: str, tmp_path: Path) -> None:
    model, cache = read(family, [150, 37], batch=2)
    cache.save(tmp_path / "cache")
    loaded = TurboQuantCache.load(tmp_path / "cache", model.config)
    assert {layer.device for layer in loaded.packed_layers} == {layer.device for layer in cache.packed_layers}
    assert goes_on_as(model, loaded, cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_to_the_cpu_and_back(family: str) -> None:
    model, cache = read(family, [150, 37], batch=2)
    stayed = copy.deepcopy(cache)
    pools = [layer.pool.shape for layer in cache.packed_layers]
    assert cache.to("cpu") is cache
    assert {t.device.type for layer in cache.packed_layers for t in layer.tensors()} == {"cpu"}
    there = copy.deepcopy(cache)
    cache.to(DEVICE)
    assert all(a[0] <= b[0] for a, b in zip([layer.pool.shape for layer in cache.packed_layers], pools, strict=True))
    ids, on_cpu = ids_of(2, 80, seed=2), model_of(family, device="cpu")
    expected = logits_after(model, copy.deepcopy(stayed), ids, GOES_ON)
    assert goes_on_as(model, cache, stayed)
    slow = logits_after(on_cpu, there, ids.cpu(), GOES_ON)
    whole = torch.cat([ids_of(2, 187), ids], 1).cpu()
    exact = logits_after(on_cpu, cache_of(on_cpu, "raw"), whole, [150, 37, *GOES_ON])[:, 187:]
    assert relative(slow, expected.cpu()) < CODES * relative(exact, slow)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_over_two_devices() -> None:
    model, expected = read("llama", [150, 37], batch=2)
    ids = ids_of(2, sum(GOES_ON), seed=2)
    spread = dispatch_model(
        model_of("llama", device="cpu"),
        {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.layers.2": 1,
         "model.norm": 1, "lm_head": 1},
    )  # fmt: skip
    cache = cache_of(spread)
    logits_after(spread, cache, ids_of(2, 187), [150, 37])
    logits = [logits_after(m, c, ids, GOES_ON).cpu() for m, c in ((spread, cache), (model, expected))]
    assert [layer.device.index for layer in cache.packed_layers] == [0, 1, 1]
    assert torch.equal(*logits) and logits[0].isfinite().all()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_offloaded_pages_are_those_that_were_there(family: str) -> None:
    """Long enough that copies take longer than a layer: whoever reads too early reads something else."""
    model = model_of(family)
    ids = ids_of(4, 6000)
    sizes = [2000, 1999, 1, *[1] * 100, 1900]
    expected = logits_after(model, cache_of(model), ids, sizes)
    offloaded = cache_of(model, offloading=True, offload_only_non_sliding=False)
    assert torch.equal(logits_after(model, offloaded, ids, sizes), expected)
    here = [layer for layer in offloaded.packed_layers if not layer.table.pages.is_offloaded(layer.slot)]
    assert len(here) <= 2
    for layer in offloaded.packed_layers:
        layer.offload()
    held = [t for layer in offloaded.packed_layers for t in layer.table.pages.tensors(layer.slot)]
    assert len(held) == len(offloaded.packed_layers) and not any(t.is_cuda for t in held)
    offloaded.layers[0].prefetch()
    assert offloaded.layers[0].pool.device.type == DEVICE


# -- static mode -------------------------------------------------------------------------------------------------------
def replayed(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`run` as a captured graph, which puts its result where it put the last one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def test_a_captured_step_sees_edited_rows() -> None:
    """Reordered, cropped into a page and reset between replays: the graph reads the same addresses."""
    config = LlamaConfig(hidden_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    room, generator = 300, torch.Generator(DEVICE).manual_seed(0)

    def some(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, heads, tokens, 64, device=DEVICE, dtype=torch.float16, generator=generator)

    def attend(cache: TurboQuantCache, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return turboquant_attention(nn.Module(), query, *cache.update(key, value, 0), mask)[0]

    def mask_of(length: int, new: int) -> Tensor:
        position = torch.arange(room, device=DEVICE)
        seen = position <= length + torch.arange(new, device=DEVICE)[:, None]
        return seen[None, None].repeat(2, 1, 1, 1)

    cache = TurboQuantCache(config, "tq4", **SIZES, max_cache_len=room)
    fed = [some(4, 1), some(2, 1), some(2, 1), mask_of(0, 1)]
    attend(cache, some(4, 150), some(2, 150), some(2, 150), mask_of(0, 150))
    for length in (150, 151):  # compiles what the graph is going to hold
        fed[3].copy_(mask_of(length, 1))
        attend(cache, *fed)
    twin = copy.deepcopy(cache)
    replay = replayed(lambda: attend(cache, *fed))
    for edit in (
        lambda c: None,
        lambda c: c.reorder_cache(torch.tensor([1, 1], device=DEVICE)),
        lambda c: c.crop(-45),
        lambda c: c.reorder_cache(torch.tensor([1, 0], device=DEVICE)),
    ):
        edit(cache), edit(twin)
        for _ in range(40):
            given = [some(4, 1), some(2, 1), some(2, 1), mask_of(int(twin.get_seq_length()), 1)]
            for to, x in zip(fed, given, strict=True):
                to.copy_(x)
            assert torch.equal(replay(), attend(twin, *given))
    assert all(torch.equal(a, b) for a, b in zip(bits(cache), bits(twin), strict=True))
    assert int(cache.get_seq_length()) == 152 + 160 - 45
    assert cache.report().packed_tokens >= 2 * 5 * PAGE


def test_compiled_decoding_goes_on_after_rows_were_reordered() -> None:
    """`generate()` compiles its steps for a static cache, and the second turn finds them compiled."""
    model = tiny_model(initializer_range=0.2).to(DEVICE)
    model.set_attn_implementation("turboquant")
    ids, more = ids_of(2, 100), ids_of(2, 20, seed=3)
    results = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for cache in (cache_of(model, "raw", max_cache_len=240), cache_of(model, "raw")):
        first = generate(model, ids, cache, new=40)
        rows = torch.tensor([1, 0], device=DEVICE)
        cache.reorder_cache(rows)
        scored = {"output_logits": True, "return_dict_in_generate": True}
        out = generate(model, torch.cat([first[rows], more], 1), cache, new=60, **scored)
        results.append((out.sequences[:, 160:].cpu(), [step.float().cpu() for step in out.logits]))
        assert cache.report().packed_tokens >= 2 * 5 * PAGE
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    for row in range(2):
        static, dynamic = ((tokens[row], [step[row] for step in logits]) for tokens, logits in results)
        assert_same_until_a_close_call(static, dynamic, gap=1e-2)


# -- sliding windows ---------------------------------------------------------------------------------------------------
def dense_attention(
    query: Tensor, key: PackedKV, mask: Tensor | None, scaling: float, softcap: float | None, s_aux: Tensor | None
) -> Tensor:
    """Attention in float64 over the bytes that a layer has, dequantized, [B, q, Hq, Dv]."""
    layer, step = key.layer, key.step
    keys, values = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in layer._gather(step))
    new, shown = query.shape[2], keys.shape[2]
    scores = query.double() @ keys.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.arange(shown, device=query.device) <= torch.arange(shown - new, shown, device=query.device)[:, None]
    if mask is not None:
        seen = seen & (mask != 0)
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        aux = s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, aux], -1)
    weights = scores.softmax(-1)[..., :shown].nan_to_num(0.0)  # a query of padding sees nothing
    return (weights @ values).transpose(1, 2)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, float]]:
    """Of each attention call but a first prompt's: length, whether the layer has a window, and the relative error."""
    found: list[tuple[int, bool, float]] = []
    packed = attention._packed

    def compared(
        query: Tensor, key: PackedKV, mask: Tensor | None, scaling: float, window: int | None, softcap: float | None,
        s_aux: Tensor | None, is_causal: bool,
    ) -> Tensor:  # fmt: skip
        step, expected = key.step, None
        if not step.is_first:
            expected = dense_attention(query, key, mask, scaling, softcap, s_aux)
        out = packed(query, key, mask, scaling, window, softcap, s_aux, is_causal)
        if expected is not None:
            length = step.origin + step.start + step.new
            found.append((length, isinstance(key.layer, SlidingLayer), relative(out, expected)))
        return out

    monkeypatch.setattr(attention, "_packed", compared)
    return found


@pytest.mark.parametrize(
    ("family", "preset", "dtype"),
    [
        ("mistral", "tq4", torch.float16),
        ("mistral", "k8v4", torch.bfloat16),
        ("gemma3", "4bit_nc", torch.float16),
        ("gemma2", "tq4", torch.float16),
        ("gpt_oss", "tq4", torch.float16),
    ],
)
def test_attention_reads_what_dequantizing_gives(
    family: str, preset: str, dtype: torch.dtype, errors: list[tuple[int, bool, float]]
) -> None:
    """At every length across the borders of pages, window and the table's origin; left padding of more than a page."""
    model = model_of(family, dtype)
    cache = cache_of(model, preset)
    ids, mask = (x.to(DEVICE) for x in left_padded(2, 230, [0, 45]))
    at = 0
    with torch.no_grad():
        for size in (60, *[1] * 50, 37, 3, 9, *[1] * 71):
            at += size
            model(ids[:, at - size : at], attention_mask=mask[:, :at], past_key_values=cache)
    (table,) = cache.sliding_tables.values()
    assert table.origin > 0 and table.spans[0][0] < 0  # a page lies across the origin
    windowed = [length for length, is_sliding, _ in errors if is_sliding]
    assert {WINDOW - 1, WINDOW, WINDOW + 1, at} <= set(windowed)
    assert sum(not is_sliding for _, is_sliding, _ in errors) == (0 if family == "mistral" else len(windowed))
    limit = TOLERANCE if dtype != torch.bfloat16 else 2 * TOLERANCE  # rounding what comes out takes 1.7e-3 of it
    wrong = [(length, is_sliding, error) for length, is_sliding, error in errors if not error < limit]
    assert not wrong


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("preset", ["raw", "tq4"])
def test_kernels_agree_with_eager_attention_and_with_the_cpu(family: str, preset: str) -> None:
    """Logits of chunks and single tokens."""
    # Eager attention shows the cache neither padding, which then enters the means of pages, nor queries, without which keys
    # are not balanced.
    ids, mask = left_padded(2, 230, [0, 45 if preset == "raw" else 0])
    sizes = (100, 37, 3, *[1] * 50, 40)

    def logits_of(preset: str, device: str, name: str) -> Tensor:
        model = model_of(family, torch.float32 if preset == "raw" else torch.float16, device)
        model.set_attn_implementation(name)
        cache = cache_of(model, preset, **({} if preset == "raw" else {"balance_keys": False}))
        logits, at = [], 0
        with torch.no_grad():
            for size in sizes:
                at += size
                part, seen = ids[:, at - size : at].to(device), mask[:, :at].to(device)
                logits.append(model(part, attention_mask=seen, past_key_values=cache).logits.to(DEVICE))
        assert cache.report().packed_tokens > 0
        return torch.cat(logits, 1)[mask[:, :at].to(DEVICE) != 0]  # what is not padding

    ours = logits_of(preset, DEVICE, "turboquant")
    limit = 1e-4 if preset == "raw" else CODES * relative(logits_of("raw", "cpu", "turboquant"), ours)
    for device, name in ((DEVICE, "sdpa"), (DEVICE, "eager"), ("cpu", "turboquant")):
        assert relative(logits_of(preset, device, name), ours) < limit


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_padded_row_equals_the_row_alone(family: str) -> None:
    model = model_of(family, torch.float32)
    ids, mask = (x.to(DEVICE) for x in left_padded(2, 220, [70, 0]))
    both, alone = cache_of(model, "raw"), cache_of(model, "raw")
    at, differ = 0, []
    with torch.no_grad():
        for size in (100, 37, 3, *[1] * 60):
            at += size
            padded = model(ids[:, at - size : at], attention_mask=mask[:, :at], past_key_values=both).logits[:1]
            first = max(70, at - size)
            row = model(ids[:1, first:at], past_key_values=alone).logits
            differ.append(relative(padded[:, -row.shape[1] :], row))
    assert max(differ) < 1e-4
    assert both.report().packed_tokens > 0
