"""Transformers' own layers inside a `TurboQuantCache`: undone, moved, and taken apart and put together for a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from ..reporting.memory import storage_bytes

# Those that can be saved, by name: what they hold is known. All are built from these numbers.
SAVED_CLASSES = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
    "DummyLayer",
)
LARGEST_KERNEL = 1024  # of a convolution that has recorded another number of states
OPTIONS = ("sliding_window", "max_cache_len", "number_of_states")
# Host numbers that change with the tokens, where a class has them.
NUMBERS = ("cumulative_length", "cumulative_length_int", "record_past")


@contextmanager
def all_or_nothing(layers: Sequence[Any]) -> Iterator[list[Any]]:
    """Put these layers back as they were if the body fails.

    Yields:
        What they were, which keeps their tensors alive: the body may clear it once nothing is to be put back any more.
    """
    saved = [(layer, {name: _copied(value) for name, value in vars(layer).items()}) for layer in layers]
    try:
        yield saved
    except BaseException:
        for layer, attributes in saved:
            for name, value in attributes.items():
                if isinstance(value, Tensor) and value.ndim == 0:
                    getattr(layer, name).copy_(value)  # a captured graph knows its address
                else:
                    setattr(layer, name, value)
        raise


def _copied(value: Any) -> Any:
    """A copy of what transformers changes in place: tables by state, and static lengths. Other tensors it replaces."""
    if isinstance(value, dict):
        return dict(value)
    return value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value


def largest_first(layers: Sequence[Any]) -> list[Any]:
    """These layers by the bytes that they hold."""
    return sorted(layers, key=lambda layer: storage_bytes(vars(layer)), reverse=True)


def move_stock(layer: Any, device: torch.device) -> None:
    """Take every tensor of `layer` to `device`."""
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(layer, name, value.to(device))
        elif isinstance(value, dict):
            setattr(layer, name, {k: v.to(device) if isinstance(v, Tensor) else v for k, v in value.items()})
    if getattr(layer, "device", None) is not None:
        layer.device = device


def require_window(layer: Any) -> None:
    """Refuse a crop of a growing sliding layer that took back more tokens than were recorded, which it does not notice.

    Raises:
        RuntimeError: a next query would miss keys.
    """
    if not isinstance(layer, cache_utils.DynamicSlidingWindowLayer) or not layer.is_initialized:
        return
    length, kept = layer.get_seq_length(), layer.keys.shape[2]
    if kept < min(length, layer.sliding_window - 1):
        raise RuntimeError(
            f"crop to {length} tokens: a layer with a sliding window of {layer.sliding_window} would have only {kept} left."
            " Remove no more than those that came after cache.activate_past_recording()."
        )


def forget_states(layer: Any) -> None:
    """Drop the states of linear attention, which transformers' reset zeroes: the next batch may have other rows."""
    for i in range(getattr(layer, "number_of_states", 0)):
        layer.conv_states[i] = layer.recurrent_states[i] = layer.conv_kernel_size[i] = None
        layer.is_conv_states_initialized[i] = layer.is_recurrent_states_initialized[i] = False


# -- files -------------------------------------------------------------------------------------------------------------
def description(layer: Any, max_cache_len: int | None) -> dict[str, Any]:
    """What a layer is, as numbers and names: `{"class": ..., **options}`.

    Raises:
        ValueError: a class that cannot be saved.
    """
    kind = type(layer)
    if kind.__name__ not in SAVED_CLASSES or getattr(cache_utils, kind.__name__, None) is not kind:
        raise ValueError(f"a {kind.__name__} cannot be saved: what it holds is not known.")
    is_windowed = "StaticSlidingWindow" in kind.__name__  # which keeps the smaller of its window and the length
    found: dict[str, Any] = {"class": kind.__name__}
    for option in OPTIONS:
        source = "max_cache_len" if is_windowed and option == "sliding_window" else option
        if (value := getattr(layer, source, None)) is not None:
            found[option] = max_cache_len if is_windowed and option == "max_cache_len" else value
    return found


