"""`PackedKV`: what `cache.update` returns in place of a key or value tensor.

A handle, not a tensor. It knows its layer and carries the new raw states. The `"turboquant"` attention recognises it
and asks the layer to attend; `F.scaled_dot_product_attention` is intercepted through `__torch_function__` and takes the
same path; anything else sees a dense tensor, dequantized when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..cache import TurboQuantCache
    from .full import TurboQuantLayer


class Step:
    """The tokens of one `update`, shared by the key's and the value's handle.

    They are committed (appended to the exact tail, pages packed where due) once attention has seen them, since only
    attention knows the padding. Until then the layer holds the step. The step knows neither the layer nor, but weakly, the
    cache: one that is dropped then must free its memory at once, not when the garbage collector finds a cycle.

    Attributes:
        key, value: [B, H, n, D / Dv], the raw states.
        rows: the same as the ops want them: no gradient, each vector contiguous.
        new: n, the number of these tokens.
        is_first: nothing was cached before; attention over the raw states is complete.
        start: positions cached before these tokens (host knowledge; the dynamic mode only), counted from `origin`.
        origin: the `BlockTable.origin` of the layer when they came.
        committed: whether the layer has taken the tokens in.
        read: in code that is being compiled, what was last read of the layer's state; it has to be read before `commit`.
        ends: the cache, if this step is the last of a forward pass, which is over when it is committed.
    """

    __slots__ = ("committed", "dense", "ends", "is_first", "key", "new", "origin", "read", "rows", "start", "value")

    def __init__(self, key: Tensor, value: Tensor, is_first: bool, start: int, origin: int) -> None:
        self._take(key, value)
        self.is_first, self.start, self.origin = is_first, start, origin
        self.committed = False
        self.ends: ref[TurboQuantCache] | None = None
        self.read: Tensor | None = None
        self.dense: tuple[Tensor, Tensor] | None = None

    def _take(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value
        self.rows = (_row_vectors(key), _row_vectors(value))
        self.new = key.shape[2]

    @property
    def after(self) -> tuple[Tensor, ...]:
        """The last argument of ops that write to what was read (`ops.py`)."""
        return () if self.read is None else (self.read,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """For a cache that is copied between `update` and attention: the copy takes the tokens in at its next use."""
        memo[id(self)] = twin = object.__new__(Step)
        twin._take(self.key.detach().clone(), self.value.detach().clone())
        twin.is_first, twin.start, twin.origin = self.is_first, self.start, self.origin
        twin.committed, twin.dense, twin.read, twin.ends = self.committed, None, None, None
        return twin

    def __getstate__(self) -> tuple[None, dict[str, Any]]:  # for pickling, which takes no weak references
        return None, {name: getattr(self, name) for name in self.__slots__} | {"ends": None}


def _row_vectors(states: Tensor) -> Tensor:
    if states.requires_grad:
        states = states.detach()
    return states if states.stride(-1) == 1 else states.contiguous()


class PackedKV:
    """The keys or the values of one layer after an update, shape [B, H, length, D], packed.

    `shape`, `dtype`, `device`, `size()`, `dim()` cost nothing; every other use dequantizes the history once.
    """

    __slots__ = ("is_cut", "is_key", "layer", "repeats", "step")

    def __init__(self, layer: TurboQuantLayer, step: Step, is_key: bool, repeats: int = 1, is_cut: bool = False) -> None:
        self.layer, self.step = layer, step
        self.is_key = is_key
        self.repeats = repeats  # query heads a KV head, after transformers' repeat_kv
        self.is_cut = is_cut  # a static cache's first prompt, without the empty positions behind it

    @property
    def raw(self) -> Tensor:
        """The new tokens' states, [B, H, n, D]."""
        return self.step.key if self.is_key else self.step.value

    @property
    def shape(self) -> torch.Size:
        batch, heads, new, dim = self.raw.shape
        length = new if self.is_cut else self.layer.visible_length(self.step)
        return torch.Size((batch, heads * self.repeats, length, dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.raw.dtype

    @property
    def device(self) -> torch.device:
        return self.raw.device

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dense(self) -> Tensor:
        """The dequantized states as a tensor, [B, H * repeats, length, D]."""
        if self.is_cut:
            or_drop(self, self.layer.commit, self.step, None)
            dense = self.raw
        else:
            dense = or_drop(self, self.layer.dense, self.step)[0 if self.is_key else 1]
        return dense if self.repeats == 1 else dense.repeat_interleave(self.repeats, dim=1)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("device")
        if isinstance(target, torch.dtype) and target == self.dtype:
            return self
        if isinstance(target, (torch.device, str, int)) and len(args) + len(kwargs) == 1:
            device = torch.device(target)
            if device.type == self.device.type and device.index in (None, self.device.index):
                return self
        return self.dense().to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        every = slice(None)
        if isinstance(index, tuple) and all(i is None or isinstance(i, slice) for i in index):
            if index == (every, every, None, every, every):  # the first step of transformers' repeat_kv
                return _HeadRepeat(self)
            if self.step.is_first and index == (every, every, slice(None, self.raw.shape[2]), every):
                return PackedKV(self.layer, self.step, self.is_key, self.repeats, is_cut=True)
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __repr__(self) -> str:
        return f"PackedKV({'key' if self.is_key else 'value'}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        return func(*(densify(a) for a in args), **{name: densify(a) for name, a in kwargs.items()})

    def __len__(self) -> int:
        return self.shape[0]


def _operator(name: str) -> Any:
    def apply(handle: PackedKV, *others: Any) -> Any:
        return getattr(handle.dense(), name)(*(densify(other) for other in others))

    return apply


# Python looks operators up on the type, where __getattr__ has no say.
for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(PackedKV, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(PackedKV, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"):  # compared by element and hashed by identity, as tensors
    setattr(PackedKV, f"__{_name}__", _operator(f"__{_name}__"))


class _HeadRepeat:
    """`handle[:, :, None, :, :]` inside transformers' `repeat_kv`: keeps the handle packed through expand and reshape."""

    def __init__(self, handle: PackedKV, repeats: int = 1) -> None:
        self._handle = handle
        self._repeats = repeats

    def expand(self, *sizes: Any) -> Any:
        batch, heads, length, dim = self._handle.shape
        wanted = sizes[0] if len(sizes) == 1 else sizes
        if len(wanted) == 5 and (*wanted[:2], *wanted[3:]) == (batch, heads, length, dim):
            return _HeadRepeat(self._handle, wanted[2])
        return self._dense().expand(*sizes)

    def reshape(self, *sizes: Any) -> Any:
        batch, heads, length, dim = self._handle.shape
        wanted = sizes[0] if len(sizes) == 1 else sizes
        if tuple(wanted) == (batch, heads * self._repeats, length, dim):
            handle = self._handle
            return PackedKV(handle.layer, handle.step, handle.is_key, handle.repeats * self._repeats, handle.is_cut)
        return self._dense().reshape(*sizes)

    def _dense(self) -> Tensor:
        return self._handle.dense()[:, :, None, :, :].expand(-1, -1, self._repeats, -1, -1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dense(), name)


def are_pair(key: Any, value: Any) -> bool:
    """Whether these are the key's and the value's handle of one update."""
    handles = isinstance(key, PackedKV) and isinstance(value, PackedKV)
    return handles and key.step is value.step and key.is_key and not value.is_key and key.is_cut == value.is_cut


def densify(value: Any) -> Any:
    """`value` with every handle in it replaced by its dense tensor."""
    if isinstance(value, PackedKV):
        return value.dense()
    if isinstance(value, (list, tuple)):
        return type(value)(densify(v) for v in value)
    return value


def kept_positions(mask: Tensor, batch_size: int) -> Tensor:
    """Which positions of each row are not padding, [B, kv]: those that some query may see."""
    seen = mask[:, 0, 0] if mask.shape[2] == 1 else mask[:, 0].any(1)
    return seen.expand(batch_size, -1)


def or_drop(handle: PackedKV, read: Callable[..., Any], *arguments: Any) -> Any:
    """`read(*arguments)`; where it fails, the layer forgets the handle's step, as if its tokens had not come.

    Otherwise a forward pass that failed here would leave tokens that the layer takes in later.
    """
    if torch.compiler.is_compiling():
        return read(*arguments)
    try:
        return read(*arguments)
    except BaseException:
        handle.layer.drop(handle.step)
        raise


def attend_first(query: Tensor, handle: PackedKV, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Attention over a first prompt's raw states by torch's own kernels: exact, and fastest while nothing is packed.

    Args:
        query: [B, Hq, q, D].
        handle: of the keys or of the values.
        mask: complete bool mask [B or 1, 1, q or 1, >= n], or None.

    Returns:
        [B, Hq, q, Dv].

    Raises:
        ValueError: a tensor on another device than the keys'.
    """
    key, value = handle.step.key, handle.step.value
    handle.layer.require_device(handle.step, query, mask)
    group = query.shape[1] // key.shape[1]
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        if group > 1:  # with a mask, grouped heads would fall back to a kernel that holds all scores
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            group = 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor | PackedKV,
    value: Tensor | PackedKV,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` where key or value is a handle: the same arguments and result.

    Its masks are complete by torch's contract, and `is_causal` aligns the first query with the first key, which is only
    meaningful for a first prompt.
    """
    packed = are_pair(key, value)
    readable = attn_mask is None or (attn_mask.dtype == torch.bool and (attn_mask.ndim < 4 or attn_mask.shape[1] == 1))
    if packed and readable and dropout_p == 0.0 and (scale is None or scale > 0):
        assert isinstance(key, PackedKV) and isinstance(value, PackedKV)
        if key.step.is_first or not is_causal or query.shape[2] == key.shape[2]:
            return or_drop(key, _attend, query, key, attn_mask, is_causal, scale)
    return F.scaled_dot_product_attention(
        query, densify(key), densify(value), attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attend(query: Tensor, key: PackedKV, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    step, layer = key.step, key.layer
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        layer.require_mask(key, query, mask)
    if not step.is_first:
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return layer.attend_and_commit(step, query, mask, None, scaling, 0.0, is_causal).transpose(1, 2)
    out = attend_first(query, key, mask, is_causal, scale)
    layer.commit(step, mask, query)
    return out
