"""The thread that owns a model: continuous batching over *programs*.

A program is a generator that yields `Feed(session, num_rows)` when it wants a session's uncached tokens computed, and
is sent the logits [num_rows, vocab] of its last tokens. Verifying is one feed, drafting k tokens is k feeds; the
worker runs the feeds of all waiting programs as one ragged batch, step after step:

1. take new programs, drop cancelled ones;
2. plan: short feeds (rounds) first, then chunks of long ones (prefill) until `max_step_tokens` is reached, so that a
   long prompt delays another session's round by one step at most;
3. give the planned sessions KV blocks, evicting the cache of others when the pool is dry;
4. one forward; hand logits to the programs whose feed is complete.

Programs run on this thread, between forwards; they hold no locks and must not block.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from tandem.engine.block_pool import BlockPool, PoolExhausted
from tandem.engine.gathering import Gathering
from tandem.engine.runner import ModelRunner, RaggedBatch
from tandem.engine.session import Session
from tandem.engine.step_times import StepTimes
from tandem.errors import InternalError, Overloaded, TandemError, Unavailable
from tandem.types import ServiceTimes

T = TypeVar("T")

_PRICED_DRAFTS = 8  # drafted tokens a sequence for which a step's time is foretold; the rest lies on a line


@dataclass(frozen=True, slots=True)
class Feed:
    """Compute what of the session is not cached yet; answer with the logits of its last `num_rows` tokens."""

    session: Session
    num_rows: int


Program = Generator[Feed, torch.Tensor, T]


@dataclass(frozen=True, slots=True)
class Completed(Generic[T]):
    """A program's return value, and where its time went."""

    value: T
    times: ServiceTimes


@dataclass(slots=True)
class _Job:
    program: Program[Any]
    future: Future[Completed[Any]]
    submitted: float
    feed: Feed | None = None  # None: not started
    forward_seconds: float = 0.0
    num_sequences: int = 1  # of the last forward
    round_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The next `num_tokens` uncached tokens of a job's feed."""

    job: _Job
    feed: Feed
    num_tokens: int
    completes: bool


class StepObserver(Protocol):
    """Told of every forward, on the worker's thread."""

    def step(self, *, seconds: float, num_tokens: int, num_sequences: int) -> None: ...


