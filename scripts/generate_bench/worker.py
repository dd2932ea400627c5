"""A process that measures: requests come as JSON lines on standard input, replies go as JSON lines to standard output.

    python -m generate_bench.worker SHAPE DEVICE

Modules are imported and nothing else happens until the first request, so that many workers may wait beside one that
measures. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import torch
import transformers

from .caches import CACHES
from .capacity import decodes_with
from .measure import Prepared, Result, failure, free, measure, prepare
from .profile import initialize, profile_step
from .repeats import measure_compiled
from .shapes import Point, build_model, prompt


class Worker:
    """Keeps the model, and which caches were prepared at which point last.

    Of those without compilation, which take turns, none outlives its measurement.
    """

    def __init__(self, shape: str, device: str) -> None:
        self.shape, self.device = shape, torch.device(device)
        self.model: Any = None
        self.prepared: dict[str, Prepared] = {}

    def build(self, attention: str) -> None:
        if self.model is None:
            self.model = build_model(self.shape, attention, self.device)
            with torch.no_grad():
                logits = self.model(prompt(self.model, 1, 64), use_cache=False).logits
            if not logits.isfinite().all():
                raise RuntimeError("the random model's logits are not finite")

    def answer(self, request: dict[str, Any]) -> Result:
        """Do what a request asks: `do` names it."""
        do = request["do"]
        if do == "facts":
            return facts(self.device)
        cache = CACHES[request["cache"]]
        self.build(cache.attention)
        if do == "capacity":
            self.model.set_attn_implementation(cache.attention)
            return {"fits": decodes_with(self.model, cache, request["rows"], request["tokens"])}
        if do == "prepare":
            if request.get("profiled"):
                initialize()
            self.prepared[cache.name] = prepare(self.model, cache, Point(request["point"]))
            return {}
        prepared = self.prepared[cache.name]
        if do == "profile":
            return profile_step(self.model, prepared)
        result = (measure_compiled if cache.compiled else measure)(self.model, prepared)
        self.release()
        return result

    def release(self) -> None:
        """Free all that other caches are to be measured without."""
        for prepared in self.prepared.values():
            prepared.drop()
        free(self.device)


def facts(device: torch.device) -> Result:
    """What the machine is, and how many bytes a second it reads and writes in a copy."""
    found: Result = {"torch": torch.__version__, "transformers": transformers.__version__}
    if device.type == "cuda":
        from bench_decode import copy_ceiling  # which needs Triton

        ceiling = copy_ceiling()
        torch.cuda.empty_cache()
        memory = torch.cuda.get_device_properties(device).total_memory
        return found | {"gpu": torch.cuda.get_device_name(), "memory_bytes": memory, "copy_bytes_per_second": ceiling}
    source = torch.empty(1 << 24, dtype=torch.int32)
    target = torch.empty_like(source)
    began = time.perf_counter()
    torch.neg(source, out=target)
    speed = 2 * source.nbytes / (time.perf_counter() - began)
    return found | {"gpu": "no GPU", "memory_bytes": 1 << 36, "copy_bytes_per_second": speed}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    transformers.logging.set_verbosity_error()
    shape, device = sys.argv[1:]
    worker = Worker(shape, device)
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:  # one cell is lost, and the worker with it unless only memory was short
            traceback.print_exc()
            reply = failure(error)
        if "oom" in reply:
            worker.release()
        print(json.dumps(reply), file=replies)
        if "error" in reply:
            break


if __name__ == "__main__":
    main()
