"""Programs for a worker, a runner that waits for leave, and what must be true of both: for tests of the worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch

from tandem.engine.session import Session
from tandem.engine.worker import Completed, Feed, Program, Worker
from tests.toy_models import ToyModel, ToyRunner, held_blocks, working

MODEL = ToyModel(vocab_size=9, seed=1)
PATIENCE_SECONDS = 10.0


def prompt(length: int, *, seed: int = 0) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(0, MODEL.vocab_size, length)]


def score(session: Session, num_rows: int = 1) -> Program[torch.Tensor]:
    """The logits of the session's last tokens."""
    logits: torch.Tensor = yield Feed(session, num_rows)
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


async def soon(awaitable: Awaitable[Completed[Any]]) -> object:
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
