"""What a drafter is. A new one implements these two protocols and is named in `draft_service/__main__.py`.

Beside them: what a drafter may do for another one, and whom it tells what comes of preparing drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from tandem.types import Drafted, DraftWish, SessionStart


class DrafterSession(Protocol):
    """One text at a drafter. Calls come one at a time."""

    @property
    def length(self) -> int:
        """Tokens the session holds, drafted ones included."""

    async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
        """Keep `keep_length` tokens, append `new_tokens`, then guess what follows, no more than `wish` says. What is
        less likely to stand than its price is left out by a drafter that can tell. Raises OutOfStep when the session
        holds fewer than `keep_length` tokens.
        """

    def close(self) -> None:
        """Free what the session holds."""


class FollowerSession(DrafterSession, Protocol):
    """A session that can look on while another drafter drafts."""

    def follow(
        self, keep_length: int, new_tokens: Sequence[int], guesses: Sequence[int], num_draft_tokens: int
    ) -> bool:
        """Keep `keep_length` tokens, append `new_tokens`, and take `guesses`, a draft of `num_draft_tokens` at most,
        for one's own. False, with nothing changed, where there is no use in it. Raises OutOfStep."""


class Drafter(Protocol):
    """A way of guessing what comes next."""

    def open(self, start: SessionStart) -> DrafterSession:
        """A session, to be closed by the caller; a model starts its prefill at once."""


class Follower(Protocol):
    """A drafter whose sessions can look on."""

    def open(self, start: SessionStart) -> FollowerSession:
        """As Drafter's."""


PreparedOutcome = Literal[
    "hit",  # the whole draft was there when it was asked for
    "partial",  # part of it
    "miss",  # another outcome came, or it came before anything was there
    "busy",  # left out: others had work for the model
    "cancelled",  # the text ended, or went on without the model
]
PREPARED_OUTCOMES: tuple[PreparedOutcome, ...] = get_args(PreparedOutcome)


class PreparationObserver(Protocol):
    """Told what comes of preparing drafts. From any thread."""

    def token_prepared(self) -> None:
        """A token was drafted ahead."""

    def tokens_used(self, *, seconds: float) -> None:
        """Such tokens are in a draft that was asked for; the forwards they took are saved."""

    def tokens_wasted(self, num_tokens: int) -> None:
        """So many were not."""

    def prepared(self, outcome: PreparedOutcome) -> None:
        """The round that a draft was prepared for has come, or will not."""
