"""Attention over a paged KV cache, as a function that transformers' modelling code calls in every layer.

`PagedContext` turns a RaggedBatch into index tensors once per forward: where new keys and values go, and which cached
ones each group of sequences reads. `paged_attention` then writes a layer's new keys and values and attends, group by
group.

Shapes: T packed tokens, S sequences, B sequences of a group, n queries and L keys of each, H key/value heads, G query
heads for each of these, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tandem.engine.runner import Int32Array, RaggedBatch

_SHORT_QUERIES = 32  # up to here (verify blocks, single tokens) sequences attend together, above one by one

Int64Array = npt.NDArray[np.int64]
Rows = slice | torch.Tensor  # rows of a tensor: a view where they are consecutive, an index where not


def to_device(array: Int32Array | Int64Array, device: torch.device) -> torch.Tensor:
    """Indices for torch, which wants 64 bits."""
    return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)


class AttentionGroup:
    """Sequences that attend in one call: B sequences, n queries each, L keys each; shorter ones are padded."""

    num_sequences: int  # B
    num_queries: int  # n
    num_keys: int  # L
    slots: Rows  # of the keys in the cache, B * L of them
    rows: Rows  # packed rows of the queries, B * n of them; padding may be any row
    kept: torch.Tensor | None  # which of the B * n results are not padding; None: all
    targets: Rows  # packed rows of the results that are kept
    short: bool  # few queries each
    causal: bool  # one long sequence from its first token on

    def bias(self, repeats: int) -> torch.Tensor | None:
        """[B, 1, repeats * n, L], added to the scores: 0 where a query sees a key, -inf where not; None: sees all.

        Not boolean, since scaled_dot_product_attention would turn that into this one again in every layer.
        """
        raise NotImplementedError

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Attention of the group's rows of `query` [T, H * G, D] over the cache [slots, H, D]: [rows, H * G, D]."""
        key, value = self._gather(keys), self._gather(values)
        batch, heads, n = self.num_sequences, keys.shape[1], self.num_queries
        repeats = query.shape[1] // heads
        query = query[self.rows].view(batch, n, heads, repeats, -1).permute(0, 2, 3, 1, 4)  # [B, H, G, n, D]
        if self.short or softcap is not None:
            # The G query heads of a key head become G times as many queries: every key is read once, for all of them.
            query = query.reshape(batch, heads, repeats * n, -1)
            bias = self.bias(repeats)
            if softcap is None:
                output = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
            else:
                output = _softcapped_attention(query, key, value, bias=bias, scaling=scaling, softcap=softcap)
        else:
            # One long sequence: heads go where the batch was, so that one mask [n, L] serves all heads as it is.
            output = functional.scaled_dot_product_attention(
                query[0],
                key[0][:, None].expand(-1, repeats, -1, -1),
                value[0][:, None].expand(-1, repeats, -1, -1),
                attn_mask=None if self.causal else self.bias(1),
                is_causal=self.causal,
                scale=scaling,
            )
        output = output.view(batch, heads, repeats, n, -1).permute(0, 3, 1, 2, 4)
        output = output.reshape(batch * n, heads * repeats, -1)
        return output if self.kept is None else output[self.kept]

    def _gather(self, cache: torch.Tensor) -> torch.Tensor:
        """The group's keys or values [B, H, L, D]; a view where they lie in a row."""
        rows = cache[self.slots] if isinstance(self.slots, slice) else cache.index_select(0, self.slots)
        return rows.view(self.num_sequences, self.num_keys, *cache.shape[1:]).transpose(1, 2)


class _Group(AttentionGroup):
    """As many queries and keys as the longest of its sequences has."""

    def __init__(self, context: PagedContext, members: Int64Array, window: int | None) -> None:
        starts, lengths, past = context.starts[members], context.lengths[members], context.past[members]
        # The oldest position that any of a sequence's queries sees; older keys are not even gathered.
        first = np.zeros_like(past) if window is None else np.maximum(past - window + 1, 0)
        num_keys = past + lengths - first
        self.num_sequences = len(members)
        self.num_queries = n = int(lengths.max())
        self.num_keys = int(num_keys.max())
        self.slots = context.slots_of_keys(members, first, num_keys)
        # Packed rows of the queries [B * n]; padding repeats a sequence's last query, and `kept` drops its result.
        self.kept = None
        if (lengths == n).all() and (np.diff(members) == 1).all():
            self.rows = self.targets = slice(int(starts[0]), int(starts[-1]) + n)
        else:
            steps = np.arange(n)
            rows = (starts[:, None] + np.minimum(steps, lengths[:, None] - 1)).reshape(-1)
            kept = np.flatnonzero(steps < lengths[:, None])
            self.rows, self.targets = to_device(rows, context.device), to_device(rows[kept], context.device)
            if len(kept) < len(rows):
                self.kept = to_device(kept, context.device)

        self.short = n <= _SHORT_QUERIES
        self.sees_all = n == 1 and bool((num_keys == self.num_keys).all())
        # A prompt from its first token on: kernels know this pattern without a mask, and skip half of the work.
        self.causal = not self.short and int(past[0]) == 0 and (window is None or n <= window)
        self._first, self._past, self._window = first, past, window
        self._device, self._dtype = context.device, context.dtype
        self._biases: dict[int, torch.Tensor] = {}

    def bias(self, repeats: int) -> torch.Tensor | None:
        if self.sees_all:
            return None
        if repeats not in self._biases:
            device = self._device
            keys = torch.arange(self.num_keys, device=device) + to_device(self._first, device)[:, None]
            queries = torch.arange(self.num_queries, device=device).repeat(repeats)
            queries = queries + to_device(self._past, device)[:, None]
            self._biases[repeats] = causal_bias(queries, keys, self._window, self._dtype)
        return self._biases[repeats]


