"""Connections that are slow, half-open, too large or unread: each ends in time, and the others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import orjson
from fastapi import FastAPI, Request, Response
from starlette.types import Message, Receive, Scope, Send

from gateway.connection import BoundedProtocol
from tests.fakes import LIMITS, eventually, serving

QUICK = replace(LIMITS, header_seconds=0.3, body_seconds=0.3)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def connections() -> list[BoundedProtocol]:
    """Those that are open."""
    # isinstance would ask objects for their __class__, of which some have much to say
    protocols = [item for item in gc.get_objects() if issubclass(type(item), BoundedProtocol)]
    return [protocol for protocol in protocols if protocol in protocol.connections]


def application() -> FastAPI:
    app = FastAPI()

    @app.get("/")
    async def hello() -> Response:
        return Response("hello")

    @app.get("/slow")
    async def slow() -> Response:
        await asyncio.sleep(1.0)
        return Response("slow")

    @app.post("/")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    return app


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(5):
        return await reader.read()


async def test_l7_half_sent_headers_are_given_up_whatever_trickles_in() -> None:
    async with serving(application(), limits=QUICK) as url, connected(url) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-")

        async def trickle() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        answer = await _rest(reader)
        trickling.cancel()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    assert orjson.loads(body)["error"]["code"] == "timeout"


async def test_l7_a_connection_on_which_nothing_comes_is_closed() -> None:
    async with serving(application(), limits=QUICK) as url, connected(url) as (reader, _):
        assert await _rest(reader) == b""


async def test_l7_bytes_that_begin_no_request_prolong_nothing() -> None:
    async with serving(application(), limits=QUICK) as url, connected(url) as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.5)  # between two requests a connection may be idle for longer
        writer.write(b"\r\n")
        assert await _rest(reader) == b""


async def test_l7_a_body_that_trickles_on_after_its_refusal_is_cut() -> None:
    """A 413 leaves the connection open, so that the client can read it."""
    limits = replace(QUICK, body_seconds=-1.5)  # half a second with what the protocol adds

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Response("too large", status_code=413)(scope, receive, send)
        else:
            while True:  # the lifespan
                message: Message = await receive()
                await send({"type": message["type"] + ".complete"})

    async with serving(refuse, limits=limits) as url, connected(url) as (reader, writer):  # type: ignore[arg-type]
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        await reader.readuntil(b"too large")

        async def trickle() -> None:
            while True:
                writer.write(b"a")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        with contextlib.suppress(ConnectionError):  # a reset is as good as an end
            await _rest(reader)
        trickling.cancel()


async def test_l7_five_hundred_half_open_connections_keep_nobody_waiting_and_end() -> None:
    async with serving(application(), limits=replace(LIMITS, header_seconds=1.0)) as url:
        host, port = url.removeprefix("http://").split(":")
        halves = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
        for _, writer in halves:
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n")
        async with connected(url) as (reader, writer):
            writer.write(GET)
            async with asyncio.timeout(5):
                await reader.readuntil(b"hello")
        answers = await asyncio.gather(*(_rest(reader) for reader, _ in halves))
        assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)
        await eventually(lambda: not connections(), seconds=5.0)
        for _, writer in halves:
            writer.close()


async def test_headers_without_end_are_refused() -> None:
    async with serving(application()) as url, connected(url) as (reader, writer):
        lines = [b"x-%02d: %b\r\n" % (number, b"a" * 1000) for number in range(66)]
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(lines[:65]))
        await asyncio.sleep(0.1)
        writer.write(lines[65])  # the one that is too much; what came behind it would cost the answer
        answer = await _rest(reader)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_a_slow_answer_is_no_slow_request() -> None:
    async with serving(application(), limits=QUICK) as url, connected(url) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"slow")


async def test_half_of_the_next_request_does_not_cut_the_answer_to_this_one() -> None:
    async with serving(application(), limits=QUICK) as url, connected(url) as (reader, writer):
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n")
        await reader.readuntil(b"\r\n\r\nslow")
        assert (await _rest(reader)).startswith(b"HTTP/1.1 408")


async def test_a_connection_is_used_again_and_again() -> None:
    async with serving(application(), limits=QUICK) as url, connected(url) as (reader, writer):
        for _ in range(4):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
            await asyncio.sleep(0.1)
            writer.write(b"cd")
            await reader.readuntil(b"\r\n\r\nabcd")
            await asyncio.sleep(0.1)


async def test_an_answer_that_stays_unread_is_given_up_with_its_connection() -> None:
    """Twice: while it is being sent, and when it is complete but for what fills the buffers."""
    gone = asyncio.Event()
    large = 16 << 20

    async def send_much(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            while True:
                message: Message = await receive()
                await send({"type": message["type"] + ".complete"})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * large, "more_body": True})
        await send({"type": "http.response.body", "body": b"x", "more_body": False})  # waits for the reader
        gone.set()

    async with serving(send_much, limits=replace(LIMITS, write_seconds=0.5)) as url:  # type: ignore[arg-type]
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            client.sendall(GET)
            await eventually(lambda: len(connections()) == 1)
            assert not gone.is_set()
            await eventually(lambda: not connections(), seconds=10.0)
            await asyncio.wait_for(gone.wait(), 5)  # its task has ended as well


async def test_a_client_that_vanishes_is_asked_for_by_the_kernel() -> None:
    async with serving(application()) as url, connected(url):
        await eventually(lambda: len(connections()) == 1)
        (one,) = connections()
        accepted: socket.socket = one.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
