"""Drafts from the session's own text: what followed the last time the text ended like this. No model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from draft_service.drafters.base import Drafted
from tandem.errors import OutOfStep
from tandem.types import NO_DRAFT, Draft, SessionStart

# Earlier occurrences compared for the longest match: bounds a round to tens of microseconds on any text.
_MAX_CANDIDATES = 32


class NgramDrafter:
    """Continues the longest suffix, of `min_ngram` to `max_ngram` tokens, that occurred before (prompt lookup)."""

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram

    def open(self, start: SessionStart) -> NgramSession:
        return NgramSession(start.token_ids, min_ngram=self._min_ngram, max_ngram=self._max_ngram)


class NgramSession:
    """Indexes where each `min_ngram` of the committed tokens ended; guesses are not indexed until they stand."""

    def __init__(self, token_ids: Sequence[int], *, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._tokens: list[int] = []
        self._guessed: tuple[int, ...] = ()
        self._ends: dict[tuple[int, ...], deque[int]] = {}
        self._append(token_ids)

    @property
    def length(self) -> int:
        return len(self._tokens) + len(self._guessed)

    async def propose(self, keep_length: int, new_tokens: Sequence[int], num_draft_tokens: int) -> Drafted:
        self._advance(keep_length, new_tokens)
        self._guessed = self._continuation(num_draft_tokens)
        return Drafted(Draft(self._guessed) if self._guessed else NO_DRAFT)

    def close(self) -> None:
        self._ends.clear()

    def _advance(self, keep_length: int, new_tokens: Sequence[int]) -> None:
        if keep_length > self.length:
            raise OutOfStep(f"the session holds {self.length} tokens, the message wants to keep {keep_length}")
        stand = self._guessed[: max(0, keep_length - len(self._tokens))]
        self._guessed = ()
        if keep_length < len(self._tokens):  # not part of the normal course: only a repeated message does this
            kept = self._tokens[:keep_length]
            self._tokens = []
            self._ends.clear()
            self._append(kept)
        self._append(stand)
        self._append(new_tokens)

    def _append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._tokens.append(token_id)
            if len(self._tokens) >= self._min_ngram:
                key = tuple(self._tokens[-self._min_ngram :])
                self._ends.setdefault(key, deque(maxlen=_MAX_CANDIDATES)).append(len(self._tokens))

    def _continuation(self, num_tokens: int) -> tuple[int, ...]:
        """What followed the longest match of the text's end; of equally long ones, the latest."""
        tokens, total = self._tokens, len(self._tokens)
        best_end, best_size = 0, 0
        for end in reversed(self._ends.get(tuple(tokens[-self._min_ngram :]), ())):
            if end == total:
                continue  # the suffix itself
            size = self._min_ngram
            while size < self._max_ngram and size < end and tokens[end - size - 1] == tokens[total - size - 1]:
                size += 1
            if size > best_size:
                best_end, best_size = end, size
            if size == self._max_ngram:
                break
        if not best_size:
            return ()
        # A match that overlaps the end goes on periodically, as the text did.
        period = total - best_end
        return tuple(tokens[best_end + i % period] for i in range(num_tokens))
