"""The worker: whatever it batches, chunks, evicts or drops, each program gets the logits it would get alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from tandem.engine.planning import MAX_BACKGROUND_FEEDS
from tandem.engine.session import Session
from tandem.engine.step_times import StepTimes
from tandem.engine.worker import Completed, Feed, Program, Worker
from tandem.errors import InternalError, InvalidRequest, Overloaded, TandemError, Unavailable
from tests.toy_models import StepLog, ToyModel, ToyRunner, held_blocks, text_state, until_idle, working

MODEL = ToyModel(vocab_size=9, seed=1)
PATIENCE_SECONDS = 10.0


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads only get in each other's way on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompt(length: int, *, seed: int = 0) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(0, MODEL.vocab_size, length)]


def score(session: Session, num_rows: int = 1) -> Program[torch.Tensor]:
    """The logits of the session's last tokens."""
    logits = yield Feed(session, num_rows)
    return logits.clone()


def decode(session: Session, num_tokens: int) -> Program[list[int]]:
    """Plain greedy decoding, in one program."""
    text: list[int] = []
    for _ in range(num_tokens):
        logits = yield Feed(session, 1)
        text.append(int(logits[0].argmax()))
        session.advance(len(session.tokens), text[-1:])
    return text


def expected_rows(tokens: Sequence[int], num_rows: int) -> torch.Tensor:
    return torch.stack([MODEL.logits(tokens[: len(tokens) - num_rows + 1 + row]) for row in range(num_rows)])


