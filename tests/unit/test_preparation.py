"""Prepared drafts: each is to the bit the draft that asking afresh would bring; preparing takes nothing from anyone.

That the law of the output does not change with them: test_verifier_law.py. Under seeds: test_exact_seeded.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from draft_service.drafters.auto import AutoDrafter
from draft_service.drafters.base import DrafterSession
from draft_service.drafters.model import ModelDrafter, ModelDrafterSession
from draft_service.drafters.preparation import Preparation
from tandem.engine.session import Session
from tandem.engine.worker import Feed, Program, Worker
from tandem.errors import OutOfStep
from tandem.lookup.drafter import LookupDrafter
from tandem.types import Drafted, DraftWish, SamplingParams, SessionStart, Verification
from tests.toy_models import ToyModel, ToyRunner, held_blocks, until_idle, working
from tests.worker_programs import decode

MODEL = ToyModel(vocab_size=9, seed=1)
PROMPT = (1, 2, 3, 4, 5, 6, 7)
PATIENCE_SECONDS = 10.0

STARTS = {
    "greedy": SessionStart(
        token_ids=PROMPT, prompt_length=7, sampling=SamplingParams(temperature=0.0, frequency_penalty=0.4), seed=5
    ),
    "rejection": SessionStart(
        token_ids=PROMPT, prompt_length=7, sampling=SamplingParams(presence_penalty=0.5, top_p=0.95), seed=6
    ),
    "coupled": SessionStart(
        token_ids=PROMPT,
        prompt_length=7,
        sampling=SamplingParams(temperature=1.2, repetition_penalty=1.1),
        seed=7,
        verification=Verification.COUPLED,
    ),
}


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@dataclass
class Ledger:
    """A PreparationObserver that remembers."""

    outcomes: list[str] = field(default_factory=list)
    num_prepared: int = 0
    num_wasted: int = 0
    seconds: float = 0.0

    def token_prepared(self) -> None:
        self.num_prepared += 1

    def tokens_used(self, *, seconds: float) -> None:
        self.seconds += seconds

    def tokens_wasted(self, num_tokens: int) -> None:
        self.num_wasted += num_tokens

    def prepared(self, outcome: str) -> None:
        self.outcomes.append(outcome)


def preparing(worker: Worker, *, branches: int = 5, ledger: Ledger | None = None) -> ModelDrafter:
    return ModelDrafter(worker, law_size=6, prepared_branches=branches, observer=ledger)


async def fresh(worker: Worker, start: SessionStart, text: Sequence[int], num_tokens: int) -> Drafted:
    """The draft of `text` by a session that has never prepared anything."""
    session = ModelDrafter(worker, law_size=6).open(replace(start, token_ids=tuple(text)))
    try:
        return await session.propose(len(text), (), DraftWish(num_tokens))
    finally:
        session.close()


def prepared_for(session: DrafterSession) -> list[tuple[int, ...]]:
    """The tokens, behind the text that the last draft was for, for which there is a branch, likeliest first."""
    assert isinstance(session, ModelDrafterSession)
    assert isinstance(session._preparation, Preparation)
    return list(session._preparation._branches)


async def assert_nothing_held(worker: Worker) -> None:
    await until_idle(worker)
    assert (await worker.run(held_blocks(worker))).value == 0
    assert worker.num_sessions == 0
    assert not worker._forks


class GatedRunner(ToyRunner):
    """Runs one forward for each `step`, so that a test can act in between."""

    def __init__(self, *, num_blocks: int = 256) -> None:
        self.permits = threading.Semaphore(0)
        super().__init__(MODEL, num_blocks=num_blocks, gate=self.permits)

    async def step(self, num_steps: int = 1) -> None:
        target = self.num_forwards + num_steps
        for _ in range(num_steps):
            self.permits.release()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.num_forwards < target:  # noqa: ASYNC110 - another thread cannot set an asyncio.Event
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # the programs have their logits, and the next step waits at the gate

    async def step_while_there_is_work(self, num_steps: int) -> None:
        """So many forwards at most: fewer where nobody wants one within 50 ms."""
        for _ in range(num_steps):
            before = self.num_forwards
            self.permits.release()
            for _ in range(50):
                await asyncio.sleep(0.001)
                if self.num_forwards > before:
                    break
            else:
                self.permits.acquire(blocking=False)
                break
        await asyncio.sleep(0.01)

    def open(self) -> None:
        for _ in range(100_000):
            self.permits.release()


@asynccontextmanager
async def gated(*, num_blocks: int = 256) -> AsyncIterator[tuple[Worker, GatedRunner]]:
    runner = GatedRunner(num_blocks=num_blocks)
    with working(runner) as worker:
        try:
            yield worker, runner
        finally:
            runner.open()


async def by_steps(runner: GatedRunner, task: asyncio.Task[Drafted]) -> Drafted:
    """Let the model run for as long as `task` needs."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not task.done():
            runner.permits.release()
            await asyncio.sleep(0.005)
    return task.result()


