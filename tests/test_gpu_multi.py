"""More than one GPU: a model over two by a device map answers as on one, and so do two ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor

from tests import tiny_models
from tests.multi import on_ranks
from tests.multi.conftest import MODEL
from tests.multi.ranks import Ranks
from tests.test_gpu_contract import bits, relative
from tq_hf import TurboQuantCache
from tq_hf.generation.comparison import cache_argument

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ON_TWO = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.layers.2": 1,
          "model.norm": 1, "lm_head": 1}  # fmt: skip
PROMPT = 190
STATIC = {"max_cache_len": 256}
SLEEP = 1 << 27  # cycles: longer than a launch takes by far


def model_of(device: str = "cpu") -> Any:
    model = tiny_models.tiny_model(**MODEL | {"num_hidden_layers": 3, "head_dim": 64})
    model.set_attn_implementation("turboquant")
    return model.to(device, torch.float16)


def on_two() -> Any:
    return dispatch_model(model_of(), ON_TWO)


def padded() -> tuple[Tensor, Tensor]:
    ids = tiny_models.prompt(2, PROMPT, vocab=MODEL["vocab_size"])
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    return ids * mask, mask


@pytest.mark.parametrize("kind", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("preset", ["raw", "tq4"])
def test_a_device_map_gives_the_tokens_of_one_gpu(preset: str, kind: dict[str, Any]) -> None:
    """The static one learns on one device where rows start, and keeps it on both."""
    ids, mask = padded()
    one, two = (
        on_ranks.generate(model, {"preset": preset, **kind}, ids, mask, disable_compile=True)
        for model in (model_of("cuda:0"), on_two())
    )
    assert two["devices"] == ["cuda:0", "cuda:1", "cuda:1"] and one["devices"] == ["cuda:0"] * 3
    assert torch.equal(two["tokens"], one["tokens"]) and torch.equal(two["logits"], one["logits"])
    assert all(torch.equal(a, b) for a, b in zip(two["pages"], one["pages"], strict=True))
    assert two["packed"] == one["packed"] > 0.5 and not two["dense"]


def test_a_balanced_map_of_transformers_own(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    size = sum(parameter.nbytes for parameter in model_of().parameters())
    model = on_ranks.load(tmp_path, device_map="balanced", max_memory={0: int(0.7 * size), 1: size}, dtype=torch.float16)
    assert len(set(model.hf_device_map.values())) == 2
    ids, mask = padded()
    two, one = (on_ranks.generate(each, {"preset": "raw"}, ids, mask) for each in (model, model_of("cuda:0")))
    assert len(set(two["devices"])) == 2 and torch.equal(two["tokens"], one["tokens"])


def states(device: str, seed: int, heads: int = 2, tokens: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, tokens, 64, generator=generator, dtype=torch.float16).to(device)


STEPS = 70  # in which a page falls due with every preset


def decoded(preset: str, device: str, stream: Any, sleep: int = 0) -> list[Tensor]:
    """Outputs of single tokens behind a prompt, and the layer's tensors in the end. The current device is the first.

    Args:
        stream: the current stream of `device`.
        sleep: cycles that pass on it before a token's states are there; until then they are zeros.
    """
    cache = TurboQuantCache(model_of().config, preset, boundary_layers=0)
    prompt = [states(device, seed, tokens=300) for seed in (0, 1)]
    ready = [[states(device, 10 * i + j, heads) for j, heads in enumerate((2, 2, 4))] for i in range(STEPS)]
    late = [[torch.zeros_like(tensor) for tensor in tensors] for tensors in ready]
    torch.cuda.synchronize(device)
    found = []
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)  # that of the stream is current otherwise
        layer = cache.layers[0]
        key, _ = layer.update(*prompt)
        layer.commit(key.step, None, states(device, 2, heads=4, tokens=300))
        for i, (sources, targets) in enumerate(zip(ready, late)):
            if sleep and i % 10 == 0:
                with torch.cuda.device(device):
                    torch.cuda._sleep(sleep)
            for source, target in zip(sources, targets):
                target.copy_(source)
            key, _ = cache.layers[0].update(targets[0], targets[1])  # the others have none
            found.append(layer.attend(key.step, targets[2], None, None, 0.125, 0.0, True))
            layer.commit(key.step, None, targets[2])
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(device)
    return [*found, *layer.tensors()]


@pytest.mark.parametrize("preset", ["tq4", "tq3", "4bit_nc", "raw"])
def test_kernels_run_where_their_tensors_are(preset: str) -> None:
    """On the device that is not the current one, and there on its current stream, behind what that has still to do."""
    expected = decoded(preset, "cuda:0", torch.cuda.default_stream("cuda:0"))
    decoded(preset, "cuda:1", torch.cuda.default_stream("cuda:1"))  # compiles, which would wait
    found = decoded(preset, "cuda:1", torch.cuda.Stream("cuda:1"), SLEEP)
    for a, b in zip(found, expected, strict=True):
        assert str(a.device) == "cuda:1" and torch.equal(a.cpu(), b.cpu())


def read(model: Any, cache: TurboQuantCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids.to("cuda:0"), **{cache_argument(model): cache}).logits.cpu()


@pytest.mark.parametrize("preset", ["tq4", "raw"])
def test_edits_of_a_cache_on_two_gpus(preset: str, tmp_path: Path) -> None:
    """Cropped, forked, reordered, written to a file and read again, against the same on one GPU."""
    ids = tiny_models.prompt(2, 300, vocab=MODEL["vocab_size"])
    logits, caches = [], []
    for name, model in (("one", model_of("cuda:0")), ("two", on_two())):
        cache = TurboQuantCache(model.config, preset)
        read(model, cache, ids[:, :260])
        cache.crop(-30)
        (cache,) = cache.fork(1)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.save(tmp_path / name)
        cache = TurboQuantCache.load(tmp_path / name, model.config)
        logits.append(read(model, cache, ids[:, 230:]))
        caches.append(cache)
    assert torch.equal(*logits)
    assert [layer.device.index for layer in caches[1].packed_layers] == [0, 1, 1]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*map(bits, caches), strict=True))
    gathered = TurboQuantCache.load(tmp_path / "two", model_of().config, device="cuda:0")
    assert torch.equal(read(model_of("cuda:0"), gathered, ids[:, 230:]), logits[0])


def test_a_cache_of_another_device_map() -> None:
    ids = tiny_models.prompt(2, 260, vocab=MODEL["vocab_size"])
    one, two = model_of("cuda:0"), on_two()
    cache = TurboQuantCache(two.config, "tq4")
    read(two, cache, ids[:, :200])
    with pytest.raises(ValueError, match=r"keys are on cuda:0, and .* tokens are on cuda:1: .* another device map"):
        read(one, copy_of(cache), ids[:, 200:])
    expected = read(two, copy_of(cache), ids[:, 200:])
    assert torch.equal(read(one, cache.to("cuda:0"), ids[:, 200:]), expected)
    with pytest.raises(ValueError, match=r"keys are on cuda:1, and .* tokens are on cuda:0"):
        read(two, cache, ids[:, 200:])


def copy_of(cache: TurboQuantCache) -> TurboQuantCache:
    (twin,) = cache.fork(1)
    return twin


def test_offloaded_pages_come_back_to_their_devices() -> None:
    ids = tiny_models.prompt(2, 400, vocab=MODEL["vocab_size"])
    model = on_two()
    caches = [TurboQuantCache(model.config, "tq4", offloading=offloading) for offloading in (False, True)]
    for part in (ids[:, :300], ids[:, 300:301], ids[:, 301:]):
        assert torch.equal(*(read(model, cache, part) for cache in caches))


@pytest.fixture(scope="module")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks"), "nccl") as started:
        yield started


@pytest.mark.parametrize("kind", [{}, STATIC], ids=["dynamic", "static, compiled"])
@pytest.mark.parametrize("preset", ["raw", "tq4"])
def test_two_ranks_answer_as_one(gpu_ranks: Ranks, tmp_path: Path, preset: str, kind: dict[str, Any]) -> None:
    """In float32, whose rounding is no token's choice."""
    tiny_models.tiny_model(**MODEL | {"head_dim": 64}).save_pretrained(tmp_path)
    ids, mask = padded()
    kind = {"preset": preset, **kind}
    alone = on_ranks.generate(on_ranks.load(tmp_path).to("cuda:0"), kind, ids, mask)
    for rank, found in enumerate(gpu_ranks.run(on_ranks.generate_sharded, tmp_path, kind, ids, mask)):
        assert torch.equal(found["tokens"], alone["tokens"])
        assert relative(found["logits"], alone["logits"]) < 1e-3
        assert found["heads"] == [1, 1] and found["devices"] == [f"cuda:{rank}"] * 2
        assert found["nbytes"] == pytest.approx(alone["nbytes"] / 2, rel=5e-3)
        assert found["graphs"] == ("max_cache_len" in kind) and found["breaks"] == 0 and not found["dense"]