async def soon(awaitable: Awaitable[Completed[torch.Tensor]] | Awaitable[Completed[list[int]]]) -> object:
    """The value, or TimeoutError where the worker has forgotten about it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        return (await awaitable).value


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to get there."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - it cannot set an asyncio.Event
            await asyncio.sleep(0.001)


class GatedRunner(ToyRunner):
    """Runs one forward for each `step`, so that a test can act in between."""

    def __init__(self, *, block_size: int = 4, num_blocks: int = 64) -> None:
        self.permits = threading.Semaphore(0)
        super().__init__(MODEL, block_size=block_size, num_blocks=num_blocks, gate=self.permits)

    async def step(self, num_steps: int = 1) -> None:
        """Let so many forwards run, and wait until they have."""
        target = self.num_forwards + num_steps
        for _ in range(num_steps):
            self.permits.release()
        await until(lambda: self.num_forwards >= target)

    def open(self) -> None:
        """From now on nothing waits."""
        for _ in range(100_000):
            self.permits.release()


@asynccontextmanager
async def gated(*, max_step_tokens: int = 64, **options: int) -> AsyncIterator[tuple[Worker, GatedRunner]]:
    """A worker that runs step by step; opened and closed at the end."""
    runner = GatedRunner(**options)
    with working(runner, max_step_tokens=max_step_tokens) as worker:
        try:
            yield worker, runner
        finally:
            runner.open()


async def assert_scores(worker: Worker, session: Session, num_rows: int = 1) -> None:
    logits = await soon(worker.run(score(session, num_rows)))
    assert isinstance(logits, torch.Tensor)
    assert torch.equal(logits, expected_rows(session.tokens, num_rows))


async def assert_nothing_held(worker: Worker) -> None:
    """All was freed, once the worker has done what it was told."""
    assert (await worker.run(held_blocks(worker))).value == 0
    assert worker.num_sessions == 0
    await until(lambda: worker.num_programs == 0)


async def test_the_logits_of_a_text_are_the_models() -> None:
    with working(ToyRunner(MODEL)) as worker:
        session = worker.new_session(prompt(23))
        for num_rows in (1, 5, 23):
            await assert_scores(worker, session, num_rows)
        worker.end_session(session)
        await assert_nothing_held(worker)


@pytest.mark.parametrize("max_step_tokens", [8, 17, 64])
@pytest.mark.parametrize("num_blocks", [25, 400])
async def test_many_programs_together_say_what_each_says_alone(num_blocks: int, max_step_tokens: int) -> None:
    """Twenty texts, some with equal beginnings; with 25 blocks (a text needs up to 17) they evict each other."""
    runner = ToyRunner(MODEL, num_blocks=num_blocks)
    with working(runner, max_step_tokens=max_step_tokens) as worker:
        prompts = [prompt(5 + 2 * (i // 2), seed=i // 2) + prompt(i % 2, seed=i) for i in range(20)]
        sessions = [worker.new_session(tokens) for tokens in prompts]
        texts = await asyncio.gather(*(soon(worker.run(decode(session, 40))) for session in sessions))
        assert texts == [MODEL.greedy(tokens, 40) for tokens in prompts]
        for session in sessions:
            worker.end_session(session)
        await assert_nothing_held(worker)
    assert max(batch.num_sequences for batch in runner.batches) > 1


async def test_long_drafts_are_foretold_to_change_the_steps_size_twice() -> None:
    times = StepTimes([(1, 0.010), (64, 0.073)], change_seconds=0.005)
    worker = Worker(
        ToyRunner(MODEL), name="toy", max_step_tokens=64, max_programs=4, observer=StepLog(), step_times=times
    )
    worker.start()
    try:
        foretold = (await worker.run(score(worker.new_session(prompt(3))))).times.round_seconds
    finally:
        worker.close()
    assert len(foretold) == 17
    steps = np.diff(foretold)
    assert steps[4] > 0.010
    assert np.delete(steps, 4).max() < 0.003


async def test_a_step_never_holds_more_tokens_than_its_budget() -> None:
    log = StepLog()
    runner = ToyRunner(MODEL, num_blocks=400)
    with working(runner, max_step_tokens=32, log=log) as worker:
        sessions = [worker.new_session(prompt(10 * i + 1, seed=i)) for i in range(20)]
        await asyncio.gather(*(soon(worker.run(score(session, 1 + len(session.tokens) // 20))) for session in sessions))
        await asyncio.gather(*(soon(worker.run(decode(session, 5))) for session in sessions))
    assert max(log.num_tokens) == 32
    assert log.num_tokens == [batch.num_tokens for batch in runner.batches]
    assert log.num_sequences == [batch.num_sequences for batch in runner.batches]


async def test_a_long_prefill_is_computed_in_chunks_and_asks_for_logits_once() -> None:
    runner = ToyRunner(MODEL, block_size=16, num_blocks=300)
    with working(runner, max_step_tokens=256) as worker:
        await assert_scores(worker, worker.new_session(prompt(4_000)))
    assert [batch.num_tokens for batch in runner.batches] == [256] * 15 + [160]
    assert [len(batch.logits_rows) for batch in runner.batches] == [0] * 15 + [1]


@pytest.mark.parametrize("num_drafted", [0, 1, 5, 15, 16, 40])
async def test_a_long_prefill_delays_another_sessions_round_by_one_step_at_most(num_drafted: int) -> None:
    """The step that runs when the round arrives ends first; the very next one holds the round. Drafts longer than a
    block are rounds too."""
    async with gated(max_step_tokens=256, block_size=16, num_blocks=400) as (worker, runner):
        talker = worker.new_session(prompt(50, seed=1))
        ready = asyncio.create_task(worker.run(score(talker)))
        await runner.step()
        await ready
        prefill = asyncio.create_task(worker.run(score(worker.new_session(prompt(4_000)))))
        await runner.step(2)
        for number in range(3):
            talker.guess(prompt(num_drafted, seed=number))
            verified = asyncio.create_task(worker.run(score(talker, num_drafted + 1)))
            await asyncio.sleep(0.01)  # the step that was planned without it waits at the gate
            await runner.step(2)
            assert torch.equal((await verified).value, expected_rows(talker.tokens, num_drafted + 1))
            talker.advance(50, prompt(1, seed=number))
            talker.truncate(50)
        assert not prefill.done()
        runner.open()
        await prefill


@pytest.mark.parametrize("max_step_tokens", [4, 5, 7, 8, 9])
async def test_whatever_budget_a_worker_accepts_a_prefill_does_not_stop_rounds(max_step_tokens: int) -> None:
    """A budget too small for a round beside a prefill must be refused at construction."""
    try:
        Worker(ToyRunner(MODEL), name="", max_step_tokens=max_step_tokens, max_programs=1, observer=StepLog())
    except ValueError:
        return
    async with gated(max_step_tokens=max_step_tokens, num_blocks=400) as (worker, runner):
        prefill = asyncio.create_task(worker.run(score(worker.new_session(prompt(400)))))
        await runner.step(2)
        talk = asyncio.create_task(worker.run(score(worker.new_session(prompt(4, seed=1)))))
        await asyncio.sleep(0.01)
        await runner.step(2)
        await until(talk.done)
        assert not prefill.done()


@asynccontextmanager
async def crowd(worker: Worker, size: int) -> AsyncIterator[None]:
    """So many sessions that have a round for every step, for ever."""
    talkers = [worker.new_session(prompt(4, seed=seed)) for seed in range(size)]
    talks = [asyncio.create_task(worker.run(decode(talker, 1_000_000))) for talker in talkers]
    await asyncio.sleep(0.01)
    yield
    for talk in talks:
        talk.cancel()
    await asyncio.gather(*talks, return_exceptions=True)


async def test_rounds_however_many_do_not_starve_a_prefill() -> None:
    """Forty sessions fill every step of 16 tokens. A prefill of 200 tokens still gets a block (4 tokens) of each, so it
    is done after 50 steps and the one that was under way."""
    async with gated(max_step_tokens=16, num_blocks=2_000) as (worker, runner):
        prefill = asyncio.create_task(worker.run(score(worker.new_session(prompt(200, seed=77)))))
        await asyncio.sleep(0.01)
        async with crowd(worker, 40):
            await runner.step(51)
            await until(prefill.done)
        # A prefill ends at whole blocks, so up to 3 tokens of a step may stay unused.
        assert {batch.num_tokens for batch in runner.batches} <= {13, 14, 15, 16}


async def test_a_verify_that_was_evicted_does_not_starve_under_many_rounds() -> None:
    """Its cache is gone, so it has 22 tokens to compute again, a block a step, and then all its 9 rows in one step."""
    async with gated(max_step_tokens=32, num_blocks=2_000) as (worker, runner):
        evicted = worker.new_session(prompt(30, seed=99))
        evicted.guess(prompt(8))
        verified = asyncio.create_task(worker.run(score(evicted, 9)))
        await asyncio.sleep(0.01)
        async with crowd(worker, 60):
            await runner.step(8)
            await until(verified.done)
        assert torch.equal(verified.result().value, expected_rows(evicted.tokens, 9))


@pytest.mark.parametrize("prompt_length", [1, 3, 18])
@pytest.mark.parametrize("num_rows", [15, 16])
async def test_rows_that_fill_a_step_wait_for_the_few_tokens_before_them(num_rows: int, prompt_length: int) -> None:
    """These do not reach a whole block, and are computed all the same; else the rows would wait for ever."""
    with working(ToyRunner(MODEL), max_step_tokens=16) as worker:
        session = worker.new_session(prompt(18), prompt_length=prompt_length)
        rows = await soon(worker.run(score(session, num_rows)))
        assert isinstance(rows, torch.Tensor)
        assert torch.equal(rows, expected_rows(session.tokens, num_rows))


@pytest.mark.parametrize("num_rows", [17, 100])
async def test_a_feed_of_more_rows_than_a_step_holds_is_refused(num_rows: int) -> None:
    """It could never be planned: the caller would wait for ever, and the worker would turn round at full speed."""
    with working(ToyRunner(MODEL), max_step_tokens=16) as worker:
        session = worker.new_session(prompt(100))
        with pytest.raises(TandemError):
            await soon(worker.run(score(session, num_rows)))
        await assert_scores(worker, session, 4)


@pytest.mark.parametrize("num_rows", [1, 4])
async def test_a_feed_of_more_rows_than_there_are_tokens_fails_alone(num_rows: int) -> None:
    async with gated() as (worker, runner):
        bystander = asyncio.create_task(worker.run(decode(worker.new_session([1, 2]), 3)))
        await asyncio.sleep(0.01)
        empty = worker.new_session([0] * (num_rows - 1))
        failing = asyncio.create_task(worker.run(score(empty, num_rows)))
        await asyncio.sleep(0.01)
        runner.open()
        with pytest.raises(TandemError):
            await soon(failing)
        assert await soon(bystander) == MODEL.greedy([1, 2], 3)
        empty.advance(num_rows - 1, [5])
        await assert_scores(worker, empty, num_rows)


async def test_a_prefix_that_another_text_computed_is_reused() -> None:
    runner = ToyRunner(MODEL, num_blocks=100)
    with working(runner) as worker:
        shared = prompt(40)
        await assert_scores(worker, worker.new_session([*shared, 1]))
        await assert_scores(worker, worker.new_session([*shared, 2, 3]))
        await assert_scores(worker, worker.new_session(shared))
    assert [batch.num_tokens for batch in runner.batches] == [41, 2, 4]


async def test_an_ended_sessions_prefix_is_still_found() -> None:
    runner = ToyRunner(MODEL)
    with working(runner) as worker:
        session = worker.new_session(prompt(20))
        await assert_scores(worker, session)
        worker.end_session(session)
        await assert_nothing_held(worker)
        await assert_scores(worker, worker.new_session(prompt(20)))
    assert [batch.num_tokens for batch in runner.batches] == [20, 4]


@pytest.mark.parametrize("num_drafted", [1, 2, 4, 7])
async def test_reuse_leaves_every_row_that_is_asked_for_to_be_computed(num_drafted: int) -> None:
    """Both texts end at a block's border, and the second wants the logits behind its last committed token as well:
    that token must be computed again although its block is at hand."""
    with working(ToyRunner(MODEL)) as worker:
        await assert_scores(worker, worker.new_session(prompt(8)))
        session = worker.new_session(prompt(8))
        session.guess(prompt(num_drafted, seed=5))
        await assert_scores(worker, session, num_drafted + 1)


async def test_equal_prompts_that_arrive_together_are_mostly_computed_once() -> None:
    """Eight times 500 tokens at once, in steps of 62 that do not end at block borders: not 4,000 tokens of work."""
    runner = ToyRunner(MODEL, num_blocks=2_000)
    with working(runner, max_step_tokens=62) as worker:
        sessions = [worker.new_session(prompt(500)) for _ in range(8)]
        answers = await asyncio.gather(*(soon(worker.run(score(session))) for session in sessions))
        for answer in answers:
            assert isinstance(answer, torch.Tensor)
            assert torch.equal(answer, expected_rows(prompt(500), 1))
    assert sum(batch.num_tokens for batch in runner.batches) < 1_000


async def test_rolling_back_into_a_block_that_another_reads_leaves_the_other_alone() -> None:
    with working(ToyRunner(MODEL)) as worker:
        first = worker.new_session(prompt(8))
        await assert_scores(worker, first)
        second = worker.new_session([*prompt(8), 3])
        await assert_scores(worker, second)
        assert second.blocks[:2] == first.blocks
        first.advance(6, [7, 7, 7])
        first.guess([1])
        second.guess([2])
        answers = await asyncio.gather(worker.run(score(first, 2)), worker.run(score(second, 2)))
        assert torch.equal(answers[0].value, expected_rows(first.tokens, 2))
        assert torch.equal(answers[1].value, expected_rows(second.tokens, 2))


async def test_a_request_too_large_for_the_cache_is_overloaded_and_the_others_go_on() -> None:
    """The pool has 10 blocks of 4: texts of 40 tokens fit, one of 41 does not."""
    with working(ToyRunner(MODEL, num_blocks=10)) as worker:
        fits, others = worker.new_session(prompt(40)), [worker.new_session(prompt(9, seed=seed)) for seed in range(4)]
        large = worker.new_session(prompt(41, seed=9))
        results = await asyncio.gather(
            *(soon(worker.run(decode(session, 5))) for session in others),
            soon(worker.run(score(large))),
            soon(worker.run(score(fits))),
            return_exceptions=True,
        )
        assert results[:4] == [MODEL.greedy(prompt(9, seed=seed), 5) for seed in range(4)]
        assert isinstance(results[4], Overloaded)
        assert "KV" in results[4].message
        assert isinstance(results[5], torch.Tensor)
        assert torch.equal(results[5], expected_rows(prompt(40), 1))
        for session in (large, fits, *others):
            worker.end_session(session)
        await assert_nothing_held(worker)


async def test_two_programs_of_one_session_take_turns() -> None:
    """A batch must not hold a session twice: both would write into the same block."""
    async with gated() as (worker, runner):
        session = worker.new_session(prompt(11))
        tasks = [asyncio.create_task(worker.run(score(session, num_rows))) for num_rows in (2, 5)]
        await asyncio.sleep(0.01)
        runner.open()
        for task, num_rows in zip(tasks, (2, 5), strict=True):
            assert torch.equal((await task).value, expected_rows(prompt(11), num_rows))


async def test_two_texts_that_fit_one_at_a_time_both_get_done() -> None:
    """Each needs 9 of 10 blocks in the end, so they drive each other out, round after round."""
    with working(ToyRunner(MODEL, num_blocks=10), max_step_tokens=8) as worker:
        sessions = [worker.new_session(prompt(20, seed=seed)) for seed in range(2)]

        async def rounds(session: Session) -> list[int]:
            text: list[int] = []
            for _ in range(5):
                text += (await worker.run(decode(session, 3))).value
            return text

        async with asyncio.timeout(PATIENCE_SECONDS):
            texts = await asyncio.gather(*map(rounds, sessions))
        assert texts == [MODEL.greedy(prompt(20, seed=seed), 15) for seed in range(2)]


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


async def assert_forks(worker: Worker, number: int) -> None:
    def count() -> Program[int]:
        yield from ()
        return len(worker._forks)

    assert (await worker.run(count())).value == number


async def test_background_programs_get_the_steps_that_nobody_else_wants() -> None:
    async with gated() as (worker, runner):
        spare, talker = worker.new_session(prompt(5)), worker.new_session(prompt(6, seed=1))
        worker.run_in_background(background(decode(spare, 100)))
        await asyncio.sleep(0.01)
        await runner.step(2)  # nobody else is there
        talk = asyncio.create_task(worker.run(decode(talker, 6)))
        await asyncio.sleep(0.01)  # the step that was planned without it waits at the gate
        await runner.step(7)
        await soon(talk)
        await runner.step(2)
        lengths = [int(batch.position_ids[-1]) + 1 for batch in runner.batches]
        assert lengths == [5, 6, 7, 6, 7, 8, 9, 10, 11, 8, 9]
        assert worker.num_programs == 0
        worker.end_session(spare)
        worker.end_session(talker)
        runner.open()
        await assert_nothing_held(worker)


def background(program: Program[object]) -> Program[None]:
    yield from program


async def test_a_background_step_holds_few_sequences() -> None:
    log = StepLog()
    async with gated(num_blocks=400) as (worker, runner):
        worker._observer = log
        sessions = [worker.new_session(prompt(4, seed=seed)) for seed in range(20)]
        for session in sessions:
            worker.run_in_background(background(decode(session, 2)))
        await asyncio.sleep(0.01)
        runner.open()
        for session in sessions:
            await assert_scores(worker, session)
        await until(lambda: sum(log.num_sequences) >= 60)
        assert max(log.num_sequences) <= MAX_BACKGROUND_FEEDS
        for session in sessions:
            worker.end_session(session)
        await assert_nothing_held(worker)


async def test_a_session_and_its_forks_are_computed_side_by_side_and_end_together() -> None:
    runner = ToyRunner(MODEL)
    answers: list[list[int]] = []

    def branch(fork: Session) -> Program[None]:
        answers.append((yield from decode(fork, 5)))

    def split(session: Session) -> Program[None]:
        yield Feed(session, 1)
        for token_id in (3, 4, 5):
            fork = worker.fork(session)
            fork.truncate(9)
            fork.guess([token_id])
            worker.run_in_background(branch(fork))

    with working(runner) as worker:
        session = worker.new_session(prompt(11))
        await worker.run(split(session))
        await until(lambda: len(answers) == 3)
        assert answers == [MODEL.greedy([*prompt(11)[:9], token_id], 5) for token_id in (3, 4, 5)]
        assert sum(batch.num_tokens for batch in runner.batches) == 11 + 3 * 5
        assert max(batch.num_sequences for batch in runner.batches) == 3
        await assert_scores(worker, session)
        await assert_forks(worker, 3)
        worker.end_session(session)
        await assert_forks(worker, 0)
        await assert_nothing_held(worker)


async def test_ending_a_sessions_background_work_leaves_the_session() -> None:
    ended: list[int] = []

    def branch(fork: Session) -> Program[None]:
        try:
            yield from decode(fork, 1_000_000)
        finally:
            ended.append(1)

    def split(session: Session) -> Program[None]:
        yield from ()
        for _ in range(2):
            worker.run_in_background(branch(worker.fork(session)))
        worker.run_in_background(branch(session))

    def end(session: Session) -> Program[int]:
        yield from ()
        worker.end_background(session)
        return worker.num_background

    with working(ToyRunner(MODEL, num_blocks=4096)) as worker:
        session = worker.new_session(prompt(7))
        await worker.run(split(session))
        await asyncio.sleep(0.02)
        assert (await worker.run(end(session))).value == 0
        assert len(ended) == 3
        await assert_forks(worker, 0)
        await assert_scores(worker, session)
        worker.end_session(session)
        await assert_nothing_held(worker)


async def test_forks_are_the_first_to_lose_their_blocks_and_take_none_from_others() -> None:
    """Ten blocks of 4. The session has 3, each fork copies one and needs more; then another text wants 6."""

    def branch(fork: Session, seed: int) -> Program[None]:
        fork.guess(prompt(8, seed=seed))
        yield Feed(fork, 1)

    def split(session: Session) -> Program[None]:
        yield Feed(session, 1)
        for seed in range(5):
            worker.run_in_background(branch(worker.fork(session), seed))

    runner = ToyRunner(MODEL, num_blocks=10)
    with working(runner) as worker:
        session = worker.new_session(prompt(10))
        await worker.run(split(session))
        await until_idle(worker)
        await assert_forks(worker, 2)  # of 3 blocks each, the first one shared; the others found none
        before = len(runner.batches)
        other = worker.new_session(prompt(24, seed=9))
        await assert_scores(worker, other)
        await assert_scores(worker, session)
        await assert_forks(worker, 0)
        assert sum(batch.num_tokens for batch in runner.batches[before:]) == 24 + 1  # the session lost nothing
        worker.end_session(session)
        worker.end_session(other)
        await assert_nothing_held(worker)


async def test_a_session_that_has_ended_can_be_neither_fed_nor_forked() -> None:
    """As where a stream ends between two programs: blocks that it took then, nobody would free."""

    def fork(session: Session) -> Program[Session]:
        yield from ()
        return worker.fork(session)

    with working(ToyRunner(MODEL)) as worker:
        session = worker.new_session(prompt(7))
        worker.end_session(session)
        with pytest.raises(Unavailable):
            await soon(worker.run(score(session)))
        with pytest.raises(Unavailable):
            await worker.run(fork(session))
        worker.run_in_background(background(score(session)))
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


async def test_times_add_up_to_what_the_caller_saw() -> None:
    runner = ToyRunner(MODEL, step_seconds=0.02)
    with working(runner) as worker:
        began = time.perf_counter()
        completed = await worker.run(decode(worker.new_session([1]), 3))
        seconds = time.perf_counter() - began
    assert 0.06 <= completed.times.forward_seconds <= seconds
    assert 0.0 <= completed.times.queue_seconds <= seconds - completed.times.forward_seconds + 0.001


def test_a_budget_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="of 4, got 3"):
        Worker(ToyRunner(MODEL), name="", max_step_tokens=3, max_programs=1, observer=StepLog())


@pytest.mark.parametrize("num_blocks", [30, 60, 1_000])
async def test_clients_that_draft_reject_cancel_and_leave_at_random_always_get_the_right_rows(num_blocks: int) -> None:
    """Twelve clients, 25 rounds each, few different texts: shared prefixes, evictions, copies, all at once."""
    runner = ToyRunner(MODEL, num_blocks=num_blocks)
    with working(runner, max_step_tokens=20) as worker:

        async def client(seed: int) -> None:
            numbers = np.random.default_rng(seed)
            session = worker.new_session(prompt(int(numbers.integers(1, 24)), seed=seed % 3))
            for _ in range(25):
                action = numbers.random()
                if action < 0.1:  # the stream ends, and another one begins
                    tokens = session.tokens[: int(numbers.integers(1, len(session.tokens) + 1))]
                    worker.end_session(session)
                    session = worker.new_session(tokens)
                length = len(session.tokens)
                keep = int(numbers.integers(max(1, length - 6), length + 1))
                session = await exchange(session, keep, numbers, cancel=action > 0.85)
            worker.end_session(session)

        async def exchange(session: Session, keep: int, numbers: np.random.Generator, *, cancel: bool) -> Session:
            """One round, at most 60 tokens long. The program alone touches the session, as in the services."""
            new = [int(token_id) for token_id in numbers.integers(0, 2, int(numbers.integers(1, 4)))]
            drafted = [int(token_id) for token_id in numbers.integers(0, 2, int(numbers.integers(0, 6)))]
            keep = min(keep, 50)
            text = [*session.tokens[:keep], *new, *drafted]

            def verify() -> Program[torch.Tensor]:
                session.advance(keep, new)
                session.guess(drafted)
                return (yield from score(session, len(drafted) + 1))

            task = asyncio.create_task(worker.run(verify()))
            await asyncio.sleep(0)
            if not cancel:
                assert torch.equal((await task).value, expected_rows(text, len(drafted) + 1))
                return session
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            worker.end_session(session)  # after a cancelled round the stream ends
            return worker.new_session(text)

        async with asyncio.timeout(30):
            await asyncio.gather(*map(client, range(12)))
        await assert_nothing_held(worker)