# --- the draft is the same ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", STARTS)
@pytest.mark.parametrize("block_size", [1, 4, 8])
async def test_a_prepared_draft_is_to_the_bit_the_one_that_asking_brings(rule: str, block_size: int) -> None:
    """120 rounds of any outcome, foreseen or not, of other lengths than foreseen too; laws compared as bytes."""
    start, numbers = STARTS[rule], np.random.default_rng(block_size)
    ledger = Ledger()
    with (
        working(ToyRunner(MODEL, block_size=block_size, num_blocks=1024)) as worker,
        working(ToyRunner(MODEL, block_size=block_size, num_blocks=1024)) as other,
    ):
        session = preparing(worker, ledger=ledger).open(start)
        text = list(PROMPT)
        drafted = await session.propose(len(text), (), DraftWish(3))
        hits = 0
        for _ in range(120):
            await until_idle(worker)
            ahead = drafted.draft.token_ids
            foreseen = prepared_for(session)
            if foreseen and numbers.random() < 0.8:
                tail = foreseen[int(numbers.integers(len(foreseen)))]
            else:
                tail = (*ahead[: int(numbers.integers(len(ahead) + 1))], int(numbers.integers(9)))
            # As the gateway does it: keep what is equal, append the rest.
            num_kept = 0
            while num_kept < min(len(tail), len(ahead)) and tail[num_kept] == ahead[num_kept]:
                num_kept += 1
            num_tokens = int(numbers.integers(1, 6))
            length, text = len(text), [*text, *tail]
            drafted = await session.propose(length + num_kept, tail[num_kept:], DraftWish(num_tokens))
            assert drafted.draft == (await fresh(other, start, text, num_tokens)).draft
            assert session.length == len(text) + num_tokens
            hits += drafted.prepared
        session.close()
        await assert_nothing_held(worker)
    assert hits == ledger.outcomes.count("hit") > 20
    assert ledger.outcomes.count("partial") > 10
    assert ledger.outcomes.count("miss") > 5
    assert ledger.outcomes[-1] == "cancelled"
    assert len(ledger.outcomes) == 121
    assert 0 < ledger.num_wasted < ledger.num_prepared
    assert ledger.seconds > 0.0


@pytest.mark.parametrize("rule", STARTS)
async def test_a_branch_that_is_not_finished_is_drafted_to_its_end_and_nothing_of_it_twice(rule: str) -> None:
    start = STARTS[rule]
    with working(ToyRunner(MODEL)) as other:
        for num_steps in range(6):
            async with gated() as (worker, runner):
                session = preparing(worker).open(start)
                drafted = await by_steps(runner, asyncio.create_task(session.propose(7, (), DraftWish(4))))
                await asyncio.sleep(0.01)  # the first step of the preparation waits at the gate
                await runner.step_while_there_is_work(num_steps)
                first = prepared_for(session)[0]
                kept = len(first) - 1
                assert first[:kept] == drafted.draft.token_ids[:kept]
                before = runner.num_forwards
                again = await by_steps(
                    runner, asyncio.create_task(session.propose(7 + kept, first[kept:], DraftWish(4)))
                )
                # One that was under way may be the background's. A recovered token's branch drafts from the first step.
                needed = max(0, 4 - num_steps) if kept < 4 else max(0, 5 - num_steps)
                assert runner.num_forwards - before <= needed + 1
                assert again.draft == (await fresh(other, start, [*PROMPT, *first], 4)).draft
                session.close()


