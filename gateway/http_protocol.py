"""uvicorn's HTTP protocol with the bounds it lacks: how large what is no body may be, how long it may take, and how
many connections there may be.

Without them a client that sends a header without end fills the memory, and one that sends a byte now and then keeps its
connection for good: every byte resets uvicorn's keep-alive timer, and middleware sees a request only when its head is
complete. (Kludex/uvicorn#157, xorbitsai/inference#5213)
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import orjson
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from gateway.connection import WriteBoundedProtocol
from gateway.errors import RETRY_AFTER_SECONDS, http_error_body

# Connections beyond the limit that are still told so; those beyond these are cut without a word.
_TOLD_BEYOND: Final = 64
_TELL_SECONDS: Final = 2.0  # for one of them to ask for something, which is what can be answered
_BODY_MARGIN_SECONDS: Final = 5.0  # after which a body's own limit, which has an answer, must have ended it


class BoundedProtocol(WriteBoundedProtocol):
    """One connection.

    Of each request, everything that is no body (line, headers, the framing of chunks, trailers) has a size, its head
    must arrive within a time, and so must its end. Who exceeds them is told, where no answer is on the way, and the
    connection closes.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        max_header_bytes: int,
        header_timeout_seconds: float,
        body_timeout_seconds: float,
        write_timeout_seconds: float,
        max_connections: int,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop, write_timeout_seconds=write_timeout_seconds)
        self._max_header_bytes = max_header_bytes
        self._header_timeout_seconds = header_timeout_seconds
        self._body_timeout_seconds = body_timeout_seconds + _BODY_MARGIN_SECONDS
        self._overhead_bytes = 0  # of the request that arrives, without its body
        self._body_bytes = 0  # of the piece that is being parsed
        self._pure = True  # nothing of an earlier request is in that piece
        self._in_head = True  # of a request, or before it
        self._began = False  # a request's first byte is here, its last one is not
        self._refused = False
        self._max_connections = max_connections
        self._surplus = False  # one connection too many
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._surplus = len(self.connections) > self._max_connections
        if len(self.connections) > self._max_connections + _TOLD_BEYOND:
            transport.abort()
        else:
            self._expect_within(_TELL_SECONDS if self._surplus else self._header_timeout_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._surplus:  # answered now, and not on arrival: a client that still sends would never read it
            self._refuse(503, f"{self._max_connections} connections are open already; try again soon")
            return
        if not self._began:
            self._began = True
            self._expect_within(self._header_timeout_seconds)
        self._body_bytes, self._pure = 0, True
        super().data_received(data)
        if self._pure:
            self._overhead_bytes += len(data) - self._body_bytes
        if self._overhead_bytes > self._max_header_bytes:
            self._refuse(431, f"the request's headers are larger than {self._max_header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._began:  # right behind the end of the request before
            self._began = True
            self._expect_within(self._header_timeout_seconds)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self._max_header_bytes:
            self._refuse(431, f"the request's headers are larger than {self._max_header_bytes} bytes")
        if self._refused:
            return
        self._in_head = False
        self._expect_within(self._body_timeout_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._began, self._pure = True, False, False
        self._overhead_bytes = 0
        self._forget_deadline()
        if not self._refused:
            super().on_message_complete()

    def _expect_within(self, seconds: float) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(seconds, self._late, seconds)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self, seconds: float) -> None:
        if self.pipeline or (self._in_head and self._answering):
            self._expect_within(seconds)  # what an earlier request asked for comes first
        elif self._in_head and self._began:
            self._refuse(408, f"the request's headers did not arrive within {seconds:g} s")
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # none yet before the first request, which the stubs do not say
        return cycle is not None and not cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Close; with an answer, where that is not in the middle of another."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        structlog.get_logger().warning("request_refused", status=status)
        if self._in_head and not self._answering:
            body = orjson.dumps(http_error_body(status, message))
            again = f"retry-after: {RETRY_AFTER_SECONDS}\r\n" if status == 503 else ""
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{again}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
