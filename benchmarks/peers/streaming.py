"""One streamed answer over HTTP, with a limit on the whole of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.peers.peer import NotOffered, PeerFailed
from tandem.cli.sse import read_events


@dataclass(frozen=True, slots=True)
class Event:
    """The JSON of one event, and the seconds from the request to it."""

    seconds: float
    content: dict[str, Any]


class StreamClient:
    """Posts to one server. Proxies are for other machines.

    Every request has a connection of its own: servers close those that wait long, as all do here between two turns.
    """

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def close(self) -> None:
        self._client.close()

    def post(self, path: str, body: dict[str, Any], *, timeout_seconds: float) -> Iterator[Event]:
        """The events as they come. Raises PeerFailed for any other end than the stream's own."""
        began = time.perf_counter()
        # httpx limits every read: the whole is limited here.
        try:
            with self._client.stream("POST", path, json=body, timeout=timeout_seconds) as response:
                if response.status_code != 200:
                    response.read()
                    kind = NotOffered if response.status_code == 400 else PeerFailed
                    raise kind(f"status {response.status_code}: {_message(response)}")
                for event in read_events(response.iter_raw()):
                    seconds = time.perf_counter() - began
                    if seconds > timeout_seconds:
                        raise PeerFailed(f"no complete answer after {timeout_seconds:.0f} s")
                    if event.data == "[DONE]":
                        continue
                    content = json.loads(event.data)
                    if "error" in content:
                        raise PeerFailed(f"the answer broke off: {content['error']}")
                    yield Event(seconds, content)
        except httpx.HTTPError as error:
            raise PeerFailed(f"no complete answer: {error!r}") from error


def _message(response: httpx.Response) -> str:
    """What went wrong, in the server's words: OpenAI's form of an error, or whatever it is."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]