async def test_a_hit_is_answered_while_the_model_is_in_the_middle_of_a_forward() -> None:
    async with gated() as (worker, runner):
        session = preparing(worker).open(STARTS["greedy"])
        await by_steps(runner, asyncio.create_task(session.propose(7, (), DraftWish(2))))
        await asyncio.sleep(0.01)
        await runner.step(3)
        assert worker.num_programs == 0
        tokens = prepared_for(session)[0]
        other = worker.new_session([1, 2, 3])
        stuck = asyncio.create_task(worker.run(score(other)))
        await asyncio.sleep(0.01)
        drafted = await asyncio.wait_for(session.propose(7 + len(tokens) - 1, tokens[-1:], DraftWish(2)), 2.0)
        assert drafted.prepared
        assert not stuck.done()
        session.close()
        worker.end_session(other)


def score(session: Session) -> Program[torch.Tensor]:
    logits: torch.Tensor = yield Feed(session, 1)
    return logits.clone()


async def test_keeping_more_than_there_is_is_out_of_step_though_the_next_token_was_foreseen() -> None:
    with working(ToyRunner(MODEL)) as worker:
        session = preparing(worker).open(STARTS["greedy"])
        await session.propose(7, (), DraftWish(2))
        await until_idle(worker)
        bonus = next(tokens for tokens in prepared_for(session) if len(tokens) == 3)
        with pytest.raises(OutOfStep):
            await session.propose(7 + 3, bonus[2:], DraftWish(2))
        session.close()
        await assert_nothing_held(worker)


async def test_a_message_that_goes_back_behind_the_draft_is_a_miss_and_the_draft_is_right() -> None:
    ledger = Ledger()
    with working(ToyRunner(MODEL)) as worker, working(ToyRunner(MODEL)) as other:
        session = preparing(worker, ledger=ledger).open(STARTS["coupled"])
        await session.propose(7, (4, 4, 4), DraftWish(3))
        await until_idle(worker)
        drafted = await session.propose(8, (5,), DraftWish(3))
        assert drafted.draft == (await fresh(other, STARTS["coupled"], [*PROMPT, 4, 5], 3)).draft
        assert ledger.outcomes == ["miss"]
        session.close()


@pytest.mark.parametrize("context_length", range(8, 15))
async def test_near_the_end_of_the_drafts_context_less_is_prepared_then_nothing(context_length: int) -> None:
    start = STARTS["greedy"]
    runner = ToyRunner(MODEL, context_length=context_length)
    with working(runner) as worker, working(ToyRunner(MODEL, context_length=context_length)) as other:
        session = preparing(worker).open(start)
        text = list(PROMPT)
        drafted = await session.propose(7, (), DraftWish(3))
        while drafted.draft.token_ids:
            await until_idle(worker)
            ahead = drafted.draft.token_ids
            tail = (prepared_for(session) or [(*ahead, 8)])[0]
            length, text = len(text), [*text, *tail]
            num_kept = len(tail) - 1
            drafted = await session.propose(length + num_kept, tail[num_kept:], DraftWish(3))
            assert drafted.draft == (await fresh(other, start, text, 3)).draft
        session.close()
        await assert_nothing_held(worker)


async def test_with_no_branches_the_model_computes_only_what_is_asked() -> None:
    runner = ToyRunner(MODEL)
    ledger = Ledger()
    with working(runner) as worker:
        session = preparing(worker, branches=0, ledger=ledger).open(STARTS["greedy"])
        await session.propose(7, (), DraftWish(3))
        await until_idle(worker)
        assert sum(batch.num_tokens for batch in runner.batches) == 7 + 1 + 2  # the prompt's last token again
        session.close()
        await assert_nothing_held(worker)
    assert (ledger.outcomes, ledger.num_prepared) == ([], 0)


