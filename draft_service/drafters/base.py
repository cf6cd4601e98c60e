"""What a drafter is. A new one implements these two protocols and is named in `draft_service/__main__.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.types import Draft, ServiceTimes, SessionStart


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft, maybe empty, and what it took."""

    draft: Draft
    times: ServiceTimes = field(default_factory=ServiceTimes)


class DrafterSession(Protocol):
    """One text at a drafter. Calls come one at a time."""

    @property
    def length(self) -> int:
        """Tokens the session holds, drafted ones included."""

    async def propose(self, keep_length: int, new_tokens: Sequence[int], num_draft_tokens: int) -> Drafted:
        """Keep `keep_length` tokens, append `new_tokens`, then guess at most `num_draft_tokens` that follow.

        Raises OutOfStep when the session holds fewer than `keep_length` tokens.
        """

    def close(self) -> None:
        """Free what the session holds."""


class Drafter(Protocol):
    """A way of guessing what comes next."""

    def open(self, start: SessionStart) -> DrafterSession:
        """A session, to be closed by the caller; a model starts its prefill at once."""
