"""Decode steps and verify blocks in shapes that do not depend on the data, so that a CUDA graph can replay them.

Launching a model's kernels one by one from Python takes longer than the GPU needs to run them. A graph launches them
all at once, but it is a tape: the same kernels on the same memory, whatever the numbers in it. So a batch is laid out
in a *bucket*, S sequences of n new tokens each and L keys at most, and written into the bucket's buffer by one copy.
All else (positions, slots, masks) is computed from that buffer on the device, as part of the step:

* missing new tokens of a sequence, and missing sequences, are padding: their keys go to a block set aside for them,
  their logits are left out of the answer;
* missing keys repeat the sequence's own last one and are masked, as in `PagedContext`: nothing that other sequences
  hold can touch it, not even a NaN.

How a step is recorded is up to a `Capture`: `cuda_graphs.py` on a GPU; `as_it_is` runs it anew each time, which works
everywhere, and is how all of this is tested without a GPU.

Shapes: S sequences, n new tokens of each, L keys of each, M blocks of each, R rows of logits that are wanted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.engine.paged_attention import AttentionGroup, Int64Array, Rows, causal_bias, to_device
from tandem.engine.runner import Int32Array, RaggedBatch

_log = logging.getLogger(__name__)

_NUM_NEW = (1, 2, 3, 5, 9, 17)  # a token, or k drafted ones and the one before them
_MOST_SEQUENCES = 64
_FEWEST_KEYS, _MOST_KEYS = 256, 4096  # of a sequence
_MOST_ROWS = 512  # S * n: logits of 128,000 ids are 262 MB then
# S * L: keys and values of 8 heads of 128 in 16 bits are 0.5 GB then, for one layer at a time.
_MOST_KEYS_OF_ALL = 1 << 17
_MOST_STEPS = 64  # recorded at once; each keeps its logits and a few MB of the driver's
_WINDOW_MULTIPLE = 16  # fused attention wants masks whose rows start at aligned addresses

Step = Callable[[], torch.Tensor]  # one forward over a bucket's buffer: logits [S * n, vocab], reused by the next call
Capture = Callable[[Step], Step]  # records a step; raises RuntimeError where it cannot be recorded


def as_it_is(step: Step) -> Step:
    """The Capture that records nothing."""
    return step


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shapes of one step."""

    num_sequences: int  # S
    num_new: int  # n
    num_keys: int  # L


def bucket_of(batch: RaggedBatch) -> Bucket | None:
    """The smallest bucket that holds the batch; None where it is too large for any."""
    lengths = np.diff(batch.sequence_starts)
    longest = int(lengths.max())
    if longest > _NUM_NEW[-1] or len(lengths) > _MOST_SEQUENCES:
        return None
    num_sequences = _power_of_two(len(lengths))
    num_new = next(count for count in _NUM_NEW if count >= longest)
    num_keys = max(_FEWEST_KEYS, _power_of_two(int((batch.past_lens + lengths).max())))
    rows, keys = num_sequences * num_new, num_sequences * num_keys
    if num_keys > _MOST_KEYS or rows > _MOST_ROWS or keys > _MOST_KEYS_OF_ALL:
        return None
    return Bucket(num_sequences, num_new, num_keys)


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


