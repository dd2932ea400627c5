"""`TurboQuantLayer`: the state of one attention layer, as transformers' cache wants to see it.

    update(key, value)  ─► handles (nothing is stored yet)
    attend(step, query) ─► packed pages + sinks + ring + new tokens, in one softmax; then
    commit(step)        ─► due pages are packed, new tokens go into the ring
                           (`attend_and_commit` does both; in most decode steps it is one op)

Tokens are committed after attention has seen them, because only attention knows which of them are padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .. import debug, ops
from ..config import TurboQuantConfig
from ..pages.pool import while_alone
from ..pages.table import BlockTable
from ..quantizer.conditioning import partners
from ..quantizer.rotary import Rotary
from ..reporting.memory import storage_bytes
from ..reporting.reports import LayerReport, packed_report
from .checks import LayerChecks, signature
from .dense import LayerDense
from .edits import Before, LayerEdits
from .packed_kv import PackedKV, Step, kept_positions


class TurboQuantLayer(LayerChecks, LayerEdits, LayerDense, CacheLayerMixin):
    """Packed pages, an exact tail and exact first tokens of one full-attention layer.

    Args:
        config: how keys and values are stored.
        table: the block table that all packed layers of the cache share.
        preset: name for reports.
        rotary: of its keys, None for none.
        guards_capacity: check a static cache's length here (one layer of the cache does it for all).

    The tensors are made at the first `update`, from the shapes, dtype and device of its states.
    """

    is_sliding = False
    sliding_window: int | None = None
    is_croppable = True
    supports_early_init = True
    index: int | None = None  # in its cache, for messages
    has_dropped = False  # whether it has forgotten the tokens of the newest forward pass; static mode

    def __init__(
        self,
        config: TurboQuantConfig,
        table: BlockTable,
        preset: str,
        rotary: Rotary | None = None,
        guards_capacity: bool = False,
    ) -> None:
        # Not `CacheLayerMixin.__init__`, which would set `keys` and `values`.
        self.rotary = rotary
        self.guards_capacity = guards_capacity
        self.last_layer: TurboQuantLayer | None = None  # static mode: the last one of the cache, where this is the first
        self.config = config
        self.table = table
        self.preset = preset
        self.slot = table.add_layer()
        self.begin()

    @property
    def is_compileable(self) -> bool:
        return self.table.is_static

    # -- storage -----------------------------------------------------------------------------------------------------
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tail, the sinks and (static mode) the pool for states [B, H, n, D / Dv]."""
        is_first, has_pages = self.table.batch_size is None, self.table.pages.holds(self.slot)
        try:
            self._allocate(key_states, value_states)
        except BaseException:
            self.forget()
            if is_first:
                self.table.clear()
            elif not has_pages:
                self.table.pages.discard(self.slot)
            raise

    @torch.inference_mode(False)  # an inference tensor could not be written outside inference mode later
    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        layout = self._layout(key_states, value_states)
        batch, heads = key_states.shape[:2]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.layout_name = layout.name
        self.key_dim, self.value_dim = layout.key_dim, layout.value_dim
        self.kv_heads = heads
        self.table.begin(batch)
        self.on_device = self.table.on(self.device)

        def exact(tokens: int, dim: int) -> Tensor:
            return torch.zeros(batch, heads, tokens, dim, dtype=self.dtype, device=self.device)

        ring = self.config.recent_window + self.config.page_size  # the most that is exact after a commit
        self.ring_key, self.ring_value = exact(ring, self.key_dim), exact(ring, self.value_dim)
        self.sink_key = exact(self.table.sink_tokens, self.key_dim)
        self.sink_value = exact(self.table.sink_tokens, self.value_dim)
        pages = self.table.pages.capacity if self.table.is_static else 0
        if not self.table.pages.holds(self.slot):
            shape = (pages, heads, layout.page_words)
            self.table.pages.put(self.slot, torch.zeros(shape, dtype=torch.int32, device=self.device))
        self.flags = torch.zeros(heads, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(3, dtype=torch.int32, device=self.device)
        self.packed_end = self.table.sink_tokens
        self.counters[1:2].fill_(self.packed_end)  # an item that is assigned is copied, for which the host waits
        self.balance = self.query_energy = None
        if self.config.balance_keys:
            shape = (batch, heads, self.key_dim)
            self.balance = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self.query_energy = torch.zeros_like(self.balance)
            pairs = partners(self.rotary, self.key_dim, self.device)
            self.partner, self.partner_share = pairs.channel, pairs.share
        self.is_initialized = True
        self.mark_static()

    def mark_static(self) -> None:
        """Static mode: tell the compiler that addresses stay, so that CUDA graphs read and write the state in place."""
        if self.table.is_static and not torch.compiler.is_compiling():
            for tensor in self.tensors() + self.table.tensors():
                torch._dynamo.mark_static_address(tensor)

    def tensors(self) -> list[Tensor]:
        """Every tensor that this layer holds, once (the shared block table is not among them)."""
        if not self.is_initialized:
            return []
        state = self.table.pages.tensors(self.slot) + [getattr(self, name) for name in self.state_names()]
        if self.pending is not None:
            state += [self.pending.key, self.pending.value]
        if self.before is not None:
            state += self.before.tensors
        return state

    @property
    def pool(self) -> Tensor:
        """The packed pages of all rows, and of forks that share them: int32 [pages, H, page_words]."""
        return self.table.pages.of(self.slot)

    # -- transformers' contract --------------------------------------------------------------------------------------
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[PackedKV, PackedKV]:
        """Take new states and return handles for all keys and values so far.

        Args:
            key_states, value_states: [B, H, n, D / Dv], the model's dtype.

        Returns:
            Two `PackedKV`, shape [B, H, length + n, D / Dv] (static mode: [B, H, max_cache_len, D / Dv]).

        Raises:
            ValueError: shapes, dtype or device differ from the first call, or do not fit together.
            RuntimeError: the static capacity is exceeded.
        """
        if self.pending is not None:
            self.flush()
        compiling = torch.compiler.is_compiling()
        if compiling or signature(key_states, value_states) != self._valid:
            key_states, value_states = self._accept(key_states, value_states)
            if not compiling:
                self._valid = signature(key_states, value_states)
        if self.guards_capacity:
            self._check_capacity(key_states.shape[2])
        self._make_way(key_states.shape[2])
        self.pending = step = Step(key_states, value_states, self.is_empty, self.length, self.table.origin)
        return PackedKV(self, step, is_key=True), PackedKV(self, step, is_key=False)

    def _make_way(self, new: int) -> None:
        """Called before `new` tokens come in: a layer that forgets does so here."""

    def _mask_to_read(self, step: Step, mask: Tensor | None) -> Tensor | None:
        """A step's mask over all that its attention reads: a layer whose handles show less adds the rest here."""
        return mask

    def _announce(self, step: Step) -> None:
        """Called before a step's tokens are taken in: a layer that keeps no pages for what nobody will see notes it here."""

    def _accept(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """New states in the dtype they are kept in; makes the tensors where these are the first."""
        device = key.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            # Rotary embeddings leave keys in float32 there; attention would cast both.
            dtype = torch.get_autocast_dtype(device)
            key, value = key.to(dtype), value.to(dtype)
        self._validate(key, value)
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        return key, value

    def _known_length(self, step: Step) -> int:
        """Key positions up to the step's last one, from the table's origin on."""
        if self.table.max_cache_len is not None:
            return self.table.max_cache_len
        return step.start + step.new

    visible_length = _known_length  # key positions that a step's handles show

    def hidden(self, step: Step) -> int:
        """Positions from the table's origin on that come before those."""
        return 0

    def get_seq_length(self) -> Any:
        """Tokens in the cache: an int, or in the static mode a device scalar once there are any."""
        if not self.is_initialized:
            return 0
        pending = 0 if self.pending is None else self.pending.new
        if self.table.is_static:
            return self.counters[0] + pending if pending else self.counters[0]
        return self.length + pending

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of key positions, position of the first) that attention will see at the next update."""
        if self.table.max_cache_len is not None:
            return self.table.max_cache_len, 0
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.table.max_cache_len is None else self.table.max_cache_len

    def _state(self, new: int = 0) -> tuple[Tensor | None, ...]:
        """What every op reads, in the ops' order. `new` tokens are about to be committed."""
        if debug.ENABLED:
            debug.check_state(self, new)
        pool, table = self.table.pages.of(self.slot), self.on_device
        exact = (self.ring_key, self.ring_value, self.sink_key, self.sink_value)
        return (pool, *exact, table.page_ids, table.entries, table.row_start, self.counters, self.balance)

    # -- attention and storing ---------------------------------------------------------------------------------------
    def attend_and_commit(
        self,
        step: Step,
        query: Tensor,
        mask: Tensor | None,
        aux_sinks: Tensor | None,
        scaling: float,
        softcap: float,
        causal: bool,
    ) -> Tensor:
        """`attend`, then `commit`: what attention functions call for all but a first prompt."""
        if self._only_appends(step, query):
            return self._attend_and_append(step, query, mask, aux_sinks, scaling, softcap, causal)
        out = self.attend(step, query, mask, aux_sinks, scaling, softcap, causal)
        self.commit(step, mask, query)
        return out

    def _only_appends(self, step: Step, query: Tensor) -> bool:
        """Whether a step has a single token that only has to be written to the ring, as most decode steps do."""
        if step.new != 1 or step.committed or torch.compiler.is_compiling() or self.offload_after_commit or debug.ENABLED:
            return False
        table, length = self.table, self.length
        return not (
            table.is_static
            or query.numel() == 0
            or table.due(length + 1, self.packed_end)
            or table.is_padding_only(length)
            or self._learns_balance()
        )

    @while_alone
    def _attend_and_append(
        self,
        step: Step,
        query: Tensor,
        mask: Tensor | None,
        aux_sinks: Tensor | None,
        scaling: float,
        softcap: float,
        causal: bool,
    ) -> Tensor:
        """`attend_and_commit` of a step that `_only_appends`, in one call."""
        self.require_device(step, query, mask, aux_sinks)
        mask = self._mask_to_read(step, mask)
        self.before, self.is_torn = Before(self.length, self.packed_end, self.is_empty), True
        try:
            self._announce(step)
            reads = self._reads(query, *step.rows, mask, aux_sinks, scaling, softcap, causal)
            out = ops.attend_and_commit(self.flags, self.config.recent_window, *reads)
            self.length += 1
            step.committed, self.pending = True, None
        except BaseException:
            step.committed = False
            self.take_back()
            raise
        self._has_taken_in(step)
        return ops.inference_only(out, query, step.key, step.value, aux_sinks)

    def _reads(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any) -> tuple[Any, ...]:
        """What the op `attend` takes. `others`: from its argument `aux_sinks` on, less the layout's name."""
        aux_sinks, *how = others
        query = query.detach() if query.requires_grad else query
        return query, key, value, *self._state(), mask, aux_sinks, self.layout_name, *how, len(self.table.spans)

    @while_alone
    def attend(
        self,
        step: Step,
        query: Tensor,
        mask: Tensor | None,
        aux_sinks: Tensor | None,
        scaling: float,
        softcap: float,
        causal: bool,
    ) -> Tensor:
        """Attention of `query` over everything cached and the step's new tokens.

        Args:
            query: [B, Hq, q, D].
            mask: bool or uint8 [B or 1, 1, q or 1, >= length], nonzero keeps; None keeps all.
            aux_sinks: [Hq] logits in each head's softmax denominator (gpt-oss), or None.
            causal: whether query i sees only positions up to its own; the last query is the newest token.

        Returns:
            [B, q, Hq, Dv] in the query's dtype.

        Raises:
            ValueError: a tensor on another device than the cache's.
        """
        self.require_device(step, query, mask, aux_sinks)
        mask = self._mask_to_read(step, mask)
        key, value = step.rows
        if step.committed:  # a second layer reads the same keys (KV sharing): they are part of the state by now
            self._require_newest(step)
            key, value = key[:, :, :0], value[:, :, :0]
        out = ops.attend(*self._reads(query, key, value, mask, aux_sinks, scaling, softcap, causal))
        if torch.compiler.is_compiling():
            step.read = out
        return ops.inference_only(out, query, step.key, step.value, aux_sinks)

    @while_alone
    def commit(self, step: Step, mask: Tensor | None, query: Tensor | None = None) -> None:
        """Take the step's tokens in: pack the pages that fall due, write the rest into the ring.

        Args:
            mask: bool or uint8 [B or 1, 1, q or 1, >= length + n]: positions that it hides from every query are padding;
                None: no padding.
            query: [B, Hq, n, D], the queries of these tokens, where an attention function has seen them.

        An exception in here leaves the layer as it was before these tokens; in the static mode, which keeps no copies,
        it leaves `is_torn`.
        """
        if step.committed:
            return
        is_static, learns = self.table.is_static, self._learns_balance()
        if is_static:
            due = (step.new + self.config.page_size - 1) // self.config.page_size  # at most
        else:
            due = self.table.due(self.length + step.new, self.packed_end)
        if torch.compiler.is_compiling():
            self._take_in(step, mask, query, due, learns)
            return
        if not is_static:
            self.before = self._as_it_is(step, due, learns)
        self.is_torn = True
        try:
            self._take_in(step, mask, query, due, learns)
        except BaseException:
            step.committed = False
            if not is_static:
                self.take_back()
            raise
        self._has_taken_in(step)

    def _has_taken_in(self, step: Step) -> None:
        self.is_torn = False
        if step.ends is not None and (cache := step.ends()) is not None:
            for layer in cache.packed_layers:
                layer.before = None

    def _take_in(self, step: Step, mask: Tensor | None, query: Tensor | None, due: int, learns: bool) -> None:
        """`commit`, with `due` pages to pack, of a layer that (still) `learns` its keys' balance."""
        self._announce(step)
        table, new = self.table, step.new
        is_static = table.is_static
        key, value = step.rows
        starts = new > 1 or step.is_first or (not is_static and table.is_padding_only(step.start))
        keep = None
        if mask is not None and (due or starts or learns):
            keep = self._kept(step, mask)
            if starts:
                table.note_padding(keep, self.counters[0] if is_static else step.start, new)
        elif starts and not is_static:
            table.note_no_padding(step.start + new)
        if learns:
            self._observe(step, query, keep)
        if not is_static:
            self.length += new
            if due:
                self.packed_end += due * self.config.page_size
                table.reserve(self.packed_end)
                table.pages.grow(self.slot, table.pages.capacity)
                table.pages.note_written(self.slot)
        ops.commit(
            key,
            value,
            *self._state(new),
            self.flags,
            keep,
            self.layout_name,
            self.config.recent_window,
            due,
            *step.after,
        )
        step.committed = True
        self.is_empty = False
        self.pending = None
        if debug.ENABLED:
            debug.report_states(self)
        if self.offload_after_commit:
            self.offload()

    def _kept(self, step: Step, mask: Tensor) -> Tensor:
        """Which positions of each row a step's mask shows to some query, [B, >= length + n]."""
        return kept_positions(mask, step.key.shape[0])

    def _learns_balance(self) -> bool:
        """Whether new tokens may take part in the balance of key channels; the static mode cannot tell on the host."""
        if self.balance is None:
            return False
        # Once every row has its first page, it has its factors.
        return self.table.is_static or self.packed_end <= self.table.latest_start + self.config.sink_tokens

    def _observe(self, step: Step, query: Tensor | None, keep: Tensor | None) -> None:
        """Take the new tokens' part in the balance of key channels, before they are committed."""
        if debug.ENABLED:
            debug.check_state(self)
        key = step.rows[0]
        if query is not None:
            query = query.detach()
            if query.shape[2] != key.shape[2]:  # transformers folds the heads of a KV head into a single token's queries
                query = query.flatten(1, 2).unsqueeze(2) if key.shape[2] == 1 else None
        ops.observe(
            query,
            key,
            self.ring_key,
            self.on_device.row_start,
            self.counters,
            self.balance,
            self.query_energy,
            self.partner,
            self.partner_share,
            keep,
            self.config.page_size,
            self.config.sink_tokens,
            self.config.recent_window,
            self.config.center_keys,
            *step.after,
        )

    def drop(self, step: Step) -> None:
        """Forget tokens that attention refused or failed on, as if `update` had not been called."""
        if self.pending is step:
            self.pending = None
            self.has_dropped = True

    def flush(self) -> None:
        """Commit tokens that no attention function has looked at."""
        if self.pending is not None:
            self.commit(self.pending, mask=None)

    @property
    def batch_size(self) -> int:
        rows = self.table.batch_size
        if rows is None:
            raise AttributeError("batch_size is unknown before the first update")  # transformers asks with hasattr
        return rows

    @while_alone
    def offload(self) -> None:
        """Move the packed pages to host memory until they are read again. Exact tokens, which are few, stay.

        Between `update` and attention, where transformers calls this, attention still has to read them: then they go right
        after it.

        Raises:
            RuntimeError: in the static mode, where a captured graph knows the addresses.
        """
        if self.table.is_static:
            raise RuntimeError("a static TurboQuantCache cannot be offloaded: make it without max_cache_len.")
        self.offload_after_commit = self.pending is not None
        if self.is_initialized and self.pending is None:
            self.table.pages.offload(self.slot)

    @while_alone
    def prefetch(self) -> None:
        """Bring offloaded pages back ahead of their use."""
        if self.is_initialized:
            self.table.pages.fetch(self.slot)

    # -- reports -----------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        return storage_bytes(self.tensors())

    def report(self, layer: int) -> LayerReport:
        """Counts and bytes as of now (reads the device's counters)."""
        return packed_report(layer, self)
