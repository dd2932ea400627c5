"""Where a model's parts go, and what each device holds."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import dispatch_model
from generate_bench.shapes import build_model, model_config
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import CompileConfig
from transformers.distributed import DistributedConfig

from tq_hf import TurboQuantCache

ONE, MAP, PARALLEL = "one GPU", "device_map", "tensor parallel"
PLACEMENTS = (ONE, MAP, PARALLEL)
STANDARD_DEVIATION = 1.0  # of random keys and values


def place(placement: str, shape: str, device_type: str) -> Any:
    """A model of random weights, the same ones in every placement, made on the device.

    With tensor parallelism every rank makes the whole model and keeps its part; `torchrun` has started the ranks.
    """
    local = torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0))) if device_type == "cuda" else torch.device("cpu")
    if local.type == "cuda":
        torch.cuda.set_device(local)
    model = build_model(shape, "sdpa", local)
    if placement == MAP:
        return dispatch_model(
            model, device_map(model, ["cpu" if d.type == "cpu" else d.index for d in devices(device_type)])
        )
    if placement == PARALLEL:
        config = DistributedConfig(tp_plan="auto")
        sharded = type(model).from_pretrained(
            None,
            config=model_config(shape),
            state_dict=model.state_dict(),
            dtype=model.dtype,
            distributed_config=config,
        )
        return sharded.eval()
    return model


def devices(device_type: str) -> list[torch.device]:
    if device_type == "cpu":
        return [torch.device("cpu")]
    return [torch.device(device_type, i) for i in range(torch.cuda.device_count())]


def device_map(model: Any, over: list[int | str]) -> dict[str, int | str]:
    """Equal numbers of layers on each device, embeddings on the first, the output on the last."""
    layers = len(model.model.layers)
    parts = {f"model.layers.{i}": over[i * len(over) // layers] for i in range(layers)}
    first, last = over[0], over[-1]
    return {"model.embed_tokens": first, "model.rotary_emb": first, **parts, "model.norm": last, "lm_head": last}


@torch.no_grad()
def fill(model: Any, cache: Any, rows: int, tokens: int) -> None:
    """Put random keys and values into each layer: decoding takes as long behind them as behind a prompt of that length."""
    for index, layer in enumerate(model.model.layers):
        projection = layer.self_attn.k_proj.weight
        local = projection.to_local() if isinstance(projection, DTensor) else projection
        dim = layer.self_attn.head_dim
        generator = torch.Generator(local.device).manual_seed(index)
        shape = (rows, local.shape[0] // dim, tokens, dim)
        keys, values = (
            torch.empty(shape, dtype=local.dtype, device=local.device).normal_(0, STANDARD_DEVIATION, generator=generator)
            for _ in range(2)
        )
        cache.update(keys, values, index)
        if isinstance(cache, TurboQuantCache):
            cache.layers[index].flush()


def tensors_of(cache: Any) -> list[Tensor]:
    """Every tensor that a cache holds."""
    if isinstance(cache, TurboQuantCache):
        layers = [tensor for layer in cache.packed_layers for tensor in layer.tensors()]
        return layers + [tensor for table in cache.tables for tensor in table.tensors()]
    return [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]


def memory(model: Any, cache: Any, device_type: str) -> list[dict[str, int]]:
    """Of each device of this process: bytes of weights, of the cache, and allocated at the peak (0 on the CPU)."""
    found = []
    own = [model.device] if torch.distributed.is_initialized() else devices(device_type)
    for device in own:
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        storages = (t.untyped_storage() for t in tensors_of(cache) if t.device == device)
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        weight_bytes = sum(weight.nbytes for weight in weights if weight.device == device)
        found.append({"weight_bytes": weight_bytes, "cache_bytes": sum(held.values()), "peak_bytes": peak})
    return found


def restart_peaks(device_type: str) -> None:
    for device in devices(device_type) if device_type == "cuda" else ():
        torch.cuda.reset_peak_memory_stats(device)


def compile_options(device_type: str) -> dict[str, Any]:
    """What makes `generate()` compile on the CPU, where it only does on request: dry runs trace."""
    if device_type == "cuda":
        return {}
    config = CompileConfig(mode="default", backend="eager")
    config._compile_all_devices = True
    return {"compile_config": config}
