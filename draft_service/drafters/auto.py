"""Drafts from the session's own text where that repeats itself, else from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draft_service.drafters.base import Follower, FollowerSession
from tandem.lookup.drafter import LookupDrafter, LookupSession
from tandem.types import Drafted, DraftWish, SessionStart


class AutoDrafter:
    """Round by round: a match of at least `min_match` tokens is continued, which costs nothing; else `model` drafts.

    Which of the two drafts depends on the text so far and on what became of earlier guesses, never on draws to come, so
    each round is as exact as the one that drafts it.
    """

    def __init__(self, *, lookup: LookupDrafter, model: Follower, min_match: int) -> None:
        if min_match < 1:
            raise ValueError(f"min_match must be at least 1, got {min_match}")
        self._lookup = lookup
        self._model = model
        self._min_match = min_match

    def open(self, start: SessionStart) -> AutoSession:
        return AutoSession(
            self._lookup.open(start), self._model.open(start), length=len(start.token_ids), min_match=self._min_match
        )


class AutoSession:
    """The lookup's session has the text. The model's looks on while that one drafts, to be ready when its turn comes,
    or is told then what it missed."""

    def __init__(self, lookup: LookupSession, model: FollowerSession, *, length: int, min_match: int) -> None:
        self._lookup = lookup
        self._model = model
        self._min_match = min_match
        self._shared = length  # the model's session has the text's first so many tokens
        self._model_guessed: tuple[int, ...] = ()  # and behind them its own last draft

    @property
    def length(self) -> int:
        return self._lookup.length

    async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
        self._lookup.advance(keep_length, new_tokens)
        if keep_length < self._shared:  # only a repeated message: whatever was guessed behind it is void
            self._shared, self._model_guessed = keep_length, ()
        found = self._lookup.guess(wish)
        if self._lookup.match_length >= self._min_match and found.token_ids:
            self._show_model(found.token_ids, wish.num_draft_tokens)
            return Drafted(found)
        drafted = await self._ask_model(wish)
        if not drafted.draft.token_ids:  # the model's context is at its end: a short match is better than nothing
            return replace(drafted, draft=found)
        self._lookup.show(drafted.draft.token_ids)
        return drafted

    def close(self) -> None:
        self._lookup.close()
        self._model.close()

    async def _ask_model(self, wish: DraftWish) -> Drafted:
        drafted = await self._model.propose(*self._missed(), wish)
        self._shared, self._model_guessed = len(self._lookup.tokens), drafted.draft.token_ids
        return drafted

    def _show_model(self, guesses: tuple[int, ...], num_draft_tokens: int) -> None:
        if self._model.follow(*self._missed(), guesses, num_draft_tokens):
            self._shared, self._model_guessed = len(self._lookup.tokens), guesses

    def _missed(self) -> tuple[int, tuple[int, ...]]:
        """How many tokens the model's session keeps, and the text's tokens behind them."""
        missed = tuple(self._lookup.tokens[self._shared :])
        stand = 0
        while stand < min(len(missed), len(self._model_guessed)) and missed[stand] == self._model_guessed[stand]:
            stand += 1
        return self._shared + stand, missed[stand:]
