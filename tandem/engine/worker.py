"""The thread that owns a model: continuous batching over *programs*.

A program is a generator that yields `Feed(session, num_rows)` when it wants a session's uncached tokens computed, and
is sent the logits [num_rows, vocab] of its last tokens. Verifying is one feed, drafting k tokens is k feeds; the
worker runs the feeds of all waiting programs as one ragged batch, step after step:

1. take new programs, drop cancelled ones;
2. plan (planning.py): short feeds (rounds) first, then chunks of long ones (prefill) until `max_step_tokens` is
   reached, so that a long prompt delays another session's round by one step at most;
3. give the planned sessions KV blocks, evicting the cache of others when the pool is dry;
4. one forward; hand logits to the programs whose feed is complete. Where all of them say how they will go on, the
   forward may compute that, too;
5. what they then want computed beside the model (`Joint`), for all at once.

Programs run on this thread, between forwards; they hold no locks and must not block.

*Background* programs, and *forks*, sessions that continue another one by way of trial, serve work that may turn out to
be needed. They get the steps in which no other program waits, and only free blocks, which they are the first to lose;
`end_background` ends them.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from tandem.engine.block_pool import BlockPool, PoolExhausted
from tandem.engine.forwards import Forwards
from tandem.engine.gathering import Gathering
from tandem.engine.planning import Chunk, plan_step
from tandem.engine.programs import Completed, Feed, Job, Joint, Program
from tandem.engine.runner import AheadRunner, ModelRunner
from tandem.engine.session import Session
from tandem.engine.step_times import StepTimes
from tandem.errors import InternalError, Overloaded, TandemError, Unavailable
from tandem.types import ServiceTimes

__all__ = ["Completed", "Feed", "Joint", "Program", "StepObserver", "Worker"]

T = TypeVar("T")


class StepObserver(Protocol):
    """Told of every forward, on the worker's thread."""

    def step(self, *, seconds: float, num_tokens: int, num_sequences: int) -> None: ...


