"""Extreme numbers: what comes out is finite where what went in was, and a token that is not finite stays alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.robustness.counts import count
from tests.robustness.rows import HEADS, different, feed, one_layer, random, row_of, same_bits
from tq_hf import PRESETS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOKENS, CHUNKS = 79, (70, 5, 1, 1, 1, 1)  # two pages of 32, one of them packed by a decode step


def with_norm(size: float) -> Callable[[Tensor], Tensor]:
    return lambda x: normalize(x, dim=-1) * size


def one_huge(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 5] = 6e4
    return x


# A row of the batch each. float16 turns the smallest into zeros, and what is beyond 65504 is clamped to it below.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda x: x,
    "zero": torch.zeros_like,
    "subnormal": lambda x: x * 1e-40,
    "norm 1e-8": with_norm(1e-8),
    "norm 1e-4": with_norm(1e-4),
    "norm 1e2": with_norm(1e2),
    "norm 1e4": with_norm(1e4),
    "all equal": lambda x: torch.full_like(x, 0.7),
    "all equal and large": lambda x: torch.full_like(x, 3e4),
    "one huge": one_huge,
    "to 1e5": lambda x: (x * 4e4).clamp(-1e5, 1e5),
    "tokens of all sizes": lambda x: x * torch.logspace(-8, 4, x.shape[2])[:, None],
}


def numbers(dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[kinds, H, TOKENS, dim]."""
    plain = random(1, HEADS, TOKENS, dim, seed=seed)
    limit = torch.finfo(dtype).max
    return torch.cat([make(plain) for make in KINDS.values()]).clamp(-limit, limit).to(dtype)


CASES = [(preset, 64, dtype) for preset in ("tq4", "4bit_nc", "raw") for dtype in (FP32, BF16, FP16)]
CASES += [(preset, 64, FP16) for preset in PRESETS if preset not in ("tq4", "4bit_nc", "raw")]
CASES += [(preset, dim, BF16) for preset in ("tq3", "k8v4") for dim in (16, 80, 256)]


@pytest.mark.parametrize(("preset", "dim", "dtype"), CASES, ids=str)
def test_finite_numbers_give_finite_outputs(preset: str, dim: int, dtype: torch.dtype) -> None:
    kinds, shift = list(KINDS), 5
    key, value = numbers(dim, dtype, seed=1), numbers(dim, dtype, seed=2).roll(shift, 0)  # large beside small ones
    assert key.isfinite().all() and value.isfinite().all()
    query = random(len(kinds), 2 * HEADS, TOKENS, dim, seed=3, dtype=dtype)
    cache = one_layer(dim, preset)
    output = feed(cache, query, key, value, CHUNKS)
    assert cache.report().packed_tokens == 64 * len(kinds)
    assert output.isfinite().all(), [kinds[i] for i in (~output.flatten(1).isfinite().all(1)).nonzero().flatten()]
    usual = kinds.index("usual")
    for row, read, given in zip((usual, usual + shift), cache.layers[0].unpacked(), (key, value), strict=True):
        assert read is not None and read.dtype == dtype
        assert read.isfinite().all(), [kinds[i] for i in (~read.flatten(1).isfinite().all(1)).nonzero().flatten()]
        error = (read[row].float() - given[row].float()).norm() / given[row].float().norm()
        assert error < 0.6, f"the usual row comes back with an error of {error:.2f}"
    count("vectors of extreme numbers", 2 * key.shape[0] * HEADS * TOKENS)


@pytest.mark.parametrize(
    ("preset", "side", "size", "flagged"),
    [
        ("tq4", "value", 5e4, False),
        ("tq4", "value", 1e5, True),
        ("4bit_nc", "key", 5e4, False),
        ("4bit_nc", "key", 1e5, True),
        ("4bit_nc", "value", 6e4, False),
        ("4bit_nc", "value", 1e5, True),
        ("k8v4", "key", 440.0, False),
        ("k8v4", "key", 500.0, True),
        ("raw", "key", 1e38, False),
        ("raw", "value", 1e38, False),
    ],
)
def test_numbers_beyond_their_stored_format_are_clamped_and_said(preset: str, side: str, size: float, flagged: bool) -> None:
    """A scale is fp16: vectors whose coordinates are larger than 65504 on average come back smaller, and `check` says so."""
    cache = one_layer(64, preset)
    states = {name: random(1, HEADS, TOKENS, 64, seed=i, dtype=BF16) for i, name in enumerate(("key", "value"))}
    signs = random(64, seed=9).sign() * size
    states[side][0, 1, 20] = signs.to(BF16)
    feed(cache, random(1, 2 * HEADS, TOKENS, 64, seed=3, dtype=BF16), **states, chunks=CHUNKS)
    if flagged:
        with pytest.raises(ValueError, match=r"layer 0, KV heads \[1\]: a number beyond its stored format"):
            cache.check()
    else:
        cache.check()
    read = dict(zip(("key", "value"), cache.layers[0].unpacked(), strict=True))[side]
    assert read is not None and read.isfinite().all()
    found = (read[0, 1, 20].double() @ signs.double() / signs.double().square().sum()).item()
    assert (0.4 < found < 0.95) if flagged else (0.9 < found < 1.1), f"{found:.2f} of it came back"


