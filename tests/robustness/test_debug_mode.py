"""`TQ_HF_DEBUG=1`: a block table or counter that has been overwritten is named before an op reads it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.robustness.counts import count
from tests.test_cache import CONFIG, filled, states
from tests.test_cache_fork import SMALL, extend
from tests.test_generate import generate, left_padded
from tests.tiny_models import tiny_model
from tq_hf import TurboQuantCache, debug, ops
from tq_hf.attention import turboquant_attention
from tq_hf.layers.full import TurboQuantLayer

ROOT = Path(__file__).parents[2]
LENGTH = 110  # three pages of 32 behind 4 sinks, and 10 exact tokens


@pytest.fixture
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "ENABLED", True)


def attend(cache: TurboQuantCache, layer: int = 1) -> Tensor:
    rows = cache.batch_size
    handles = cache.layers[layer].update(states(1, rows, seed=3), states(1, rows, seed=4))
    return turboquant_attention(torch.nn.Module(), states(1, rows, seed=5), *handles, None)[0]


def write(name: str, *at: int, value: int) -> Callable[[TurboQuantLayer], None]:
    def corrupt(layer: TurboQuantLayer) -> None:
        holder = layer if name == "counters" else layer.on_device
        getattr(holder, name)[at] = value

    return corrupt


def share_next(layer: TurboQuantLayer) -> None:
    """A page about to be written, which a row uses already."""
    (page, *_), table = layer.table.rows[0], layer.table
    table.pages.free.append(page)


CORRUPTIONS: list[tuple[Callable[[TurboQuantLayer], None], str]] = [
    (write("page_ids", 1, 2, value=6), "row 1, entry 2: page 6 is none of the 6 pages"),
    (write("page_ids", 0, 0, value=2**31 - 1), "row 0, entry 0: page 2147483647 is none of the 6"),
    (write("page_ids", 1, 1, value=-2), "row 1, entry 1: page -2 is none of the 6"),
    (write("page_ids", 1, 1, value=0), "row 1, entry 1: page 0 on cpu, and "),
    (write("page_ids", 0, 2, value=-1), "row 0, entry 2: page -1 on cpu, and "),
    (write("entries", 1, 0, value=37), "entry 1 starts at 37 with 32 tokens, the one before ends at 36"),
    (write("entries", 2, 1, value=33), "entry 2 starts at 68 with 33 tokens"),
    (write("entries", 2, 1, value=31), "entry 2 ends at 99, and pages at 100"),
    (write("entries", 0, 0, value=-40), "entry 0 starts at -40"),
    (write("row_start", 1, value=-1), "row 1 starts at -1 on cpu, and at 0"),
    (write("row_start", 0, value=5), "row 0 starts at 5 on cpu, and at 0"),
    (write("counters", 0, value=10**6), "tokens 100 to 1000000 are exact, and there are 32 slots"),
    (write("counters", 0, value=-1), "a length of -1"),
    (write("counters", 1, value=68), "tokens 68 to 111 are exact, and there are 32 slots"),
    (write("counters", 2, value=17), "17 entries in use and 0 due, of 16"),
    (write("counters", 2, value=4), "entry 3 starts at 0 with 0 tokens"),
]


@pytest.mark.parametrize("reads", ["attend", "gather"])
@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS, ids=[message for _, message in CORRUPTIONS])
def test_what_an_op_would_read_is_checked(
    debugging: None, monkeypatch: pytest.MonkeyPatch, corrupt: Any, message: str, reads: str
) -> None:
    cache = filled(LENGTH, batch=2, **SMALL)
    attend(cache)
    corrupt(cache.packed_layers[1])
    monkeypatch.setattr(ops, reads, lambda *args: pytest.fail("the op was called"))
    with pytest.raises(RuntimeError, match=f"layer 1: .*{message}"):
        attend(cache) if reads == "attend" else cache.layers[1].unpacked()
    count("block tables corrupted")


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (share_next, "row 0, entry 3: page 0 is to be written, and"),
        (write("counters", 2, value=2), "entry 1 ends at 68, and pages at 100"),
        (write("row_start", 1, value=3), "row 1 starts at 3 on cpu, and at 0"),
    ],
)
def test_what_a_commit_would_write_is_checked(
    debugging: None, monkeypatch: pytest.MonkeyPatch, corrupt: Any, message: str
) -> None:
    cache = filled(LENGTH, batch=2, **SMALL)
    before = [layer.pool.clone() for layer in cache.packed_layers]
    corrupt(cache.packed_layers[0])
    with pytest.raises(RuntimeError, match=f"layer 0: .*{message}"):
        extend(cache, 40, seed=7)
    for layer, pool in zip(cache.packed_layers, before, strict=True):
        assert torch.equal(layer.pool[: len(pool)], pool)
    count("block tables corrupted")


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("llama", {"max_cache_len": 200}), ("mistral_sliding", {"recent_window": 8})]
)
def test_sound_tables_pass(debugging: None, family: str, options: dict[str, Any]) -> None:
    """Padding, shared pages, pages cut by a crop; lengths on the device; a window that moves."""
    model = tiny_model(family)
    ids, mask = left_padded(2, 110, [70, 0])
    cache = TurboQuantCache(model.config, "tq4", **{**SMALL, **options})
    generate(model, ids, cache, mask, new=12)
    if family == "llama":
        cache.crop(-60)
        cache.reorder_cache(torch.tensor([1, 1]))
        generate(model, ids[[1, 1]], cache, mask[[1, 1]], new=3)
    assert cache.report().packed_tokens > 0


def test_non_finite_states_are_reported_once_with_layer_and_head(debugging: None, caplog: pytest.LogCaptureFixture) -> None:
    cache = filled(LENGTH, batch=2, **SMALL)
    key, value = states(1, 2, seed=3), states(1, 2, seed=4)
    value[1, 0, 0, 7] = torch.nan
    cache.layers[1].update(key, value)
    with caplog.at_level(logging.WARNING, "tq_hf.debug"):
        cache.layers[1].flush()
        for _ in range(60):  # its page is packed meanwhile
            attend(cache)
    assert [record.getMessage() for record in caplog.records] == ["TQ_HF_DEBUG: layer 1: KV heads [0]: a non-finite value"]


PROGRAM = """
from tests.test_cache import filled
from tests.test_cache_fork import SMALL
cache = filled(110, batch=2, **SMALL)
cache.layers[1].on_device.page_ids[1, 1] = 4000
cache.layers[1].unpacked()
"""


@pytest.mark.parametrize(("setting", "checks"), [("0", False), ("1", True)])
def test_the_environment_decides(setting: str, checks: bool) -> None:
    environment = {**os.environ, "TQ_HF_DEBUG": setting}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0  # torch's own check of an index on the CPU, where nothing looked at the table before
    assert ("TQ_HF_DEBUG: layer 1: row 1, entry 1: page 4000" in done.stderr) == checks


def test_without_it_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not debug.ENABLED, "unset TQ_HF_DEBUG for the tests"
    for name in ("check_state", "report_states"):
        monkeypatch.setattr(debug, name, lambda *args: pytest.fail("debug mode is off"))
    cache = TurboQuantCache(CONFIG, "tq4", **SMALL)
    for layer in range(2):
        cache.update(states(LENGTH), states(LENGTH), layer)
    attend(cache)
    cache.layers[0].unpacked()
