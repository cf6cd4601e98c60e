"""Drafts that are looked up, by example, then against new sessions of the same text.

The text's index: test_suffix_automaton.py. The table: test_ngram_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import OutOfStep
from tandem.lookup.drafter import LookupDrafter, LookupSession
from tandem.types import DraftWish, SamplingParams, SessionStart

SEEDED = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def start_of(tokens: Sequence[int], *, temperature: float = 1.0) -> SessionStart:
    params = SamplingParams(temperature=temperature)
    return SessionStart(token_ids=tuple(tokens), prompt_length=max(1, len(tokens)), sampling=params, seed=0)


def open_session(tokens: Sequence[int], *, min_match: int = 2) -> LookupSession:
    return LookupDrafter(min_match=min_match, least_certainty=0.0).open(start_of(tokens))


async def drafts(
    session: LookupSession,
    keep_length: int,
    new_tokens: Sequence[int],
    num_tokens: int,
    *,
    least_certainties: Sequence[float] = (),
) -> list[int]:
    drafted = await session.propose(keep_length, new_tokens, DraftWish(num_tokens, tuple(least_certainties)))
    assert drafted.draft.law is None  # deterministic: one-hot
    return list(drafted.draft.token_ids)


@pytest.mark.parametrize(("min_match", "least_certainty"), [(0, 0.1), (-1, 0.1), (None, 0.1), (1, -0.1), (1, 1.1)])
def test_what_makes_no_sense_is_refused(min_match: int | None, least_certainty: float) -> None:
    with pytest.raises(ValueError, match=r"min_match|least_certainty|nothing to look up"):
        LookupDrafter(min_match=min_match, least_certainty=least_certainty)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),  # what followed 1, 2 the last time
        ([1, 2, 7, 9, 1, 2, 8, 9, 1, 2], [8, 9, 1]),  # of equally long matches, the latest
        ([5, 1, 2, 7, 9, 6, 1, 2, 8, 9, 5, 1, 2], [7, 9, 6]),  # a longer match beats a later one
        ([1, 2, 1, 2], [1, 2, 1]),  # a match that overlaps the end goes on as the text did
        ([4, 4, 4], [4, 4, 4]),
        ([9, 1, 2, 3, 1, 2], [3, 1, 2]),  # and so does one whose continuation reaches the end
        ([1, 2, 3, 4], []),  # nothing was seen twice
        ([1, 3, 2, 1], []),  # one token is too short a match
        ([7], []),
    ],
)
async def test_continuations_by_hand(tokens: list[int], expected: list[int]) -> None:
    assert await drafts(open_session(tokens), len(tokens), (), 3) == expected


async def test_a_draft_is_as_long_as_was_asked_for() -> None:
    for asked in (0, 1, 5, 40):
        assert await drafts(open_session([1, 2, 3, 1, 2, 3]), 6, (), asked) == ([1, 2, 3] * 20)[:asked]


async def test_a_draft_ends_where_it_is_too_unsure() -> None:
    """Nothing is known yet, so matches of 1, 2, 3 tokens are right in 26, 55, 62 of 100 cases."""
    for least, expected in ((0.3, []), (0.2, [2]), (0.1, [2, 3]), (0.08, [2, 3, 4]), (0.0, [2, 3, 4, 5])):
        session = open_session([1, 2, 3, 4, 5, 9, 1], min_match=1)
        assert await drafts(session, 7, (), 4, least_certainties=[least]) == expected


async def test_what_became_of_guesses_decides_how_far_the_next_ones_go() -> None:
    """A text whose pairs return, and one whose pairs never do; in both, a token alone was there before."""

    async def next_draft(text: list[int], *, drafter: LookupDrafter, temperature: float = 1.0) -> list[int]:
        session = drafter.open(start_of(text[:1], temperature=temperature))
        for length in range(1, len(text)):
            await drafts(session, length, text[length : length + 1], 0 if length % 2 else 2)
        return await drafts(session, len(text), (), 2)

    pairs = [token for pair in zip(range(100, 140), range(200, 240), strict=True) for token in pair]
    right, wrong = LookupDrafter(least_certainty=0.2), LookupDrafter(least_certainty=0.2)
    assert await next_draft([*pairs, *pairs, 100], drafter=right) == [200, 101]
    swapped = [token for pair in zip(range(100, 140), range(300, 340), strict=True) for token in pair]
    assert await next_draft([*pairs, *swapped, 100], drafter=wrong) == []
    # A new text starts with what others have seen, among those that are sampled alike.
    assert await drafts(wrong.open(start_of([1, 2, 1])), 3, (), 2) == []
    assert await drafts(wrong.open(start_of([1, 2, 1], temperature=0.0)), 3, (), 2) == [2]


async def test_a_kind_of_guess_that_was_given_up_comes_back_when_it_would_be_right() -> None:
    session = LookupDrafter(least_certainty=0.2).open(start_of([1]))
    text = [1]

    async def go_on(token: int) -> list[int]:
        text.append(token)
        return await drafts(session, len(text) - 1, (token,), 1)

    for number in range(60):  # after 1 always another token
        await go_on(1_000 + number)
        await go_on(1)
    assert await go_on(5) == []
    assert await go_on(1) == []
    guessed = []
    for number in range(60):  # pairs that return, of new tokens each time: matches of one token that are right
        pair = (2_000 + number, 3_000 + number)
        guessed += [await go_on(token) for token in (*pair, *pair)]
    assert sum(bool(guess) for guess in guessed[:40]) < 10
    assert sum(bool(guess) for guess in guessed[-40:]) >= 10


async def test_a_shorter_match_than_the_shortest_is_not_continued() -> None:
    tokens = [1, 2, 3, 9, 2, 3]
    assert await drafts(open_session(tokens, min_match=2), 6, (), 1) == [9]
    assert await drafts(open_session(tokens, min_match=3), 6, (), 1) == []


async def test_accepted_guesses_stand_and_rejected_ones_leave_no_trace() -> None:
    session = open_session([1, 2, 3, 4, 1, 2])
    assert await drafts(session, 6, (), 3) == [3, 4, 1]
    assert session.length == 9
    assert await drafts(session, 7, (8,), 3) == []  # 3 stood, 4 did not: the text ends in 3, 8
    assert session.length == 8
    assert await drafts(session, 8, (1, 2), 3) == [3, 8, 1]  # not 3, 4, 1: that was only guessed
    assert session.length == 13


async def test_a_repeated_message_is_answered_the_same() -> None:
    session = open_session([1, 2, 3, 1])
    first = await drafts(session, 4, (2,), 2)
    assert first == [3, 1]
    for _ in range(3):
        assert await drafts(session, 4, (2,), 2) == first


async def test_keeping_more_than_there_is_is_out_of_step_and_changes_nothing() -> None:
    session = open_session([1, 2, 1, 2])
    assert await drafts(session, 4, (), 1) == [1]
    with pytest.raises(OutOfStep, match="holds 5 tokens, the message wants to keep 6"):
        await session.propose(6, (3,), DraftWish(1))
    assert session.length == 5
    assert await drafts(session, 5, (), 2) == [2, 1]


def by_search(tokens: Sequence[int], *, min_match: int, num_tokens: int) -> list[list[int]]:
    """The definition: the longest suffix that occurred before, and what followed it at each of these places."""
    for size in range(len(tokens) - 1, min_match - 1, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[len(tokens) - size :]]
        if ends:
            return [_continued(tokens, end, num_tokens) for end in ends]
    return [[]]


def _continued(tokens: Sequence[int], end: int, count: int) -> list[int]:
    text = list(tokens)
    for i in range(count):
        text.append(text[end + i])
    return text[len(tokens) :]


@SEEDED
@given(tokens=st.lists(st.integers(0, 2), max_size=30), min_match=st.integers(1, 3), num_tokens=st.integers(1, 8))
async def test_the_drafter_continues_what_a_search_finds(tokens: list[int], min_match: int, num_tokens: int) -> None:
    session = open_session(tokens, min_match=min_match)
    expected = by_search(tokens, min_match=min_match, num_tokens=num_tokens)
    assert await drafts(session, len(tokens), (), num_tokens) in expected


@SEEDED
@given(
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
    rounds=st.lists(st.tuples(st.floats(0, 1), st.lists(st.integers(0, 1), max_size=3), st.integers(1, 5)), max_size=6),
)
async def test_whatever_was_kept_and_appended_it_drafts_as_a_new_session_would(
    tokens: list[int], rounds: list[tuple[float, list[int], int]]
) -> None:
    """Any rollback, into the guesses or far behind them, leaves no trace."""
    session = open_session(tokens)
    text = list(tokens)
    for share, new_tokens, num_tokens in rounds:
        keep_length = round(share * session.length)
        text = [*text[:keep_length], *new_tokens]
        drafted = await drafts(session, keep_length, new_tokens, num_tokens)
        assert drafted == await drafts(open_session(text), len(text), (), num_tokens)
        text += drafted
        assert session.length == len(text)
