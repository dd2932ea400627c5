"""What the ranks of the tensor-parallel tests do: each has its own model, and answers with what a test compares."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig
from transformers.distributed import DistributedConfig

from tq_hf import TurboQuantCache, enable
from tq_hf.cli import main
from tq_hf.generation.comparison import cache_argument

NEW = 12  # tokens a generation makes; among them a page falls due


@cache
def sharded(folder: Path) -> Any:
    """This rank's part of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(folder, distributed_config=DistributedConfig(tp_plan="auto"))


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="turboquant", **options).eval()


def generate(model: Any, kind: dict[str, Any], ids: Tensor, mask: Tensor, compiled: bool = False, **options: Any) -> Any:
    """Greedy tokens, and what can be seen of the cache that they filled; tensors on the CPU.

    Args:
        kind: what `TurboQuantCache` takes.
        compiled: trace decoding on the CPU. On a GPU `generate()` compiles a static cache's by itself.
    """
    made = TurboQuantCache(model.config, **kind)
    ids, mask = ids.to(model.device), mask.to(model.device)
    counters.clear()
    torch._dynamo.reset()
    if compiled:
        options["compile_config"] = CompileConfig(mode="default", backend="eager", fullgraph=True)
        options["compile_config"]._compile_all_devices = True
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, **{cache_argument(model): made}, max_new_tokens=NEW, min_new_tokens=NEW,
            do_sample=False, output_logits=True, return_dict_in_generate=True, **options,
        )  # fmt: skip
    made.check()
    report = made.report()
    return {
        "tokens": out.sequences.cpu(),
        "logits": torch.stack(out.logits).cpu(),
        "pages": [layer.pool[: layer.table.pages.used].cpu() for layer in made.packed_layers],
        "devices": [str(layer.device) for layer in made.packed_layers],
        "heads": [layer.kv_heads for layer in made.packed_layers],
        "nbytes": sum(layer.nbytes for layer in made.packed_layers),
        "packed": report.packed_tokens / (report.packed_tokens + report.exact_tokens),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "dense": any(table.dense_read_noted for table in made.tables),
    }


def generate_sharded(folder: Path, kind: dict[str, Any], ids: Tensor, mask: Tensor, compiled: bool = False) -> Any:
    return generate(sharded(folder), kind, ids, mask, compiled)


def generate_beams(folder: Path, kind: dict[str, Any], ids: Tensor, mask: Tensor) -> Any:
    return generate(sharded(folder), kind, ids, mask, num_beams=3)


def edited(model: Any, ids: Tensor, path: Path) -> Tensor:
    """Logits after a cache was cropped, forked, reordered and written to a file and read again."""
    argument = cache_argument(model)
    made = TurboQuantCache(model.config, "raw")
    with torch.no_grad():
        model(ids[:, :170], **{argument: made})
        made.crop(-30)
        (made,) = made.fork(1)
        made.reorder_cache(torch.tensor([1, 0]))
        made.save(path)
        made = TurboQuantCache.load(path, model.config)
        return model(ids[:, 140:], **{argument: made}).logits


def edited_sharded(folder: Path, ids: Tensor, files: Path) -> Tensor:
    return edited(sharded(folder), ids, files / f"rank{torch.distributed.get_rank()}")


def load_of_other_rank(folder: Path, files: Path) -> list[str]:
    """What is said where a rank reads what the other one wrote."""
    other = files / f"rank{1 - torch.distributed.get_rank()}"
    model = sharded(folder)
    return [message_of(partial(TurboQuantCache.load, other, config)) for config in (model.config, None)]


def refusals(folder: Path, plan: Any, ids: Tensor) -> dict[str, str]:
    """What is said of a model whose heads do not fit the ranks: by caches, by `enable`, by transformers' own forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(folder, distributed_config=DistributedConfig(tp_plan=plan))
    return {
        "cache": message_of(lambda: TurboQuantCache(model.config, "tq4")),
        "static": message_of(lambda: TurboQuantCache(model.config, "tq4", max_cache_len=200)),
        "enable": message_of(lambda: enable(model)),
        "forward": message_of(lambda: model(ids)),
    }


def command_line(argv: list[str]) -> str:
    """What `tq_hf` prints in this process, as one of those that a launcher starts."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(argv)
    assert not code, printed.getvalue()
    return printed.getvalue()


def bench_cell(point: str, cache_name: str) -> Any:
    """A cell of `scripts/bench_multi_gpu.py`, all ranks' devices in it."""
    from generate_bench.shapes import Point
    from multi_bench.placements import PARALLEL, place
    from multi_bench.worker import measure_cell, of_all_ranks

    return of_all_ranks(measure_cell(place(PARALLEL, "tiny", "cpu"), "cpu", Point(point), cache_name))


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
