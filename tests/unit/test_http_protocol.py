"""What a connection may send and how long it may take, on real sockets of the real server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog

from gateway.__main__ import build_server
from gateway.settings import Settings
from tests.fakes import FakeFleet, alphabet, eventually
from tests.gateways import COMPLETIONS, build

BODY = b'{"prompt":"a","max_tokens":2}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


@asynccontextmanager
async def listening(fleet: FakeFleet | None = None, **settings: Any) -> AsyncIterator[int]:
    """The port of a gateway as `python -m gateway` builds it."""
    chosen = Settings(shutdown_grace_seconds=0.1, **settings)
    app, _, admission = build(fleet or FakeFleet.following(alphabet), **settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = build_server(chosen, app, admission)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await asyncio.wait_for(running, 5)


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes, which it must within 5 seconds."""
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionResetError:  # closed while we were still sending
        return b""


def code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "head",
    [
        POST + b"x: " + b"y" * 9000 + b"\r\n\r\n",
        POST + b"".join(b"x-%d: y\r\n" % number for number in range(1500)) + b"\r\n",
        b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["one header", "many headers", "address"],
)
async def test_headers_beyond_the_limit_are_a_431_and_the_connection_ends(
    head: bytes, logs: list[MutableMapping[str, Any]]
) -> None:
    """CVE-2025-48956: a header of any size was read into memory."""
    async with listening(max_header_bytes=8192) as port, connection(port) as (reader, writer):
        writer.write(head)
        assert code(await rest(reader)) == (431, "headers_too_large")
    assert [entry["status"] for entry in logs if entry["event"] == "request_refused"] == [431]


async def test_a_header_without_end_is_cut_off_near_the_limit() -> None:
    async with (
        listening(max_header_bytes=8192, header_timeout_seconds=60) as port,
        connection(port) as (reader, writer),
    ):
        writer.write(POST + b"x: ")
        sent = 0
        while not reader.at_eof() and sent < 50_000_000:
            try:
                writer.write(b"y" * 10_000)
                await writer.drain()
                sent += 10_000
                await asyncio.sleep(0)
            except ConnectionError:
                break
        await rest(reader)
    assert sent < 10_000_000  # what fits into the sockets' buffers; the server itself stopped at the limit


async def test_trailers_and_the_framing_of_chunks_count_too() -> None:
    """A body in chunks may be followed by headers, and each chunk may carry an extension: neither has a limit else."""
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    for tail in (b"0\r\nx: " + b"y" * 9000, b"1;" + b"e" * 9000 + b"\r\n{\r\n"):
        async with listening(max_header_bytes=8192, body_timeout_seconds=60) as port:
            async with connection(port) as (reader, writer):
                writer.write(head)
                await writer.drain()
                await asyncio.sleep(0.05)
                writer.write(tail)
                await rest(reader)  # closed


async def test_large_bodies_small_chunks_and_many_requests_are_none_of_its_business() -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2, "user": "u" * 100_000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 1000):
            yield body[begin : begin + 1000]

    json_type = {"content-type": "application/json"}
    async with listening(max_header_bytes=8192) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=json_type) as http:
            for _ in range(5):
                assert (await http.post(COMPLETIONS, content=body)).status_code == 200
                assert (await http.post(COMPLETIONS, content=pieces())).status_code == 200
                assert (await http.get("/v1/models", headers={"x": "y" * 6000})).status_code == 200
        async with connection(port) as (reader, writer):  # pipelined, all in one piece
            writer.write((b"GET /health/live HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 900 + b"\r\n\r\n") * 20)
            answers = b""
            while answers.count(b'{"status":"live"}') < 20:
                answers += await asyncio.wait_for(reader.read(65536), 5)
        assert answers.count(b"HTTP/1.1 200") == 20


@pytest.mark.parametrize(("sent", "trickled"), [(b"", b""), (b"\r\n", b"\r\n"), (b"POST /v1/comp", b"x"), (POST, b"x")])
async def test_l7_headers_that_trickle_are_given_up(sent: bytes, trickled: bytes) -> None:
    """L7: half-open connections that send a byte now and then stayed for good."""
    async with listening(header_timeout_seconds=0.4) as port, connection(port) as (reader, writer):
        writer.write(sent)

        async def trickle() -> None:
            while True:
                await asyncio.sleep(0.05)
                writer.write(trickled)

        trickling = asyncio.create_task(trickle())
        answer = await rest(reader)
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
    if sent:
        assert code(answer) == (408, "timeout")
    else:
        assert answer == b""  # a browser that connects ahead of time is not told off


async def test_l7_two_hundred_half_open_connections_harm_nobody_and_end() -> None:
    async with listening(header_timeout_seconds=1.5) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in opened:
            writer.write(POST)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2})).status_code == 200
        answers = await asyncio.gather(*(rest(reader) for reader, _ in opened))
        assert {code(answer) for answer in answers} == {(408, "timeout")}
        for _, writer in opened:
            writer.close()


async def test_a_body_that_nobody_waits_for_must_end_too() -> None:
    """A request that is refused at once is answered, and what still comes of its body is dropped: not for ever."""
    async with listening(body_timeout_seconds=0.1, max_body_bytes=10) as port, connection(port) as (reader, writer):
        writer.write(POST + b"content-length: 100000\r\n\r\n{")
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 413")

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.2)

        trickling = asyncio.create_task(trickle())
        try:
            assert await asyncio.wait_for(reader.read(), 10) == b""  # closed, 5 s after the body's time
        except ConnectionResetError:
            pass
        finally:
            trickling.cancel()
            await asyncio.gather(trickling, return_exceptions=True)


async def test_a_slow_second_request_does_not_cut_the_first_ones_answer() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening(fleet, header_timeout_seconds=0.2) as port, connection(port) as (reader, writer):
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        await eventually(lambda: fleet.target.num_open == 1)
        writer.write(b"GET /health/l")  # and no more
        await asyncio.sleep(0.5)
        fleet.target.gate.set()
        answer = await rest(reader)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1 408") == 1


async def test_one_connection_too_many_is_told_to_come_back_and_harms_nobody() -> None:
    async with listening(max_connections=2) as port:
        address = f"http://127.0.0.1:{port}"
        async with connection(port), httpx.AsyncClient(base_url=address) as kept:
            assert (await kept.get("/health/live")).status_code == 200
            async with connection(port) as (reader, writer):
                writer.write(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
                answer = await rest(reader)
                assert code(answer) == (503, "unavailable")
                assert b"\r\nretry-after: 1\r\n" in answer
            assert (await kept.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2})).status_code == 200
        for _ in range(100):  # both have left: there is room again
            async with httpx.AsyncClient(base_url=address) as http:
                if (await http.get("/health/live")).status_code == 200:
                    break
                await asyncio.sleep(0.01)
        else:
            pytest.fail("no room, though everybody has left")


async def test_a_flood_of_silent_connections_is_cut_and_who_was_there_is_served() -> None:
    async with listening(max_connections=3) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as kept:
        assert (await kept.get("/health/live")).status_code == 200
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        ended = [asyncio.create_task(rest(reader)) for reader, _ in opened]
        await asyncio.wait(ended, timeout=0.5)
        assert sum(one.done() for one in ended) >= 300 - 3 - 64  # at once
        assert (await kept.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2})).status_code == 200
        await asyncio.wait(ended, timeout=3.0)
        assert sum(one.done() for one in ended) >= 300 - 3  # those that were to be told asked for nothing
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*ended)
