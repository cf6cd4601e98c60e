"""The n-gram drafter by example, then against new sessions of the same text. Its index: test_suffix_automaton.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.ngram import NgramDrafter, NgramSession
from tandem.errors import OutOfStep
from tandem.types import SamplingParams, SessionStart

SEEDED = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def open_session(tokens: Sequence[int], *, min_ngram: int = 2, tokens_per_match: int = 64) -> NgramSession:
    start = SessionStart(token_ids=tuple(tokens), prompt_length=max(1, len(tokens)), sampling=SamplingParams(), seed=0)
    return NgramDrafter(min_ngram=min_ngram, tokens_per_match=tokens_per_match).open(start)


async def drafts(session: NgramSession, keep_length: int, new_tokens: Sequence[int], num_tokens: int) -> list[int]:
    drafted = await session.propose(keep_length, new_tokens, num_tokens)
    assert drafted.draft.law is None  # deterministic: one-hot
    return list(drafted.draft.token_ids)


@pytest.mark.parametrize(("min_ngram", "tokens_per_match"), [(0, 3), (4, 0), (-1, -1)])
def test_lengths_that_make_no_sense_are_refused(min_ngram: int, tokens_per_match: int) -> None:
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(min_ngram=min_ngram, tokens_per_match=tokens_per_match)


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


async def test_a_draft_is_as_long_as_its_match_allows_and_as_was_asked_for() -> None:
    for tokens_per_match, asked, expected in ((1, 8, 3), (2, 8, 6), (2, 5, 5), (4, 40, 12), (64, 40, 40), (2, 0, 0)):
        session = open_session([1, 2, 3, 1, 2, 3], tokens_per_match=tokens_per_match)  # the match is 1, 2, 3
        assert await drafts(session, 6, (), asked) == ([1, 2, 3] * 20)[:expected]


async def test_the_length_of_a_draft_follows_the_text() -> None:
    """One token in common, then two, then a new one: two tokens a match give 2, 4, none."""
    session = open_session([1, 2, 3, 4, 5, 9, 1], min_ngram=1, tokens_per_match=2)
    assert await drafts(session, 7, (), 8) == [2, 3]
    assert await drafts(session, 8, (), 8) == [3, 4, 5, 9]
    assert await drafts(session, 8, (7,), 8) == []


async def test_a_shorter_match_than_the_shortest_is_not_continued() -> None:
    tokens = [1, 2, 3, 9, 2, 3]
    assert await drafts(open_session(tokens, min_ngram=2), 6, (), 1) == [9]
    assert await drafts(open_session(tokens, min_ngram=3), 6, (), 1) == []


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
        await session.propose(6, (3,), 1)
    assert session.length == 5
    assert await drafts(session, 5, (), 2) == [2, 1]


def by_search(tokens: Sequence[int], *, min_ngram: int, num_tokens: int) -> list[list[int]]:
    """The definition: the longest suffix that occurred before, and what followed it at each of these places."""
    for size in range(len(tokens) - 1, min_ngram - 1, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[len(tokens) - size :]]
        if ends:
            return [_continued(tokens, end, min(num_tokens, 2 * size)) for end in ends]
    return [[]]


def _continued(tokens: Sequence[int], end: int, count: int) -> list[int]:
    text = list(tokens)
    for i in range(count):
        text.append(text[end + i])
    return text[len(tokens) :]


@SEEDED
@given(tokens=st.lists(st.integers(0, 2), max_size=30), min_ngram=st.integers(1, 3), num_tokens=st.integers(1, 8))
async def test_the_drafter_continues_what_a_search_finds(tokens: list[int], min_ngram: int, num_tokens: int) -> None:
    session = open_session(tokens, min_ngram=min_ngram, tokens_per_match=2)
    expected = by_search(tokens, min_ngram=min_ngram, num_tokens=num_tokens)
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
