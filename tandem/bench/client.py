"""Speaks to a gateway: one timed answer, and what it says of itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final, Self

import httpx

from tandem.bench.timeline import Timeline, read_timeline
from tandem.errors import InvalidRequest, TandemError, Unavailable

# A gateway that has nothing to say yet sends a comment every 15 s.
_TIMEOUT: Final = httpx.Timeout(120.0, connect=5.0)
# A proxy does not know this machine.
NO_PROXY: Final[Mapping[str, None]] = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}


class BenchClient:
    """Speaks to the gateway at `url`; a context. Every method raises TandemError where the gateway does not answer."""

    def __init__(
        self, url: str, *, api_key: str | None, concurrency: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=_TIMEOUT,
            # Connections stay open, so that no answer but the first pays for one.
            limits=httpx.Limits(
                max_connections=concurrency, max_keepalive_connections=concurrency, keepalive_expiry=None
            ),
            transport=transport,
            mounts=NO_PROXY,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(self, body: Mapping[str, Any]) -> Timeline:
        """One streamed chat answer, timed."""
        chunks: list[tuple[float, bytes]] = []
        try:
            request = self._http.build_request("POST", "/v1/chat/completions", json=body)
            began = time.perf_counter()
            response = await self._http.send(request, stream=True)
            try:
                if response.status_code != 200:
                    await response.aread()
                    raise _refused(self._url, response)
                async for data in response.aiter_bytes():
                    chunks.append((time.perf_counter() - began, data))  # noqa: PERF401  (the times are the point)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise Unavailable(f"no answer from {self._url}: {error!r}") from error
        return read_timeline(chunks)

    async def model(self) -> dict[str, Any]:
        """The served model's card, under its own id."""
        cards = (await self._document("/v1/models")).get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise Unavailable(f"{self._url} does not answer like a gateway: is it the right --url?")
        return next((card for card in cards if card["id"] != "tandem"), {"id": "tandem"})

    async def readiness(self) -> tuple[str, tuple[str, ...]]:
        """`ready` or `degraded`, and why."""
        content = await self._document("/health/ready")
        return str(content.get("status")), tuple(map(str, content.get("reasons") or ()))

    async def _document(self, path: str) -> dict[str, Any]:
        try:
            response = await self._http.get(path)
        except httpx.TransportError as error:
            raise Unavailable(
                f"no gateway answers at {self._url} ({error}): start one with `tandem up`, name another with --url, "
                "or let --up start one for the run"
            ) from error
        if response.status_code != 200:
            raise _refused(self._url, response)
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise Unavailable(f"{self._url} does not answer like a gateway: is it the right --url?")
        return content


def _refused(url: str, response: httpx.Response) -> TandemError:
    try:
        error = response.json()["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text[:200] or response.reason_phrase
    if response.status_code == 401:
        message += "; give a key with --api-key or TANDEM_API_KEY"
    if response.status_code == 429:
        message += "; a smaller --concurrency, or a gateway with a longer queue"
    kind = InvalidRequest if response.status_code in (400, 404, 422) else Unavailable
    return kind(f"{url} answers {response.status_code}: {message}")
