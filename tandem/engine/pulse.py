"""Whether a model still computes, by a real step of one token where there is no other to go by.

A process that answers says nothing of its model: a device can hang, or fail at every step, for hours, and the health
check be green (vllm#39863). While work is done its steps are the proof; when none has ended for a while, one token is
computed, through the same queue and thread as everybody's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tandem.engine.programs import Feed, Program
from tandem.engine.worker import Worker
from tandem.errors import Overloaded, TandemError, Unavailable

# Between two looks, as a share of the time after which a model counts as stalled; and at most.
_LOOK_SHARE, _LONGEST_LOOK_SECONDS = 1 / 3, 10.0


class ModelPulse:
    """One worker's. `first` before anything is served, then `watch` for ever."""

    def __init__(self, worker: Worker, *, stall_seconds: float) -> None:
        """`stall_seconds`: so long after its last step, with work to do, a model counts as stalled. A step must be
        shorter: on a slow machine one of `max_step_tokens` takes seconds."""
        self._worker = worker
        self._stall_seconds = stall_seconds
        self._look_seconds = min(_LOOK_SHARE * stall_seconds, _LONGEST_LOOK_SECONDS)
        self._fault: str | None = "no step was computed yet"

    def check(self) -> None:
        """Raises Unavailable, with the reason, where the last step to go by did not end, or failed."""
        if self._fault is not None:
            raise Unavailable(self._fault)

    async def first(self) -> None:
        """Compute a token, however long it takes. Raises what the model does: the service must not begin then."""
        await self._compute_one()
        self._fault = None

    async def watch(self, changed: Callable[[str | None], Awaitable[None]]) -> None:
        """Look again and again; tell when the model stops computing (why), and when it computes again (None).

        Ends by being cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._look_seconds)
            if self._worker.last_success >= before:
                await self._set(None, changed)
                continue
            began = time.monotonic()
            computing = asyncio.create_task(self._compute_one())
            try:
                while not (await asyncio.wait([computing], timeout=self._look_seconds))[0]:
                    if time.monotonic() - max(began, self._worker.last_success) >= self._stall_seconds:
                        await self._set(f"the model has not finished a step for {self._stall_seconds:g} s", changed)
                await self._set(self._fault_of(computing), changed)
            finally:
                computing.cancel()

    def _fault_of(self, computing: asyncio.Task[None]) -> str | None:
        error = computing.exception()
        if error is None:
            return None
        if isinstance(error, Overloaded) and time.monotonic() - self._worker.last_success < self._stall_seconds:
            return None  # so much work that there is no room for one token more
        if isinstance(error, TandemError):
            return error.message
        raise error

    async def _compute_one(self) -> None:
        session = self._worker.new_session((0,))

        def program() -> Program[None]:
            yield Feed(session, num_rows=1)

        try:
            await self._worker.run(program())
        finally:
            self._worker.end_session(session)

    async def _set(self, fault: str | None, changed: Callable[[str | None], Awaitable[None]]) -> None:
        was_well, self._fault = self._fault is None, fault
        if was_well is not (fault is None):
            await changed(fault)
