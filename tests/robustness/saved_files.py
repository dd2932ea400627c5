"""Saved caches to break, ways to break them, and what a cache that loads nevertheless must be able to do."""

from __future__ import annotations

import copy
import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer, StaticLayer

from tests.test_generate import generate, left_padded
from tests.tiny_models import prompt, tiny_model
from tq_hf import TurboQuantCache, debug
from tq_hf.attention import turboquant_attention
from tq_hf.layers.full import TurboQuantLayer
from tq_hf.layers.hybrid import HybridLayer

SMALL = {"page_size": 32, "recent_window": 0, "sink_tokens": 4}
# Padding and shared pages; lengths on the device; a window that has moved; recurrent states; layers of transformers' own.
SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dynamic": ("llama", "tq4", {}),
    "static": ("llama", "4bit_nc", {"max_cache_len": 130, "boundary_layers": 0}),
    "sliding": ("mistral_sliding", "tq2", {}),
    "hybrid": ("falcon_h1", "tq3", {}),
    "mixed": ("gemma3_hybrid", "raw", {"page_size": 32, "recent_window": 32}),
    "mixed static": ("gemma3_hybrid", "raw", {"max_cache_len": 130, "page_size": 32, "recent_window": 32}),
    "linear": ("qwen3_next", "tq4", {}),
    "empty": ("gemma3_hybrid", "tq4", {}),
}


@lru_cache(maxsize=None)
def config_of(name: str) -> Any:
    return tiny_model(SAVED[name][0]).config


def save(name: str, path: Path) -> None:
    family, preset, options = SAVED[name]
    model = tiny_model(family)
    cache = TurboQuantCache(model.config, preset, **{**SMALL, **options})
    if name != "empty":
        ids, mask = left_padded(2, 80, [36, 0]) if name == "dynamic" else (prompt(2, 80), None)
        generate(model, ids, cache, mask, new=4)
    if name == "dynamic":
        cache.crop(-30)
        cache.reorder_cache(torch.tensor([1, 1]))
    cache.save(path)


# -- breaking ----------------------------------------------------------------------------------------------------------
NASTY = st.sampled_from(
    (
        *(
            0,
            1,
            -1,
            2,
            3,
            31,
            32,
            33,
            63,
            64,
            65,
            100,
            127,
            255,
            256,
            2**16,
            2**31 - 1,
            2**31,
            2**40,
            2**63,
            2**64,
            10**30,
        ),
        *(
            None,
            True,
            False,
            "",
            "cpu",
            "cuda:9",
            "meta",
            "float16",
            "bfloat16",
            "F64",
            [],
            {},
            [0],
            0.5,
            1e308,
            "x" * 99,
        ),
    )
)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, with this project's own header parsed, and the tensors' bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["header"] = json.loads(header["__metadata__"]["header"])
    return header, data[8 + size :]


