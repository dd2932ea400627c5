"""Layers on several devices: what a device map does to a cache, with devices that are pretended where it takes two."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from tests import tiny_models
from tests.multi import on_ranks
from tests.multi.conftest import MODEL
from tests.multi.places import Places, place_of, put
from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.layers.packed_kv import scaled_dot_product_attention

COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
FULL = LlamaConfig(**COMMON)
SLIDING = Gemma3TextConfig(**COMMON, sliding_window=192, layer_types=["sliding_attention", "full_attention"])
ROWS, PADDING = 2, 20
ONE, TWO = ("cpu", "cpu"), ("cuda:0", "cuda:1")
STATIC = {"max_cache_len": 400}


# -- through transformers and accelerate -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [{"preset": "raw"}, {"preset": "tq4", "max_cache_len": 256}], ids=str)
def test_a_model_half_on_the_disk(model_folder: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    """accelerate's hooks bring weights in for each module, and send it all arguments that have a `to`."""
    where = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
             "model.norm": "disk", "lm_head": "cpu"}  # fmt: skip
    spread = on_ranks.load(model_folder, device_map=where, offload_folder=tmp_path)
    assert spread.model.layers[1].self_attn.k_proj.weight.is_meta
    ids = tiny_models.prompt(2, 190, vocab=MODEL["vocab_size"])
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    found, expected = (on_ranks.generate(model, kind, ids * mask, mask) for model in (spread, on_ranks.load(model_folder)))
    assert torch.equal(found["tokens"], expected["tokens"]) and torch.equal(found["logits"], expected["logits"])
    assert found["packed"] == expected["packed"] > 0.5 and not found["dense"]
    assert all(torch.equal(*pages) for pages in zip(found["pages"], expected["pages"], strict=True))


# -- on pretended devices ----------------------------------------------------------------------------------------------
def states(tokens: int, heads: int, seed: int) -> Tensor:
    return torch.randn(ROWS, heads, tokens, 32, generator=torch.Generator().manual_seed(seed))


