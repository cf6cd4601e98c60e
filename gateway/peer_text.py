"""What a model service holds of a text, so that each message carries only the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """Keep the first `keep_length` tokens, then append `new_tokens`."""

    keep_length: int
    new_tokens: tuple[int, ...]


class PeerText:
    """The tokens a peer was told of, and those it guessed behind them.

    Example: told of 10 tokens, guessed (7, 8, 9); the text goes on with 7, 8, 4. The change is then "keep 12, append
    (4,)": the peer's own 7 and 8 stand, and need not be sent or computed again.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._guessed: tuple[int, ...] = ()

    def change_to(self, token_ids: Sequence[int]) -> Change:
        """The change that makes the peer hold `token_ids`, which continue what it was told before."""
        tail = tuple(token_ids[self._length :])
        stand = 0
        while stand < min(len(tail), len(self._guessed)) and tail[stand] == self._guessed[stand]:
            stand += 1
        change = Change(self._length + stand, tail[stand:])
        self._length = len(token_ids)
        self._guessed = ()
        return change

    def guess(self, token_ids: Sequence[int]) -> None:
        """The peer now holds these guesses too."""
        self._guessed = tuple(token_ids)
