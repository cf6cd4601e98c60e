"""One streamed chat answer from a gateway: a request out, pieces of text and a report back."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from tandem.cli.sse import ServerSentEvent, read_events
from tandem.errors import InvalidRequest, TandemError, Unavailable

_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 120.0  # a gateway that has nothing to say yet sends a comment every 15 s


@dataclass(slots=True, kw_only=True)
class ChatSettings:
    """What every request of a chat carries; the chat's commands change it. None: the gateway decides."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    speculation: bool = True
    num_draft_tokens: int | str | None = None
    drafter: str | None = None

    def body(self, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
        """The request for the answer to `messages`."""
        speculation = {
            "enabled": self.speculation,
            "num_draft_tokens": self.num_draft_tokens,
            "drafter": self.drafter,
            "trace": True,
        }
        body = {
            "model": "tandem",
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "speculation": {name: value for name, value in speculation.items() if value is not None},
        }
        return {name: value for name, value in body.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one or more tokens of the same kind."""

    text: str
    accepted: bool  # drafted, and accepted by the target; else the target's own
    num_tokens: int


@dataclass(slots=True)
class Report:
    """What the gateway says of the answer, when it has ended. Filled while the answer is read."""

    finish_reason: str | None = None
    num_tokens: int | None = None
    speculation: dict[str, Any] = field(default_factory=dict)


class ChatClient:
    """Speaks to the gateway at `url`. Close it, or use it as a context."""

    def __init__(self, url: str, *, api_key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        self.url = _checked(url)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS),
            transport=transport,
            mounts=_no_proxy(httpx.URL(self.url).host),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model_id(self) -> str:
        """The id of the model that is served."""
        try:
            response = self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise _refused(response)
        try:
            ids = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self.url} does not answer like a gateway: is it the right --url?") from error
        return next((name for name in ids if name != "tandem"), "tandem")

    def answer(self, body: dict[str, Any], report: Report) -> Generator[Piece]:
        """The answer's pieces as they come. Close the generator to stop the answer: that closes the connection.

        Raises TandemError, with what is to be done, when the gateway cannot be reached, refuses, or breaks off.
        """
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refused(response)
                for event in read_events(response.iter_bytes()):
                    if event.data == "[DONE]":
                        return
                    yield from _pieces(event, report)
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except httpx.TransportError as error:
            raise Unavailable(f"the connection to {self.url} broke in the middle of the answer ({error})") from error
        raise Unavailable(f"{self.url} ended the stream before the answer's end: its log says why")

    def _unreachable(self, error: httpx.TransportError) -> TandemError:
        return Unavailable(
            f"no gateway answers at {self.url} ({error}): start one with `tandem up`, or name another with --url"
        )


def _pieces(event: ServerSentEvent, report: Report) -> Iterator[Piece]:
    """The pieces in one event; the rest of it goes into `report`."""
    try:
        chunk = json.loads(event.data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise Unavailable(f"the stream holds what is no JSON object: {event.data[:100]!r}")
    if "error" in chunk:
        raise TandemError(f"the answer broke off: {_error_message(chunk)}")
    if isinstance(usage := chunk.get("usage"), dict):
        report.num_tokens = usage.get("completion_tokens")
    if isinstance(speculation := chunk.get("speculation"), dict):
        report.speculation = speculation
    for choice in chunk.get("choices") or []:
        report.finish_reason = choice.get("finish_reason") or report.finish_reason
        yield from _joined(choice.get("trace") or [], (choice.get("delta") or {}).get("content") or "")


def _joined(trace: Sequence[dict[str, Any]], content: str) -> Iterator[Piece]:
    """Neighbours of the same kind as one piece. Where the trace is not the text's, the text counts."""
    if "".join(token["text"] for token in trace) != content:
        yield Piece(content, accepted=False, num_tokens=max(1, len(trace)))
        return
    text, accepted, num_tokens = "", False, 0
    for token in trace:
        is_accepted = token["origin"] == "accepted"
        if num_tokens and is_accepted != accepted:
            yield Piece(text, accepted, num_tokens)
            text, num_tokens = "", 0
        text, accepted, num_tokens = text + token["text"], is_accepted, num_tokens + 1
    if num_tokens:
        yield Piece(text, accepted, num_tokens)


def _refused(response: httpx.Response) -> TandemError:
    try:
        message = _error_message(response.json())
    except ValueError:
        message = response.text[:200] or response.reason_phrase
    advice = f"; try again in {wait} s" if (wait := response.headers.get("retry-after")) else ""
    if response.status_code == 401:
        advice = "; give a key with --api-key or TANDEM_API_KEY"
    if response.status_code in (400, 404, 422):
        return InvalidRequest(f"refused ({response.status_code}): {message}{advice}")
    return Unavailable(f"the gateway answers {response.status_code}: {message}{advice}")


def _error_message(body: object) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or body)[:1000]


def _checked(url: str) -> str:
    """`url` without what is added to it: both http://host:8000 and http://host:8000/v1 mean the same gateway."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url must begin with http:// or https://, got {url!r}", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _no_proxy(host: str) -> dict[str, None]:
    """A proxy does not know this machine. SSL_CERT_FILE, the environment's other say, holds for it all the same."""
    if not _is_loopback(host):
        return {}
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