class StaticInputs:
    """A bucket's buffer on the device, and views of what is in it."""

    def __init__(self, bucket: Bucket, *, block_size: int, spare_block: int, device: torch.device) -> None:
        self.bucket, self.block_size, self.spare_block = bucket, block_size, spare_block
        num_blocks = -(-bucket.num_keys // block_size)
        self._shapes = (
            (bucket.num_sequences, bucket.num_new),
            (bucket.num_sequences,),
            (bucket.num_sequences,),
            (bucket.num_sequences, num_blocks),
        )
        self._sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self.token_ids, self.past, self.lengths, self.blocks = (  # [S, n], [S], [S], [S, M]
            part.view(shape) for part, shape in zip(self._buffer.split(self._sizes), self._shapes, strict=True)
        )

    def fill(self, batch: RaggedBatch) -> None:
        """Write a batch that fits the bucket, in one copy. Sequences that are missing get no tokens and no past."""
        host = np.zeros(len(self._buffer), dtype=np.int64)
        parts = np.split(host, np.cumsum(self._sizes)[:-1])
        token_ids, past, lengths, blocks = (
            part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)
        )
        sequences, steps = _cells(batch.sequence_starts)
        token_ids[sequences, steps] = batch.token_ids
        past[: batch.num_sequences] = batch.past_lens
        lengths[: batch.num_sequences] = np.diff(batch.sequence_starts)
        blocks[:] = self.spare_block
        sequences, steps = _cells(batch.block_starts)
        inside = steps < blocks.shape[1]  # a sequence may hold more blocks than its tokens take
        blocks[sequences[inside], steps[inside]] = batch.block_table[inside]
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

    def __init__(self, inputs: StaticInputs, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.inputs, self.keys, self.values = inputs, keys, values
        steps = torch.arange(inputs.bucket.num_new, device=keys[0].device)
        last_step = (inputs.lengths - 1).clamp(min=0)
        self.last = inputs.past + last_step  # [S], each sequence's last position
        # Padding stands where the last token stands: a position that the model knows, whose query sees some key.
        self.positions = inputs.past[:, None] + torch.minimum(steps, last_step[:, None])  # [S, n]
        padding = steps >= inputs.lengths[:, None]
        # Not torch.where, which would copy its number to the device, and that no graph can hold.
        spare_slot = inputs.spare_block * inputs.block_size
        self.new_slots: Rows = self.slots_of(self.positions).masked_fill_(padding, spare_slot).flatten()
        self._groups: dict[int | None, list[_StaticGroup]] = {}

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of each sequence's tokens at positions [S, any]."""
        size = self.inputs.block_size
        blocks: torch.Tensor = self.inputs.blocks.gather(1, positions // size)
        return blocks * size + positions % size

    def groups(self, window: int | None) -> list[_StaticGroup]:
        if window not in self._groups:
            self._groups[window] = [_StaticGroup(self, window)]
        return self._groups[window]


class _StaticGroup(AttentionGroup):
    """All sequences of a bucket, with all the keys that a window leaves."""

    kept, short, causal = None, True, False

    def __init__(self, context: StaticContext, window: int | None) -> None:
        bucket, past = context.inputs.bucket, context.inputs.past
        self.num_sequences, self.num_queries, self.num_keys = bucket.num_sequences, bucket.num_new, bucket.num_keys
        first = torch.zeros_like(past)
        if window is not None:
            seen = window - 1 + bucket.num_new  # by any of a sequence's queries
            self.num_keys = min(bucket.num_keys, -(-seen // _WINDOW_MULTIPLE) * _WINDOW_MULTIPLE)
            first = (past - window + 1).clamp(min=0)
        self._key_positions = first[:, None] + torch.arange(self.num_keys, device=past.device)  # [S, L]
        self.slots = context.slots_of(torch.minimum(self._key_positions, context.last[:, None])).flatten()
        self.rows = self.targets = slice(0, bucket.num_sequences * bucket.num_new)
        self._query_positions, self._window, self._dtype = context.positions, window, context.keys[0].dtype
        self._biases: dict[int, torch.Tensor] = {}

    def bias(self, repeats: int) -> torch.Tensor:
        if repeats not in self._biases:
            queries = self._query_positions.repeat(1, repeats)
            self._biases[repeats] = causal_bias(queries, self._key_positions, self._window, self._dtype)
        return self._biases[repeats]


class StaticDecoder:
    """Recorded steps, by bucket: the ones used last, `most_steps` of them.

    `compute` is the model: token ids [1, T], positions [1, T] and a context -> logits [T, vocab], float32. The caches
    `keys` and `values` have a block of their own for padding, `spare_block`, which no sequence owns.
    """

    def __init__(
        self,
        compute: Callable[[torch.Tensor, torch.Tensor, StaticContext], torch.Tensor],
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        block_size: int,
        spare_block: int,
        capture: Capture,
        most_steps: int = _MOST_STEPS,
    ) -> None:
        self._compute = compute
        self._keys, self._values = keys, values
        self._block_size, self._spare_block = block_size, spare_block
        self._capture: Capture | None = capture
        self._most_steps = most_steps
        self._steps: OrderedDict[Bucket, tuple[StaticInputs, Step]] = OrderedDict()  # the one used last is last

    def forward(self, batch: RaggedBatch) -> torch.Tensor | None:
        """Logits [R, vocab], reused by the next call; None where the batch fits no bucket or nothing can be recorded.

        A bucket's first batch takes longer, since its step is recorded then.
        """
        bucket = bucket_of(batch)
        if self._capture is None or bucket is None:
            return None
        if bucket in self._steps:
            self._steps.move_to_end(bucket)
            inputs, step = self._steps[bucket]
            inputs.fill(batch)
        else:
            inputs = StaticInputs(
                bucket, block_size=self._block_size, spare_block=self._spare_block, device=self._keys[0].device
            )
            inputs.fill(batch)  # before recording, which may run the step
            while len(self._steps) >= self._most_steps:
                self._steps.popitem(last=False)
            try:
                step = self._capture(lambda: self._run(inputs))
            except RuntimeError as error:
                # Some models' code looks at its numbers, as that of many experts does. They are served without.
                _log.warning("decode steps are not recorded: %s: %s", type(error).__name__, error)
                self._capture = None
                self._steps.clear()
                return None
            self._steps[bucket] = (inputs, step)
        return step()[inputs.rows(batch)]

    def _run(self, inputs: StaticInputs) -> torch.Tensor:
        context = StaticContext(inputs, self._keys, self._values)
        return self._compute(inputs.token_ids.view(1, -1), context.positions.view(1, -1), context)