class Worker:
    """Runs programs on one thread that owns `runner`. `max_programs` bounds what may wait; more is Overloaded."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        name: str,
        max_step_tokens: int,
        max_programs: int,
        observer: StepObserver,
        step_times: StepTimes | None = None,
    ) -> None:
        if max_step_tokens < runner.block_size:
            raise ValueError(
                f"max_step_tokens must be at least one block of {runner.block_size}, got {max_step_tokens}"
            )
        self._runner = runner
        self._pool = BlockPool(num_blocks=runner.num_blocks, block_size=runner.block_size)
        self._max_step_tokens = max_step_tokens
        self._max_programs = max_programs
        self._observer = observer
        self._step_times = step_times
        self._inbox: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._num_programs = 0  # touched by the submitting thread and this one, under the lock
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._sessions: dict[Session, None] = {}  # oldest first; changed on the worker's thread only
        self._closing = False
        self._gathering = Gathering()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Finish nothing more: waiting programs fail with Unavailable. Blocks until the thread has ended."""
        with self._lock:
            self._closing = True
            self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def pool(self) -> BlockPool:
        """For gauges (plain reads from any thread) and for programs (on the worker's thread)."""
        return self._pool

    @property
    def max_rows(self) -> int:
        """Most rows a feed may ask for: they come from one step."""
        return self._max_step_tokens

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_programs(self) -> int:
        """Programs running or waiting."""
        return self._num_programs

    async def run(self, program: Program[T]) -> Completed[T]:
        """Run a program to its end. Cancelling the caller closes the program before its next step.

        Raises what the program raises, Overloaded when `max_programs` wait already, Unavailable when closing,
        InternalError when the model fails.
        """
        future: Future[Completed[T]] = Future()
        with self._lock:
            if self._closing:
                raise Unavailable("the model service is shutting down")
            if self._num_programs >= self._max_programs:
                raise Overloaded(f"{self._max_programs} requests wait for the model already")
            self._num_programs += 1
            # Under the lock: what is put before `close` is answered by the thread, nothing is put after.
            self._inbox.put(_Job(program, future, time.perf_counter()))
        return await asyncio.wrap_future(future)

    def new_session(self, token_ids: Sequence[int], *, prompt_length: int | None = None) -> Session:
        """A session for programs to use, to be given to `end_session` in the end. From any thread."""
        session = Session(self._pool, token_ids, prompt_length)
        self._inbox.put(lambda: self._sessions.__setitem__(session, None))
        return session

    def end_session(self, session: Session) -> None:
        """Free a session's cache before the next step, and end its program if one runs. From any thread."""
        self._inbox.put(lambda: self._end_session(session))

    def _end_session(self, session: Session) -> None:
        for job in [job for job in self._jobs if job.feed is not None and job.feed.session is session]:
            job.program.close()
            self._finish(job, error=Unavailable("the session has ended"))
        session.release()
        self._sessions.pop(session, None)
        self._gathering.left()

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # per thread
        while not self._closing:
            self._take_new()
            try:
                self._drop_cancelled()
                self._step(self._plan())
            except Exception as error:  # noqa: BLE001 - a fault of ours must not leave every later request waiting for ever
                for job in list(self._jobs):
                    if job.feed is not None:
                        job.feed.session.release()  # whatever of it is half done is computed anew
                    self._finish(job, error=InternalError(f"{type(error).__name__}: {error}"), cause=error)
        for job in list(self._jobs):
            self._finish(job, error=Unavailable("the model service is shutting down"))
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Job):
                self._finish(item, error=Unavailable("the model service is shutting down"))

    def _take_new(self) -> None:
        while True:
            try:
                if self._jobs:
                    wait_seconds = self._gathering.remaining_seconds(time.perf_counter())
                    item = self._inbox.get(block=wait_seconds > 0.0, timeout=wait_seconds or None)
                else:
                    item = self._inbox.get()
            except queue.Empty:
                return
            if item is None:
                return
            if isinstance(item, _Job):
                self._gathering.arrived()
                self._jobs.append(item)
                self._resume(item, None)
            else:
                item()

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._jobs if job.future.cancelled()]:
            job.program.close()
            self._finish(job)

    def _plan(self) -> list[_Chunk]:
        waiting = [(job, job.feed) for job in self._jobs if job.feed is not None]
        for _, feed in waiting:
            feed.session.rewind(len(feed.session.tokens) - feed.num_rows)
            feed.session.reuse_prefix(feed.num_rows)
        rounds = [pair for pair in waiting if self._is_round(pair[1])]
        prefills = [pair for pair in waiting if not self._is_round(pair[1])]
        budget = self._max_step_tokens
        chunks: list[_Chunk] = []
        planned: dict[Session, None] = {}
        for job, feed in [*rounds, *prefills]:
            # However many rounds there are, one block a step is left for prefill, so that it cannot starve. Only the
            # first in line may take all: a round as large as a step would never fit otherwise.
            left = self._runner.block_size if prefills and chunks and self._is_round(feed) else 0
            room, missing = budget - left, _missing(feed)
            num_tokens = missing if missing <= room else self._part(feed, room)
            if num_tokens < 1 or feed.session in planned:
                continue
            planned[feed.session] = None
            chunks.append(_Chunk(job, feed, num_tokens, completes=num_tokens == missing))
            budget -= num_tokens
        return chunks

    def _part(self, feed: Feed, room: int) -> int:
        """How many of a feed's tokens to compute now, of `room` that are too few for all of them; may be none.

        The last rows stay together, since their logits come from one forward. Prompts are cut at whole blocks, so that
        they are computed in the same pieces however busy the model is.
        """
        session, size = feed.session, self._runner.block_size
        end = min(session.cached + room, len(session.tokens) - feed.num_rows)
        whole = end // size * size
        return (whole if session.cached < whole and end < session.decode_start else end) - session.cached

    def _is_round(self, feed: Feed) -> bool:
        """Whether little has to be computed beside the rows that are wanted: a verify, or a drafted token."""
        return _missing(feed) - feed.num_rows <= self._runner.block_size

    def _step(self, chunks: list[_Chunk]) -> None:
        chunks = self._reserve(chunks)
        if not chunks:
            return
        batch = _ragged_batch(chunks)
        began = time.perf_counter()
        try:
            logits = self._runner.forward(batch)
            # NaN counts as the largest; single -inf are allowed. One look at all rows, since on a GPU it waits for the
            # forward: its time is known after that, and what has gone wrong in it.
            finite: list[bool] = logits.amax(dim=-1).isfinite().tolist() if len(batch.logits_rows) else []
        except Exception as error:  # noqa: BLE001 - the model failed: these programs end, the service goes on
            for chunk in chunks:
                chunk.feed.session.release()
                self._finish(chunk.job, error=InternalError(f"the model failed: {type(error).__name__}: {error}"))
            return
        seconds = time.perf_counter() - began
        self._observer.step(seconds=seconds, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences)
        round_seconds = self._learn(chunks, seconds)
        row = num_answered = 0
        for chunk in chunks:
            session = chunk.feed.session
            session.computed(session.cached + chunk.num_tokens)
            chunk.job.forward_seconds += seconds
            chunk.job.num_sequences, chunk.job.round_seconds = len(chunks), round_seconds
            if chunk.completes:
                these = slice(row, row + chunk.feed.num_rows)
                row = these.stop
                if all(finite[these]):
                    self._resume(chunk.job, logits[these])
                else:  # half precision that overflowed: an argmax would answer as if all were well
                    session.release()
                    self._finish(chunk.job, error=InternalError("the model's logits are not finite numbers"))
                num_answered += chunk.job not in self._jobs
        self._gathering.step_ended(time.perf_counter(), seconds=seconds, num_answered=num_answered)

    def _learn(self, chunks: list[_Chunk], seconds: float) -> tuple[float, ...]:
        """Take the step's time into account; what one with 0, 1, 2, ... drafted tokens a sequence would take."""
        if self._step_times is None:
            return ()
        if all(chunk.num_tokens <= self._runner.block_size for chunk in chunks):  # prefills are another matter
            self._step_times.observe(sum(chunk.num_tokens for chunk in chunks), seconds)
        return tuple(self._step_times.seconds(len(chunks) * (1 + k)) for k in range(_PRICED_DRAFTS + 1))

    def _reserve(self, chunks: list[_Chunk]) -> list[_Chunk]:
        """Blocks for every chunk, taken from idle sessions or from the last chunks where the pool is dry."""
        kept = list(chunks)
        index = 0
        while index < len(kept):
            session = kept[index].feed.session
            try:
                copy = session.reserve(session.cached + kept[index].num_tokens)
                if copy is not None:
                    self._runner.copy_blocks([copy[0]], [copy[1]])
                index += 1
            except PoolExhausted:
                busy = {chunk.feed.session for chunk in kept[: index + 1]}
                idle = [other for other in self._sessions if other.blocks and other not in busy]
                if idle:
                    idle[-1].release()  # the youngest: the oldest is nearest to its end
                    kept = [chunk for chunk in kept if chunk.feed.session is not idle[-1]]
                elif index > 0:
                    kept = kept[:index]  # the rest waits for the next step
                else:
                    message = "the KV cache is too small for this request alone: give the service more KV memory"
                    self._finish(kept[0].job, error=Overloaded(message))
                    return []
        return kept

    def _resume(self, job: _Job, logits: torch.Tensor | None) -> None:
        """Let a program run to its next feed or its end."""
        try:
            job.feed = next(job.program) if logits is None else job.program.send(logits)
            self._check(job.feed)
        except StopIteration as end:
            self._finish(job, value=end.value)
        except TandemError as error:
            self._finish(job, error=error)
        except Exception as error:  # noqa: BLE001 - a program's fault is its caller's to hear of
            self._finish(job, error=InternalError(f"{type(error).__name__}: {error}"), cause=error)

    def _check(self, feed: Feed) -> None:
        """Refuse a feed that could never be planned, whose program would wait for ever."""
        most = min(len(feed.session.tokens), self.max_rows)
        if not 1 <= feed.num_rows <= most:
            raise InternalError(f"logits of {feed.num_rows} tokens are wanted in one step, which holds at most {most}")

    def _finish(
        self, job: _Job, *, value: object = None, error: TandemError | None = None, cause: Exception | None = None
    ) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        with self._lock:
            self._num_programs -= 1
        if not job.future.set_running_or_notify_cancel():
            return
        if error is not None:
            error.__cause__ = cause
            job.future.set_exception(error)
            return
        queued = time.perf_counter() - job.submitted - job.forward_seconds
        times = ServiceTimes(
            queue_seconds=max(0.0, queued),
            forward_seconds=job.forward_seconds,
            num_sequences=job.num_sequences,
            round_seconds=job.round_seconds,
        )
        job.future.set_result(Completed(value, times))


