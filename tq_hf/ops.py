"""The operations on a packed layer, as `torch.library` ops: torch reference on CPU, Triton kernels on CUDA.

Layouts that the kernels do not know (`has_kernels`) run in the reference on CUDA too. It reads lengths on the host, and so
cannot serve a static cache there.

A layer's state is a set of flat tensors, so that the ops can be traced by `torch.compile`. With B rows, H KV heads,
S sink tokens, a ring of R = recent window + page slots and a block table of E entries:

| tensor | dtype, shape | meaning |
| --- | --- | --- |
| pool | int32 [pages, H, page_words] | packed pages (`layout.py`), each written once |
| ring_key, ring_value | model dtype [B, H, R, D / Dv] | exact recent tokens: position p stands in slot p % R |
| sink_key, sink_value | model dtype [B, H, S, D / Dv] | exact first tokens: slot i holds position row_start + i |
| page_ids | int32 [B, E] | the page of each entry; -1 where an entry holds nothing but padding, or has left a window |
| entries | int32 [E, 2] | start position and token count of each entry, the same for all rows |
| row_start | int32 [B] | position of each row's first token that is not padding |
| counters | int32 [3] | tokens committed, first position not in a page, entries in use |
| balance | fp32 [B, H, D] or None | factors of the key channels (`quantizer/conditioning.py`); 0 for rows without a page |
| query_energy | fp32 [B, H, D] | what the factors are made from |
| flags | int32 [H] | what was stored differently from what was given (bits in `layout.py`) |

Positions count from the start of the batch, left padding included, so that all rows advance together; those of a sliding
layer from its table's origin (`layers/sliding.py`), which may lie inside the first entry: that one's start is negative
then, and what it has before position 0 counts nowhere. Counters live on the device: nothing here reads them on the host
where that would wait for a GPU.

`torch.library.Library` is used directly, because a call through `torch.library.custom_op` costs ten times as much.

What `commit` and `observe` take as `after` is not looked at: it tells the compiler that attention has read the state before
they write to it. Inductor moves ops towards their users otherwise, attention behind `commit`, and then has to keep a copy of
everything that `commit` overwrites: the whole cache, at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import reference
from .layout import PageLayout

_STATE = "Tensor{p} pool, Tensor{r} ring_key, Tensor{r} ring_value, Tensor{s} sink_key, Tensor{s} sink_value, "
_TABLE = "Tensor page_ids, Tensor entries, Tensor row_start, "
_READ = _STATE.format(p="", r="", s="") + _TABLE + "Tensor counters, Tensor? balance, "
_WRITE = (
    _STATE.format(p="(a!)", r="(b!)", s="(c!)")
    .replace("(b!) ring_value", "(d!) ring_value")
    .replace("(c!) sink_value", "(e!) sink_value")
)

_library = torch.library.Library("tq_hf", "DEF")
_library.define(
    f"attend(Tensor query, Tensor key, Tensor value, {_READ}Tensor? mask, Tensor? aux_sinks, str layout, float scaling,"
    " float softcap, bool causal, SymInt max_entries) -> Tensor"
)
_library.define(
    f"commit(Tensor key, Tensor value, {_WRITE}{_TABLE}Tensor(f!) counters, Tensor? balance, Tensor(g!) flags, Tensor? keep,"
    " str layout, int recent_window, SymInt max_due, Tensor? after=None) -> ()"
)
_library.define(
    "observe(Tensor? query, Tensor key, Tensor ring_key, Tensor row_start, Tensor counters, Tensor(a!) balance,"
    " Tensor(b!) query_energy, Tensor partner, Tensor partner_share, Tensor? keep, int page_size, int sinks,"
    " int recent_window, bool center_keys, Tensor? after=None) -> ()"
)
_library.define(f"gather({_READ}str layout, SymInt length) -> (Tensor, Tensor)")


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, heads, length, _dim = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


def _no_result(*_: object) -> None:
    return None


def _gather_fake(
    pool: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    page_ids: Tensor,
    entries: Tensor,
    row_start: Tensor,
    counters: Tensor,
    balance: Tensor | None,
    layout: str,
    length: int,
) -> tuple[Tensor, Tensor]:
    batch, heads = ring_key.shape[:2]
    return (
        ring_key.new_empty(batch, heads, length, ring_key.shape[-1]),
        ring_value.new_empty(batch, heads, length, ring_value.shape[-1]),
    )


@lru_cache(maxsize=None)  # asked at every call
def has_kernels(layout: str) -> bool:
    """Whether the Triton kernels know the layout of this name; if not, the reference does its work on every device."""
    page = PageLayout.from_name(layout)
    if page.key_format == "qjl" or page.value_format == "grouped":
        return False
    if page.rotation != "hadamard" and (page.rotates_keys or page.rotates_values):
        return False
    return page.scale != "norm" or page.key_format != "lloyd_max"


def _arguments(op: str) -> list[str]:
    return [a.name for a in getattr(torch.ops.tq_hf, op).default._schema.arguments]


def _position(op: str, argument: str) -> int | None:
    names = _arguments(op)
    return names.index(argument) if argument in names else None


@lru_cache(maxsize=None)  # asked at every call
def _in_kernels(name: str, layout: str | None) -> Callable[..., Any] | None:
    """The op of this name in Triton, None if it is not there for the layout."""
    if layout is not None and not has_kernels(layout):
        return None
    from . import kernels  # imported on first use: a machine without a GPU needs no Triton

    found: Callable[..., Any] = getattr(kernels, name)
    return found


def _on_cuda(name: str, in_reference: Callable[..., Any]) -> Callable[..., Any]:
    layout = _position(name, "layout")

    def launch(*args: Any) -> Any:
        return (_in_kernels(name, None if layout is None else args[layout]) or in_reference)(*args)

    return launch


def _is_plain(tensor: Tensor) -> bool:
    """Whether a call that takes this tensor is for a GPU, and nothing traces or intercepts it."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:
        return False
    return tensor.is_cuda and torch._C._len_torch_dispatch_stack() == 0


