"""The n-gram drafter by example, then against a search that has no index."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.ngram import _MAX_CANDIDATES, NgramDrafter, NgramSession
from tandem.errors import OutOfStep
from tandem.types import SamplingParams, SessionStart

SEEDED = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def open_session(tokens: Sequence[int], *, min_ngram: int = 2, max_ngram: int = 4) -> NgramSession:
    start = SessionStart(token_ids=tuple(tokens), prompt_length=max(1, len(tokens)), sampling=SamplingParams(), seed=0)
    return NgramDrafter(min_ngram=min_ngram, max_ngram=max_ngram).open(start)


async def drafts(session: NgramSession, keep_length: int, new_tokens: Sequence[int], num_tokens: int) -> list[int]:
    drafted = await session.propose(keep_length, new_tokens, num_tokens)
    assert drafted.draft.law is None  # deterministic: one-hot
    return list(drafted.draft.token_ids)


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(0, 3), (4, 3), (-1, -1)])
def test_lengths_that_make_no_sense_are_refused(min_ngram: int, max_ngram: int) -> None:
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(min_ngram=min_ngram, max_ngram=max_ngram)


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


async def test_a_match_longer_than_the_longest_counts_no_more() -> None:
    """With max_ngram 2 the later match of 1, 2 wins, although the earlier one has three tokens in common."""
    tokens = [5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]
    assert await drafts(open_session(tokens, max_ngram=2), len(tokens), (), 1) == [8]
    assert await drafts(open_session(tokens, max_ngram=3), len(tokens), (), 1) == [7]


async def test_as_many_tokens_come_as_were_asked_for() -> None:
    for num_tokens in (1, 2, 7, 40):
        assert await drafts(open_session([1, 2, 3, 1, 2, 3]), 6, (), num_tokens) == ([1, 2, 3] * 20)[:num_tokens]
    assert await drafts(open_session([1, 2, 1, 2]), 4, (), 0) == []


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


async def test_a_long_text_of_one_token_is_answered_without_looking_at_all_of_it() -> None:
    session = open_session([7] * 5_000, max_ngram=16)
    assert max(len(ends) for ends in session._ends.values()) == _MAX_CANDIDATES
    assert await drafts(session, 5_000, (), 4) == [7] * 4


def by_search(tokens: Sequence[int], *, min_ngram: int, max_ngram: int, num_tokens: int) -> list[int]:
    """The definition: try the longest suffix first, from the latest place on; then go on as from there."""
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for i in range(num_tokens):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@SEEDED
@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 4),
    num_tokens=st.integers(1, 8),
)
async def test_the_index_finds_what_a_search_finds(
    tokens: list[int], min_ngram: int, more: int, num_tokens: int
) -> None:
    """Up to 30 tokens there are fewer candidates than the bound, so that the two agree exactly."""
    session = open_session(tokens, min_ngram=min_ngram, max_ngram=min_ngram + more)
    expected = by_search(tokens, min_ngram=min_ngram, max_ngram=min_ngram + more, num_tokens=num_tokens)
    assert await drafts(session, len(tokens), (), num_tokens) == expected


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
