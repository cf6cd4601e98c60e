"""Is the gateway ready? Its /health/ready, asked until it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import httpx

_POLL_SECONDS = 0.25
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the gateway says of itself; `silent`: nothing, as it does not answer yet."""

    status: Literal["silent", "unavailable", "degraded", "ready"]
    reasons: tuple[str, ...] = ()

    @property
    def serving(self) -> bool:
        return self.status in ("degraded", "ready")


def parse_readiness(http_status: int, body: bytes) -> Readiness:
    """200 means that requests are served; the body tells how, and what is missing."""
    try:
        content = json.loads(body)
    except ValueError:
        content = {}
    if not isinstance(content, dict):
        content = {}
    named = content.get("reasons")
    reasons = tuple(map(str, named)) if isinstance(named, list) else ()
    if http_status != 200:
        return Readiness("unavailable", reasons)
    return Readiness("degraded" if content.get("status") == "degraded" else "ready", reasons)


class ReadinessProbe:
    """Asks one gateway, on this machine: directly, not through a proxy, and without a look at its certificate, which
    need not name this machine's address."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/health/ready"

    async def wait_until(
        self,
        satisfied: Callable[[Readiness], bool],
        *,
        show: Callable[[Readiness], None] | None = None,
        limit_seconds: float | None = None,
    ) -> Readiness:
        """Ask until `satisfied`, or until the limit is over; the last answer. Each one is shown."""
        readiness = Readiness("silent")
        try:
            async with (
                asyncio.timeout(limit_seconds),
                httpx.AsyncClient(trust_env=False, verify=False, timeout=_TIMEOUT_SECONDS) as client,  # noqa: S501
            ):
                while True:
                    readiness = await self._ask(client)
                    if satisfied(readiness):
                        return readiness
                    if show is not None:
                        show(readiness)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            return readiness

    async def _ask(self, client: httpx.AsyncClient) -> Readiness:
        try:
            response = await client.get(self._url)
        except httpx.HTTPError:
            return Readiness("silent")
        return parse_readiness(response.status_code, response.content)