# -- a bad token -------------------------------------------------------------------------------------------------------
PLACES = {"sink": 1, "first page": 20, "second page": 60, "ring": 72, "newest": TOKENS - 1}


BAD = [(preset, torch.nan) for preset in ("tq4", "4bit_nc", "k8v4", "raw")] + [("tq4", -torch.inf)]


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("preset", "bad"), BAD)
def test_a_bad_token_changes_no_other_row_or_head(preset: str, place: str, side: str, bad: float) -> None:
    rows, row, head, at, dim = 2, 1, 1, PLACES[place], 64
    states = {name: random(rows, HEADS, TOKENS, dim, seed=i, dtype=BF16) for i, name in enumerate(("key", "value"))}
    query = random(rows, 2 * HEADS, TOKENS, dim, seed=3, dtype=BF16)
    broken = {name: tensor.clone() for name, tensor in states.items()}
    broken[side][row, head, at, 7] = bad
    clean, dirty = one_layer(dim, preset), one_layer(dim, preset)
    expected = feed(clean, query, **states, chunks=CHUNKS)
    output = feed(dirty, query, **broken, chunks=CHUNKS)
    mates = [i for i in range(rows) if i != row]
    assert same_bits(output[mates], expected[mates])
    assert same_bits(output[row, :, : 2 * head], expected[row, :, : 2 * head])
    for i in mates:
        assert different(row_of(dirty.layers[0], i), row_of(clean.layers[0], i)) == []
    held, meant = row_of(dirty.layers[0], row), row_of(clean.layers[0], row)
    other_head = 1 - head
    for name in ("pages", "ring_key", "ring_value", "sink_key", "sink_value"):
        axis = 1 if name == "pages" or name.startswith("ring") else 0
        parts = (t[name].transpose(0, axis)[other_head] if axis else t[name][other_head] for t in (held, meant))
        assert same_bits(*parts), name
    with pytest.raises(ValueError, match=rf"\(.*\): layer 0, KV heads \[{head}\]: a non-finite {side}\. Check"):
        dirty.check()
    clean.check()
    if "page" in place:  # packed, it is a zero vector: what comes later is finite
        assert output[row, -1].isfinite().all()
        read = dict(zip(("key", "value"), dirty.layers[0].unpacked(), strict=True))[side]
        assert read is not None and read[row, head, at].float().norm() < 12  # of the page's mean, if it has one
    count("bad tokens")


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_bad_token_leaves_its_pages_neighbours_alone(preset: str, side: str) -> None:
    """Hidden by the mask in both runs: nothing but its own vector differs, neither in the page nor in what is read."""
    dim, at = 64, 20
    states = {name: random(1, HEADS, TOKENS, dim, seed=i) for i, name in enumerate(("key", "value"))}
    query, keep = random(1, 2 * HEADS, TOKENS, dim, seed=3), torch.ones(1, TOKENS, dtype=torch.uint8)
    keep[0, at] = 0
    broken = {name: tensor.clone() for name, tensor in states.items()}
    broken[side][0, 1, at] = torch.nan
    caches, outputs, reads = [], [], []
    for given in (states, broken):
        cache = one_layer(dim, preset)
        outputs.append(feed(cache, query, **given, chunks=CHUNKS, keep=keep))
        caches.append(cache)
        reads.append([t for t in cache.layers[0].unpacked() if t is not None])
    others = [i for i in range(TOKENS) if i != at]
    for meant, read in zip(*reads, strict=True):
        assert same_bits(read[:, :, others], meant[:, :, others])
    assert same_bits(outputs[1][:, CHUNKS[0] :], outputs[0][:, CHUNKS[0] :])  # once it is packed, nobody sees it
    held, meant_row = (row_of(cache.layers[0], 0) for cache in caches)
    assert set(different(held, meant_row)) <= {"pages"}
    assert same_bits(held["pages"][1], meant_row["pages"][1])
    count("bad tokens")


@pytest.mark.parametrize("preset", ["tq4", "tq2"])
def test_a_bad_key_takes_no_part_in_its_pages_mean(preset: str) -> None:
    """Without a mask: its neighbours come back as well as they do without it."""
    key, value = (random(1, HEADS, TOKENS, 64, seed=i) + 50 for i in range(2))
    query = random(1, 2 * HEADS, TOKENS, 64, seed=3)
    errors = []
    for bad in (0.0, torch.nan, torch.inf):
        given = key.clone()
        given[0, 1, 20, 3] += bad
        cache = one_layer(64, preset)
        feed(cache, query, given, value, CHUNKS)
        read, _ = cache.layers[0].unpacked()
        assert read is not None
        others = [i for i in range(2, 66) if i != 20]
        errors.append((read[:, :, others] - key[:, :, others]).square().mean().sqrt().item())
    assert max(errors) < 1.05 * errors[0], errors