def contents(layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a layer holds: host numbers, and tensors by name."""
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name in NUMBERS:
        if (value := getattr(layer, name, None)) is not None:
            numbers[name] = bool(value) if name == "record_past" else int(value)
    if isinstance(getattr(layer, "keys", None), Tensor) and layer.is_initialized:
        tensors["keys"], tensors["values"] = layer.keys, layer.values
    for i in range(getattr(layer, "number_of_states", 0)):
        numbers[f"has_previous_state.{i}"] = bool(layer.has_previous_state[i])
        if layer.is_conv_states_initialized[i]:
            numbers[f"conv_kernel_size.{i}"] = int(layer.conv_kernel_size[i])
            tensors[f"conv_states.{i}"] = layer.conv_states[i]
        if layer.is_recurrent_states_initialized[i]:
            tensors[f"recurrent_states.{i}"] = layer.recurrent_states[i]
    return numbers, tensors


def build(described: Mapping[str, Any]) -> Any:
    """The empty layer of a `description`.

    Raises:
        ValueError: an unknown class, or options that are not its.
    """
    options = {name: value for name, value in described.items() if name != "class"}
    name = described.get("class")
    kind = getattr(cache_utils, name, None) if name in SAVED_CLASSES else None
    if kind is None:
        raise ValueError(f"a layer of class {name!r} is unknown to this transformers")
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ValueError(f"a {name} has no options {unknown}")
    for option, value in options.items():
        if type(value) is not int or not 0 < value < (1000 if option == "number_of_states" else 2**62):
            raise ValueError(f"{option}={value!r} of a {name} is no positive number in its range")
    try:
        layer = kind(**options)
        rebuilt = description(layer, options.get("max_cache_len"))
    except TypeError as error:
        raise ValueError(f"options {options} do not make a {name}: {error}") from None
    if rebuilt != dict(described):
        raise ValueError(f"options {options} do not make a {name}: it has {rebuilt}")
    return layer


def check_contents(
    layer: Any, numbers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raise `ValueError` unless these can be the contents of the empty `layer`."""
    states = range(getattr(layer, "number_of_states", 0))
    linear = {f"{kind}.{i}" for kind in ("conv_states", "recurrent_states") for i in states}
    attention = {"keys", "values"} if hasattr(layer, "update") and not _is_dummy(layer) else set()
    if unknown := sorted(set(shapes) - linear - attention):
        raise ValueError(f"a {type(layer).__name__} does not hold {unknown}")
    expected = set(contents(layer)[0]) | {name.replace("conv_states", "conv_kernel_size") for name in linear & set(shapes)}
    expected -= {name for name in expected if name.startswith("recurrent_states")}
    if set(numbers) != expected:
        raise ValueError(f"a {type(layer).__name__} has the numbers {sorted(expected)}, not {sorted(numbers)}")
    for name, value in numbers.items():
        wanted = bool if name == "record_past" or name.startswith("has_previous_state") else int
        if type(value) is not wanted or not 0 <= value < 2**62:
            raise ValueError(f"{name}={value!r} is no {wanted.__name__} in its range")
    if any(not dtype.is_floating_point for dtype in dtypes.values()):
        raise ValueError(f"states of dtype {set(dtypes.values())} are no floating-point numbers")
    for name in linear & set(shapes):
        kernel = numbers.get(name.replace("conv_states", "conv_kernel_size"))
        shape = shapes[name]
        fits = kernel is None or kernel == shape[-1] or (numbers["record_past"] and kernel < LARGEST_KERNEL)
        if len(shape) < 2 or not fits:
            raise ValueError(f"{name} of shape {shape} does not fit a kernel of {kernel}")
    if "keys" in shapes or "values" in shapes:
        if dtypes.get("keys") != dtypes.get("values"):
            raise ValueError(f"keys of {dtypes.get('keys')} and values of {dtypes.get('values')} do not fit together")
        _check_attention(layer, numbers, shapes.get("keys", ()), shapes.get("values", ()))
    elif numbers.get("cumulative_length", 0) or numbers.get("cumulative_length_int", 0):
        raise ValueError(f"a {type(layer).__name__} of {dict(numbers)} has no keys")


def _check_attention(layer: Any, numbers: Mapping[str, Any], keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    if len(keys) != 4 or len(values) != 4 or keys[:3] != values[:3]:
        raise ValueError(f"keys {keys} and values {values} do not fit together")
    length = numbers.get("cumulative_length", keys[2])
    if isinstance(layer, cache_utils.StaticLayer):
        fits = keys[2] == layer.max_cache_len and length <= layer.max_cache_len
        counted = numbers.get("cumulative_length_int", length)
        fits = fits and (counted == length or counted > layer.max_cache_len)
    elif isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
        fits = min(length, layer.sliding_window - 1) <= keys[2] <= length
    else:
        fits = True
    if not fits:
        raise ValueError(f"{keys[2]} stored keys do not fit a {type(layer).__name__} of {length} tokens")


def fill(layer: Any, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put checked contents into an empty layer; the tensors become its own."""
    if "record_past" in numbers:
        layer.record_past = numbers["record_past"]
    for i in range(getattr(layer, "number_of_states", 0)):
        conv, recurrent = tensors.get(f"conv_states.{i}"), tensors.get(f"recurrent_states.{i}")
        if conv is not None:
            kernel = numbers[f"conv_kernel_size.{i}"]
            layer.lazy_initialization(conv_states=conv, state_idx=i)
            layer.conv_states[i].copy_(conv)
            layer.conv_kernel_size[i] = kernel  # recorded, states are more or fewer
        if recurrent is not None:
            layer.lazy_initialization(recurrent_states=recurrent, state_idx=i)
            layer.recurrent_states[i].copy_(recurrent)
        layer.has_previous_state[i] = numbers[f"has_previous_state.{i}"]
    if "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
        if isinstance(layer, cache_utils.StaticLayer):
            torch._dynamo.mark_static_address(layer.keys)
            torch._dynamo.mark_static_address(layer.values)
    for name in ("cumulative_length", "cumulative_length_int"):
        if isinstance(getattr(layer, name, None), Tensor):
            getattr(layer, name).fill_(numbers[name])
        elif name in numbers:
            setattr(layer, name, numbers[name])


def _is_dummy(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"
