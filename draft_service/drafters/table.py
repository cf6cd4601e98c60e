"""Drafts of what the target tends to say, by the last few tokens: a table of n-grams from its own answers. No model."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafters.base import Drafted
from tandem.errors import OutOfStep
from tandem.ngram_table import NgramTable
from tandem.types import Draft, SessionStart


class TableDrafter:
    """Guesses on, token after token, until the whole guess is less likely than `least_certainty`, from 0 to 1.

    It depends on the text alone, so its law is one-hot (docs/exactness.md).
    """

    def __init__(self, table: NgramTable, *, least_certainty: float) -> None:
        self._table = table
        self._least_certainty = least_certainty

    def open(self, start: SessionStart) -> TableSession:
        return TableSession(self._table, start.token_ids, least_certainty=self._least_certainty)


class TableSession:
    """A text, with the guesses behind it."""

    def __init__(self, table: NgramTable, token_ids: Sequence[int], *, least_certainty: float) -> None:
        self._table = table
        self._tokens = list(token_ids)
        self._least_certainty = least_certainty

    @property
    def length(self) -> int:
        return len(self._tokens)

    async def propose(self, keep_length: int, new_tokens: Sequence[int], num_draft_tokens: int) -> Drafted:
        self._advance(keep_length, new_tokens)
        certainty = 1.0
        for _ in range(num_draft_tokens):
            guess = self._table.next(self._tokens)
            if guess is None:
                break
            certainty *= guess[1]
            if certainty < self._least_certainty:
                break
            self._tokens.append(guess[0])
        return Drafted(Draft(tuple(self._tokens[keep_length + len(new_tokens) :])))

    def follow(
        self, keep_length: int, new_tokens: Sequence[int], guesses: Sequence[int], num_draft_tokens: int
    ) -> bool:
        self._advance(keep_length, new_tokens)
        self._tokens.extend(guesses)
        return True

    def close(self) -> None:
        self._tokens = []

    def _advance(self, keep_length: int, new_tokens: Sequence[int]) -> None:
        if keep_length > self.length:
            raise OutOfStep(f"the session holds {self.length} tokens, the message wants to keep {keep_length}")
        del self._tokens[keep_length:]
        self._tokens.extend(new_tokens)
