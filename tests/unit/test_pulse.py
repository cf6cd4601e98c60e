"""Whether a model computes: told by its steps, or by one token where there are none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from tandem.engine.pulse import ModelPulse
from tandem.engine.runner import RaggedBatch
from tandem.engine.worker import Feed, Program, Worker
from tandem.errors import InternalError, Unavailable
from tests.fakes import eventually
from tests.toy_models import ToyModel, ToyRunner, working

STALL_SECONDS = 0.3
MODEL = ToyModel(vocab_size=30, seed=1)


@dataclass
class Watched:
    pulse: ModelPulse
    changes: list[bool] = field(default_factory=list)

    async def changed(self, fault: str | None) -> None:
        self.changes.append(fault is None)

    def fault(self) -> str:
        try:
            self.pulse.check()
        except Unavailable as error:
            return error.message
        return ""


@asynccontextmanager
async def watched(worker: Worker, *, before: Callable[[], object] = lambda: None) -> AsyncIterator[Watched]:
    """A pulse that has had its first step; `before` is called, then it is watched."""
    one = Watched(ModelPulse(worker, stall_seconds=STALL_SECONDS))
    await one.pulse.first()
    before()
    watching = asyncio.create_task(one.pulse.watch(one.changed))
    try:
        yield one
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_nothing_is_ready_before_a_token_was_computed() -> None:
    runner = ToyRunner(MODEL)
    with working(runner) as worker:
        pulse = ModelPulse(worker, stall_seconds=STALL_SECONDS)
        with pytest.raises(Unavailable):
            pulse.check()
        await pulse.first()
        pulse.check()
        assert [batch.num_tokens for batch in runner.batches] == [1]
        await eventually(lambda: worker.pool.num_held == worker.num_sessions == 0)


class _NoNumbers(ToyRunner):
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        return super().forward(batch) * torch.nan


async def test_a_model_that_gives_no_numbers_does_not_begin() -> None:
    with working(_NoNumbers(MODEL)) as worker:
        pulse = ModelPulse(worker, stall_seconds=STALL_SECONDS)
        with pytest.raises(InternalError, match="finite"):
            await pulse.first()
        with pytest.raises(Unavailable):
            pulse.check()


async def test_a_model_that_hangs_is_found_out_and_one_that_goes_on_is_ready_again() -> None:
    runner = ToyRunner(MODEL)
    with working(runner) as worker:
        async with watched(worker) as one:
            await asyncio.sleep(STALL_SECONDS)
            assert one.changes == []
            gate = runner.gate = threading.Semaphore(0)
            await eventually(lambda: one.changes == [False], seconds=5.0)
            assert "not finished a step for 0.3 s" in one.fault()
            runner.gate = None
            gate.release()
            await eventually(lambda: one.changes == [False, True], seconds=5.0)
            assert one.fault() == ""


async def test_a_model_that_hangs_with_its_queue_full_is_found_out_too() -> None:
    runner = ToyRunner(MODEL)
    with working(runner, max_programs=1) as worker:
        gate = threading.Semaphore(0)

        def fill_the_queue() -> None:
            runner.gate = gate
            session = worker.new_session((1, 2, 3))

            def program() -> Program[None]:
                yield Feed(session, num_rows=1)

            worker.submit(program())

        async with watched(worker, before=fill_the_queue) as one:
            await eventually(lambda: one.changes == [False], seconds=5.0)
            runner.gate = None
            gate.release()
            await eventually(lambda: one.changes == [False, True], seconds=5.0)


async def test_a_model_that_fails_at_every_step_is_not_ready() -> None:
    failing: set[int] = set()
    runner = ToyRunner(MODEL, fail_on=failing)
    with working(runner) as worker:
        async with watched(worker) as one:
            failing.update(range(1000))
            await eventually(lambda: one.changes == [False], seconds=5.0)
            assert "the model failed" in one.fault()
            failing.clear()
            await eventually(lambda: one.changes == [False, True], seconds=5.0)


async def test_while_work_is_done_nothing_is_computed_for_the_pulse() -> None:
    runner = ToyRunner(MODEL, step_seconds=0.005)
    with working(runner) as worker:
        async with watched(worker) as one:
            session = worker.new_session((1, 2, 3))

            def work() -> Program[None]:
                for _ in range(200):
                    session.advance(len(session.tokens), (1,))
                    yield Feed(session, num_rows=1)

            before = runner.num_forwards
            await worker.run(work())
            assert runner.num_forwards - before == 200
            assert one.changes == []
