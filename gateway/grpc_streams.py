"""One session's bidirectional stream, with the ways in which grpc.aio streams end mapped to Tandem's errors."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

import grpc

from tandem.errors import TandemError, TimedOut, Unavailable
from tandem.rpc.status import to_error

Request = TypeVar("Request")
Response = TypeVar("Response")


class SessionStream(Generic[Request, Response]):
    """Sends the opening message at once, then exchanges one message at a time."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response], opening: Request, *, peer: str) -> None:
        self._call = call
        self._peer = peer
        self._opening: asyncio.Task[None] | None = asyncio.create_task(self._write(opening))

    async def receive(self, *, timeout_seconds: float) -> Response:
        """The next answer. Raises TandemError; TimedOut after `timeout_seconds`, and the stream is then over."""
        return await self._guarded(None, timeout_seconds)

    async def exchange(self, request: Request, *, timeout_seconds: float) -> Response:
        """Send a message and receive its answer. Raises as `receive`."""
        return await self._guarded(request, timeout_seconds)

    def close(self) -> None:
        """Cancel the call, which tells the other side: an abandoned grpc.aio stream would never end (grpc#43462)."""
        if self._opening is not None:
            self._opening.cancel()
        self._call.cancel()

    async def _write(self, request: Request) -> None:
        await self._call.write(request)

    async def _guarded(self, request: Request | None, timeout_seconds: float) -> Response:
        try:
            async with asyncio.timeout(timeout_seconds):
                if self._opening is not None:
                    opening, self._opening = self._opening, None
                    await opening
                if request is not None:
                    await self._call.write(request)
                response: Response = await self._call.read()  # type: ignore[assignment]  # or EOF, see below
        except TimeoutError:
            raise TimedOut(f"{self._peer} did not answer within {timeout_seconds:g} seconds") from None
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