def _missing(feed: Feed) -> int:
    return len(feed.session.tokens) - feed.session.cached


def _ragged_batch(chunks: list[_Chunk]) -> RaggedBatch:
    """Pack chunks. Rows are wanted of chunks that complete their feed only."""
    sessions = [chunk.feed.session for chunk in chunks]
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    rows: list[int] = []
    starts, block_starts = [0], [0]
    for chunk, session in zip(chunks, sessions, strict=True):
        end = session.cached + chunk.num_tokens
        token_ids += session.tokens[session.cached : end]
        positions += range(session.cached, end)
        starts.append(len(token_ids))
        blocks += session.blocks
        block_starts.append(len(blocks))
        if chunk.completes:
            rows += range(len(token_ids) - chunk.feed.num_rows, len(token_ids))
    return RaggedBatch(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        position_ids=np.asarray(positions, dtype=np.int32),
        past_lens=np.asarray([session.cached for session in sessions], dtype=np.int32),
        sequence_starts=np.asarray(starts, dtype=np.int32),
        decode_starts=np.asarray([session.decode_start for session in sessions], dtype=np.int32),
        block_table=np.asarray(blocks, dtype=np.int32),
        block_starts=np.asarray(block_starts, dtype=np.int32),
        logits_rows=np.asarray(rows, dtype=np.int32),
    )
