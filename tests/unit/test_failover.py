"""Sessions that outlive their target: the same tokens whatever fails when, under both rules; and where it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from draft_service.drafters.base import Drafter
from draft_service.drafters.model import ModelDrafter
from gateway.backends import Target, TargetSession
from gateway.failover import FailoverReason, FailoverTarget
from tandem.errors import (
    InternalError,
    InvalidRequest,
    OutOfStep,
    Overloaded,
    TandemError,
    TimedOut,
    Unavailable,
)
from tandem.lookup.drafter import LookupDrafter
from tandem.types import NO_DRAFT, Draft, SamplingParams, SessionStart, Verdict, Verification
from target_service.verifier import Verifier
from tests.fakes import ScriptedTarget, alphabet
from tests.in_process import InProcessDrafts, InProcessTarget, speak
from tests.toy_models import ToyModel, ToyRunner, working

Plan = Callable[
    [int], TandemError | None
]  # what the call of that number, from 0, fails with; all replicas count as one


def never(_: int) -> None:
    return None


@dataclass
class FlakyReplicas:
    """gateway.failover.Replicas over one target that is real, or a fake, whose answers get lost by plan.

    The answer is computed before it is lost: what a target has drawn must not matter either.
    """

    target: Target
    plan: Plan = never
    num_up: int = 2
    seconds_since_up: float = 0.0
    num_calls: int = 0
    num_lost: int = 0
    patience: list[float] = field(default_factory=list)
    starts: list[SessionStart] = field(default_factory=list)
    num_open: int = 0

    def open(self, start: SessionStart, *, patience: float, address: str | None = None) -> _FlakySession:
        if self.num_up == 0:
            raise Unavailable("target 127.0.0.1:1: connection refused")
        self.patience.append(patience)
        self.starts.append(start)
        self.num_open += 1
        return _FlakySession(self, self.target.open(start))


class _FlakySession:
    def __init__(self, replicas: FlakyReplicas, session: TargetSession) -> None:
        self._replicas = replicas
        self._session = session
        self._open = True

    async def first(self) -> Verdict:
        return self._kept(await self._session.first())

    async def verify(self, token_ids: Sequence[int], draft: Draft) -> Verdict:
        return self._kept(await self._session.verify(token_ids, draft))

    def _kept(self, verdict: Verdict) -> Verdict:
        replicas = self._replicas
        number, replicas.num_calls = replicas.num_calls, replicas.num_calls + 1
        error = replicas.plan(number)
        if error is not None:
            replicas.num_lost += 1
            raise error
        return verdict

    def close(self) -> None:
        if self._open:
            self._open = False
            self._replicas.num_open -= 1
            self._session.close()


def over(replicas: FlakyReplicas, *, limit_seconds: float = 5.0) -> tuple[FailoverTarget, list[FailoverReason]]:
    seen: list[FailoverReason] = []
    return FailoverTarget(replicas, limit_seconds=limit_seconds, observe=seen.append), seen


# --- the tokens are the same


TOY = ToyModel(vocab_size=12, seed=5, scale=1.5)
ERRORS = (
    Unavailable("gone"),
    TimedOut("late"),
    InternalError("a fault"),
    OutOfStep("a round names a length that the session does not hold"),
    Overloaded("full"),
)


@dataclass(frozen=True)
class Services:
    target: InProcessTarget
    drafts: InProcessDrafts


@contextmanager
def services() -> Iterator[Services]:
    with working(ToyRunner(TOY)) as target, working(ToyRunner(TOY.like(weight=0.8, seed=6))) as draft:
        drafters: dict[str, Drafter] = {
            "model": ModelDrafter(draft, law_size=12),
            "ngram": LookupDrafter(least_certainty=0.0),
        }
        yield Services(InProcessTarget(Verifier(target)), InProcessDrafts(drafters, vocab_size=12))


def start_of(verification: Verification, *, seed: int) -> SessionStart:
    return SessionStart(
        token_ids=(1, 2, 3, 1, 2),
        prompt_length=5,
        sampling=SamplingParams(temperature=0.9, frequency_penalty=0.3, top_k=9),
        seed=seed,
        verification=verification,
        num_logprobs=2,
    )


@pytest.mark.parametrize("verification", Verification)
@pytest.mark.parametrize("drafter", ["model", "ngram"])
async def test_whatever_fails_when_the_tokens_are_those_of_no_fault_at_all(
    verification: Verification, drafter: str
) -> None:
    """Under the rejection rule too, where other drafts make other texts: the same drafts are asked about again."""
    with services() as made:
        for seed in range(6):
            start, k = start_of(verification, seed=seed), 1 + seed % 6
            right = await speak(start, num_tokens=30, target=made.target, drafts=made.drafts, drafter=drafter, k=k)
            for every in (3, 5):
                # Every kind in turn, at other calls for each seed. A session that is opened again needs two calls.
                def plan(number: int, every: int = every, seed: int = seed) -> TandemError | None:
                    number += seed
                    return ERRORS[number // every % len(ERRORS)] if number % every == 0 else None

                replicas = FlakyReplicas(made.target, plan)
                target, seen = over(replicas)
                answer = await speak(start, num_tokens=30, target=target, drafts=made.drafts, drafter=drafter, k=k)
                assert answer.token_ids == right.token_ids
                assert [one.num_accepted for one in answer.rounds] == [one.num_accepted for one in right.rounds]
                assert [one.origins for one in answer.rounds] == [one.origins for one in right.rounds]
                for mine, theirs in zip(answer.logprobs, right.logprobs, strict=True):
                    assert mine.logprob == pytest.approx(theirs.logprob)
                assert len(seen) == replicas.num_lost > 0
                assert replicas.num_open == 0


async def test_a_lost_first_token_is_drawn_again_and_the_prompt_scored_again() -> None:
    with services() as made:
        start = replace(start_of(Verification.REJECTION, seed=1), prompt_logprobs=True)
        right = await speak(start, num_tokens=8, target=made.target)
        replicas = FlakyReplicas(made.target, lambda number: Unavailable("gone") if number in (0, 3) else None)
        target, seen = over(replicas)
        answer = await speak(start, num_tokens=8, target=target)
    assert answer.token_ids == right.token_ids
    assert answer.rounds[0].prompt_logprobs == right.rounds[0].prompt_logprobs
    assert len(answer.rounds[0].prompt_logprobs) == 4
    assert [one.prompt_logprobs for one in replicas.starts] == [True, True, False]  # later ones have been scored
    assert [len(one.token_ids) for one in replicas.starts] == [5, 5, 7]
    assert seen == [FailoverReason.UNAVAILABLE] * 2


async def test_a_draftless_round_that_was_lost_costs_one_call() -> None:
    """Its answer is the first token after the text, which a session says when it opens."""
    target = ScriptedTarget(alphabet)
    replicas = FlakyReplicas(target, lambda number: TimedOut("late") if number == 2 else None)
    failover, seen = over(replicas)
    session = failover.open(START)
    assert (await session.first()).token_id == ord("b")
    assert (await session.verify(tuple(b"xab"), NO_DRAFT)).token_id == ord("c")
    assert (await session.verify(tuple(b"xabc"), NO_DRAFT)).token_id == ord("d")
    assert (await session.verify(tuple(b"xabcd"), NO_DRAFT)).token_id == ord("e")
    session.close()
    assert target.num_calls == 5
    assert seen == [FailoverReason.TIMEOUT]


# --- where it ends

START = SessionStart(token_ids=tuple(b"xa"), prompt_length=2, sampling=SamplingParams(), seed=1)


@pytest.mark.parametrize(
    ("error", "told"),
    [(Unavailable("gone"), Unavailable), (TimedOut("late"), Unavailable), (InternalError("a fault"), InternalError)],
)
async def test_a_request_that_every_replica_fails_at_ends_after_four_of_them(
    error: TandemError, told: type[TandemError]
) -> None:
    """It might be the request that kills them."""
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda number: error if number >= 2 else None)
    failover, seen = over(replicas)
    session = failover.open(START)
    await session.first()
    await session.verify(tuple(b"xab"), NO_DRAFT)
    with pytest.raises(told, match=error.message):
        await session.verify(tuple(b"xabc"), NO_DRAFT)
    session.close()
    assert replicas.num_calls == 2 + 4
    assert len(seen) == 3
    assert replicas.num_open == 0


async def test_faults_that_answers_lie_between_are_never_too_many() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda number: Unavailable("gone") if number % 2 else None)
    failover, seen = over(replicas)
    session = failover.open(START)
    text = list(START.token_ids)
    text.append((await session.first()).token_id)
    for _ in range(20):
        text.append((await session.verify(text, NO_DRAFT)).token_id)
    assert bytes(text[2:]).decode() == "bcdefghijklmnopqrstuv"
    assert len(seen) == 20


@pytest.mark.parametrize(
    "error", [InvalidRequest("token_ids holds 7", param="token_ids"), ValueError("a fault in the gateway")]
)
async def test_what_another_replica_would_answer_just_so_is_raised_at_once(error: Exception) -> None:
    target = ScriptedTarget(alphabet, fail_at=(0, error))
    failover, seen = over(FlakyReplicas(target))
    with pytest.raises(type(error)):
        await failover.open(START).first()
    assert target.num_calls == 1
    assert seen == []


async def test_a_second_replica_gets_more_time_before_it_is_late() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda number: TimedOut("late") if number < 3 else None)
    failover, _ = over(replicas)
    await failover.open(START).first()
    assert replicas.patience == [1.0, 4.0, 16.0, 64.0]


# --- no replica is up


async def test_a_stream_waits_for_a_target_to_come_back_and_goes_on() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda number: Unavailable("gone") if number == 1 else None)
    failover, seen = over(replicas)
    session = failover.open(START)
    await session.first()
    replicas.num_up = 0
    waiting = asyncio.create_task(session.verify(tuple(b"xab"), NO_DRAFT))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    replicas.num_up = 1
    assert (await waiting).token_id == ord("c")
    assert seen == [FailoverReason.UNAVAILABLE]


async def test_a_stream_for_which_none_comes_back_in_time_ends_with_the_reason() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda number: TimedOut("late") if number == 1 else None)
    failover, _ = over(replicas, limit_seconds=0.2)
    session = failover.open(START)
    await session.first()
    replicas.num_up = 0
    with pytest.raises(Unavailable, match="connection refused"):
        await session.verify(tuple(b"xab"), NO_DRAFT)
    session.close()
    assert replicas.num_open == 0


async def test_a_request_that_comes_while_the_only_target_is_away_waits_for_it() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), num_up=0, seconds_since_up=0.1)
    failover, seen = over(replicas)
    waiting = asyncio.create_task(failover.open(START).first())
    await asyncio.sleep(0.1)
    replicas.num_up = 1
    assert (await waiting).token_id == ord("b")
    assert seen == []  # nothing was opened again


async def test_a_request_that_comes_when_all_are_long_gone_is_refused_at_once() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), num_up=0, seconds_since_up=5.1)
    failover, _ = over(replicas)
    with pytest.raises(Unavailable, match="connection refused"):
        failover.open(START)


async def test_a_request_that_waits_for_a_target_waits_for_what_is_left_of_the_limit() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), num_up=0, seconds_since_up=4.8)
    failover, _ = over(replicas)
    async with asyncio.timeout(2):
        with pytest.raises(Unavailable, match="connection refused"):
            await failover.open(START).first()


# --- no room


async def test_one_target_without_room_is_overloaded_at_once() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda _: Overloaded("64 sessions are open already"), num_up=1)
    failover, seen = over(replicas)
    with pytest.raises(Overloaded):
        await failover.open(START).first()
    assert replicas.num_calls == 1
    assert seen == []


async def test_where_one_target_has_no_room_the_others_are_asked() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda number: Overloaded("full") if number < 2 else None)
    replicas.num_up = 3
    failover, seen = over(replicas)
    assert (await failover.open(START).first()).token_id == ord("b")
    assert seen == [FailoverReason.OVERLOADED] * 2


async def test_a_stream_that_lost_its_target_waits_for_room_at_another() -> None:
    def plan(number: int) -> TandemError | None:
        return Unavailable("gone") if number == 1 else Overloaded("full") if 2 <= number < 7 else None

    replicas = FlakyReplicas(ScriptedTarget(alphabet), plan, num_up=1)
    failover, seen = over(replicas)
    session = failover.open(START)
    await session.first()
    assert (await session.verify(tuple(b"xab"), NO_DRAFT)).token_id == ord("c")
    assert seen == [FailoverReason.UNAVAILABLE, *[FailoverReason.OVERLOADED] * 5]


async def test_closing_while_it_waits_leaves_nothing_open() -> None:
    replicas = FlakyReplicas(ScriptedTarget(alphabet), lambda number: Unavailable("gone") if number == 1 else None)
    failover, _ = over(replicas)
    session = failover.open(START)
    await session.first()
    replicas.num_up = 0
    waiting = asyncio.create_task(session.verify(tuple(b"xab"), NO_DRAFT))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    session.close()
    session.close()
    assert replicas.num_open == 0
