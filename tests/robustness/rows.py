"""What a cache holds of one row of its batch, and a model's way to fill it, for tests that compare rows bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig

from tq_hf import TurboQuantCache
from tq_hf.attention import turboquant_attention
from tq_hf.layers.full import TurboQuantLayer

HEADS = 2
SMALL = {"page_size": 32, "recent_window": 8, "sink_tokens": 2, "boundary_layers": 0}


def one_layer(dim: int, preset: str, **options: int) -> TurboQuantCache:
    """An empty cache of one layer with two KV heads."""
    config = LlamaConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, head_dim=dim
    )
    return TurboQuantCache(config, preset, **{**SMALL, **options})


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def feed(
    cache: TurboQuantCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chunks: tuple[int, ...],
    keep: Tensor | None = None,
) -> Tensor:
    """Tokens [B, H, n, D] in these chunks through attention, as a model does it; all outputs [B, n, Hq, D].

    Args:
        keep: uint8 [B, n], zero for padding.
    """
    outputs, start = [], int(cache.get_seq_length())
    for size in chunks:
        end = start + size
        handles = cache.update(key[:, :, start:end], value[:, :, start:end], 0)
        mask = None if keep is None else keep[:, None, None, :end]
        output, _ = turboquant_attention(torch.nn.Module(), query[:, :, start:end], *handles, mask)
        outputs.append(output)
        start = end
    return torch.cat(outputs, 1)


def row_of(layer: TurboQuantLayer, row: int) -> dict[str, Tensor]:
    """All that the layer holds of one row; pages in the order of their entries."""
    length, packed_end, used = layer.counters.tolist()
    ids = layer.on_device.page_ids[row, :used].long()
    recent = torch.arange(packed_end, length) % layer.ring_key.shape[2]
    held = {
        "pages": layer.pool[ids[ids >= 0]],
        "entries": layer.on_device.entries[:used],
        "start": layer.on_device.row_start[row],
        "counters": layer.counters,
        "ring_key": layer.ring_key[row, :, recent],
        "ring_value": layer.ring_value[row, :, recent],
        "sink_key": layer.sink_key[row],
        "sink_value": layer.sink_value[row],
    }
    if layer.balance is not None and layer.query_energy is not None:
        held |= {"balance": layer.balance[row], "query_energy": layer.query_energy[row]}
    return {name: tensor.clone() for name, tensor in held.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes, NaN included."""
    a, b = a.reshape(-1), b.reshape(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names of what differs between two rows."""
    assert a.keys() == b.keys()
    return sorted(name for name in a if not same_bits(a[name], b[name]))