def read(cache: TurboQuantCache, devices: Sequence[str], sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Outputs of each layer's attention over chunks of these sizes, with padding in front of the second row."""
    outputs = []
    for number, size in enumerate(sizes):
        for i, device in enumerate(devices):
            key, value, query = (
                put(states(size, heads, seed + 100 * number + 10 * i + j), device) for j, heads in enumerate((2, 2, 4))
            )
            layer = cache.layers[i]
            length = int(layer.get_seq_length())
            handles = cache.update(key, value, i)
            shown = handles[0].shape[2]
            first = 0 if cache.table.is_static else length + size - shown
            position = torch.arange(first, first + shown)
            query_at = torch.arange(length, length + size)[:, None]
            mask = (position <= query_at) & (position > query_at - (layer.sliding_window or 10**6))
            mask = mask[None, None].repeat(ROWS, 1, 1, 1)
            mask[1, :, :, position < PADDING] = False
            outputs.append(turboquant_attention(nn.Module(), query, *handles, put(mask, device))[0])
    return outputs


def lived(config: PretrainedConfig, devices: Sequence[str], path: Path, **kind: Any) -> list[Tensor]:
    """All that was read of a cache that was edited in every way there is."""
    cache = TurboQuantCache(config, **kind)
    found = read(cache, devices, (150, 1, 40))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    found += read(cache, devices, (70, 1), seed=1)
    if cache.table.is_static:
        cache = copy.deepcopy(cache)
    else:
        (cache,) = cache.fork(1)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
    found += read(cache, devices, (3, 70), seed=2)
    if config is FULL:
        cache.crop(-60)
        found += read(cache, devices, (2,), seed=3)
    cache.check()
    assert [str(layer.device) for layer in cache.packed_layers] == list(devices)
    for layer in cache.packed_layers:
        held = [*layer.tensors(), layer.on_device.page_ids, layer.on_device.entries, layer.on_device.row_start]
        assert {str(tensor.device) for tensor in held} == {str(layer.device)}
    cache.save(path)
    cache = TurboQuantCache.load(path, config, device="cpu")
    return found + read(cache, ONE, (5,), seed=4)


@pytest.mark.parametrize("preset", ["raw", "tq4"])
@pytest.mark.parametrize(
    ("config", "kind"), [(FULL, {}), (FULL, STATIC), (SLIDING, {})], ids=["growing", "static", "sliding"]
)
def test_layers_on_two_devices(config: PretrainedConfig, kind: dict[str, Any], preset: str, tmp_path: Path) -> None:
    """Nothing that a cache does mixes devices, and all that is read of it is what it is on one."""
    kind = {"preset": preset, "boundary_layers": 0, **kind}
    expected = lived(config, ONE, tmp_path / "one", **kind)
    with Places():
        found = lived(config, TWO, tmp_path / "two", **kind)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {str(place_of(tensor)) for tensor in found} == {*TWO, "cpu"}


def test_pretended_devices_do_not_mix() -> None:
    with Places():
        here, there = put(torch.ones(2), "cuda:0"), torch.zeros(2, device="cuda:1")
        with pytest.raises(RuntimeError, match="add: expected all tensors to be on the same device"):
            here.add(there)
        assert str(here.to(there.device).add(there).device) == "cuda:1"
        assert str(here.copy_(there).device) == "cuda:0" and str((here + torch.tensor(1.0)).device) == "cuda:0"


# -- bad input ---------------------------------------------------------------------------------------------------------
ONE_DEVICE = "one device in the device_map"


@pytest.mark.parametrize("kind", [{}, STATIC], ids=["growing", "static"])
def test_keys_and_values_on_two_devices(kind: dict[str, Any]) -> None:
    with Places():
        cache = TurboQuantCache(FULL, "tq4", **kind)
        states_there = put(states(5, 2, 0), "cuda:0"), put(states(5, 2, 1), "cuda:1")
        with pytest.raises(ValueError, match=f"key on cuda:0, value on cuda:1: expected the same device.*{ONE_DEVICE}"):
            cache.update(*states_there, 0)
        assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("history", [0, 150])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_queries_on_another_device(attention: str, history: int) -> None:
    """Also in a first prompt, which torch attends to. The tokens are forgotten: a layer goes on as if they had not come."""
    with Places():
        cache = TurboQuantCache(FULL, "tq4")
        twin = TurboQuantCache(FULL, "tq4")
        for each in (cache, twin):
            _ = read(each, ("cuda:0", "cuda:0"), (history,) if history else ())
        handles = cache.update(put(states(5, 2, 7), "cuda:0"), put(states(5, 2, 8), "cuda:0"), 0)
        query = put(states(5, 4, 9), "cuda:1")
        with pytest.raises(ValueError, match=f"a tensor on cuda:1, and its keys are on cuda:0: .*{ONE_DEVICE}"):
            if attention == "turboquant":
                turboquant_attention(nn.Module(), query, *handles, None)
            else:
                scaled_dot_product_attention(query, *handles, is_causal=not history, enable_gqa=True)  # of torch
        assert cache.get_seq_length() == history
        outputs = [read(each, ("cuda:0", "cuda:0"), (30, 1), seed=3) for each in (cache, twin)]
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize(
    ("kind", "anew"),
    [({}, "call cache.reset() and read the text again"), (STATIC, "make a new cache")],
    ids=["growing", "static"],
)
def test_a_cache_of_another_device_map(kind: dict[str, Any], anew: str) -> None:
    """It says so, and holds what it held."""
    with Places():
        cache = TurboQuantCache(FULL, "tq4", **kind)
        read(cache, TWO, (150,))
        expected = read(copy.deepcopy(cache), TWO, (40,), seed=5)
        message = (
            "new keys are on cuda:1, and this layer's tokens are on cuda:0: the cache was filled under another device map."
            " Use the model with the device_map that it had, call cache.to('cuda:1') if all layers are there now, or"
            f" {anew}."
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            read(cache, TWO[::-1], (40,), seed=5)
        found = read(cache, TWO, (40,), seed=5)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        moved = cache.to("cuda:1")
        assert {str(layer.device) for layer in moved.packed_layers} == {"cuda:1"}
        read(moved, ("cuda:1", "cuda:1"), (2,))
        if not kind:
            moved.reset()
            read(moved, TWO[::-1], (2,))
