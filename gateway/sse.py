"""Server-sent events as OpenAI's clients read them, and what happens when the other side goes away.

Every event is one line `data: <JSON>` and a blank line, written whole; no `id:`, `retry:` or `event:` lines, which
break the official client. A stream ends in one of three ways:

* well: the last event is `data: [DONE]`, exactly once;
* badly, after it has begun: the last event is `data: {"error": {...}}` and there is no [DONE], so that a client which
  overlooks the error still sees that the answer is not complete. The official client raises APIError;
* cut: when the process is told to stop and the grace has run out, the chunked body is left unfinished, which every
  HTTP client reports.

The response's headers go out with the first event, or after a quarter of a second without one. So what fails at once
(queue full, target down) still gets its own status code, and a long prefill or a wait in the queue keeps no proxy
waiting; from then on, silence is filled with comment lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import error_body
from tandem.errors import TandemError

_Result = TypeVar("_Result")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEADERS_AFTER_SECONDS = 0.25


def encode_event(content: dict[str, Any]) -> bytes:
    """One event. orjson escapes line ends, so the JSON is always one line."""
    return b"data: %b\n\n" % orjson.dumps(content)


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, unless the client leaves first: then `work` is cancelled and ClientGone is raised.

    `work` is also cancelled, and waited for, when the caller is. The request's body must have been read.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = not worker.done()
        worker.cancel()
        watcher.cancel()
        await asyncio.wait((worker, watcher))
    if left:
        raise ClientGone
    return worker.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The response that writes `events`, encoded events without the [DONE], which it adds."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        request_id: str,
        ping_interval_seconds: float,
        write_timeout_seconds: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._request_id = request_id
        self._ping_interval_seconds = ping_interval_seconds
        self._write_timeout_seconds = write_timeout_seconds
        self._last_write = 0.0
        self._is_writing = False
        self._log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream. Raises what `events` raises before the headers are out, and nothing later."""
        with suppress(ClientGone):  # by then `events` is closed, and has counted it
            await until_disconnect(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = asyncio.ensure_future(anext(events, None))
            try:
                await asyncio.wait((first,), timeout=_HEADERS_AFTER_SECONDS)
                if first.done() and (error := first.exception()) is not None:
                    raise error
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._last_write = asyncio.get_running_loop().time()
                pinger = asyncio.create_task(self._ping(send))
                try:
                    last = await self._write_events(first, events, send)
                finally:
                    pinger.cancel()
                await self._send(send, last)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except _NotRead:
                # The body stays unfinished, whereupon the server closes the connection.
                self._log.warning("stream_not_read", request_id=self._request_id)
            finally:
                first.cancel()
                await asyncio.wait((first,))

    async def _write_events(
        self, first: asyncio.Future[bytes | None], events: AsyncGenerator[bytes], send: Send
    ) -> bytes:
        """Write all events but the very last, which is returned: [DONE], or the error that ended them."""
        try:
            event = await first
            while event is not None:
                await self._send(send, event)
                event = await anext(events, None)
            return DONE
        except _NotRead:
            raise
        except Exception as error:  # noqa: BLE001 (the headers are out: only the stream can carry it)
            self._log.error(
                "stream_failed",
                request_id=self._request_id,
                error=type(error).__name__,
                exc_info=not isinstance(error, TandemError),
            )
            return encode_event(error_body(error, request_id=self._request_id))

    async def _ping(self, send: Send) -> None:
        """Fill silence with comments, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            silence = loop.time() - self._last_write
            if silence < self._ping_interval_seconds:
                await asyncio.sleep(self._ping_interval_seconds - silence)
            elif self._is_writing:  # nobody reads: the write in progress has its own timeout
                await asyncio.sleep(self._ping_interval_seconds)
            else:
                with suppress(_NotRead):  # the next event will find the same
                    await self._send(send, PING)

    async def _send(self, send: Send, body: bytes) -> None:
        """One event in one message, so that nothing can come between its bytes."""
        self._is_writing = True
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise _NotRead from None
        finally:
            self._is_writing = False
            self._last_write = asyncio.get_running_loop().time()


class _NotRead(Exception):
    """The client has not read for too long."""
