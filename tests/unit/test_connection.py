"""Clients that do not read, and clients that vanish: their connections end too. On real sockets of the real server."""

from __future__ import annotations

import asyncio
import functools
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from gateway.connection import WriteBoundedProtocol
from tests.fakes import eventually

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def open_connections() -> list[WriteBoundedProtocol]:
    # isinstance would ask objects for their __class__, of which some have much to say
    protocols = [item for item in gc.get_objects() if issubclass(type(item), WriteBoundedProtocol)]
    return [protocol for protocol in protocols if protocol in protocol.connections]


class Writer:
    """An application that answers with so many bytes. `num_done` counts the answers whose last byte it got rid of."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_done = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while scope["type"] == "lifespan":
            message: Message = await receive()
            await send({"type": message["type"] + ".complete"})
        length = str(self.num_bytes + 1).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": b"x" * self.num_bytes, "more_body": True})
        await send({"type": "http.response.body", "body": b"x", "more_body": False})
        self.num_done += 1


@asynccontextmanager
async def serving(app: Writer, *, write_timeout_seconds: float) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app,
            http=functools.partial(WriteBoundedProtocol, write_timeout_seconds=write_timeout_seconds),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await asyncio.wait_for(running, 5)


async def test_an_answer_that_stays_unread_is_given_up_with_its_connection_and_its_task() -> None:
    app = Writer(16 << 20)  # more than all the buffers between hold
    async with serving(app, write_timeout_seconds=0.3) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(GET)
            await eventually(lambda: len(open_connections()) == 1)
            assert app.num_done == 0
            await eventually(lambda: not open_connections(), seconds=10.0)  # while the client still holds its end
            await eventually(lambda: app.num_done == 1)


async def test_an_answer_that_is_read_slowly_arrives_whole() -> None:
    """Its client takes longer than the timeout for all of it, but never pauses as long."""
    app = Writer(8 << 20)
    async with serving(app, write_timeout_seconds=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        got = 0
        for _ in range(30):
            got += len(await reader.readexactly(256 << 10))
            await asyncio.sleep(0.05)
        got += len(await reader.readexactly(app.num_bytes + 1 - got))
        writer.close()
        await writer.wait_closed()
    assert app.num_done == 1


async def test_a_client_that_vanishes_is_asked_for_by_the_kernel() -> None:
    async with serving(Writer(1), write_timeout_seconds=5.0) as port:
        with socket.create_connection(("127.0.0.1", port)):
            await eventually(lambda: len(open_connections()) == 1)
            (one,) = open_connections()
            accepted: socket.socket = one.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
