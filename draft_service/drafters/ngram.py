"""Drafts from the session's own text: what followed the last time the text ended like this. No model."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import Drafted
from draft_service.suffix_automaton import SuffixAutomaton
from tandem.errors import OutOfStep
from tandem.types import NO_DRAFT, Draft, SessionStart


class NgramDrafter:
    """Continues the longest suffix that occurred before, if it has `min_ngram` tokens or more (prompt lookup).

    A short match seldom holds for long, so a draft has at most `tokens_per_match` tokens for each token of the match.
    It depends on the text alone, so its law is one-hot (docs/exactness.md).
    """

    def __init__(self, *, min_ngram: int, tokens_per_match: int) -> None:
        if min_ngram < 1 or tokens_per_match < 1:
            raise ValueError(
                f"min_ngram and tokens_per_match must be at least 1, got {min_ngram} and {tokens_per_match}"
            )
        self._min_ngram = min_ngram
        self._tokens_per_match = tokens_per_match

    def open(self, start: SessionStart) -> NgramSession:
        return NgramSession(start.token_ids, min_ngram=self._min_ngram, tokens_per_match=self._tokens_per_match)


class NgramSession:
    """A text, and guesses behind it, which are not indexed until they stand.

    `propose` is `advance`, `guess` of `continuation`; the `auto` drafter takes these steps itself.
    """

    def __init__(self, token_ids: Sequence[int], *, min_ngram: int, tokens_per_match: int) -> None:
        self._min_ngram = min_ngram
        self._tokens_per_match = tokens_per_match
        self._text = SuffixAutomaton(token_ids)
        self._guessed: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self._text.tokens) + len(self._guessed)

    @property
    def tokens(self) -> Sequence[int]:
        """The text without guesses."""
        return self._text.tokens

    @property
    def match_length(self) -> int:
        """Tokens of the text's end that occurred before."""
        return self._text.match.length

    async def propose(self, keep_length: int, new_tokens: Sequence[int], num_draft_tokens: int) -> Drafted:
        self.advance(keep_length, new_tokens)
        draft = self.continuation(num_draft_tokens)
        self.guess(draft.token_ids)
        return Drafted(draft)

    def close(self) -> None:
        self._text = SuffixAutomaton()
        self._guessed = ()

    def advance(self, keep_length: int, new_tokens: Sequence[int]) -> None:
        """Keep `keep_length` tokens, append `new_tokens`. Raises OutOfStep, with nothing changed."""
        if keep_length > self.length:
            raise OutOfStep(f"the session holds {self.length} tokens, the message wants to keep {keep_length}")
        stand = self._guessed[: max(0, keep_length - len(self._text.tokens))]
        self._guessed = ()
        self._text.truncate(keep_length)
        self._text.extend(stand)
        self._text.extend(new_tokens)

    def continuation(self, num_tokens: int) -> Draft:
        """What followed the match, at most `num_tokens` of it; nothing where the match is too short."""
        match, tokens = self._text.match, self._text.tokens
        if match.length < self._min_ngram:
            return NO_DRAFT
        # A match that overlaps the end goes on periodically, as the text did.
        period = len(tokens) - match.end
        count = min(num_tokens, match.length * self._tokens_per_match)
        return Draft(tuple(tokens[match.end + i % period] for i in range(count)))

    def guess(self, token_ids: Sequence[int]) -> None:
        """The client was told `token_ids`; the next `advance` decides which of them stand."""
        self._guessed = tuple(token_ids)
