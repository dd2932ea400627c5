"""The same inputs give the same bytes: run to run, process to process, beside other rows, and in other chunks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.robustness.counts import count
from tests.robustness.rows import HEADS, different, feed, one_layer, random, row_of
from tests.test_generate import generate, left_padded
from tests.tiny_models import tiny_model
from tq_hf import PRESETS, TurboQuantCache

ROOT = Path(__file__).parents[2]
TOKENS, CHUNKS = 170, (120, 1, 30, 1, 1, 17)
BF16 = torch.bfloat16


def states(rows: int, dim: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of so many rows; the first rows are the same whatever their number."""

    def of(heads: int, seed: int) -> Tensor:
        return torch.cat([random(1, heads, TOKENS, dim, seed=100 * row + seed, dtype=dtype) for row in range(rows)])

    return of(2 * HEADS, 0), of(HEADS, 1) + 1, of(HEADS, 2)


def fingerprint() -> dict[str, str]:
    """Hashes of outputs and states by preset, and of the tokens that a model generates and the file that its cache makes."""
    found = {}
    for preset in ("tq4", "tq3", "k8v4", "paper_prod", "raw"):
        cache = one_layer(64, preset)
        output = feed(cache, *states(2, 64), CHUNKS)
        digest = hashlib.sha256(output.view(torch.int16).numpy().tobytes())
        for row in range(2):
            for tensor in row_of(cache.layers[0], row).values():
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found[preset] = digest.hexdigest()
    model = tiny_model()
    ids, mask = left_padded(2, 90, [40, 0])
    cache = TurboQuantCache(model.config, "tq3", page_size=32, recent_window=0)
    found["tokens"] = str(generate(model, ids, cache, mask, new=20).tolist())
    return found


def test_run_to_run_and_process_to_process() -> None:
    expected = fingerprint()
    assert fingerprint() == expected
    program = "import json; from tests.robustness.test_determinism import fingerprint; print(json.dumps(fingerprint()))"
    for threads, seed in (("1", "1"), ("2", "2")):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == expected, f"{threads} threads: {[name for name in expected if found[name] != expected[name]]}"
        count("fresh processes compared")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_row_does_not_depend_on_its_batch_mates(preset: str, dtype: torch.dtype) -> None:
    """Beside three others, and beside other ones than before."""
    query, key, value = states(5, 64, dtype)
    alone = one_layer(64, preset)
    output = feed(alone, query[:1], key[:1], value[:1], CHUNKS)
    expected = row_of(alone.layers[0], 0)
    assert len(expected["pages"]) >= 4
    for mates in ([0, 1, 2, 3], [2, 4, 0]):
        beside = one_layer(64, preset)
        outputs = feed(beside, query[mates], key[mates], value[mates], CHUNKS)
        at = mates.index(0)
        assert different(row_of(beside.layers[0], at), expected) == []
        error = (outputs[at].double() - output[0].double()).norm() / output[0].double().norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2)
        count("rows compared with their like alone")


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_row_does_not_depend_on_how_it_is_cut_into_chunks(preset: str) -> None:
    query, key, value = states(2, 80)
    expected = None
    for chunks in ((TOKENS,), CHUNKS, (5, 64, 1, 100), (1,) * TOKENS if preset == "tq4" else (50,) * 3 + (20,)):
        cache = one_layer(80, preset)
        feed(cache, query, key, value, chunks)
        held = [row_of(cache.layers[0], row) for row in range(2)]
        expected = expected or held
        assert [different(*rows) for rows in zip(held, expected, strict=True)] == [[], []], chunks
        count("ways to cut a prompt compared")
