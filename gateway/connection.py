"""uvicorn's HTTP protocol with a bound on how long an answer may stay unread, and a client be believed to be there."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# A stream has the same timeout, and a word in the log for it; the connection is cut when that did not help.
_AFTER_THE_STREAM_SECONDS = 2.0
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 30, 10, 3


class WriteBoundedProtocol(HttpToolsProtocol):
    """One connection. What its client does not read in time is given up, and the connection with it.

    Closing is not enough: a transport that is closed goes on until its buffer is empty, which it never is.
    """

    def __init__(self, *args: Any, write_timeout_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_timeout_seconds = write_timeout_seconds
        self._unread: asyncio.TimerHandle | None = None  # set while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _notice_when_the_client_vanishes(transport, after_seconds=self._write_timeout_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = self._write_timeout_seconds + _AFTER_THE_STREAM_SECONDS
        self._unread = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def _notice_when_the_client_vanishes(transport: asyncio.Transport, *, after_seconds: float) -> None:
    """A machine that is switched off closes no connection: have the kernel ask, and give up what stays unread, also
    where it is too little to be noticed here."""
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
