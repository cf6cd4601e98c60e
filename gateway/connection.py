"""One client's connection, bounded where uvicorn bounds nothing: how long a request may take to arrive, how large its
headers may be, how long an answer may stay unread, how long a client that vanished is waited for.

ASGI begins when the headers are complete, so no middleware sees any of it (Kludex/uvicorn#157).
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import http_error_response

# The application has these timeouts too, and a better way to say so; the connection ends when that did not help.
_AFTER_THE_APPLICATION_SECONDS = 2.0
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 30, 10, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """All positive. `max_header_bytes` may be exceeded by one read, 256 KiB."""

    header_seconds: float  # from a connection's start, or a later request's first byte, to the end of its headers
    body_seconds: float  # from there to the end of its body
    write_seconds: float  # how long what was sent may stay unread
    max_header_bytes: int


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits; `protocol_with` makes the class that has them."""

    limits: ClassVar[ConnectionLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receipt: asyncio.TimerHandle | None = None  # runs while a request is expected or arriving
        self._unread: asyncio.TimerHandle | None = None  # runs while the client does not read
        self._in_headers = False
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _notice_when_the_client_vanishes(transport, after_seconds=self.limits.write_seconds)
        self._expect(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receipt, self._unread):
            if timer is not None:
                timer.cancel()
        self._receipt = self._unread = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._receipt is None and not self._answering:
            self._expect(self.limits.header_seconds)  # even for a byte that begins no request
        super().data_received(data)
        self._num_header_bytes = self._num_header_bytes + len(data) if self._in_headers else 0
        if self._num_header_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(431, f"the request's headers are larger than {self.limits.max_header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        if self._receipt is None:
            self._expect(self.limits.header_seconds)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._expect(self.limits.body_seconds + _AFTER_THE_APPLICATION_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._receipt is not None:
            self._receipt.cancel()
            self._receipt = None

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = self.limits.write_seconds + _AFTER_THE_APPLICATION_SECONDS
        self._unread = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, which uvicorn's annotation does not say
        return cycle is not None and not cycle.response_complete

    def _expect(self, seconds: float) -> None:
        if self._receipt is not None:
            self._receipt.cancel()
        self._receipt = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._receipt = None
        if self.transport.is_closing():
            self.transport.abort()
        elif self._in_headers and self._answering:
            self._expect(self.limits.header_seconds)  # of the next request, while this one is being answered
        elif self._in_headers:
            self._refuse(408, f"the request's headers did not arrive within {self.limits.header_seconds:g} s")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer what never became a request, and close."""
        self.transport.write(_as_bytes(http_error_response(status, message, headers={"Connection": "close"})))
        self.transport.close()


def protocol_with(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """The class for `uvicorn.Config(http=...)`."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})


def _as_bytes(response: Response) -> bytes:
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return STATUS_LINE[response.status_code] + headers + b"\r\n" + bytes(response.body)


def _notice_when_the_client_vanishes(transport: asyncio.Transport, *, after_seconds: float) -> None:
    """A machine that is switched off closes no connection: have the kernel ask, and give up what stays unread."""
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (  # none of these exists everywhere
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", max(1, round(1000 * after_seconds))),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