def _without_dispatcher(name: str, in_reference: Callable[..., Any]) -> Callable[..., Any]:
    """The op of this name, past torch's dispatcher where `_is_plain`: it takes the host longer than a kernel's launch."""
    registered, on_cuda = getattr(torch.ops.tq_hf, name), _on_cuda(name, in_reference)
    counters = _position(name, "counters")  # a tensor that every op has
    assert counters is not None

    def call(*args: Any) -> Any:
        return on_cuda(*args) if _is_plain(args[counters]) else registered(*args)

    return call


def _unordered(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an op without its argument `after`."""
    end = _position(name, "after")
    return implementation if end is None else lambda *args: implementation(*args[:end])


for _name, _reference, _fake in (
    ("attend", reference.attend, _attend_fake),
    ("observe", reference.observe, _no_result),
    ("commit", reference.commit, _no_result),
    ("gather", reference.gather, _gather_fake),
):
    _library.impl(_name, _unordered(_name, _reference), "CPU")
    _library.impl(_name, _unordered(_name, _on_cuda(_name, _reference)), "CUDA")
    torch.library.register_fake(f"tq_hf::{_name}", _fake, lib=_library)

_COUNTERS, _MASK, _LAYOUT = map(_arguments("attend").index, ("counters", "mask", "layout"))

attend = _without_dispatcher("attend", reference.attend)
observe = _without_dispatcher("observe", reference.observe)
commit = _without_dispatcher("commit", reference.commit)
gather = _without_dispatcher("gather", reference.gather)


def attend_and_commit(flags: Tensor, recent_window: int, *args: Any) -> Tensor:
    """`attend`, then `commit` of the single new token, which makes no page due: a decode step, which kernels do in one chain
    of launches.

    Args:
        flags, recent_window: of `commit`.
        args: of `attend`.
    """
    if _is_plain(args[_COUNTERS]) and (run := _in_kernels("attend", args[_LAYOUT])) is not None:
        done: Tensor = run(*args, recent_window)
        return done
    out: Tensor = attend(*args)
    commit(*args[1:_MASK], flags, None, args[_LAYOUT], recent_window, 0)
    return out


class InferenceOnly(torch.autograd.Function):
    """Ties a result to what it came from, so that a backward pass fails instead of missing the gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "TurboQuantCache and attn_implementation='turboquant' are for inference: no gradient flows through packed keys"
            " and values. Run the model under torch.no_grad(), or train with transformers' DynamicCache and 'sdpa' or"
            " 'eager' attention."
        )


def inference_only(out: Tensor, *sources: Tensor | None) -> Tensor:
    """`out`, from which a backward pass to any of `sources` that wants a gradient fails."""
    if torch.is_grad_enabled():
        for source in sources:
            if source is not None and source.requires_grad:
                return InferenceOnly.apply(source, out)
    return out


def mask_error(mask: Tensor, query: Tensor, keys: int, may_be_wider: bool = False) -> str | None:
    """What is wrong with a mask that should be [B or 1, 1, q or 1, keys] for `query` [B, Hq, q, D]; None if nothing is."""
    batch, _, queries, _ = query.shape
    shape = tuple(mask.shape)
    wide_enough = shape[3] >= keys if may_be_wider else shape[3] == keys
    if shape[0] in (1, batch) and shape[1] == 1 and shape[2] in (1, queries) and wide_enough:
        return None
    return (
        f"attention mask of shape {shape} does not fit {batch} rows with {queries} queries over {keys} keys: expected"
        f" ({batch} or 1, 1, {queries} or 1, {keys})."
    )


def device_error(device: torch.device, *tensors: Tensor | None) -> str | None:
    """What is wrong with tensors that kernels would read on `device`, by address alone; None if nothing is."""
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            return (
                f"attention was given a tensor on {tensor.device}, and its keys are on {device}: move it there, or give all"
                " modules of an attention layer one device in the device_map."
            )
    return None


def attend_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    aux_sinks: Tensor | None,
    scaling: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    """Attention over plain tensors, with what torch's SDPA lacks: softcap and learned sinks.

    Args:
        query: [B, Hq, q, D].
        key, value: [B, H, n, D / Dv]; the last query is aligned with the last key.
        mask: bool or uint8 [B or 1, 1, q or 1, n], nonzero keeps.
        aux_sinks: [Hq] logits added to each head's softmax denominator.

    Returns:
        [B, q, Hq, Dv] in the query's dtype.
    """
    batch, heads, keys, key_dim = key.shape
    if error := device_error(key.device, query, value, mask, aux_sinks):
        raise ValueError(error)
    if mask is not None and (error := mask_error(mask, query, keys, may_be_wider=True)):
        raise ValueError(error)
    layout = PageLayout(key_dim, value.shape[-1], 32, "raw", 16, "raw", 16, False, "gaussian")

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=key.device)

    out = attend(
        query.detach(),
        key.detach(),
        value.detach(),
        zeros(0, heads, layout.page_words),
        key.new_empty(batch, heads, 1, key_dim),
        value.new_empty(batch, heads, 1, value.shape[-1]),
        key.new_empty(batch, heads, 0, key_dim),
        value.new_empty(batch, heads, 0, value.shape[-1]),
        zeros(batch, 1),
        zeros(1, 2),
        zeros(batch),
        zeros(3),
        None,
        mask,
        aux_sinks,
        layout.name,
        scaling,
        softcap,
        causal,
        0,
    )
    return inference_only(out, query, key, value, aux_sinks)
