"""The worker when things go wrong: failing forwards and programs, cancelled ones, closing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tandem.engine.session import Session
from tandem.engine.worker import Completed, Feed, Program, Worker
from tandem.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from tests.toy_models import StepLog, ToyModel, ToyRunner, text_state, working
from tests.worker_programs import (
    MODEL,
    PATIENCE_SECONDS,
    GatedRunner,
    assert_nothing_held,
    assert_scores,
    decode,
    expected_rows,
    gated,
    prompt,
    score,
    soon,
    until,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


async def test_j15_a_failing_forward_fails_its_programs_only_and_the_next_works() -> None:
    async with gated(max_step_tokens=16) as (worker, runner):
        runner.fail_on = {1}
        victims = [worker.new_session(prompt(8, seed=seed)) for seed in range(2)]
        waiting = worker.new_session(prompt(30, seed=7))
        started = asyncio.create_task(worker.run(score(worker.new_session([1]))))
        await asyncio.sleep(0.01)
        tasks = [asyncio.create_task(worker.run(score(session))) for session in victims]
        late = asyncio.create_task(worker.run(score(waiting)))
        await asyncio.sleep(0.01)
        runner.open()
        await started
        results = await asyncio.gather(*tasks, late, return_exceptions=True)
        failed = [isinstance(result, InternalError) for result in results]
        in_batch = runner.batches[1].num_sequences
        assert sum(failed) == in_batch
        assert failed[:2] == [True, True]
        for error in results:
            assert isinstance(error, Completed) or "ModelFailure" in str(error)
        for session in (*victims, waiting):
            await assert_scores(worker, session)


async def test_every_forward_may_fail_and_no_answer_is_ever_wrong() -> None:
    """A third of all forwards fail, whatever they hold; who tries again is answered right, and nothing leaks."""
    numbers = np.random.default_rng(3)
    runner = ToyRunner(MODEL, num_blocks=40, fail_on={int(n) for n in np.flatnonzero(numbers.random(5_000) < 0.33)})
    with working(runner, max_step_tokens=12) as worker:

        async def insist(seed: int) -> None:
            tokens = prompt(10 + seed)
            session = worker.new_session(tokens)
            text: list[int] = []
            while len(text) < 12:
                try:
                    logits = (await worker.run(score(session))).value
                except InternalError:
                    continue
                text.append(int(logits[0].argmax()))
                session.advance(len(session.tokens), text[-1:])
            worker.end_session(session)
            assert text == MODEL.greedy(tokens, 12)

        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*map(insist, range(6)))
        await assert_nothing_held(worker)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_logits_that_are_no_numbers_fail_their_program_and_no_other(value: float) -> None:
    """As half precision makes them when it overflows. An argmax would answer with some token as if all were well."""
    model = ToyModel(vocab_size=MODEL.vocab_size, seed=1)
    model.table[text_state([4, 4, 4])] = float(value)
    with working(ToyRunner(model)) as worker:
        sessions = [worker.new_session(tokens) for tokens in ([4, 4, 4], prompt(7))]
        broken, sound = await asyncio.gather(
            *(soon(worker.run(score(session))) for session in sessions), return_exceptions=True
        )
        assert isinstance(broken, InternalError)
        assert isinstance(sound, torch.Tensor)
        assert torch.equal(sound, expected_rows(prompt(7), 1))


class CopyFailure(ToyRunner):
    """Fails to copy blocks, once."""

    failures = 1

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        super().copy_blocks(sources, destinations)


async def test_after_a_failed_copy_a_session_is_computed_anew() -> None:
    """The block that should have been copied into must not be taken for the copy."""
    with working(CopyFailure(MODEL)) as worker:
        first = worker.new_session(prompt(8))
        await assert_scores(worker, first)
        second = worker.new_session([*prompt(8), 3])
        await assert_scores(worker, second)
        first.advance(7, [8])
        with pytest.raises(InternalError):
            await soon(worker.run(score(first)))
        await assert_scores(worker, first)
        await assert_scores(worker, second)


class FaultyLog(StepLog):
    """Raises at the second step."""

    def step(self, *, seconds: float, num_tokens: int, num_sequences: int) -> None:
        super().step(seconds=seconds, num_tokens=num_tokens, num_sequences=num_sequences)
        if len(self.num_tokens) == 2:
            raise KeyError("a metric")


async def test_a_fault_of_the_workers_own_answers_everyone_and_the_next_requests_work() -> None:
    with working(ToyRunner(MODEL), log=FaultyLog()) as worker:
        sessions = [worker.new_session(prompt(8, seed=seed)) for seed in range(3)]
        await assert_scores(worker, sessions[0])
        results = await asyncio.gather(
            *(soon(worker.run(score(session))) for session in sessions), return_exceptions=True
        )
        assert any(isinstance(result, InternalError) and "KeyError" in result.message for result in results)
        for session in sessions:
            await assert_scores(worker, session)
        assert worker.num_programs == 0


def raises(error: BaseException, *, after: Feed | None = None) -> Program[None]:
    if after is not None:
        yield after
    raise error


@pytest.mark.parametrize("at_start", [True, False])
async def test_an_exception_in_a_program_reaches_its_caller_only(at_start: bool) -> None:
    with working(ToyRunner(MODEL)) as worker:
        bystander = asyncio.create_task(worker.run(decode(worker.new_session(prompt(9)), 30)))
        session = worker.new_session(prompt(5, seed=1))
        after = None if at_start else Feed(session, 1)
        refusal = InvalidRequest("no", param="top_p")
        with pytest.raises(InvalidRequest) as refused:
            await worker.run(raises(refusal, after=after))
        assert refused.value.param == "top_p"
        with pytest.raises(InternalError, match="ZeroDivisionError: by hand") as failed:
            await worker.run(raises(ZeroDivisionError("by hand"), after=after))
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        with pytest.raises(InternalError):
            await worker.run(raises(StopIteration(3), after=after))
        assert await soon(bystander) == MODEL.greedy(prompt(9), 30)
        assert worker.num_programs == 0


async def test_no_more_programs_wait_than_the_bound_allows() -> None:
    runner = GatedRunner()
    with working(runner, max_programs=2) as worker:
        first, second = (asyncio.create_task(worker.run(score(worker.new_session([n])))) for n in (1, 2))
        await asyncio.sleep(0.01)
        assert worker.num_programs == 2
        with pytest.raises(Overloaded, match="2 requests"):
            await worker.run(score(worker.new_session([3])))
        assert worker.num_programs == 2
        runner.open()
        await asyncio.gather(first, second)
        await assert_scores(worker, worker.new_session([3]))


async def test_a_cancelled_program_is_dropped_before_the_next_step_and_the_others_go_on() -> None:
    closed = threading.Event()

    def program(session: Session) -> Program[torch.Tensor]:
        try:
            return (yield from score(session))
        finally:
            closed.set()

    async with gated(max_step_tokens=16) as (worker, runner):
        cancelled, kept = worker.new_session(prompt(100)), worker.new_session(prompt(40, seed=1))
        doomed = asyncio.create_task(worker.run(program(cancelled)))
        bystander = asyncio.create_task(worker.run(score(kept)))
        await asyncio.sleep(0.01)
        await runner.step()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        runner.open()
        assert isinstance(await soon(bystander), torch.Tensor)
        assert closed.wait(PATIENCE_SECONDS)
        assert cancelled.cached <= 32  # the step before the cancellation, and the one under way
        assert worker.num_programs == 0
        worker.end_session(cancelled)
        worker.end_session(kept)
        await assert_nothing_held(worker)


async def test_programs_cancelled_while_they_wait_cost_no_forward() -> None:
    async with gated() as (worker, runner):
        running = asyncio.create_task(worker.run(score(worker.new_session([1]))))
        await asyncio.sleep(0.01)
        queued = [asyncio.create_task(worker.run(score(worker.new_session([2, n])))) for n in range(5)]
        await asyncio.sleep(0.01)
        for task in queued:
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        runner.open()
        await running
        await until(lambda: worker.num_programs == 0)
        assert runner.num_forwards == 1


async def test_a_cancelled_rounds_session_can_go_on() -> None:
    async with gated() as (worker, runner):
        session = worker.new_session(prompt(10))
        session.guess([1, 2, 3])
        doomed = asyncio.create_task(worker.run(score(session, 4)))
        await asyncio.sleep(0.01)
        doomed.cancel()
        runner.open()
        await asyncio.gather(doomed, return_exceptions=True)
        await until(lambda: worker.num_programs == 0)
        session.advance(11, [8])
        await assert_scores(worker, session, 2)


async def test_ending_a_session_whose_program_still_runs_leaks_nothing() -> None:
    """As when a stream ends: the session's end may overtake the cancellation of its program."""
    async with gated(max_step_tokens=8) as (worker, runner):
        session, other = worker.new_session(prompt(60)), worker.new_session(prompt(20, seed=1))
        orphan = asyncio.create_task(worker.run(score(session)))
        bystander = asyncio.create_task(worker.run(decode(other, 10)))
        await asyncio.sleep(0.01)
        await runner.step(2)
        worker.end_session(session)
        await asyncio.sleep(0.01)
        runner.open()
        assert await soon(bystander) == MODEL.greedy(prompt(20, seed=1), 10)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(orphan, return_exceptions=True)
        worker.end_session(other)
        await assert_nothing_held(worker)