async def test_branches_are_one_batch_and_their_number_is_bounded() -> None:
    runner = ToyRunner(MODEL)
    with working(runner) as worker:
        session = preparing(worker, branches=4).open(STARTS["rejection"])
        await session.propose(7, (), DraftWish(3))
        num_before = runner.num_forwards
        await until_idle(worker)
        sizes = [batch.num_sequences for batch in runner.batches[num_before:]]
        session.close()
    # The first step: the last drafted token, and what is known of rejections. Then at most 4 branches, 3 tokens each.
    assert 1 < sizes[0] <= 5
    assert max(sizes[1:]) <= 4
    assert len(sizes) <= 4


# --- who comes first ------------------------------------------------------------------------------------------------


async def test_others_work_leaves_preparing_out() -> None:
    ledger = Ledger()
    async with gated() as (worker, runner):
        session = preparing(worker, ledger=ledger).open(STARTS["greedy"])
        await by_steps(runner, asyncio.create_task(session.propose(7, (), DraftWish(1))))
        busy = worker.new_session([3] * 20)
        second = asyncio.create_task(session.propose(7, (2,), DraftWish(1)))
        talk = asyncio.create_task(worker.run(decode(busy, 50)))
        await by_steps(runner, second)
        before = runner.num_forwards
        await asyncio.sleep(0.01)
        await runner.step(5)
        assert not talk.done()
        assert all(batch.num_sequences == 1 for batch in runner.batches[before:])  # the other one's
        third = await by_steps(runner, asyncio.create_task(session.propose(8, (2,), DraftWish(1))))
        assert not third.prepared
        session.close()
        runner.open()
        await talk
        worker.end_session(busy)
        await assert_nothing_held(worker)
    assert "busy" in ledger.outcomes


async def test_preparing_delays_anothers_round_by_one_step_at_most() -> None:
    async with gated() as (worker, runner):
        session = preparing(worker).open(STARTS["rejection"])
        await by_steps(runner, asyncio.create_task(session.propose(7, (), DraftWish(8))))
        await asyncio.sleep(0.01)
        await runner.step(2)  # the preparation is under way, and its third step waits at the gate
        other = worker.new_session([1, 2, 3])
        asked = asyncio.create_task(worker.run(score(other)))
        await asyncio.sleep(0.01)
        before = runner.num_forwards
        await runner.step(2)
        assert asked.done()
        assert [batch.num_sequences > 1 for batch in runner.batches[before:]] == [True, False]
        session.close()
        worker.end_session(other)
        runner.open()
        await assert_nothing_held(worker)


@pytest.mark.parametrize("num_blocks", [7, 9, 12, 20])
async def test_in_a_tiny_cache_branches_give_way_and_nobody_is_refused(num_blocks: int) -> None:
    """Two sessions of up to 24 tokens need 6 blocks of 4 each; branches have what is left, down to nothing."""
    start = STARTS["coupled"]
    texts: dict[int, tuple[list[int], list[int]]] = {}
    for branches in (0, 5):
        with working(ToyRunner(MODEL, num_blocks=num_blocks), max_step_tokens=16) as worker:
            drafter = preparing(worker, branches=branches)

            async def rounds(seed: int, drafter: ModelDrafter = drafter, worker: Worker = worker) -> list[int]:
                session = drafter.open(replace(start, seed=seed))
                text = list(PROMPT)
                drafted = await session.propose(7, (), DraftWish(3))
                while len(text) < 20:
                    await until_idle(worker)
                    token_ids = drafted.draft.token_ids
                    length, text = len(text), [*text, *token_ids[:1], len(text) % 9]
                    keep, new = length + 1, text[-1:]
                    drafted = await session.propose(keep, new, DraftWish(3))
                session.close()
                return [*text, *drafted.draft.token_ids]

            texts[branches] = await asyncio.gather(rounds(1), rounds(2))
            await assert_nothing_held(worker)
    assert texts[0] == texts[5]


