"""One planned step of a model: the forward, how far it goes on behind the batch, and what its time tells of others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.engine.block_pool import BlockPool
from tandem.engine.planning import Chunk, ragged_batch
from tandem.engine.runner import AheadRunner, Choosing, ModelRunner
from tandem.engine.sampling import finite_rows
from tandem.engine.step_times import StepTimes

_PRICED_DRAFTS = 16  # drafted tokens a sequence for which a step's time is foretold; the rest lies on a line
# More than this are an exception: the step has another size than those around it, and changes cost their time.
_USUAL_DRAFT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What came of a step.

    `logits`: of the rows that its chunks want, one after another, and behind each chunk's those of `behind`, the tokens
    that its session was taken on by. `states`: hidden states of the same rows; none where it went on. `finite`: by row.
    `round_seconds`: what a step of as many sequences takes with 0, 1, 2, ... drafted tokens each; empty where that is
    not known.
    """

    logits: torch.Tensor
    states: torch.Tensor
    finite: list[bool]
    behind: list[list[int]]  # [chunks]
    seconds: float
    round_seconds: tuple[float, ...]


class Forwards:
    """Computes planned steps with `runner`, behind them with `ahead`, the same runner, where it can go on by itself."""

    def __init__(
        self, runner: ModelRunner, pool: BlockPool, *, ahead: AheadRunner | None, step_times: StepTimes | None
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._ahead = ahead
        self._step_times = step_times

    def compute(self, chunks: Sequence[Chunk]) -> Computed:
        """One forward of all chunks, whose sessions have blocks for them. Raises whatever the model raises."""
        choosing = self._room_to_go_on(chunks)
        batch = ragged_batch(chunks)
        began = time.perf_counter()
        gone_on = self._ahead.forward_ahead(batch, choosing) if self._ahead is not None and choosing else None
        logits = self._runner.forward(batch) if gone_on is None else gone_on.logits
        # On a GPU this waits for the forward: its time is known after it, and what has gone wrong in it.
        finite = finite_rows(logits) if len(batch.logits_rows) else []
        seconds = time.perf_counter() - began
        return Computed(
            logits=logits,
            states=self._runner.last_states if gone_on is None else logits[:0],
            finite=finite,
            behind=[[] for _ in chunks] if gone_on is None else gone_on.token_ids,
            seconds=seconds,
            round_seconds=self._learn(chunks, seconds) if gone_on is None else (),
        )

    def _room_to_go_on(self, chunks: Sequence[Chunk]) -> list[Choosing]:
        """How each chunk's session goes on, with blocks for that; none where not all of them do, or blocks lack."""
        asked = [chunk.feed.choosing for chunk in chunks if chunk.completes and chunk.feed.num_rows == 1]
        choosing = [one for one in asked if one is not None]
        if self._ahead is None or len(choosing) < len(chunks):
            return []
        most = min(len(one.uniforms) for one in choosing)
        sessions = [chunk.feed.session for chunk in chunks]
        blocks = {session: -(-(len(session.tokens) + most) // self._pool.block_size) for session in sessions}
        if sum(count - len(session.blocks) for session, count in blocks.items()) > self._pool.num_free:
            return []  # nobody's cache is given up for it
        for session in sessions:
            session.reserve(len(session.tokens) + most)
        return choosing

    def _learn(self, chunks: Sequence[Chunk], seconds: float) -> tuple[float, ...]:
        """Take the step's time into account; what one with 0, 1, 2, ... drafted tokens a sequence would take."""
        if self._step_times is None:
            return ()
        if all(chunk.num_tokens <= self._runner.block_size for chunk in chunks):  # prefills are another matter
            self._step_times.observe(self._runner.last_step_size, seconds)
        sizes = [self._runner.step_size(len(chunks), tokens_each=1 + k) for k in range(_PRICED_DRAFTS + 1)]
        usual, changes = sizes[_USUAL_DRAFT], 2 * self._step_times.change_seconds
        seconds_of = {size: self._step_times.seconds(size) + changes * (size > usual) for size in set(sizes)}
        return tuple(seconds_of[size] for size in sizes)
