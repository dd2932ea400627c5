"""Pretended devices: tensors stay in host memory, and mixing those of different devices fails as it does with GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


class Places(TorchFunctionMode):
    """While it is entered, `device=` and `to` of any device work, `tensor.device` tells it, and an operation on tensors of
    several devices raises, host scalars apart. What operations do inside is not looked at."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == Tensor.device.__get__:  # type: ignore[attr-defined]
            return place_of(args[0])
        name = getattr(function, "__name__", "")
        if name == "to":
            return self._moved(function, args, kwargs)
        target = kwargs.pop("device", None)
        given = [args[0]] if name == "__deepcopy__" else list(_tensors((args, kwargs)))  # whose memo has all sorts
        found = {place_of(tensor) for tensor in given if tensor.dim() or place_of(tensor) != HOST}
        copies = name in ("copy_", "__setitem__")  # which torch does between devices
        if len(found) > 1 and not copies:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {sorted(map(str, found))}")
        places = {torch.device(target)} if target is not None else {place_of(args[0])} if copies else found
        return _put(function(*args, **kwargs), next(iter(places), HOST))

    def _moved(self, function: Any, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        place = place_of(tensor)
        options = []
        for value in (*rest, kwargs.pop("device", None)):
            if isinstance(value, (torch.device, str)):
                place = torch.device(value)
            elif isinstance(value, Tensor):
                place, value = place_of(value), value.dtype
                options.append(value)
            elif value is not None:
                options.append(value)
        return _put(function(tensor, *options, **kwargs) if options or kwargs else tensor.clone(), place)


def place_of(tensor: Tensor) -> torch.device:
    return tensor.__dict__.get("place", HOST)


def put(tensor: Tensor, device: str) -> Tensor:
    """A copy that pretends to be there."""
    return _put(tensor.clone(), torch.device(device))


def _put(result: Any, place: torch.device) -> Any:
    for tensor in _tensors(result):
        tensor.__dict__["place"] = place
    return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