# --- nothing leaks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(5))
async def test_closing_at_any_time_frees_the_branches(num_steps: int) -> None:
    ledger = Ledger()
    async with gated() as (worker, runner):
        session = preparing(worker, ledger=ledger).open(STARTS["rejection"])
        await by_steps(runner, asyncio.create_task(session.propose(7, (), DraftWish(3))))
        await asyncio.sleep(0.01)
        await runner.step_while_there_is_work(num_steps)
        session.close()
        runner.open()
        await assert_nothing_held(worker)
    assert ledger.outcomes == ["cancelled"]
    assert ledger.num_wasted == ledger.num_prepared


async def test_a_client_that_leaves_in_the_middle_of_a_propose_frees_the_branches() -> None:
    async with gated() as (worker, runner):
        session = preparing(worker).open(STARTS["rejection"])
        await by_steps(runner, asyncio.create_task(session.propose(7, (), DraftWish(3))))
        await asyncio.sleep(0.01)
        await runner.step(2)
        leaving = asyncio.create_task(session.propose(8, (8,), DraftWish(3)))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        session.close()
        runner.open()
        await assert_nothing_held(worker)


async def test_a_model_that_fails_while_preparing_fails_no_request() -> None:
    runner = ToyRunner(MODEL)
    with working(runner) as worker, working(ToyRunner(MODEL)) as other:
        session = preparing(worker).open(STARTS["greedy"])
        await session.propose(7, (), DraftWish(1))
        await until_idle(worker)
        runner.fail_on = range(runner.num_forwards + 2, 10_000)  # two for the draft to come
        drafted = await session.propose(7, (8,), DraftWish(2))
        await until_idle(worker)
        runner.fail_on = ()
        text = [*PROMPT, 8, *drafted.draft.token_ids[:1], 0]
        again = await session.propose(9, (0,), DraftWish(2))
        assert again.draft == (await fresh(other, STARTS["greedy"], text, 2)).draft
        session.close()
        await assert_nothing_held(worker)


# --- beside n-grams -------------------------------------------------------------------------------------------------


async def test_the_model_keeps_up_while_n_grams_draft_and_prepares_for_their_end() -> None:
    """A text that repeats itself, then does not: by then the model has computed it all, and drafted what follows."""
    runner = ToyRunner(MODEL)
    ledger = Ledger()
    prompt = (1, 2, 3, 4, 5, 6, 1, 2, 3)
    with working(runner) as worker, working(ToyRunner(MODEL)) as other:
        start = replace(STARTS["rejection"], token_ids=prompt, prompt_length=9)
        ngram = LookupDrafter(least_certainty=0.0)
        session = AutoDrafter(lookup=ngram, model=preparing(worker, ledger=ledger), min_match=3).open(start)
        await asyncio.sleep(0)
        await until_idle(worker)  # the prefill
        first = await session.propose(9, (), DraftWish(3))
        assert first.draft.token_ids == (4, 5, 6)
        await until_idle(worker)
        assert sum(batch.num_tokens for batch in runner.batches) >= 12
        *stood, recovered = prepared_for(session._model)[0]
        assert stood == [4, 5, 6][: len(stood)]
        assert len(stood) < 3, "that all stand, the n-grams are ready for"
        drafted = await session.propose(9 + len(stood), (recovered,), DraftWish(3))
        assert drafted.prepared
        assert drafted.draft == (await fresh(other, start, [*prompt, *stood, recovered], 3)).draft
        session.close()
        await assert_nothing_held(worker)
    assert ledger.outcomes[:1] == ["hit"]


async def test_a_short_context_of_the_models_does_not_stop_the_n_grams() -> None:
    runner = ToyRunner(MODEL, context_length=10)
    prompt = (1, 2, 3, 4, 5, 6, 1, 2, 3)
    with working(runner) as worker:
        start = replace(STARTS["greedy"], token_ids=prompt, prompt_length=9)
        ngram = LookupDrafter(least_certainty=0.0)
        session = AutoDrafter(lookup=ngram, model=preparing(worker), min_match=3).open(start)
        for length in range(9, 20, 2):
            token_ids = (await session.propose(length, (), DraftWish(2))).draft.token_ids
            assert len(token_ids) == 2
        session.close()
        await assert_nothing_held(worker)
