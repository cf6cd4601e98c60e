"""Where a recorded step (static_decode.py) finds its numbers: buckets of fixed shapes, their buffers, and a context for
attention that is computed from a buffer on the device.

Shapes: S sequences, n new tokens of each, L keys of each, M blocks of each, A tokens gone on for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem.engine.paged_attention import AttentionGroup, Int64Array, Rows, causal_bias, to_device
from tandem.engine.runner import Choosing, Int32Array, RaggedBatch

_NUM_NEW = (1, 2, 3, 5, 9, 17)  # a token, or k drafted ones and the one before them
_MOST_SEQUENCES = 64
_FEWEST_KEYS, _MOST_KEYS = 256, 4096  # of a sequence
_MOST_ROWS = 512  # S * n: logits of 128,000 ids are 262 MB then
# S * L: keys and values of 8 heads of 128 in 16 bits are 0.5 GB then, for one layer at a time.
_MOST_KEYS_OF_ALL = 1 << 17
_WINDOW_MULTIPLE = 16  # fused attention wants masks whose rows start at aligned addresses


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shapes of one step."""

    num_sequences: int  # S
    num_new: int  # n
    num_keys: int  # L
    num_ahead: int = 0  # A: tokens that the step chooses and computes itself
    law_size: int = 1  # and of how many of the likeliest


def bucket_of(batch: RaggedBatch, *, num_ahead: int = 0, law_size: int = 1) -> Bucket | None:
    """The smallest bucket that holds the batch and what it goes on for; None where it is too large for any."""
    lengths = np.diff(batch.sequence_starts)
    longest = int(lengths.max())
    if longest > _NUM_NEW[-1] or len(lengths) > _MOST_SEQUENCES:
        return None
    num_sequences = _power_of_two(len(lengths))
    num_new = next(count for count in _NUM_NEW if count >= longest)
    num_keys = max(_FEWEST_KEYS, _power_of_two(int((batch.past_lens + lengths).max()) + num_ahead))
    rows, keys = num_sequences * max(num_new, 1 + num_ahead), num_sequences * num_keys
    if num_keys > _MOST_KEYS or rows > _MOST_ROWS or keys > _MOST_KEYS_OF_ALL:
        return None
    return Bucket(num_sequences, num_new, num_keys, num_ahead, law_size)


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a step stand: what StaticContext needs to know of a bucket's buffer."""

    block_size: int
    spare_block: int
    num_new: int  # n
    num_keys: int  # L
    past: torch.Tensor  # [S]
    lengths: torch.Tensor  # [S]; 0: the sequence is missing
    blocks: torch.Tensor  # [S, M]

    def behind(self) -> Layout:
        """One token more of each sequence, behind these."""
        return replace(self, num_new=1, past=self.past + self.lengths, lengths=self.lengths.clamp(max=1))


class StaticInputs:
    """A bucket's buffer on the device, and views of what is in it."""

    def __init__(self, bucket: Bucket, *, block_size: int, spare_block: int, device: torch.device) -> None:
        self.bucket = bucket
        num_blocks = -(-bucket.num_keys // block_size)
        self._shapes = (
            (bucket.num_sequences, bucket.num_new),
            (bucket.num_sequences,),
            (bucket.num_sequences,),
            (bucket.num_sequences, num_blocks),
            (bucket.num_sequences,),
            (bucket.num_sequences, bucket.num_ahead),
        )
        self._sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self.token_ids, past, lengths, blocks, temperatures, uniforms = (
            part.view(shape) for part, shape in zip(self._buffer.split(self._sizes), self._shapes, strict=True)
        )
        self.layout = Layout(block_size, spare_block, bucket.num_new, bucket.num_keys, past, lengths, blocks)
        self.temperatures, self.uniforms = temperatures.view(torch.float64), uniforms.view(torch.float64)  # [S], [S, A]
        self.chosen = torch.zeros((bucket.num_sequences, bucket.num_ahead), dtype=torch.int64, device=device)

    def fill(self, batch: RaggedBatch, choosing: Sequence[Choosing] = ()) -> None:
        """Write a batch that fits the bucket, in one copy. Sequences that are missing get no tokens and no past."""
        host = np.zeros(len(self._buffer), dtype=np.int64)
        parts = np.split(host, np.cumsum(self._sizes)[:-1])
        token_ids, past, lengths, blocks, temperatures, uniforms = (
            part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)
        )
        sequences, steps = _cells(batch.sequence_starts)
        token_ids[sequences, steps] = batch.token_ids
        past[: batch.num_sequences] = batch.past_lens
        lengths[: batch.num_sequences] = np.diff(batch.sequence_starts)
        blocks[:] = self.layout.spare_block
        sequences, steps = _cells(batch.block_starts)
        inside = steps < blocks.shape[1]  # a sequence may hold more blocks than its tokens take
        blocks[sequences[inside], steps[inside]] = batch.block_table[inside]
        for index, one in enumerate(choosing):
            temperatures.view(np.float64)[index] = one.temperature
            uniforms.view(np.float64)[index] = one.uniforms[: self.bucket.num_ahead]
        # The driver has read pageable memory when the call returns, whatever the device is still doing.
        self._buffer.copy_(torch.from_numpy(host), non_blocking=True)

    def rows(self, batch: RaggedBatch) -> Rows:
        """Where the logits that the batch wants are among the step's S * n."""
        sequences, steps = _cells(batch.sequence_starts)
        rows = (sequences * self.bucket.num_new + steps)[batch.logits_rows]
        if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1:  # they ascend
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return to_device(rows, self._buffer.device)


