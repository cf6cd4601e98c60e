"""The event stream as bytes: framing, pings, ends good and bad, clients that leave or do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import orjson
import pytest
from starlette.types import Message

from gateway.sse import ClientGone, EventStream, encode_event, until_disconnect
from tandem.errors import TimedOut, Unavailable


class Client:
    """The other end of an ASGI connection."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_complete(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False


class Source:
    """Events, with a step of the test's own between them."""

    def __init__(self, *steps: bytes | Exception | Callable[[], Coroutine[Any, Any, object]]) -> None:
        self.steps = steps
        self.closed = False

    async def events(self) -> AsyncGenerator[bytes]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                else:
                    await step()
        finally:
            self.closed = True


def response(source: Source, *, ping: float = 60.0, write_timeout: float = 60.0) -> EventStream:
    return EventStream(
        source.events(), request_id="r1", ping_interval_seconds=ping, write_timeout_seconds=write_timeout
    )


async def run(stream: EventStream, client: Client) -> None:
    await stream({"type": "http"}, client.receive, client.send)


A, B = encode_event({"a": 1}), encode_event({"b": 2})


def test_a4_an_event_is_one_line_of_whole_utf8() -> None:
    event = encode_event({"text": "line\nend \r\n 中🙂"})
    assert event == 'data: {"text":"line\\nend \\r\\n 中🙂"}\n\n'.encode()


async def test_b1_b17_done_is_written_once_and_last() -> None:
    client = Client()
    source = Source(A, B)
    await run(response(source), client)
    assert client.body == A + B + b"data: [DONE]\n\n"
    assert client.is_complete
    assert source.closed


async def test_headers_keep_proxies_from_buffering() -> None:
    client = Client()
    await run(response(Source(A)), client)
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers


async def test_b12_no_line_but_data_and_comments_is_ever_written() -> None:
    client = Client()
    await run(response(Source(A, lambda: asyncio.sleep(0.1), B), ping=0.02), client)
    lines = client.body.decode().split("\n")
    assert all(line == "" or line.startswith(("data: ", ":")) for line in lines)


async def test_b18_silence_is_filled_with_pings() -> None:
    client = Client()
    await run(response(Source(A, lambda: asyncio.sleep(0.25), B), ping=0.1), client)
    assert client.body == A + b": ping\n\n" * 2 + B + b"data: [DONE]\n\n"


async def test_b18_headers_go_out_before_a_long_prefill_ends() -> None:
    client = Client()
    gate = asyncio.Event()
    task = asyncio.create_task(run(response(Source(gate.wait, A), ping=0.05), client))
    await asyncio.sleep(0.4)
    assert client.messages[0]["status"] == 200
    assert client.body.startswith(b": ping\n\n")
    gate.set()
    await task
    assert client.body.endswith(A + b"data: [DONE]\n\n")


async def test_a_failure_at_once_is_raised_for_a_status_of_its_own() -> None:
    client = Client()
    source = Source(Unavailable("down"))
    with pytest.raises(Unavailable):
        await run(response(source), client)
    assert client.messages == []
    assert source.closed


async def test_b3_b13_a_later_failure_is_the_last_event_and_no_done_follows() -> None:
    client = Client()
    await run(response(Source(A, TimedOut("too slow"))), client)
    error = {"message": "too slow", "type": "server_error", "param": None, "code": "timeout"}
    assert client.body == A + encode_event({"error": error})
    assert client.is_complete
    assert [message["type"] for message in client.messages].count("http.response.start") == 1


async def test_b3_a_failure_of_our_own_shows_only_the_request_id() -> None:
    client = Client()
    await run(response(Source(A, KeyError("secret"))), client)
    event = orjson.loads(client.body.removeprefix(A).removeprefix(b"data: "))
    assert "r1" in event["error"]["message"]
    assert b"secret" not in client.body


async def test_j1_a_client_that_leaves_ends_the_work() -> None:
    client = Client()
    source = Source(A, asyncio.Event().wait)
    task = asyncio.create_task(run(response(source), client))
    await asyncio.sleep(0.05)
    client.gone.set()
    await asyncio.wait_for(task, 1)
    assert source.closed
    assert not client.is_complete


async def test_j2_a_client_that_leaves_before_the_first_event_ends_the_work() -> None:
    client = Client()
    source = Source(asyncio.Event().wait)
    task = asyncio.create_task(run(response(source), client))
    await asyncio.sleep(0.05)
    client.gone.set()
    await asyncio.wait_for(task, 1)
    assert source.closed
    assert client.messages == []


async def test_a_client_that_does_not_read_is_dropped() -> None:
    client = Client()
    source = Source(A, B, B)

    async def stop_reading() -> None:
        client.reads.clear()

    source.steps = (A, stop_reading, B, B)
    await asyncio.wait_for(run(response(source, write_timeout=0.05), client), 1)
    assert source.closed
    assert client.body == A
    assert not client.is_complete


async def test_work_is_cancelled_and_waited_for_when_its_caller_is() -> None:
    client = Client()
    source = Source(A, asyncio.Event().wait)
    task = asyncio.create_task(run(response(source), client))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed
    assert not client.is_complete


async def test_j2_until_disconnect_gives_the_result_or_the_news() -> None:
    async def answer() -> int:
        await asyncio.sleep(0.01)
        return 42

    client = Client()
    assert await until_disconnect(client.receive, answer()) == 42
    client.gone.set()
    with pytest.raises(ClientGone):
        await until_disconnect(client.receive, answer())
