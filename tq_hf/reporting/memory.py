"""Bytes that an object's tensors take, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors in `value`: itself (what it is made of, if it wraps others), or what its lists, tuples and dicts hold."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):  # a subclass without a storage of its own, as quantized weights are
            for name in value.__tensor_flatten__()[0]:
                yield from tensors_of(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def storage_bytes(value: Any) -> int:
    """Bytes of the storages behind the tensors in `value`, each storage once: a view keeps all of its base alive."""
    storages: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors_of(value):
        storage = tensor.untyped_storage()
        storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
