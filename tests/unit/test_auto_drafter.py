"""The `auto` drafter: which of its two drafts, and that the model's session is in step whenever its turn comes.

That its drafts change no law and no text: test_verifier_law.py and test_exact_seeded.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.auto import AutoDrafter, AutoSession
from draft_service.drafters.model import ModelDrafter
from tandem.errors import OutOfStep
from tandem.lookup.drafter import LookupDrafter
from tandem.types import Draft, Drafted, DraftWish, SamplingParams, ServiceTimes, SessionStart
from tests.toy_models import ToyModel, ToyRunner, held_blocks, working

SEEDED = settings(max_examples=200, deadline=None, derandomize=True, database=None)
SLOW = ServiceTimes(forward_seconds=1.0)


@dataclass
class CountingDrafter:
    """In place of a model: after token t it drafts t + 10, t + 20, ..., until its text has `room` tokens."""

    room: int = 1_000
    follows: bool = False
    followed: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    asked: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # keep_length and new_tokens
    tokens: list[int] = field(default_factory=list)
    num_open: int = 0

    def open(self, start: SessionStart) -> CountingDrafter:
        self.num_open += 1
        self.tokens = list(start.token_ids)
        return self

    @property
    def length(self) -> int:
        return len(self.tokens)

    async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
        if keep_length > self.length:
            raise OutOfStep("more to keep than there is")
        self.asked.append((keep_length, tuple(new_tokens)))
        self.tokens = [*self.tokens[:keep_length], *new_tokens]
        count = min(wish.num_draft_tokens, self.room - self.length)
        guesses = tuple(self.tokens[-1] + 10 * (i + 1) for i in range(count))
        self.tokens += guesses
        return Drafted(Draft(guesses), SLOW)

    def follow(
        self, keep_length: int, new_tokens: Sequence[int], guesses: Sequence[int], num_draft_tokens: int
    ) -> bool:
        if self.follows:
            assert keep_length <= self.length
            self.followed.append((keep_length, tuple(new_tokens), tuple(guesses)))
            self.tokens = [*self.tokens[:keep_length], *new_tokens, *guesses]
        return self.follows

    def close(self) -> None:
        self.num_open -= 1


def start_of(tokens: Sequence[int]) -> SessionStart:
    params = SamplingParams(temperature=0.0)
    return SessionStart(token_ids=tuple(tokens), prompt_length=len(tokens), sampling=params, seed=0)


def open_session(
    tokens: Sequence[int], model: CountingDrafter, *, min_match: int = 2, min_ngram: int = 1
) -> AutoSession:
    ngram = LookupDrafter(min_match=min_ngram, least_certainty=0.0)
    return AutoDrafter(lookup=ngram, model=model, min_match=min_match).open(start_of(tokens))


async def drafts(session: AutoSession, keep_length: int, new_tokens: Sequence[int], num_tokens: int) -> list[int]:
    return list((await session.propose(keep_length, new_tokens, DraftWish(num_tokens))).draft.token_ids)


def test_a_match_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="min_match"):
        open_session([1], CountingDrafter(), min_match=0)


async def test_a_long_match_is_continued_and_costs_nothing_else_the_model_drafts() -> None:
    model = CountingDrafter()
    session = open_session([1, 2, 3, 4, 1, 2], model)
    drafted = await session.propose(6, (), DraftWish(3))
    assert (drafted.draft, drafted.times) == (Draft((3, 4, 1)), ServiceTimes())
    assert model.asked == []
    drafted = await session.propose(6, (9,), DraftWish(2))  # nothing stood; the text ends in a new token
    assert (drafted.draft, drafted.times) == (Draft((19, 29)), SLOW)
    assert model.asked == [(6, (9,))]


async def test_the_model_is_told_all_that_it_missed_and_keeps_what_it_guessed_right() -> None:
    model = CountingDrafter()
    session = open_session([1, 2, 3, 4, 5], model)
    assert await drafts(session, 5, (), 3) == [15, 25, 35]
    assert await drafts(session, 7, (1, 2), 2) == [3, 4]  # 15, 25 stood, then the text: the n-grams' turn
    assert session.length == 11
    assert await drafts(session, 11, (7,), 1) == [17]  # 3, 4 stood
    assert model.asked == [(5, ()), (7, (1, 2, 3, 4, 7))]
    assert model.tokens == [1, 2, 3, 4, 5, 15, 25, 1, 2, 3, 4, 7, 17]


async def test_a_model_that_follows_is_shown_the_n_grams_rounds_and_asked_for_the_rest() -> None:
    model = CountingDrafter(follows=True)
    session = open_session([1, 2, 3, 4, 1, 2], model)
    assert await drafts(session, 6, (), 3) == [3, 4, 1]
    assert await drafts(session, 8, (1,), 2) == [2, 3]  # 3, 4 stood: again the n-grams' turn
    assert model.followed == [(6, (), (3, 4, 1)), (9, (), (2, 3))]  # it had guessed that 1 too
    assert await drafts(session, 10, (9,), 2) == [19, 29]  # 2 stood
    assert model.asked == [(10, (9,))]
    assert model.tokens == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9, 19, 29]


async def test_where_the_models_context_ends_a_short_match_is_better_than_nothing() -> None:
    model = CountingDrafter(room=4)
    session = open_session([1, 2, 3, 1], model)
    assert await drafts(session, 4, (), 2) == [2, 3]
    assert model.asked == [(4, ())]
    assert session.length == 6


async def test_the_model_drafts_what_is_too_short_a_match_for_the_n_grams() -> None:
    session = open_session([1, 2, 3, 1, 2], CountingDrafter(), min_match=1, min_ngram=3)
    assert await drafts(session, 5, (), 1) == [12]


async def test_keeping_more_than_there_is_is_out_of_step_and_asks_nobody() -> None:
    model = CountingDrafter()
    session = open_session([1, 2, 1, 2], model)
    with pytest.raises(OutOfStep, match="holds 4 tokens, the message wants to keep 5"):
        await session.propose(5, (), DraftWish(1))
    assert (session.length, model.asked) == (4, [])


async def test_closing_closes_the_models_session() -> None:
    model = CountingDrafter()
    session = open_session([1], model)
    assert model.num_open == 1
    session.close()
    assert model.num_open == 0


@SEEDED
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=10),
    rounds=st.lists(st.tuples(st.floats(0, 1), st.lists(st.integers(0, 2), max_size=3), st.integers(1, 5)), max_size=8),
    min_match=st.integers(1, 3),
    follows=st.booleans(),
)
async def test_whatever_was_kept_and_appended_the_model_is_asked_about_the_right_text(
    tokens: list[int], rounds: list[tuple[float, list[int], int]], min_match: int, follows: bool
) -> None:
    """Any rollback, into anybody's guesses or far behind them. The drafts are those of a new session of that text."""
    model = CountingDrafter(follows=follows)
    session = open_session(tokens, model, min_match=min_match)
    text = list(tokens)
    for share, new_tokens, num_tokens in rounds:
        # At least one token of text, since the model drafts from the last one.
        keep_length = max(1, round(share * session.length))
        text = [*text[:keep_length], *new_tokens]
        num_asked = len(model.asked) + len(model.followed)
        drafted = await drafts(session, keep_length, new_tokens, num_tokens)
        assert drafted == await drafts(
            open_session(text, CountingDrafter(), min_match=min_match), len(text), (), num_tokens
        )
        text += drafted
        assert session.length == len(text)
        if len(model.asked) + len(model.followed) > num_asked:
            assert model.tokens[: len(text) - len(drafted)] == text[: len(text) - len(drafted)]


async def test_a_real_model_goes_on_where_the_n_grams_left_off_and_recomputes_nothing() -> None:
    """A text that repeats itself, then does not. The toy model's cache raises where it is fed another text."""
    toy = ToyModel(vocab_size=9, seed=1)
    runner = ToyRunner(toy, block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    with working(runner) as worker:
        model = ModelDrafter(worker, law_size=9)
        ngram = LookupDrafter(least_certainty=0.0)
        session = AutoDrafter(lookup=ngram, model=model, min_match=3).open(start_of(prompt))
        assert await drafts(session, 9, (), 3) == [4, 5, 6]
        assert await drafts(session, 12, (1,), 2) == [2, 3]  # all stood
        text = [*prompt, 4, 5, 6, 1, 8, 8]
        assert await drafts(session, 13, (8, 8), 4) == toy.greedy(text, 4)  # none stood
        assert session.length == 19
        # Prompt, the six missed tokens, and three of the four drafted: each computed once.
        assert sum(batch.num_tokens for batch in runner.batches) == len(text) + 3
        session.close()
        assert (await worker.run(held_blocks(worker))).value == 0
