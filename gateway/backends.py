"""What the speculative loop needs of the two model services, as protocols; the real ones: `grpc_backends.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.types import Draft, DraftlessReason, DraftWish, SessionStart, Verdict


class TargetSession(Protocol):
    """One text at the target. A session is its stream: `close` frees everything on the other side."""

    async def first(self) -> Verdict:
        """The first token, drawn without a draft once the prompt is prefilled. Raises TandemError."""

    async def verify(self, token_ids: Sequence[int], draft: Draft) -> Verdict:
        """Check `draft` as the continuation of `token_ids` (prompt and all tokens so far). Raises TandemError."""

    def close(self) -> None:
        """End the stream. Never blocks, never raises, may be called twice."""


class Target(Protocol):
    def open(self, start: SessionStart) -> TargetSession:
        """Start a session; its prefill begins at once."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft, or the reason why there is none (then `draft` is empty)."""

    draft: Draft
    reason: DraftlessReason | None = None
    seconds: float = 0.0  # as the gateway saw it, network included
    service_seconds: float = 0.0  # inside the draft service
    num_bytes: int = 0  # of the draft's message
    prepared: bool = False  # it was ready when it was asked for
    drafted_by: str = ""  # what the service drafts with: DraftInfo.name


class DraftSession(Protocol):
    """One text at a draft. It never fails a request: whatever goes wrong is a Proposal without a draft."""

    async def propose(self, token_ids: Sequence[int], wish: DraftWish) -> Proposal:
        """Guesses at what follows `token_ids`, no more than `wish` says."""

    def close(self) -> None:
        """End the stream. Never blocks, never raises, may be called twice."""


class Drafts(Protocol):
    def open(self, start: SessionStart, *, drafter: str) -> DraftSession:
        """Start a session with the named drafter (empty: the service's default); its prefill begins at once."""