class Worker:
    """Runs programs on one thread that owns `runner`. `max_programs` bounds what may wait; more is Overloaded.

    `ahead` is the same runner, where it can go on behind a batch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        name: str,
        max_step_tokens: int,
        max_programs: int,
        observer: StepObserver,
        step_times: StepTimes | None = None,
        ahead: AheadRunner | None = None,
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
        self._forwards = Forwards(runner, self._pool, ahead=ahead, step_times=step_times)
        self._inbox: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._num_programs = 0  # touched by the submitting thread and this one, under the lock
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._sessions: dict[Session, None] = {}  # oldest first; changed on the worker's thread only
        self._forks: dict[Session, Session] = {}  # and whose continuation each is; the same
        self._last_step_seconds = 0.0
        self._last_states = torch.empty(0, 0)
        self._last_success = -math.inf
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
        return await asyncio.wrap_future(self.submit(program))

    def submit(self, program: Program[T]) -> Future[Completed[T]]:
        """As `run`, without waiting. Programs that are submitted one after another start in this order."""
        future: Future[Completed[T]] = Future()
        with self._lock:
            if self._closing:
                raise Unavailable("the model service is shutting down")
            if self._num_programs >= self._max_programs:
                raise Overloaded(f"{self._max_programs} requests wait for the model already")
            self._num_programs += 1
            # Under the lock: what is put before `close` is answered by the thread, nothing is put after.
            self._inbox.put(Job(program, future, time.perf_counter()))
        return future

    def run_in_background(self, program: Program[None]) -> None:
        """Run a program in steps that nobody else wants. Nobody hears of its end, which may come at any step.

        From any thread. It starts in its turn, as submitted programs do. Does nothing when closing.
        """
        with self._lock:
            if not self._closing:
                self._inbox.put(Job(program, Future(), time.perf_counter(), background=True))

    def end_background(self, session: Session) -> None:
        """End a session's background programs, and its forks with theirs. On the worker's thread: for programs."""
        for fork in [fork for fork, origin in self._forks.items() if origin is session]:
            self.end_fork(fork)
        self._end_programs(session, background_only=True)

    def fork(self, session: Session) -> Session:
        """A continuation of a session, by way of trial; it ends with it. On the worker's thread: for programs.

        Raises Unavailable when the session has ended.
        """
        if session not in self._sessions:
            raise Unavailable("the session has ended")
        fork = session.fork()
        self._forks[fork] = session
        return fork

    def end_fork(self, fork: Session) -> None:
        """Free a fork and end its programs; it keeps its tokens. On the worker's thread: for programs."""
        self._end_programs(fork)
        fork.release()
        self._forks.pop(fork, None)

    @property
    def has_urgent_work(self) -> bool:
        """Whether a program waits that is not of the background. On the worker's thread: for programs."""
        return any(not job.background for job in self._jobs)

    @property
    def num_background(self) -> int:
        """Background programs that run or wait. On the worker's thread: for programs."""
        return sum(job.background for job in self._jobs)

    @property
    def last_success(self) -> float:
        """When the last forward ended that gave numbers (time.monotonic). From any thread."""
        return self._last_success

    @property
    def last_step_seconds(self) -> float:
        """How long the last forward took: for a program that was just sent logits, theirs."""
        return self._last_step_seconds

    @property
    def last_states(self) -> torch.Tensor:
        """Hidden states [num_rows, W] of the logits that a program was just sent; the next step writes them anew."""
        return self._last_states

    def new_session(self, token_ids: Sequence[int], *, prompt_length: int | None = None) -> Session:
        """A session for programs to use, to be given to `end_session` in the end. From any thread."""
        session = Session(self._pool, token_ids, prompt_length)
        self._inbox.put(lambda: self._sessions.__setitem__(session, None))
        return session

    def end_session(self, session: Session) -> None:
        """Free a session's cache before the next step, and end its program if one runs. From any thread."""
        self._inbox.put(lambda: self._end_session(session))

    def _end_session(self, session: Session) -> None:
        self.end_background(session)
        self._end_programs(session)
        session.release()
        self._sessions.pop(session, None)
        self._gathering.left(session)

    def _end_programs(self, session: Session, *, background_only: bool = False) -> None:
        for job in [job for job in self._jobs if job.feed is not None and job.feed.session is session]:
            if job.background or not background_only:
                job.program.close()
                self._finish(job, error=Unavailable("the session has ended"))

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # per thread
        while not self._closing:
            self._take_new()
            try:
                self._drop_cancelled()
                self._compute_jointly()
                self._step(plan_step(self._jobs, max_tokens=self._max_step_tokens, block_size=self._runner.block_size))
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
            if isinstance(item, Job):
                self._finish(item, error=Unavailable("the model service is shutting down"))

    def _take_new(self) -> None:
        while True:
            try:
                if self._jobs:
                    # The background gathers nobody: what arrives while it computes gathers in the meantime.
                    now = time.perf_counter()
                    wait_seconds = self._gathering.remaining_seconds(now) if self.has_urgent_work else 0.0
                    item = self._inbox.get(block=wait_seconds > 0.0, timeout=wait_seconds or None)
                else:
                    item = self._inbox.get()
            except queue.Empty:
                return
            if item is None:
                return
            if isinstance(item, Job):
                self._jobs.append(item)
                self._resume(item, None)
                if item.feed is not None and not item.background:
                    self._gathering.arrived(item.feed.session)
            else:
                item()

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._jobs if job.future.cancelled()]:
            job.program.close()
            self._finish(job)

    def _step(self, chunks: list[Chunk]) -> None:
        chunks = self._reserve(chunks)
        if not chunks:
            return
        try:
            computed = self._forwards.compute(chunks)
        except Exception as error:  # noqa: BLE001 - the model failed: these programs end, the service goes on
            for chunk in chunks:
                chunk.feed.session.release()
                self._finish(chunk.job, error=InternalError(f"the model failed: {type(error).__name__}: {error}"))
            return
        seconds = self._last_step_seconds = computed.seconds
        if all(computed.finite):
            self._last_success = time.monotonic()
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self._observer.step(seconds=seconds, num_tokens=num_tokens, num_sequences=len(chunks))
        row = 0
        for chunk, behind in zip(chunks, computed.behind, strict=True):
            session = chunk.feed.session
            these = slice(row, row + (chunk.feed.num_rows + len(behind) if chunk.completes else 0))
            row = these.stop
            if chunk.job not in self._jobs:
                continue  # ended by a program that had its logits before
            session.guess(behind)
            session.computed(session.cached + chunk.num_tokens + len(behind))
            chunk.job.forward_seconds += seconds
            chunk.job.num_sequences, chunk.job.round_seconds = len(chunks), computed.round_seconds
            if chunk.completes:
                if all(computed.finite[these]):
                    self._last_states = computed.states[these]
                    self._resume(chunk.job, computed.logits[these])
                else:  # half precision that overflowed: an argmax would answer as if all were well
                    session.release()
                    self._finish(chunk.job, error=InternalError("the model's logits are not finite numbers"))
        self._compute_jointly()
        answered = [chunk.feed.session for chunk in chunks if chunk.completes and chunk.job not in self._jobs]
        if not chunks[0].job.background:  # a step is all of one kind
            self._gathering.step_ended(time.perf_counter(), seconds=seconds, answered=answered)

    def _reserve(self, chunks: list[Chunk]) -> list[Chunk]:
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
                if kept[index].job.background:  # it takes nothing from anybody
                    self._give_up(session)
                    del kept[index]
                    continue
                evicted = self._least_needed(busy={chunk.feed.session for chunk in kept[: index + 1]})
                if evicted is not None:
                    self._give_up(evicted)
                    evicted.release()
                    kept = [chunk for chunk in kept if chunk.feed.session is not evicted]
                elif index > 0:
                    kept = kept[:index]  # the rest waits for the next step
                else:
                    message = "the KV cache is too small for this request alone: give the service more KV memory"
                    self._finish(kept[0].job, error=Overloaded(message))
                    return []
        return kept

    def _least_needed(self, *, busy: set[Session]) -> Session | None:
        """Whose cache to give up: a fork's, else the youngest session's; the oldest is nearest to its end."""
        for sessions in (self._forks, self._sessions):
            for session in reversed(sessions):
                if session.blocks and session not in busy:
                    return session
        return None

    def _give_up(self, session: Session) -> None:
        """End a fork, or the background programs of a session."""
        if session in self._forks:
            self.end_fork(session)
        else:
            self._end_programs(session, background_only=True)

    def _compute_jointly(self) -> None:
        """Answer all that wait for joint work. An error of it ends their programs."""
        while waiting := [(job, job.feed) for job in self._jobs if isinstance(job.feed, Joint)]:
            compute = waiting[0][1].compute
            jobs = [job for job, joint in waiting if joint.compute == compute]
            try:
                results = compute([joint.item for _, joint in waiting if joint.compute == compute])
            except Exception as error:  # noqa: BLE001 - their callers' to hear of; the service goes on
                for job in jobs:
                    self._finish(job, error=InternalError(f"{type(error).__name__}: {error}"), cause=error)
                continue
            for job, result in zip(jobs, results, strict=True):
                self._resume(job, result)

    def _resume(self, job: Job, answer: object) -> None:
        """Let a program run to what it wants next or its end; `answer` None: from its beginning."""
        try:
            job.feed = next(job.program) if answer is None else job.program.send(answer)
            if isinstance(job.feed, Feed):
                self._check(job.feed)
        except StopIteration as end:
            self._finish(job, value=end.value)
        except TandemError as error:
            self._finish(job, error=error)
        except Exception as error:  # noqa: BLE001 - a program's fault is its caller's to hear of
            self._finish(job, error=InternalError(f"{type(error).__name__}: {error}"), cause=error)

    def _check(self, feed: Feed) -> None:
        """Refuse a feed that could never be planned, whose program would wait for ever."""
        if feed.session not in self._sessions and feed.session not in self._forks:
            raise Unavailable("the session has ended")
        most = min(len(feed.session.tokens), self.max_rows)
        if not 1 <= feed.num_rows <= most:
            raise InternalError(f"logits of {feed.num_rows} tokens are wanted in one step, which holds at most {most}")

    def _finish(
        self, job: Job, *, value: object = None, error: TandemError | None = None, cause: Exception | None = None
    ) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        if not job.background:
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
