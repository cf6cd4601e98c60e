"""Drafter, verifier and two workers together: what they write is what plain decoding writes, in law and in text.

Everything but the transport is real: sessions, caches, batches of many texts, rollback after rejections, several
rounds a text. The models are toys, so the law of a text's first three tokens can be added up exactly. With fixed seeds
each statistical test passes or fails for good; FALSE_ALARM (1e-6) is the chance that right code had failed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from draft_service.drafters.auto import AutoDrafter, AutoSession
from draft_service.drafters.base import Drafter, DrafterSession
from draft_service.drafters.model import ModelDrafter
from gateway.peer_text import PeerText
from tandem.draft_law import SparseLaw, pack
from tandem.engine.block_pool import BlockPool
from tandem.engine.outcome import Outcome
from tandem.engine.rejection import verify
from tandem.engine.worker import Worker
from tandem.errors import ContextTooLong, InternalError, InvalidRequest, OutOfStep, Overloaded, TandemError
from tandem.lookup.drafter import LookupDrafter
from tandem.types import (
    NO_DRAFT,
    Draft,
    Drafted,
    DraftWish,
    PackedLaw,
    SamplingParams,
    SessionStart,
    TokenOrigin,
    Verdict,
)
from target_service.verifier import Verifier, VerifierSession
from tests.toy_models import (
    FALSE_ALARM,
    FloatArray,
    ToyModel,
    ToyRunner,
    held_blocks,
    misfit,
    smallest_visible_error,
    until_idle,
    working,
)

VOCAB = 4
TARGET = ToyModel(vocab_size=VOCAB, seed=4, scale=1.5)
DRAFT = TARGET.like(weight=0.6, seed=5)
OPPOSITE = TARGET.like(weight=-1.0, seed=5)  # its argmax is the target's least likely token
PROMPT = (3, 1, 2, 1, 0, 2)
GREEDY = SamplingParams(temperature=0.0)
PATIENCE_SECONDS = 20.0


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def start(
    tokens: Sequence[int] = PROMPT, *, prompt_length: int | None = None, params: SamplingParams = GREEDY, seed: int = 0
) -> SessionStart:
    return SessionStart(
        token_ids=tuple(tokens),
        prompt_length=len(tokens) if prompt_length is None else prompt_length,
        sampling=params,
        seed=seed,
    )


@dataclass
class Written:
    """The tokens after the prompt, cut at the length that was asked for, and how the drafts fared."""

    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    malformed: int
    prepared: int = 0  # drafts that were there when they were asked for


async def write(
    begin: SessionStart,
    num_tokens: int,
    *,
    verifier: Verifier,
    drafter: Drafter,
    k: int,
    idle: Worker | None = None,
) -> Written:
    """The gateway's loop, without gateway and transport. With `idle`, it waits for that worker to have nothing left to
    do before each verify."""
    text = list(begin.token_ids)
    length = len(text) + num_tokens
    at_target, at_draft = PeerText(len(text)), PeerText(len(text))
    target, draft_session = verifier.open(begin), drafter.open(begin)
    drafted = accepted = malformed = prepared = 0
    try:
        text.append((await target.first()).token_id)
        while len(text) < length:
            change = at_draft.change_to(text)
            proposed = await draft_session.propose(change.keep_length, change.new_tokens, DraftWish(k))
            draft = proposed.draft
            prepared += proposed.prepared
            at_draft.guess(draft.token_ids)
            assert draft_session.length == len(text) + len(draft.token_ids)
            if idle is not None:
                await until_idle(idle)
            change = at_target.change_to(text)
            verdict = await target.verify(change.keep_length, change.new_tokens, draft)
            at_target.guess(() if verdict.draft_error else draft.token_ids)
            text += [*draft.token_ids[: verdict.num_accepted], verdict.token_id]
            malformed += verdict.draft_error is not None
            drafted += 0 if verdict.draft_error else len(draft.token_ids)
            accepted += verdict.num_accepted
    finally:
        target.close()
        draft_session.close()
    return Written(tuple(text[length - num_tokens : length]), drafted, accepted, malformed, prepared)


async def assert_nothing_held(*workers: Worker) -> None:
    for worker in workers:
        assert (await worker.run(held_blocks(worker))).value == 0
        assert worker.num_sessions == 0


def exact_law(begin: SessionStart) -> FloatArray:
    """The law of the first three tokens [vocab, vocab, vocab] in plain decoding."""
    joint = np.zeros((VOCAB, VOCAB, VOCAB))
    for first, second in itertools.product(range(VOCAB), repeat=2):
        laws = [
            TARGET.law([*begin.token_ids, *more], begin.sampling, prompt_length=begin.prompt_length)
            for more in ((), (first,), (first, second))
        ]
        joint[first, second] = laws[0][first] * laws[1][second] * laws[2]
    return joint


LAWS = {
    "temperature 1": (SamplingParams(), 2, VOCAB),
    "one drafted token from a law of one": (SamplingParams(temperature=1.3), 1, 1),
    "penalties and a sparse law": (
        SamplingParams(temperature=0.9, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.4),
        3,
        2,
    ),
    "bans, bias, min_tokens and top_p": (
        SamplingParams(
            top_p=0.9, banned_token_ids=(3,), logit_bias=((1, 1.5),), min_tokens=2, end_token_ids=(0,), temperature=1.5
        ),
        2,
        VOCAB,
    ),
}
NUM_TEXTS = 1_500


async def write_many(
    begin: SessionStart, *, verifier: Verifier, drafter: Drafter, k: int, num_texts: int = NUM_TEXTS
) -> tuple[FloatArray, Written]:
    """Counts of the first three tokens of texts with the seeds 0, 1, 2, ..., 50 at a time, and the sums of the rest."""
    counts = np.zeros((VOCAB, VOCAB, VOCAB))
    total = Written((), 0, 0, 0)
    for batch in range(0, num_texts, 50):
        texts = await asyncio.gather(
            *(
                write(replace(begin, seed=seed), 3, verifier=verifier, drafter=drafter, k=k)
                for seed in range(batch, batch + 50)
            )
        )
        for text in texts:
            counts[text.token_ids] += 1
            total.drafted += text.drafted
            total.accepted += text.accepted
            total.malformed += text.malformed
    return counts, total


@pytest.mark.parametrize("name", LAWS)
async def test_the_first_three_tokens_follow_plain_decodings_law(name: str) -> None:
    """Chi-square over up to 64 triples of 1,500 texts; false alarm 1e-6. Sees a total-variation error of 0.145."""
    assert smallest_visible_error(num_cells=64, num_trials=NUM_TEXTS) < 0.145
    params, k, law_size = LAWS[name]
    begin = start(params=params)
    with working(ToyRunner(TARGET)) as target_worker, working(ToyRunner(DRAFT)) as draft_worker:
        drafter = ModelDrafter(draft_worker, law_size=law_size)
        counts, total = await write_many(begin, verifier=Verifier(target_worker), drafter=drafter, k=k)
        await assert_nothing_held(target_worker, draft_worker)
    assert misfit(counts, exact_law(begin)) > FALSE_ALARM
    assert 0 < total.accepted < total.drafted
    assert total.malformed == 0


@pytest.mark.parametrize("num_branches", [2, 5])
async def test_prepared_drafts_follow_plain_decodings_law(num_branches: int) -> None:
    """The same, where drafts are prepared for some outcomes of each round, and drafted on request for the others."""
    params, k, law_size = LAWS["temperature 1"]
    begin = start(params=params)
    counts, prepared, drafted = np.zeros((VOCAB, VOCAB, VOCAB)), 0, 0
    with working(ToyRunner(TARGET)) as target_worker, working(ToyRunner(DRAFT)) as draft_worker:
        drafter = ModelDrafter(draft_worker, law_size=law_size, prepared_branches=num_branches)
        verifier = Verifier(target_worker)
        for seed in range(NUM_TEXTS):
            text = await write(replace(begin, seed=seed), 3, verifier=verifier, drafter=drafter, k=k, idle=draft_worker)
            counts[text.token_ids] += 1
            prepared += text.prepared
            drafted += text.drafted
        await assert_nothing_held(target_worker, draft_worker)
    assert misfit(counts, exact_law(begin)) > FALSE_ALARM
    assert 30 < prepared < drafted // k - 50


@pytest.mark.parametrize("least_certainty", [0.0, 0.4])
async def test_n_gram_drafts_follow_plain_decodings_law(least_certainty: float) -> None:
    """The same, with deterministic drafts found in the text itself; and where it depends on what became of earlier
    ones how long they are."""
    begin = start((0, 1, 2, 0, 1, 3, 0, 2, 1, 2, 3, 0, 1), params=SamplingParams(temperature=1.2))
    with working(ToyRunner(TARGET)) as worker:
        drafter = LookupDrafter(least_certainty=least_certainty)
        counts, total = await write_many(begin, verifier=Verifier(worker), drafter=drafter, k=3)
        await assert_nothing_held(worker)
    assert misfit(counts, exact_law(begin)) > FALSE_ALARM
    assert 0 < total.accepted < total.drafted


async def test_auto_drafts_follow_plain_decodings_law() -> None:
    """The same, where n-grams and a model take turns within one text: in one round a law, in the next none."""
    begin = start((0, 1, 2, 0, 1, 3, 0, 2, 1, 2, 3, 0, 1), params=SamplingParams(temperature=1.2))
    used = {True: 0, False: 0}

    class Watched(AutoSession):
        async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
            drafted = await super().propose(keep_length, new_tokens, wish)
            used[drafted.draft.law is None] += 1
            return drafted

    class Watching(AutoDrafter):
        def open(self, start: SessionStart) -> AutoSession:
            return Watched(ngram.open(start), model.open(start), length=len(start.token_ids), min_match=2)

    with working(ToyRunner(TARGET)) as target_worker, working(ToyRunner(DRAFT)) as draft_worker:
        model = ModelDrafter(draft_worker, law_size=VOCAB)
        ngram = LookupDrafter(least_certainty=0.0)
        drafter = Watching(lookup=ngram, model=model, min_match=2)
        counts, total = await write_many(begin, verifier=Verifier(target_worker), drafter=drafter, k=1)
        await assert_nothing_held(target_worker, draft_worker)
    assert misfit(counts, exact_law(begin)) > FALSE_ALARM
    assert 0 < total.accepted < total.drafted
    assert min(used.values()) > 100


async def test_a_session_reopened_in_mid_answer_follows_the_same_law() -> None:
    """Two of the tokens were generated before: penalties and min_tokens must know."""
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.2, min_tokens=4, end_token_ids=(2,))
    begin = start((*PROMPT, 1, 3), prompt_length=len(PROMPT), params=params)
    with working(ToyRunner(TARGET)) as target_worker, working(ToyRunner(DRAFT)) as draft_worker:
        drafter = ModelDrafter(draft_worker, law_size=3)
        counts, _ = await write_many(begin, verifier=Verifier(target_worker), drafter=drafter, k=2)
    assert misfit(counts, exact_law(begin)) > FALSE_ALARM


async def test_a_verifier_with_a_wrong_rule_fails_the_same_test() -> None:
    """Negative control: recovered tokens from the target's whole law. The first token is plain, so only later ones
    show it."""

    def wrong_rule(
        logits: torch.Tensor,
        drafted: Sequence[int],
        laws: Sequence[SparseLaw] | None,
        params: SamplingParams,
        *,
        seed: int,
        position: int,
    ) -> Outcome:
        outcome = verify(logits, drafted, laws, params, seed=seed, position=position)
        if outcome.origin is not TokenOrigin.RECOVERED:
            return outcome
        row = outcome.num_accepted
        plain = verify(logits[row : row + 1], (), None, params, seed=seed, position=position + row)
        return replace(outcome, token_id=plain.token_id)

    params, k, law_size = LAWS["temperature 1"]
    with working(ToyRunner(TARGET)) as target_worker, working(ToyRunner(DRAFT)) as draft_worker:
        verifier = Verifier(target_worker, rejection_rule=wrong_rule)
        drafter = ModelDrafter(draft_worker, law_size=law_size)
        counts, _ = await write_many(start(params=params), verifier=verifier, drafter=drafter, k=k)
    assert misfit(counts, exact_law(start(params=params))) < FALSE_ALARM


@pytest.mark.parametrize("k", range(1, 9))
async def test_greedy_text_is_plain_greedy_text_whatever_the_draft(k: int) -> None:
    """A good draft, and one that is always wrong (mlx-lm#1109: rejected drafts left in the cache): 200 tokens each."""
    expected = tuple(TARGET.greedy(PROMPT, 200))
    with (
        working(ToyRunner(TARGET, num_blocks=130)) as target_worker,
        working(ToyRunner(DRAFT, num_blocks=70)) as good_worker,
        working(ToyRunner(OPPOSITE, num_blocks=70)) as bad_worker,
    ):
        verifier = Verifier(target_worker)
        good, bad = await asyncio.gather(
            *(
                write(start(), 200, verifier=verifier, drafter=ModelDrafter(worker, law_size=VOCAB), k=k)
                for worker in (good_worker, bad_worker)
            )
        )
        await assert_nothing_held(target_worker, good_worker, bad_worker)
    assert good.token_ids == bad.token_ids == expected
    assert 0 < good.accepted < good.drafted
    assert bad.accepted == 0
    assert bad.drafted >= 199 * k


async def test_a_draft_equal_to_the_target_is_accepted_whole() -> None:
    """Greedy, and sampled with the target's own law, but for what rounding in the top law's sum may cost."""
    with working(ToyRunner(TARGET)) as target_worker, working(ToyRunner(TARGET)) as draft_worker:
        drafter = ModelDrafter(draft_worker, law_size=VOCAB)
        for params in (GREEDY, SamplingParams(temperature=0.7)):
            text = await write(start(params=params), 100, verifier=Verifier(target_worker), drafter=drafter, k=4)
            assert text.accepted == text.drafted > 0


class Adversary:
    """A drafter that proposes whatever can confuse: right beginnings, nonsense, too much, too little, broken laws."""

    def __init__(self, *, seed: int) -> None:
        self._numbers = np.random.default_rng(seed)

    def open(self, start: SessionStart) -> DrafterSession:
        return AdversarySession(list(start.token_ids), self._numbers)


class AdversarySession:
    def __init__(self, tokens: list[int], numbers: np.random.Generator) -> None:
        self._tokens = tokens
        self._numbers = numbers

    @property
    def length(self) -> int:
        return len(self._tokens)

    async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
        self._tokens = [*self._tokens[:keep_length], *new_tokens]
        size = int(self._numbers.integers(0, 3 * wish.num_draft_tokens))
        right = TARGET.greedy(self._tokens, int(self._numbers.integers(0, size + 1)))
        nonsense = self._numbers.integers(0, VOCAB + int(self._numbers.integers(0, 2)), size - len(right))
        token_ids = (*right, *(int(token_id) for token_id in nonsense))
        self._tokens += token_ids
        return Drafted(Draft(token_ids, self._law(token_ids)))

    def close(self) -> None:
        pass

    def _law(self, token_ids: Sequence[int]) -> PackedLaw | None:
        one_hot = [SparseLaw(np.array([token_id], np.uint32), np.array([1.0], np.float32)) for token_id in token_ids]
        packed = pack(one_hot)
        choices = (None, packed, replace(packed, probs=packed.probs[:-1]), replace(packed, sizes=b"\x01"))
        return choices[int(self._numbers.integers(0, len(choices)))]


@pytest.mark.parametrize("seed", range(4))
async def test_an_adversarial_drafter_cannot_change_greedy_text(seed: int) -> None:
    with working(ToyRunner(TARGET, num_blocks=60), max_step_tokens=32) as worker:
        text = await write(start(), 200, verifier=Verifier(worker), drafter=Adversary(seed=seed), k=6)
        await assert_nothing_held(worker)
    assert text.token_ids == tuple(TARGET.greedy(PROMPT, 200))
    assert 0 < text.accepted < text.drafted
    assert text.malformed > 0


async def test_many_texts_at_once_on_small_caches_are_each_their_own() -> None:
    """Ten texts of 90 tokens (23 blocks) share 40 blocks at each model: caches are dropped all the time."""
    prompts = [(*PROMPT, *(n % VOCAB for n in range(seed))) for seed in range(10)]
    with (
        working(ToyRunner(TARGET, num_blocks=40), max_step_tokens=32) as target_worker,
        working(ToyRunner(DRAFT, num_blocks=40), max_step_tokens=32) as draft_worker,
    ):
        verifier, drafter = Verifier(target_worker), ModelDrafter(draft_worker, law_size=VOCAB)
        async with asyncio.timeout(PATIENCE_SECONDS):
            texts = await asyncio.gather(
                *(write(start(prompt), 75, verifier=verifier, drafter=drafter, k=4) for prompt in prompts)
            )
        await assert_nothing_held(target_worker, draft_worker)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text.token_ids == tuple(TARGET.greedy(prompt, 75))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
async def test_a_draft_model_with_a_shorter_context_drafts_up_to_its_end_and_then_no_more(
    params: SamplingParams,
) -> None:
    with (
        working(ToyRunner(TARGET)) as target_worker,
        working(ToyRunner(DRAFT, context_length=30)) as draft_worker,
    ):
        drafter = ModelDrafter(draft_worker, law_size=VOCAB)
        text = await write(start(params=params), 60, verifier=Verifier(target_worker), drafter=drafter, k=4)
        again = drafter.open(start([0] * 30))
        assert (await again.propose(30, (1,), DraftWish(4))).draft == NO_DRAFT
        again.close()
        await assert_nothing_held(target_worker, draft_worker)
    assert 0 < text.drafted <= 4 * (30 - len(PROMPT))
    if params.greedy:
        assert text.token_ids == tuple(TARGET.greedy(PROMPT, 60))


async def test_only_the_workers_own_thread_touches_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end of the draft's context, where there is nothing to draft. BlockPool has no lock."""
    threads: set[str] = set()
    true_release = BlockPool.release

    def release(pool: BlockPool, block: int) -> None:
        threads.add(threading.current_thread().name)
        true_release(pool, block)

    monkeypatch.setattr(BlockPool, "release", release)
    with (
        working(ToyRunner(TARGET)) as target_worker,
        working(ToyRunner(OPPOSITE, context_length=24)) as draft_worker,
    ):
        drafter = ModelDrafter(draft_worker, law_size=VOCAB)
        await write(start(), 40, verifier=Verifier(target_worker), drafter=drafter, k=6)
        await assert_nothing_held(target_worker, draft_worker)
    assert threads == {"toy"}


def reference_verdict(tokens: Sequence[int], draft: Sequence[int]) -> tuple[int, int]:
    """What greedy verification must answer: how many stand, and the token that follows."""
    right = TARGET.greedy(tokens, len(draft) + 1)
    stand = next((i for i, token_id in enumerate(draft) if token_id != right[i]), len(draft))
    return stand, right[stand]


def summary(verdict: Verdict) -> tuple[int, int]:
    return verdict.num_accepted, verdict.token_id


async def test_a_repeated_round_is_answered_the_same() -> None:
    draft = Draft((*TARGET.greedy([*PROMPT, 2], 2), 0, 0))
    for params in (GREEDY, SamplingParams()):
        with working(ToyRunner(TARGET)) as worker:
            session = Verifier(worker).open(start(params=params))
            await session.first()
            verdicts = [summary(await session.verify(len(PROMPT), (2,), draft)) for _ in range(3)]
            assert verdicts[0] == verdicts[1] == verdicts[2]
            if params.greedy:
                assert verdicts[0] == reference_verdict([*PROMPT, 2], draft.token_ids)
            assert session.length == len(PROMPT) + 5


async def test_a_verdict_is_that_of_the_rule_at_the_tokens_absolute_position() -> None:
    """So that a plain token, or one at the same place in another cut of rounds, uses the same random number."""
    tokens, drafted, params = [*PROMPT, 2], (1, 0, 3), SamplingParams(temperature=1.5)
    rows = torch.stack([TARGET.logits([*tokens, *drafted[:i]]) for i in range(4)])
    with working(ToyRunner(TARGET)) as worker:
        for seed in range(40):
            session = Verifier(worker).open(start(params=params, seed=seed))
            for draft, logits in ((drafted, rows), ((), rows[:1])):
                outcome = verify(logits, draft, None, params, seed=seed, position=len(tokens))
                verdict = await session.verify(len(PROMPT), (2,), Draft(draft))
                assert (*summary(verdict), verdict.origin) == (outcome.num_accepted, outcome.token_id, outcome.origin)
            session.close()


async def test_a_round_may_come_before_the_first_token_was_asked_for() -> None:
    with working(ToyRunner(TARGET, block_size=2)) as worker:
        for draft in ((), (1,), (1, 2, 3)):
            session = Verifier(worker).open(start())
            verdict = await session.verify(len(PROMPT), (), Draft(draft))
            assert summary(verdict) == reference_verdict(PROMPT, draft)


async def test_a_round_that_keeps_too_much_is_out_of_step_and_the_session_goes_on() -> None:
    with working(ToyRunner(TARGET)) as worker:
        session = Verifier(worker).open(start())
        await session.first()
        with pytest.raises(OutOfStep):
            await session.verify(len(PROMPT) + 1, (), NO_DRAFT)
        assert summary(await session.verify(len(PROMPT), (1,), NO_DRAFT)) == reference_verdict([*PROMPT, 1], ())


@pytest.mark.parametrize("draft", [NO_DRAFT, Draft((1, 2, 3))])
async def test_a_round_that_keeps_nothing_is_refused_and_harms_no_one_else(draft: Draft) -> None:
    with working(ToyRunner(TARGET, step_seconds=0.005)) as target_worker, working(ToyRunner(DRAFT)) as draft_worker:
        verifier, drafter = Verifier(target_worker), ModelDrafter(draft_worker, law_size=VOCAB)
        bystander = asyncio.create_task(write(start(), 40, verifier=verifier, drafter=drafter, k=2))
        await asyncio.sleep(0.02)
        for _ in range(5):
            session, proposer = verifier.open(start()), drafter.open(start())
            with pytest.raises(TandemError) as refused:
                await session.verify(0, (), draft)
            assert not isinstance(refused.value, InternalError)
            with pytest.raises(TandemError) as refused:
                await proposer.propose(0, (), DraftWish(3))
            assert not isinstance(refused.value, InternalError)
            session.close()
            proposer.close()
        assert (await bystander).token_ids == tuple(TARGET.greedy(PROMPT, 40))
        await assert_nothing_held(target_worker, draft_worker)


async def verified_in_time(session: VerifierSession, draft: Draft) -> Verdict:
    async with asyncio.timeout(PATIENCE_SECONDS / 4):
        return await session.verify(len(PROMPT), (2,), draft)


@pytest.mark.parametrize("num_drafted", [11, 15, 16, 40, 500])
async def test_a_draft_of_any_length_is_answered(num_drafted: int) -> None:
    """Where it does not fit into one step it is set aside as malformed, or refused; never left waiting."""
    draft = Draft(tuple(TARGET.greedy([*PROMPT, 2], num_drafted)))
    with working(ToyRunner(TARGET, num_blocks=200), max_step_tokens=16) as worker:
        session = Verifier(worker).open(start())
        await session.first()
        with contextlib.suppress(InvalidRequest):
            verdict = await verified_in_time(session, draft)
            expected = () if verdict.draft_error else draft.token_ids
            assert summary(verdict) == reference_verdict([*PROMPT, 2], expected)
        assert summary(await verified_in_time(session, NO_DRAFT)) == reference_verdict([*PROMPT, 2], ())


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
async def test_a_malformed_draft_makes_a_plain_round_and_is_named(params: SamplingParams) -> None:
    with working(ToyRunner(TARGET)) as worker:
        session = Verifier(worker).open(start(params=params))
        await session.first()
        plain = await session.verify(len(PROMPT), (2,), NO_DRAFT)
        for draft in (
            Draft((1, VOCAB)),
            Draft((1, 2), PackedLaw(b"", b"", b"")),
            Draft((1,), PackedLaw(b"1", b"", b"")),
        ):
            verdict = await session.verify(len(PROMPT), (2,), draft)
            assert verdict.draft_error
            assert (summary(verdict), verdict.origin) == (summary(plain), TokenOrigin.PLAIN)
            assert session.length == len(PROMPT) + 1


async def test_a_text_may_fill_the_context_and_no_more() -> None:
    with working(ToyRunner(TARGET, context_length=12)) as worker:
        verifier = Verifier(worker)
        session = verifier.open(start(PROMPT[:5]))
        await session.first()
        verdict = await session.verify(5, (0, 1, 2, 3), Draft((3, 2, 1)))
        assert summary(verdict) == reference_verdict([*PROMPT[:5], 0, 1, 2, 3], (3, 2, 1))
        with pytest.raises(ContextTooLong):
            await session.verify(5, (0, 1, 2, 3), Draft((3, 2, 1, 0)))
        with pytest.raises(ContextTooLong):
            verifier.open(start([0] * 12))


async def test_closing_a_drafter_in_mid_prefill_frees_its_cache() -> None:
    """The session's end reaches the worker before the prefill's cancellation does, which takes a turn of the loop."""
    gate = threading.Semaphore(0)
    with working(ToyRunner(DRAFT, gate=gate), max_step_tokens=8) as worker:
        session = ModelDrafter(worker, law_size=VOCAB).open(start([n % VOCAB for n in range(60)]))
        await asyncio.sleep(0.01)
        session.close()
        for _ in range(1_000):
            gate.release()
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is busy with something else
        await assert_nothing_held(worker)


async def test_a_prefill_that_failed_tells_the_first_proposal_or_nobody() -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    with working(ToyRunner(DRAFT, num_blocks=3)) as worker:
        drafter = ModelDrafter(worker, law_size=VOCAB)
        large = start([n % VOCAB for n in range(20)])
        asked, unasked = drafter.open(large), drafter.open(large)
        with pytest.raises(Overloaded):
            await asked.propose(20, (1,), DraftWish(2))
        await asyncio.sleep(0.02)
        asked.close()
        unasked.close()
        await assert_nothing_held(worker)
        del asked, unasked
        gc.collect()  # who never asked a failed task for its error is told then
    assert complaints == []
