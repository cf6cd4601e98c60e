"""Target faults cost time, not the answer: sessions that outlive the target they run at.

When a target dies, hangs or fails in the middle of a request, the session is opened again, at another replica or at the
same one when it is back, with the tokens so far, and *the very same question is asked again*, draft included. All
randomness is a pure function of (seed, position, purpose), so it is answered by the same tokens as if nothing had
happened, whichever rule verifies. That is more than repeating a text for a seed: a lost verdict that was drawn again
from other numbers, or asked for without its draft, would let what made it get lost have a say in what comes instead.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from gateway.backends import Target, TargetSession
from tandem.errors import InternalError, OutOfStep, Overloaded, TandemError, TimedOut, Unavailable
from tandem.types import Draft, SessionStart, Verdict

# Faults in a row without an answer between, after which a request is given up. It must not take down one replica after
# another, should it be the request that kills them.
_MOST_FAULTS = 4
_PATIENCE_GROWTH = 4.0  # a second replica that is late may be no more at fault than the first: it gets more time
_LOOK_SECONDS = 0.05  # between two looks for a replica while there is none


class FailoverReason(enum.Enum):
    """Why a session was opened again. Bounded, so that it can label a metric."""

    UNAVAILABLE = "unavailable"  # the stream broke, or the target went away
    TIMEOUT = "timeout"  # no answer in time
    ERROR = "error"  # a fault of the target's own
    OVERLOADED = "overloaded"  # no room for one more session


_REASONS: dict[type[TandemError], FailoverReason] = {
    Unavailable: FailoverReason.UNAVAILABLE,
    TimedOut: FailoverReason.TIMEOUT,
    InternalError: FailoverReason.ERROR,
    OutOfStep: FailoverReason.ERROR,
    Overloaded: FailoverReason.OVERLOADED,
}


class Replicas(Protocol):
    """Targets that say the same."""

    @property
    def num_up(self) -> int: ...

    @property
    def seconds_since_up(self) -> float:
        """Since one of them was last known to be up."""

    def open(self, start: SessionStart, *, patience: float, address: str | None = None) -> TargetSession:
        """A session at the best of them, or the one at `address` where that takes any; its prefill begins at once.
        `patience` multiplies the time after which an answer is late. Raises Unavailable when none is up."""


class FailoverTarget:
    """gateway.backends.Target over several replicas; or one, which may come back."""

    def __init__(self, replicas: Replicas, *, limit_seconds: float, observe: Callable[[FailoverReason], None]) -> None:
        """`limit_seconds`: how long a request does without any target. `observe` is told of every failover."""
        self._replicas = replicas
        self._limit_seconds = limit_seconds
        self._observe = observe

    def at(self, address: str | None) -> Target:
        """The same targets, of which the one at `address` is asked first; None: the best."""
        return _PlacedTarget(self, address)

    def open(self, start: SessionStart, *, address: str | None = None) -> FailoverSession:
        """Raises Unavailable where no target is up, and none was within the limit."""
        return FailoverSession(
            self._replicas, start, address=address, limit_seconds=self._limit_seconds, observe=self._observe
        )


@dataclass(frozen=True, slots=True)
class _PlacedTarget:
    """gateway.backends.Target: sessions that begin at one certain replica."""

    targets: FailoverTarget
    address: str | None

    def open(self, start: SessionStart) -> FailoverSession:
        return self.targets.open(start, address=self.address)


class FailoverSession:
    """gateway.backends.TargetSession."""

    def __init__(
        self,
        replicas: Replicas,
        start: SessionStart,
        *,
        address: str | None,
        limit_seconds: float,
        observe: Callable[[FailoverReason], None],
    ) -> None:
        self._replicas = replicas
        self._start = start
        self._limit_seconds = limit_seconds
        self._observe = observe
        self._session: TargetSession | None = None
        try:
            self._session = replicas.open(start, patience=1.0, address=address)
        except Unavailable:
            if replicas.seconds_since_up >= limit_seconds:
                raise

    async def first(self) -> Verdict:
        return await self._answer(self._start, None)

    async def verify(self, token_ids: Sequence[int], draft: Draft) -> Verdict:
        if self._session is not None:  # nearly always; and copies nothing
            try:
                return await self._session.verify(token_ids, draft)
            except tuple(_REASONS) as error:
                self._failed(error)
        start = replace(self._start, token_ids=tuple(token_ids), prompt_logprobs=False)
        return await self._answer(start, draft, num_faults=1)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    async def _answer(self, start: SessionStart, draft: Draft | None, *, num_faults: int = 0) -> Verdict:
        """The first token after `start`, or what `draft` is worth there; from whichever replica answers."""
        num_refused = 0
        until = asyncio.get_running_loop().time() + self._limit_seconds
        if not num_faults:
            until -= min(self._limit_seconds, self._replicas.seconds_since_up)
        while True:
            if self._session is None:
                self._session = await self._opened(start, until, patience=_PATIENCE_GROWTH**num_faults)
            try:
                verdict = await self._session.first()
                if draft is not None and draft.token_ids:
                    # The first token after the text was drawn without the draft, and is not the answer.
                    return await self._session.verify(start.token_ids, draft)
                return verdict
            except Overloaded as error:
                num_refused += 1
                now = asyncio.get_running_loop().time()
                if now >= until or (not num_faults and num_refused >= self._replicas.num_up):
                    raise
                self._failed(error)
                await asyncio.sleep(_LOOK_SECONDS)
            except tuple(_REASONS) as error:
                num_faults += 1
                if num_faults == 1:
                    until = asyncio.get_running_loop().time() + self._limit_seconds
                if num_faults >= _MOST_FAULTS:
                    raise _given_up(error) from error
                self._failed(error)

    async def _opened(self, start: SessionStart, until: float, *, patience: float) -> TargetSession:
        """A session at a replica, as soon as one is up. Raises Unavailable at `until`."""
        while True:
            try:
                return self._replicas.open(start, patience=patience)
            except Unavailable as error:
                if asyncio.get_running_loop().time() >= until:
                    raise _given_up(error) from error
            await asyncio.sleep(_LOOK_SECONDS)

    def _failed(self, error: TandemError) -> None:
        reason = _REASONS[type(error)]
        structlog.get_logger().warning(
            "failover", request_id=self._start.request_id, reason=reason.value, error=error.message
        )
        self._observe(reason)
        self.close()


def _given_up(error: TandemError) -> TandemError:
    """What the client is told: to come again later, where a target may be back by then."""
    return Unavailable(error.message) if isinstance(error, TimedOut) else error
