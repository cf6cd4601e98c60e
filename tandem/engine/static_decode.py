"""Decode steps and verify blocks in shapes that do not depend on the data, so that a CUDA graph can replay them.

Launching a model's kernels one by one from Python takes longer than the GPU needs to run them. A graph launches them
all at once, but it is a tape: the same kernels on the same memory, whatever the numbers in it. So a batch is laid out
in a *bucket* (static_context.py), S sequences of n new tokens each and L keys at most, and written into the bucket's
buffer by one copy. All else (positions, slots, masks) is computed from that buffer on the device, as part of the step:

* missing new tokens of a sequence, and missing sequences, are padding: their keys go to a block set aside for them,
  their logits are left out of the answer;
* missing keys repeat the sequence's own last one and are masked, as in `PagedContext`: nothing that other sequences
  hold can touch it, not even a NaN.

A step may *go on*: choose a token behind each sequence, compute that, choose the next, and so on, all in one
recording. How to choose stands in the buffer, so that it is nearly always as the program that drafts will choose. That
one (drafting.py) looks at the logits itself, and drops what lies behind a token that it chooses otherwise.

How a step is recorded is up to a `Capture`: `cuda_graphs.py` on a GPU; `as_it_is` runs it anew each time, which works
everywhere, and is how all of this is tested without a GPU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tandem.engine.runner import Ahead, Choosing, RaggedBatch
from tandem.engine.static_context import Bucket, Layout, StaticContext, StaticInputs, bucket_of

_log = logging.getLogger(__name__)

_NUM_AHEAD = (1, 2, 4, 7)  # tokens that a step goes on for: what is left of drafts of 2, 3, 5, 8
_LEAST_TEMPERATURE = 1e-6  # below it all weight is the likeliest's, in float32
_MOST_STEPS = 64  # recorded at once; each keeps its logits and a few MB of the driver's


class Rows(NamedTuple):
    """What a forward makes of tokens: their logits [R, vocab], and the states [R, W] that the head read, float32."""

    logits: torch.Tensor
    states: torch.Tensor


Step = Callable[[], Rows]  # one forward over a bucket's buffer: of all tokens [S * n], reused by the next call
Capture = Callable[[Step], Step]  # records a step; raises RuntimeError where it cannot be recorded


def as_it_is(step: Step) -> Step:
    """The Capture that records nothing."""
    return step


class StaticDecoder:
    """Recorded steps, by bucket: the ones used last, `most_steps` of them.

    `compute` is the model: token ids [1, T], positions [1, T] and a context -> rows of all T. The caches
    `keys` and `values` have a block of their own for padding, `spare_block`, which no sequence owns.
    """

    def __init__(
        self,
        compute: Callable[[torch.Tensor, torch.Tensor, StaticContext], Rows],
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
        self._num_ahead: Sequence[int] = _NUM_AHEAD
        self._most_steps = most_steps
        self._steps: OrderedDict[Bucket, tuple[StaticInputs, Step]] = OrderedDict()  # the one used last is last

    def forward(self, batch: RaggedBatch) -> Rows | None:
        """The rows that are wanted, reused by the next call; None where the batch fits no bucket or nothing can be
        recorded.

        A bucket's first batch takes longer, since its step is recorded then.
        """
        found = self._step(batch, bucket_of(batch), ())
        if found is None:
            return None
        inputs, step = found
        wanted = inputs.rows(batch)
        all_rows = step()
        return Rows(all_rows.logits[wanted], all_rows.states[wanted])

    def forward_ahead(self, batch: RaggedBatch, choosing: Sequence[Choosing]) -> Ahead | None:
        """See AheadRunner in runner.py."""
        most = min(len(one.uniforms) for one in choosing)
        num_ahead = max((count for count in self._num_ahead if count <= most), default=0)
        if num_ahead == 0:
            return None
        law_size = max(one.law_size for one in choosing)
        bucket = bucket_of(batch, num_ahead=num_ahead, law_size=law_size)
        found = self._step(batch, bucket, choosing)
        if found is None:
            return None
        inputs, step = found
        logits = step().logits[: batch.num_sequences * (1 + num_ahead)]
        return Ahead(logits, inputs.chosen[: batch.num_sequences].tolist())

    def _step(
        self, batch: RaggedBatch, bucket: Bucket | None, choosing: Sequence[Choosing]
    ) -> tuple[StaticInputs, Step] | None:
        """The bucket's step, and its inputs filled with the batch."""
        if self._capture is None or bucket is None:
            return None
        if bucket in self._steps:
            self._steps.move_to_end(bucket)
            self._steps[bucket][0].fill(batch, choosing)
            return self._steps[bucket]
        inputs = StaticInputs(
            bucket, block_size=self._block_size, spare_block=self._spare_block, device=self._keys[0].device
        )
        inputs.fill(batch, choosing)  # before recording, which may run the step
        while len(self._steps) >= self._most_steps:
            self._steps.popitem(last=False)
        run = self._run_ahead if bucket.num_ahead else self._run
        try:
            step = self._capture(lambda: run(inputs))
        except RuntimeError as error:
            # Some models' code looks at its numbers, as that of many experts does. They are served without.
            if bucket.num_ahead:
                _log.warning("drafts take a step for each token: %s: %s", type(error).__name__, error)
                self._num_ahead = ()
                return None
            _log.warning("decode steps are not recorded: %s: %s", type(error).__name__, error)
            self._capture = None
            self._steps.clear()
            return None
        self._steps[bucket] = (inputs, step)
        return inputs, step

    def _run(self, inputs: StaticInputs) -> Rows:
        return self._rows(inputs.token_ids, inputs.layout)

    def _run_ahead(self, inputs: StaticInputs) -> Rows:
        """[S * (1 + A)]: of each sequence's last token, and of those chosen behind it, which are left in
        `inputs.chosen`; without states, which drafts have no use for."""
        layout, bucket = inputs.layout, inputs.bucket
        every = self._rows(inputs.token_ids, layout)
        logits = every.logits.view(bucket.num_sequences, bucket.num_new, -1)
        last_step = (layout.lengths - 1).clamp(min=0)
        last = logits.gather(1, last_step[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]
        rows = [last]
        for index in range(bucket.num_ahead):
            chosen = _choose(last, inputs.temperatures, inputs.uniforms[:, index], law_size=bucket.law_size)
            inputs.chosen[:, index].copy_(chosen)
            layout = layout.behind()
            last = self._rows(chosen[:, None], layout).logits
            rows.append(last)
        return Rows(torch.stack(rows, dim=1).flatten(0, 1), every.states[:0])

    def _rows(self, token_ids: torch.Tensor, layout: Layout) -> Rows:
        """Of all tokens [S, n]: [S * n]."""
        context = StaticContext(layout, self._keys, self._values)
        return self._compute(token_ids.reshape(1, -1), context.positions.view(1, -1), context)


def _choose(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, *, law_size: int) -> torch.Tensor:
    """What `top_law` and `draw_sparse` would choose by logits [S, vocab], but for rounding: token ids [S].

    `temperatures` [S], 0: the likeliest. `uniforms` [S].
    """
    top = logits.topk(min(law_size, logits.shape[-1]), dim=-1)
    colder = (top.values - top.values[:, :1]) / temperatures.to(torch.float32).clamp(min=_LEAST_TEMPERATURE)[:, None]
    cumulative = colder.exp().to(torch.float64).cumsum(dim=-1)
    index = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    index = index.clamp(max=top.indices.shape[-1] - 1).masked_fill((temperatures == 0.0)[:, None], 0)
    return top.indices.gather(1, index)[:, 0]