async def test_a_session_can_be_ended_twice_or_without_ever_having_run() -> None:
    with working(ToyRunner(MODEL)) as worker:
        session = worker.new_session(prompt(10))
        worker.end_session(session)
        worker.end_session(session)
        await assert_nothing_held(worker)


async def test_closing_answers_who_waits_and_refuses_who_comes() -> None:
    runner = GatedRunner()
    with working(runner, max_step_tokens=8) as worker:
        session = worker.new_session(prompt(50))
        tasks = [asyncio.create_task(worker.run(score(session))) for _ in range(3)]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(worker.run(score(session))))
        await asyncio.sleep(0.01)
        runner.open()
        await closing
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable] * 4
        with pytest.raises(Unavailable, match="shutting down"):
            await worker.run(score(session))
        assert runner.num_forwards == 1
        worker.close()  # once more does no harm


class LockThatLetsClosingIn:
    """A lock whose first holder is overtaken, right after it lets go, by someone who closes the worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        self._exits = 0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        self._exits += 1
        if self._exits == 1:
            self._worker.close()


async def test_a_program_submitted_while_the_worker_closes_is_answered() -> None:
    """Otherwise its caller waits for ever for a thread that has ended."""
    with working(ToyRunner(MODEL)) as worker:
        session = worker.new_session([1])
        worker._lock = LockThatLetsClosingIn(worker)  # type: ignore[assignment]
        with contextlib.suppress(Unavailable):
            await soon(worker.run(score(session)))
