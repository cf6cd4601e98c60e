"""The model drafter's sessions, beside what test_verifier_law.py proves of its drafts."""

from __future__ import annotations

import asyncio
import threading
import time

from draft_service.drafters.model import ModelDrafter
from tandem.types import SamplingParams, SessionStart
from tests.toy_models import ToyModel, ToyRunner, held_blocks, working


async def test_j1_closing_a_session_in_its_prefill_frees_its_blocks_however_late_the_event_loop_is() -> None:
    """The prefill's cancellation reached the worker after the session's end; it then took blocks nobody would free."""
    gate = threading.Semaphore(0)
    runner = ToyRunner(ToyModel(vocab_size=9, seed=1), block_size=4, num_blocks=64, gate=gate)
    with working(runner, max_step_tokens=8) as worker:
        start = SessionStart(token_ids=(1, 2, 3) * 10, prompt_length=30, sampling=SamplingParams(), seed=1)
        session = ModelDrafter(worker, law_size=9).open(start)
        await asyncio.sleep(0.05)  # the worker is in the first of four chunks
        session.close()
        gate.release(1000)
        time.sleep(0.3)  # noqa: ASYNC251 - the loop is busy: the cancellation has not reached the worker yet
        await asyncio.sleep(0.1)
        assert (await worker.run(held_blocks(worker))).value == 0
