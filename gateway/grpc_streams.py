"""One session's bidirectional stream, with the ways in which grpc.aio streams end mapped to Tandem's errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from tandem.errors import TandemError, TimedOut, Unavailable
from tandem.rpc.status import to_error

Request = TypeVar("Request")
Response = TypeVar("Response")


_LOOK_SECONDS = 0.1  # between two looks whether a late answer need still be waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for an answer: until it is late and `may_leave` says that there is something better to do; for
    `most_seconds` in any case."""

    late_seconds: float
    most_seconds: float
    may_leave: Callable[[], bool] = lambda: True

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises TimeoutError when the block takes longer."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.most_seconds
        timers: list[asyncio.TimerHandle] = []  # the one that is set

        def look() -> None:
            if loop.time() >= end or self.may_leave():
                scope.reschedule(loop.time())
            else:
                timers[:] = [loop.call_later(min(_LOOK_SECONDS, end - loop.time()), look)]

        async with asyncio.timeout(None) as scope:
            timers.append(loop.call_later(min(self.late_seconds, self.most_seconds), look))
            try:
                yield
            finally:
                timers[0].cancel()


class SessionStream(Generic[Request, Response]):
    """Sends the opening message at once, then exchanges one message at a time."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response], opening: Request, *, peer: str) -> None:
        self._call = call
        self._peer = peer
        self._opening: asyncio.Task[None] | None = asyncio.create_task(self._write(opening))

    async def receive(self, patience: Patience) -> Response:
        """The next answer. Raises TandemError; TimedOut when patience ends, and the stream is then over."""
        return await self._guarded(None, patience)

    async def exchange(self, request: Request, patience: Patience) -> Response:
        """Send a message and receive its answer. Raises as `receive`."""
        return await self._guarded(request, patience)

    def close(self) -> None:
        """Cancel the call, which tells the other side: an abandoned grpc.aio stream would never end (grpc#43462)."""
        if self._opening is not None:
            self._opening.cancel()
        self._call.cancel()

    async def _write(self, request: Request) -> None:
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:  # grpc.aio's own word for a connection that took no more
                raise Unavailable(f"{self._peer} ended the session") from error
            raise

    async def _guarded(self, request: Request | None, patience: Patience) -> Response:
        began = time.monotonic()
        try:
            async with patience.limit():
                if self._opening is not None:
                    opening, self._opening = self._opening, None
                    await opening
                if request is not None:
                    await self._write(request)
                response: Response = await self._call.read()  # type: ignore[assignment]  # or EOF, see below
        except TimeoutError:
            raise TimedOut(f"{self._peer} did not answer within {time.monotonic() - began:.2g} seconds") from None
        except grpc.aio.AioRpcError as error:
            raise to_error(error, peer=self._peer) from error
        except asyncio.InvalidStateError:  # a write to a call that ended meanwhile
            raise await self._ended() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not us: the other side went away, which grpc.aio reports as if the caller had been cancelled.
            raise Unavailable(f"{self._peer} ended the session") from None
        if response is grpc.aio.EOF:
            raise Unavailable(f"{self._peer} ended the session")
        return response

    async def _ended(self) -> TandemError:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK or code is grpc.StatusCode.CANCELLED:
            return Unavailable(f"{self._peer} ended the session")
        empty = grpc.aio.Metadata()
        return to_error(grpc.aio.AioRpcError(code, empty, empty, details, None), peer=self._peer)
