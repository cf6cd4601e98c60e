"""A gateway over scripted services, in this process, and how tests talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import orjson
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.admission import Admission
from gateway.app import create_app
from gateway.metrics import GatewayMetrics
from gateway.settings import Settings
from tests.fakes import FakeFleet, Script, eventually, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


@dataclass
class Gateway:
    """A gateway that answers, and how to talk to it."""

    fleet: FakeFleet
    admission: Admission
    http: httpx.AsyncClient
    url: str = ""  # where it listens, if it does

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON of a stream's events. The [DONE] must be there, once and last."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            text = (await response.aread()).decode()
        data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        assert data.count("[DONE]") == 1
        assert data[-1] == "[DONE]"
        return [orjson.loads(line) for line in data[:-1]]

    async def metric(self, name: str, **labels: str) -> float:
        page = (await self.http.get("/metrics")).text
        for family in parse_text(page):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"no sample {name} {labels}")


def build(fleet: FakeFleet | Script, **changes: Any) -> tuple[FastAPI, FakeFleet, Admission]:
    behind = fleet if isinstance(fleet, FakeFleet) else FakeFleet.following(fleet)
    chosen = Settings(**{"num_draft_tokens": 4, **changes})
    metrics = GatewayMetrics(max_num_draft_tokens=chosen.max_num_draft_tokens)
    admission = Admission(
        max_running=chosen.max_concurrent_requests,
        max_queued=chosen.max_queued_requests,
        replicas=behind.replicas,
    )
    return create_app(chosen, behind, metrics, admission=admission), behind, admission


@asynccontextmanager
async def gateway(fleet: FakeFleet | Script, **changes: Any) -> AsyncIterator[Gateway]:
    """Without a network: fast, but a client here cannot leave, and sees a response only when it is complete."""
    app, behind, admission = build(fleet, **changes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=10) as http:
        yield Gateway(fleet=behind, admission=admission, http=http)
        await check_nothing_leaked(behind, admission)


@asynccontextmanager
async def listening_gateway(fleet: FakeFleet | Script, **changes: Any) -> AsyncIterator[Gateway]:
    """On a real socket of a real server."""
    app, behind, admission = build(fleet, **changes)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=10) as http:
        yield Gateway(fleet=behind, admission=admission, http=http, url=url)
        await check_nothing_leaked(behind, admission)


@asynccontextmanager
async def official_client(fleet: FakeFleet | Script) -> AsyncIterator[tuple[openai.AsyncOpenAI, Gateway]]:
    async with listening_gateway(fleet) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=10)
        async with client:
            yield client, served


async def check_nothing_leaked(fleet: FakeFleet, admission: Admission) -> None:
    """After every test: no session is open, no place is taken."""
    await eventually(lambda: fleet.target.num_open == fleet.drafts.num_open == 0)
    await eventually(lambda: admission.running == admission.waiting == 0)


@asynccontextmanager
async def open_stream(served: Gateway, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
    """A streaming request on a connection of its own, which closes with the block."""
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=10) as http,
        http.stream("POST", path, json={**body, "stream": True}) as response,
    ):
        yield response


def text_of(events: Sequence[dict[str, Any]], *, index: int = 0) -> str:
    """All text of one choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
