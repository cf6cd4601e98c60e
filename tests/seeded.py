"""Seeded requests whose right answers are known, and clients that read, or leave. For tests of faults under load."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.stack import Stack

_WORDS = (
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "fox",
    "who",
    "lived",
    "in",
    "the",
    "old",
    "forest",
    "and",
    "sang",
)


@dataclass(frozen=True)
class Question:
    """A request with a seed, and the token ids that answer it."""

    body: dict[str, Any]
    answer: tuple[int, ...]


def questions(stack: Stack, count: int, *, num_tokens: tuple[int, int], seed: int = 0) -> list[Question]:
    """`count` different requests for `num_tokens` (least, most), answered by plain decoding, which no draft touches."""
    choose = random.Random(seed)
    bodies = [
        {
            "model": "tandem",
            "prompt": " ".join(choose.choices(_WORDS, k=choose.randint(3, 40))),
            "max_tokens": choose.randint(*num_tokens),
            "temperature": choose.choice([0.0, 0.7, 1.0]),
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(count)
    ]

    def answer(body: dict[str, Any]) -> Question:
        plain = stack.complete(**body, speculation={"enabled": False})
        return Question(body, tuple(plain["choices"][0]["token_ids"]))

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(answer, bodies))


@dataclass(frozen=True)
class Ending:
    """How a request ended: with token ids, or with an error that says why; never with neither."""

    token_ids: tuple[int, ...] = ()
    status: int = 200
    error: dict[str, Any] | None = None


class Progress:
    """How many tokens have come so far, of all requests together."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def add(self, count: int) -> None:
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def wait_for(self, count: int, *, timeout_seconds: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, timeout_seconds), self._count


def ask(url: str, body: dict[str, Any], *, stream: bool, limit_seconds: float, seen: Progress | None = None) -> Ending:
    """Send one request and read all of its answer. Raises AssertionError where the answer just stops."""
    with httpx.Client(timeout=httpx.Timeout(limit_seconds)) as client:
        if not stream:
            response = client.post(f"{url}/v1/completions", json=body)
            content = response.json()
            if response.status_code != 200:
                return Ending(status=response.status_code, error=content["error"])
            return Ending(tuple(content["choices"][0]["token_ids"]))
        with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response:
            if response.status_code != 200:
                response.read()
                return Ending(status=response.status_code, error=response.json()["error"])
            token_ids: list[int] = []
            for event in events(response):
                if event is None:
                    return Ending(tuple(token_ids))
                if "error" in event:
                    return Ending(tuple(token_ids), error=event["error"])
                new = [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or []]
                token_ids += new
                if seen is not None:
                    seen.add(len(new))
    raise AssertionError(f"the stream ended after {len(token_ids)} tokens, without [DONE] and without an error")


def events(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """A stream's events; None for the [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield None if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))


def in_parallel(
    stack: Stack, asked: Sequence[Question], meanwhile: Callable[[Progress], None], *, limit_seconds: float
) -> list[Ending]:
    """All questions at once, every other one as a stream, while `meanwhile` runs here."""
    seen = Progress()
    with ThreadPoolExecutor(len(asked)) as pool:
        pending = [
            pool.submit(ask, stack.url, one.body, stream=number % 3 != 2, limit_seconds=limit_seconds, seen=seen)
            for number, one in enumerate(asked)
        ]
        meanwhile(seen)
        return [one.result() for one in pending]


def leave(stack: Stack, body: dict[str, Any], choose: random.Random) -> str:
    """Send a request and go away somewhere on the way, gently or with a reset; where."""
    where = choose.choice(
        ["in the headers", "in the body", "after the request", "after a while", "in the answer", "at the end"]
    )
    stream = choose.random() < 0.6
    raw = json.dumps(body | {"stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", stack.gateway_port), timeout=60.0) as connection:
        if choose.random() < 0.5:  # RST in place of FIN
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if where == "in the headers":
            connection.sendall(head[: choose.randrange(1, len(head))])
        elif where == "in the body":
            connection.sendall(head + raw[: choose.randrange(len(raw))])
        else:
            connection.sendall(head + raw)
            _read(connection, where, choose)
    return f"{where}, {'stream' if stream else 'document'}"


def _read(connection: socket.socket, where: str, choose: random.Random) -> None:
    if where == "after a while":
        connection.settimeout(choose.uniform(0.0, 1.0))
        try:
            while connection.recv(65536):
                pass
        except TimeoutError:
            pass
    elif where == "in the answer":
        wanted = choose.randrange(1, 5000)
        while wanted > 0 and (chunk := connection.recv(min(wanted, 65536))):
            wanted -= len(chunk)
    elif where == "at the end":
        tail = b""
        while b"[DONE]" not in tail and not tail.endswith(b"}}") and (chunk := connection.recv(65536)):
            tail = (tail + chunk)[-64:]
