"""Places for answers: how many may run at once, and who waits."""

from __future__ import annotations

import asyncio
from collections import deque

from tandem.errors import Overloaded, Unavailable


class Admission:
    """Places for answers, and one queue, first come first served. All answers to one request start together."""

    def __init__(self, *, max_running: int, max_queued: int) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.draining = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

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

    async def acquire(self, count: int) -> None:
        """Wait for `count` places. Raises Overloaded or Unavailable at once. Cancelling it leaves the queue."""
        if self.draining:
            raise Unavailable("the gateway is shutting down")
        if not self._queue and self.running + count <= self._max_running:
            self._take(count)
            return
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"{self.running} answers are running and {len(self._queue)} requests are waiting already")
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.remove((count, turn))
                self._grant()  # the next in line may need less
            else:  # granted and cancelled in the same moment
                self.release(count)
            raise

    def release(self, count: int) -> None:
        self.running -= count
        self._grant()

    def _grant(self) -> None:
        while self._queue and self.running + self._queue[0][0] <= self._max_running:
            count, turn = self._queue.popleft()
            self._take(count)
            turn.set_result(None)
        if not self.running:  # then the queue is empty too, as any request fits when nothing runs
            self._idle.set()

    def _take(self, count: int) -> None:
        self.running += count
        self._idle.clear()