def join(header: dict[str, Any], tensors: bytes) -> bytes:
    metadata = dict(header["__metadata__"])
    if not isinstance(metadata.get("header"), str):
        metadata["header"] = json.dumps(metadata.get("header"))
    text = json.dumps({**header, "__metadata__": metadata}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tensors


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [p for key, value in items for p in [(*path, key), *places(value, (*path, key))]]


KINDS = ("cut", "more", "bits", "table bits", "entry", "entry", "entry", "tensor", "size", "garbage")
DTYPES = ("F32", "F16", "BF16", "I32", "I64", "U8", "BOOL", "F64", "F8_E4M3")


@st.composite
def broken(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after one to three changes of one kind."""
    kind = draw(st.sampled_from(KINDS))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data) - 1))]
    if kind == "more":
        return data + draw(st.binary(min_size=1, max_size=64))
    if kind == "garbage":
        return draw(st.binary(max_size=200))
    if kind == "size":
        size = draw(st.sampled_from([0, 1, 2**20, 10**8, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2 * len(data)))
        return struct.pack("<Q", size) + data[8:]
    header, tensors = split(data)
    if kind == "bits":
        start = len(data) - len(tensors)
        changed = bytearray(data)
        for _ in range(draw(st.integers(1, 3))):  # in the header as often as in the tensors
            at = draw(st.integers(0, start - 1) | st.integers(0, len(data) - 1))
            changed[at] ^= 1 << draw(st.integers(0, 7))
        return bytes(changed)
    names = [name for name in header if name != "__metadata__"]
    if kind == "table bits":
        small = [name for name in names if name.startswith("tables.") or name.endswith(("flags", ".balance"))]
        if not small:
            return data
        changed = bytearray(tensors)
        for _ in range(draw(st.integers(1, 3))):
            begin, end = header[draw(st.sampled_from(small))]["data_offsets"]
            if end - begin >= 4:
                at = begin + 4 * draw(st.integers(0, (end - begin) // 4 - 1))
                number = draw(st.sampled_from([0, 1, -1, 2, 31, 32, 33, 2**31 - 1, -(2**31)]) | st.integers(-3, 200))
                changed[at : at + 4] = struct.pack("<i", number)
        return join(header, bytes(changed))
    if kind == "tensor":
        if not names:
            return data
        name = draw(st.sampled_from(names))
        change = draw(st.sampled_from(["drop", "rename", "dtype", "shape", "offsets", "swap"]))
        if change == "drop":
            del header[name]
        elif change == "rename":
            others = [*names, "other", "layers.0.keys", "layers.1.hybrid.conv_states.0"]
            header[draw(st.sampled_from(others))] = header.pop(name)
        elif change == "dtype":
            header[name]["dtype"] = draw(st.sampled_from(DTYPES))
        elif change == "swap":
            other = draw(st.sampled_from(names))
            header[name], header[other] = header[other], header[name]
        else:
            values = header[name]["shape" if change == "shape" else "data_offsets"]
            if values:
                values[draw(st.integers(0, len(values) - 1))] = copy.deepcopy(draw(NASTY))
        return join(header, tensors)
    for _ in range(draw(st.integers(1, 3))):
        ours = header["__metadata__"]["header"]
        path = draw(st.sampled_from(places(ours)))
        holder = ours
        for step in path[:-1]:
            holder = holder[step]
        value = holder[path[-1]]
        near = [value + d for d in (-32, -1, 1, 32)] if type(value) is int else []
        change = copy.deepcopy(draw(st.sampled_from(["delete", "repeat", *near]) | NASTY))
        if change == "delete":
            del holder[path[-1]]
        elif change == "repeat" and isinstance(holder, list):
            holder.append(copy.deepcopy(value))
        else:
            holder[path[-1]] = change
        if not ours:
            break
    return join(header, tensors)


# -- using -------------------------------------------------------------------------------------------------------------
class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def use(cache: TurboQuantCache, path: Path) -> None:
    """What the next forward passes and the edits after them do; raises whatever goes wrong."""
    rows, limit, length = cache._rows or 2, cache.table.max_cache_len, int(cache.get_seq_length())
    for new in (1, 40):
        if limit is not None and length + new > limit:
            continue
        length += new
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, TurboQuantLayer):
                _attend(cache, i, rows, new)
                debug.check_state(layer)
            elif isinstance(layer, (DynamicLayer, StaticLayer)):
                like = (layer.keys, layer.values) if layer.is_initialized else (torch.ones(rows, 2, 0, 16),) * 2
                cache.update(*(t.new_ones(*t.shape[:2], new, t.shape[3]) for t in like), i)
            _update_states(layer.state if isinstance(layer, HybridLayer) else layer)
    assert repr(cache) and len(str(cache.report()).splitlines()) == len(cache.layers) + 3
    for keys, values, _ in cache:
        assert keys is None or values is None or keys.shape[:3] == values.shape[:3]
    cache.reorder_cache(torch.arange(rows).flip(0))
    cache.save(path)
    assert int(TurboQuantCache.load(path).get_seq_length()) == int(cache.get_seq_length())
    cache.reset()
    assert int(cache.get_seq_length()) == 0


def _attend(cache: TurboQuantCache, i: int, rows: int, new: int) -> None:
    layer = cache.layers[i]
    heads, dims, dtype = 2, (16, 16), torch.float32
    if layer.is_initialized:
        heads, dims, dtype = layer.kv_heads, (layer.key_dim, layer.value_dim), layer.dtype
    key, value = cache.update(*(torch.ones(rows, heads, new, dim, dtype=dtype) for dim in dims), i)
    query = torch.ones(rows, 2 * heads, new, dims[0], dtype=dtype)
    output, _ = turboquant_attention(torch.nn.Module(), query, key, value, _window(layer, key, new))
    assert output.shape == (rows, new, 2 * heads, dims[1])


def _update_states(layer: Any) -> None:
    for s in range(getattr(layer, "number_of_states", 0)):
        if layer.is_conv_states_initialized[s]:
            shape = layer.conv_states[s].shape
            layer.update_conv_state(layer.conv_states[s].new_ones(*shape[:-1], 1), s)
        if layer.is_recurrent_states_initialized[s]:
            layer.update_recurrent_state(torch.ones_like(layer.recurrent_states[s]), s)


def _window(layer: TurboQuantLayer, key: Any, new: int) -> Tensor | None:
    """The complete mask that transformers makes for a layer with a window or a static one; None for others."""
    window, shown = layer.sliding_window, key.shape[2]
    if window is None and not layer.table.is_static:
        return None
    first = int(layer.get_seq_length()) - new if window is None else shown - new
    own = torch.arange(new)[:, None] + first
    at = torch.arange(shown)
    return ((at <= own) & (at > own - (window or shown + 1)))[None, None]
