"""The worker: whatever it batches, chunks or evicts, each program gets the logits it would get alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from tandem.engine.session import Session
from tandem.engine.step_times import StepTimes
from tandem.engine.worker import Program, Worker
from tandem.errors import Overloaded, TandemError
from tests.toy_models import StepLog, ToyRunner, working
from tests.worker_programs import (
    MODEL,
    PATIENCE_SECONDS,
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