def _cells(starts: Int32Array) -> tuple[Int64Array, Int64Array]:
    """Row and column in a padded table for each item of a packed list, whose row i begins at starts[i]."""
    counts = np.diff(starts).astype(np.int64)
    rows = np.arange(len(counts)).repeat(counts)
    return rows, np.arange(int(starts[-1])) - starts.astype(np.int64)[rows]


class StaticContext:
    """What PagedContext is for any batch, computed on the device from a bucket's buffer."""

    def __init__(self, layout: Layout, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.layout, self.keys, self.values = layout, keys, values
        steps = torch.arange(layout.num_new, device=keys[0].device)
        last_step = (layout.lengths - 1).clamp(min=0)
        self.last = layout.past + last_step  # [S], each sequence's last position
        # Padding stands where the last token stands: a position that the model knows, whose query sees some key.
        self.positions = layout.past[:, None] + torch.minimum(steps, last_step[:, None])  # [S, n]
        padding = steps >= layout.lengths[:, None]
        # Not torch.where, which would copy its number to the device, and that no graph can hold.
        spare_slot = layout.spare_block * layout.block_size
        self.new_slots: Rows = self.slots_of(self.positions).masked_fill_(padding, spare_slot).flatten()
        self._groups: dict[int | None, list[_StaticGroup]] = {}

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of each sequence's tokens at positions [S, any]."""
        size = self.layout.block_size
        blocks: torch.Tensor = self.layout.blocks.gather(1, positions // size)
        return blocks * size + positions % size

    def groups(self, window: int | None) -> list[_StaticGroup]:
        if window not in self._groups:
            self._groups[window] = [_StaticGroup(self, window)]
        return self._groups[window]


class _StaticGroup(AttentionGroup):
    """All sequences of a bucket, with all the keys that a window leaves."""

    kept, short, causal = None, True, False

    def __init__(self, context: StaticContext, window: int | None) -> None:
        layout, past = context.layout, context.layout.past
        self.num_sequences, self.num_queries, self.num_keys = len(past), layout.num_new, layout.num_keys
        first = torch.zeros_like(past)
        if window is not None:
            seen = window - 1 + layout.num_new  # by any of a sequence's queries
            self.num_keys = min(layout.num_keys, -(-seen // _WINDOW_MULTIPLE) * _WINDOW_MULTIPLE)
            first = (past - window + 1).clamp(min=0)
        self._key_positions = first[:, None] + torch.arange(self.num_keys, device=past.device)  # [S, L]
        self.slots = context.slots_of(torch.minimum(self._key_positions, context.last[:, None])).flatten()
        self.rows = self.targets = slice(0, self.num_sequences * self.num_queries)
        self._query_positions, self._window, self._dtype = context.positions, window, context.keys[0].dtype
        self._biases: dict[int, torch.Tensor] = {}

    def bias(self, repeats: int) -> torch.Tensor:
        if repeats not in self._biases:
            queries = self._query_positions.repeat(1, repeats)
            self._biases[repeats] = causal_bias(queries, self._key_positions, self._window, self._dtype)
        return self._biases[repeats]