def causal_bias(queries: torch.Tensor, keys: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, q, L] from positions of queries [B, q] and keys [B, L]: -inf where a query does not see a key, else 0."""
    queries, keys = queries[:, :, None], keys[:, None, :]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None]


def _softcapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Attention with scores squashed into (-softcap, softcap) (Gemma 2), which no fused kernel does."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(query.dtype), value)


class AttentionContext(Protocol):
    """What the attention function of every layer needs to know of one forward."""

    @property
    def keys(self) -> Sequence[torch.Tensor]:
        """Per layer, the cached keys [slots, H, D]."""

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """Per layer, the cached values [slots, H, D]."""

    @property
    def new_slots(self) -> Rows:
        """Where the keys and values of the T packed tokens go."""

    def groups(self, window: int | None) -> Sequence[AttentionGroup]:
        """All sequences, in groups; the same for all layers with the same window."""


class PagedContext:
    """The context of any batch whatever: groups as the batch's own lengths suggest."""

    def __init__(
        self, batch: RaggedBatch, block_size: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        self.keys, self.values = keys, values
        self.device, self.dtype = keys[0].device, keys[0].dtype
        self.starts = batch.sequence_starts[:-1].astype(np.int64)
        self.lengths = np.diff(batch.sequence_starts).astype(np.int64)
        self.past = batch.past_lens.astype(np.int64)
        self._blocks = batch.block_table.astype(np.int64)
        self._block_starts = batch.block_starts.astype(np.int64)
        self._block_size = block_size
        sequences = np.repeat(np.arange(batch.num_sequences), self.lengths)
        positions = (self.past - self.starts)[sequences] + np.arange(batch.num_tokens)
        self.new_slots = self._rows(self._slots(sequences, positions))
        self._groups: dict[int | None, list[_Group]] = {}

    def groups(self, window: int | None) -> list[_Group]:
        if window not in self._groups:
            self._groups[window] = [_Group(self, members, window) for members in self._members(window)]
        return self._groups[window]

    def slots_of_keys(self, members: Int64Array, first: Int64Array, num_keys: Int64Array) -> Rows:
        """Slots of the members' keys from position `first` on, `num_keys` of each, padded to the longest.

        Padding repeats a sequence's own last slot: what other sequences hold can then never touch it, not even a NaN.
        """
        steps = np.minimum(np.arange(num_keys.max()), num_keys[:, None] - 1)
        return self._rows(self._slots(members[:, None], first[:, None] + steps).reshape(-1))

    def _members(self, window: int | None) -> list[Int64Array]:
        """Which sequences attend together: those with few queries and about as many keys, so that padding is small."""
        num_keys = self.past if window is None else np.minimum(self.past, window)
        short = np.flatnonzero(self.lengths <= _SHORT_QUERIES)
        groups = [np.array([long]) for long in np.flatnonzero(self.lengths > _SHORT_QUERIES)]
        short = short[np.argsort(num_keys[short], kind="stable")]
        while len(short):
            size = int(np.searchsorted(num_keys[short], 2 * num_keys[short[0]] + 64, side="right"))
            groups.append(np.sort(short[:size]))
            short = short[size:]
        return groups

    def _slots(self, sequences: Int64Array, positions: Int64Array) -> Int64Array:
        blocks: Int64Array = self._blocks[self._block_starts[sequences] + positions // self._block_size]
        return blocks * self._block_size + positions % self._block_size

    def _rows(self, slots: Int64Array) -> Rows:
        if (np.diff(slots) == 1).all():
            return slice(int(slots[0]), int(slots[-1]) + 1)
        return to_device(slots, self.device)


# Arguments differ between families of models, hence Any; `model_check.inspect` has made sure that a model passes
# nothing that is ignored here.


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tandem_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store `key` and `value` [1, H, T, D], attend with `query` [1, H * G, T, D]; returns [1, T, H * G, D]."""
    if tandem_context is None:
        raise RuntimeError(
            "this model belongs to a TorchRunner; to call it directly, first call model.set_attn_implementation('sdpa')"
        )
    keys, values = tandem_context.keys[module.layer_idx], tandem_context.values[module.layer_idx]
    for cache, new in ((keys, key), (values, value)):
        rows = new[0].transpose(0, 1)
        if isinstance(tandem_context.new_slots, slice):
            cache[tandem_context.new_slots] = rows
        else:
            cache.index_copy_(0, tandem_context.new_slots, rows)
    packed_query = query[0].transpose(0, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    groups = tandem_context.groups(sliding_window)
    outputs = [group.attend(packed_query, keys, values, scaling=scaling, softcap=softcap) for group in groups]
    if len(groups) == 1 and isinstance(groups[0].targets, slice):
        return outputs[0][None], None
    output = query.new_empty(len(packed_query), *outputs[0].shape[1:])
    for group, part in zip(groups, outputs, strict=True):
        output[group.targets] = part
    return output[None], None
