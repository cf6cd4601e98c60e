"""The worker's background programs and forks: work that may turn out to be needed."""

from __future__ import annotations

import asyncio

import pytest

from tandem.engine.planning import MAX_BACKGROUND_FEEDS
from tandem.engine.session import Session
from tandem.engine.worker import Feed, Program, Worker
from tandem.errors import Unavailable
from tests.toy_models import StepLog, ToyRunner, until_idle, working
from tests.worker_programs import (
    MODEL,
    assert_nothing_held,
    assert_scores,
    decode,
    gated,
    prompt,
    score,
    soon,
    until,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


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
