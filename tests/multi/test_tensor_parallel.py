"""Tensor parallelism on two gloo ranks: each packs its KV heads, and both answer what a single process answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_models
from tests.multi import on_ranks
from tests.multi.conftest import MODEL
from tests.multi.ranks import RankError, Ranks

PROMPT = 190
STATIC = {"max_cache_len": 256}


def padded() -> tuple[Tensor, Tensor]:
    """Two prompts, the second one shorter and padded on its left."""
    ids = tiny_models.prompt(2, PROMPT, vocab=MODEL["vocab_size"])
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    return ids * mask, mask


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("preset", "kind", "compiled"),
    [("raw", {}, False), ("tq4", {}, False), ("raw", STATIC, False), ("tq4", STATIC, True)],
    ids=["raw", "tq4", "raw, static", "tq4, static, compiled"],
)
def test_two_ranks_answer_as_one(
    ranks: Ranks, model_folder: Path, preset: str, kind: dict[str, Any], compiled: bool
) -> None:
    ids, mask = padded()
    kind = {"preset": preset, **kind}
    alone = on_ranks.generate(on_ranks.load(model_folder), kind, ids, mask)
    both = ranks.run(on_ranks.generate_sharded, model_folder, kind, ids, mask, compiled)
    assert alone["heads"] == [2, 2] and alone["packed"] > 0.5
    for rank, found in enumerate(both):
        assert torch.equal(found["tokens"], alone["tokens"])
        assert relative(found["logits"], alone["logits"]) < 1e-4
        assert found["heads"] == [1, 1] and found["packed"] == alone["packed"] and not found["dense"]
        # Counters, and what pairs channels, are no head's and so on both ranks: little, even beside a tiny model's pages.
        assert found["nbytes"] == pytest.approx(alone["nbytes"] / 2, rel=5e-3)
        for own, whole in zip(found["pages"], alone["pages"], strict=True):
            assert own.shape == whole[:, :1].shape
            if preset == "tq4":  # of codes, hardly one falls on the other side of an edge
                assert float((own == whole[:, rank : rank + 1]).float().mean()) > 0.999
        assert found["graphs"] == compiled and found["breaks"] == 0


def test_beams_are_those_of_one_rank(ranks: Ranks, model_folder: Path) -> None:
    ids, mask = padded()
    for kind in ({"preset": "raw"}, {"preset": "raw", **STATIC}):
        alone = on_ranks.generate(on_ranks.load(model_folder), kind, ids, mask, num_beams=3)
        for found in ranks.run(on_ranks.generate_beams, model_folder, kind, ids, mask):
            assert torch.equal(found["tokens"], alone["tokens"])


@pytest.mark.parametrize("family", ["gpt_neox", "olmo2", "gemma3_hybrid"])
def test_families_with_other_plans(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """Fused projections; queries and keys of which every rank has all heads; layers with a window."""
    own = {} if family == "gpt_neox" else {"head_dim": 32}
    changes = {name: value for name, value in MODEL.items() if name != "head_dim"} | own
    window = {"sliding_window": 160} if family == "gemma3_hybrid" else {}
    tiny_models.tiny_model(family, **changes, **window).save_pretrained(tmp_path)
    ids, mask = padded()
    alone = on_ranks.generate(on_ranks.load(tmp_path), {"preset": "raw"}, ids, mask)
    share = 1 if family == "olmo2" else 2
    for found in ranks.run(on_ranks.generate_sharded, tmp_path, {"preset": "raw"}, ids, mask):
        assert torch.equal(found["tokens"], alone["tokens"])
        assert relative(found["logits"], alone["logits"]) < 1e-4
        assert found["heads"] == [heads // share for heads in alone["heads"]]


def test_edits_and_files_of_each_rank(ranks: Ranks, model_folder: Path, tmp_path: Path) -> None:
    ids = tiny_models.prompt(2, PROMPT, vocab=MODEL["vocab_size"])
    alone = on_ranks.edited(on_ranks.load(model_folder), ids, tmp_path / "alone")
    for found in ranks.run(on_ranks.edited_sharded, model_folder, ids, tmp_path):
        assert relative(found, alone) < 1e-4
    for rank, said in enumerate(ranks.run(on_ranks.load_of_other_rank, model_folder, tmp_path)):
        for message in said:
            assert f"tp_rank {1 - rank}, this one {rank}" in message
    config = on_ranks.load(model_folder).config
    whole = on_ranks.message_of(lambda: on_ranks.TurboQuantCache.load(tmp_path / "rank0", config))
    assert "tp_rank 0, this one None; tp_size 2, this one None" in whole


@pytest.mark.parametrize("heads", [1, 3])
def test_kv_heads_that_ranks_cannot_share(ranks: Ranks, tmp_path: Path, heads: int) -> None:
    """transformers loads such a model, and fails in its forward at a shape that names neither heads nor ranks."""
    changes = MODEL | {"hidden_size": 32 * heads, "num_attention_heads": 2 * heads, "num_key_value_heads": heads}
    tiny_models.tiny_model(**changes).save_pretrained(tmp_path)
    ids = tiny_models.prompt(1, 8, vocab=MODEL["vocab_size"])
    divisors = "1" if heads == 1 else "1, 3"
    expected = (
        f"ValueError: num_key_value_heads={heads} cannot be split over tp_size=2 ranks: each rank packs whole KV heads."
        f" Start a number of ranks that divides it ({divisors}), or load the model with device_map='auto' in a single"
        " process."
    )
    for said in ranks.run(on_ranks.refusals, tmp_path, "auto", ids):
        assert said["cache"] == said["static"] == said["enable"] == expected
        assert said["forward"].startswith("RuntimeError: shape")


def test_queries_without_their_keys(ranks: Ranks, model_folder: Path) -> None:
    """A plan of the user's own, with which transformers reads keys of other heads and says nothing."""
    plan = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "q"}
    plan |= {f"model.layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "kv"}
    plan["model.layers.*.self_attn.o_proj"] = "rowwise"
    ids = tiny_models.prompt(1, 8, vocab=MODEL["vocab_size"])
    for said in ranks.run(on_ranks.refusals, model_folder, plan, ids):
        assert "shards q_proj over tp_size=2 ranks and leaves all num_key_value_heads=2 on each" in said["cache"]
        assert said["cache"] == said["static"] == said["enable"] and said["forward"] == ""


def test_a_rank_that_fails_is_heard(tmp_path: Path) -> None:
    with Ranks(1, tmp_path) as alone, pytest.raises(RankError, match=r"rank 0, int:\n(?s:.*)invalid literal for int"):
        alone.run(int, "no number")
