"""Measures a placement's cells, one after the other, and appends each as a JSON line to a file.

    python -m multi_bench.worker PLACEMENT SHAPE DEVICE CELLS OUT          CELLS: JSON list of [point, cache]

With tensor parallelism `torchrun` starts as many of it as there are GPUs; the first one writes.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from generate_bench.caches import CACHES
from generate_bench.measure import compilations, compiled_facts, failure, generate, packed_facts, summary
from generate_bench.shapes import Point, prompt

from .placements import fill, memory, place, restart_peaks

WARM_UP_TOKENS = 6  # compiles, records CUDA graphs, replays them
NEW_TOKENS = 33  # of the timed run: the first and 32 steps


def measure_cell(model: Any, device_type: str, point: Point, name: str) -> dict[str, Any]:
    """Decode behind a filled cache through `generate()`, after a warm-up behind the same cache.

    Returns:
        Seconds and counts of this rank, and `devices`: what each of its devices holds.
    """
    cache = CACHES[name]
    torch._dynamo.reset()  # what was compiled for the last cell's cache
    model.set_attn_implementation(cache.attention)
    made = cache.make(model.config, point.capacity)
    fill(model, made, point.rows, point.tokens)
    before = compilations()
    # The cache holds all but the last of these tokens, with which generate() goes on.
    generate(model, prompt(model, point.rows, point.tokens + 1), cache, made, WARM_UP_TOKENS)
    warm = compilations()
    restart_peaks(device_type)

    def timed(ahead: bool) -> dict[str, Any]:
        held = int(made.get_seq_length())
        ids = prompt(model, point.rows, held + 1)
        return summary(generate(model, ids, cache, made, NEW_TOKENS, ahead=ahead), point)

    result = timed(ahead=False)
    if cache.packed:
        result |= packed_facts(made)
    if cache.compiled:
        result |= {"ahead_step_s": timed(ahead=True)["step_s"]}
        result |= compiled_facts(warm) | {"graphs": warm["graphs"] - before["graphs"]}
    return result | {"devices": memory(model, made, device_type)}


def main() -> None:
    placement, shape, device_type, cells, out = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    model = place(placement, shape, device_type)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for point, name in json.loads(cells):
        gc.collect()
        if device_type == "cuda":
            torch.cuda.empty_cache()
        try:
            result = measure_cell(model, device_type, Point(point), name)
        except Exception as error:
            traceback.print_exc()
            result = failure(error)
        result = of_all_ranks(result)
        if rank == 0:
            with Path(out).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"placement": placement, "point": point, "cache": name, **result}) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def of_all_ranks(result: dict[str, Any]) -> dict[str, Any]:
    """The first rank's result with every rank's devices; what failed on any rank has failed."""
    if not torch.distributed.is_initialized():
        return result
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, result)
    for other in everyone:
        if "devices" not in other:
            return dict(other)
    return everyone[0] | {"devices": [device for other in everyone for device in other["devices"]]}


if __name__ == "__main__":
    main()
