"""Places for answers: how many may run at once, whether the targets have room for them, and who waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.kv_room import AnswerSize, Place, Promised, Replica, find_places
from tandem.errors import Overloaded, Unavailable

_LOOK_SECONDS = 1.0  # between two looks whether a target that was away is back, with room for who waits


@dataclass(frozen=True, slots=True)
class Grant:
    """So many answers may run. `places` are theirs, in order; none where no target says what room it has."""

    count: int
    places: tuple[Place, ...] = ()

    def target_of(self, number: int) -> str | None:
        """The address of the target with room for answer `number`; None: any."""
        return self.places[number].address if self.places else None


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    sizes: Sequence[AnswerSize]
    turn: asyncio.Future[Grant]


class Admission:
    """Places for answers, and one queue, first come first served. All answers to one request start together.

    Who is first in line and does not fit yet is waited for, also by those behind who would fit: else a large request
    could be passed for ever.
    """

    def __init__(
        self, *, max_running: int, max_queued: int, replicas: Callable[[], Sequence[Replica]] = lambda: ()
    ) -> None:
        """`replicas` tells the targets that take answers now, the best first; none: bounded by `max_running` alone."""
        self._max_running = max_running
        self._max_queued = max_queued
        self._replicas = replicas
        self._queue: deque[_Waiting] = deque()
        self._promised: dict[str, Promised] = {}  # by address; only where there is something
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.draining = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def num_promised_tokens(self) -> int:
        """Of the targets' KV caches, by running answers."""
        return sum(promised.num_tokens for promised in self._promised.values())

    def drain(self) -> None:
        """Take no more requests. Those that run or wait go on."""
        self.draining = True

    async def idle(self, *, within_seconds: float) -> bool:
        """Whether nothing runs and nothing waits, as soon as that is so, or after the time given."""
        try:
            async with asyncio.timeout(within_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def acquire(self, sizes: Sequence[AnswerSize]) -> Grant:
        """Wait for a place for each answer; to be released in the end.

        Raises Overloaded or Unavailable at once. Cancelling it leaves the queue.
        """
        if self.draining:
            raise Unavailable("the gateway is shutting down")
        if not self._queue and (grant := self._find(sizes)) is not None:
            self._take(grant)
            return grant
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"{self.running} answers are running and {len(self._queue)} requests are waiting already")
        mine = _Waiting(sizes, asyncio.get_running_loop().create_future())
        self._queue.append(mine)
        try:
            while not mine.turn.done():
                await asyncio.wait([mine.turn], timeout=_LOOK_SECONDS)
                self._grant()
        except asyncio.CancelledError:
            if mine.turn.done():  # granted and cancelled in the same moment
                self.release(mine.turn.result())
            else:
                self._queue.remove(mine)
                self._grant()  # the next in line may need less
            raise
        return mine.turn.result()

    def release(self, grant: Grant) -> None:
        self.running -= grant.count
        for place in grant.places:
            left = self._promised.pop(place.address) - place
            if left.num_answers:
                self._promised[place.address] = left
        self._grant()

    def _grant(self) -> None:
        while self._queue and (grant := self._find(self._queue[0].sizes)) is not None:
            self._take(grant)
            self._queue.popleft().turn.set_result(grant)
        if not self.running:  # then the queue is empty too, as any request fits when nothing runs
            self._idle.set()

    def _find(self, sizes: Sequence[AnswerSize]) -> Grant | None:
        count = len(sizes)
        if self.running + count > self._max_running:
            return None
        replicas = self._replicas()
        if replicas and (places := find_places(sizes, replicas, self._promised)) is not None:
            return Grant(count, places)
        # Without a target that is up, requests find out for themselves. And what would fit if all targets were up
        # (gateway/jobs.py has checked) must not wait for one that may never come back.
        return Grant(count) if not replicas or not self.running else None

    def _take(self, grant: Grant) -> None:
        self.running += grant.count
        for place in grant.places:
            self._promised[place.address] = self._promised.get(place.address, Promised()) + place
        self._idle.clear()
