"""The loop with a draft that is never, always and sometimes right; every expected token is derived in a comment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from gateway.draft_length import FixedLength
from gateway.speculate import Round, SpeculationPlan, speculate
from tandem.errors import Unavailable
from tandem.types import DraftlessReason, SamplingParams, SessionStart, TokenOrigin
from tests.fakes import ScriptedDrafts, ScriptedTarget, alphabet, always, never

A, R, B, P = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS, TokenOrigin.PLAIN
START = SessionStart(token_ids=tuple(b"xa"), prompt_length=2, sampling=SamplingParams(), seed=1)


async def rounds_of(
    target: ScriptedTarget, drafts: ScriptedDrafts, *, num_tokens: int, num_draft_tokens: int = 3
) -> list[Round]:
    plan = SpeculationPlan(num_draft_tokens=num_draft_tokens)
    max_length = len(START.token_ids) + num_tokens
    stream = speculate(
        START, max_length=max_length, plan=plan, length=FixedLength(plan.num_draft_tokens), target=target, drafts=drafts
    )
    async with aclosing(stream) as rounds:
        return [outcome async for outcome in rounds]


def fakes(wrong_at: Callable[[int], bool]) -> tuple[ScriptedTarget, ScriptedDrafts]:
    return ScriptedTarget(alphabet), ScriptedDrafts(alphabet, wrong_at=wrong_at)


def texts(rounds: list[Round]) -> list[str]:
    return [bytes(outcome.token_ids).decode() for outcome in rounds]


async def test_a_draft_that_is_always_right_gives_k_plus_one_tokens_a_round() -> None:
    rounds = await rounds_of(*fakes(never), num_tokens=9)
    # The first token alone, then 3 accepted + 1 bonus, twice: 1 + 4 + 4.
    assert texts(rounds) == ["b", "cdef", "ghij"]
    assert [outcome.origins for outcome in rounds] == [(P,), (A, A, A, B), (A, A, A, B)]
    assert [outcome.draftless_reason for outcome in rounds] == [DraftlessReason.FIRST, None, None]


async def test_a_draft_that_is_never_right_gives_one_recovered_token_a_round() -> None:
    rounds = await rounds_of(*fakes(always), num_tokens=4)
    # One token is left for the last round: no room for a draft.
    assert texts(rounds) == ["b", "c", "d", "e"]
    assert [outcome.origins for outcome in rounds] == [(P,), (R,), (R,), (P,)]
    assert [outcome.draftless_reason for outcome in rounds] == [
        DraftlessReason.FIRST,
        None,
        None,
        DraftlessReason.LIMIT,
    ]


async def test_a_draft_that_is_sometimes_right_keeps_what_comes_before_its_fault() -> None:
    rounds = await rounds_of(*fakes(lambda position: position % 3 == 2), num_tokens=8)
    # Positions 0 to 7 are b to i; d (2) and g (5) are guessed wrong. Round 1 drafts c D e: c stands, d is recovered.
    # Round 2 drafts e f G: e f stand, g is recovered. Round 3 has two tokens left, so drafts one: h, then bonus i.
    assert texts(rounds) == ["b", "cd", "efg", "hi"]
    assert [(outcome.num_drafted, outcome.num_accepted) for outcome in rounds] == [(0, 0), (3, 1), (3, 2), (1, 1)]
    assert [outcome.origins[-1] for outcome in rounds] == [P, R, R, B]


@pytest.mark.parametrize("num_tokens", range(1, 12))
@pytest.mark.parametrize("wrong_at", [never, always, lambda position: position % 3 == 2])
async def test_c7_e9_the_text_never_exceeds_its_limit_whatever_k(
    num_tokens: int, wrong_at: Callable[[int], bool]
) -> None:
    for num_draft_tokens in (0, 1, 4, 16):
        rounds = await rounds_of(*fakes(wrong_at), num_tokens=num_tokens, num_draft_tokens=num_draft_tokens)
        assert "".join(texts(rounds)) == "bcdefghijklm"[:num_tokens]


async def test_without_draft_tokens_no_draft_session_is_opened() -> None:
    target, drafts = fakes(never)
    rounds = await rounds_of(target, drafts, num_tokens=3, num_draft_tokens=0)
    assert texts(rounds) == ["b", "c", "d"]
    assert {outcome.draftless_reason for outcome in rounds} == {DraftlessReason.OFF}
    assert drafts.drafters == []


async def test_a_draft_that_is_down_makes_plain_rounds_with_the_reason() -> None:
    target, drafts = fakes(never)
    drafts.down = DraftlessReason.TIMEOUT
    rounds = await rounds_of(target, drafts, num_tokens=3)
    assert texts(rounds) == ["b", "c", "d"]
    assert [outcome.draftless_reason for outcome in rounds] == [
        DraftlessReason.FIRST,
        DraftlessReason.TIMEOUT,
        DraftlessReason.LIMIT,
    ]


async def test_both_sessions_are_closed_when_the_text_is_complete() -> None:
    target, drafts = fakes(never)
    await rounds_of(target, drafts, num_tokens=5)
    assert (target.num_open, drafts.num_open) == (0, 0)
    assert len(target.starts) == len(drafts.drafters) == 1


async def test_j14_both_sessions_are_closed_when_the_consumer_stops() -> None:
    target, drafts = fakes(never)
    plan = SpeculationPlan(num_draft_tokens=3)
    async with aclosing(
        speculate(
            START, max_length=50, plan=plan, length=FixedLength(plan.num_draft_tokens), target=target, drafts=drafts
        )
    ) as rounds:
        await anext(rounds)
        assert (target.num_open, drafts.num_open) == (1, 1)
    assert (target.num_open, drafts.num_open) == (0, 0)


async def test_j2_both_sessions_are_closed_when_the_request_is_cancelled_before_its_first_token() -> None:
    target, drafts = fakes(never)
    target.gate = asyncio.Event()  # never set: a prefill without end
    task = asyncio.create_task(rounds_of(target, drafts, num_tokens=10))
    await asyncio.sleep(0.01)
    assert (target.num_open, drafts.num_open) == (1, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (target.num_open, drafts.num_open) == (0, 0)


async def test_both_sessions_are_closed_when_the_target_fails() -> None:
    target, drafts = fakes(never)
    target.fail_at = (1, Unavailable("gone"))
    with pytest.raises(Unavailable):
        await rounds_of(target, drafts, num_tokens=10)
    assert (target.num_open, drafts.num_open) == (0, 0)
