"""The gateway over a real socket, with scripted services behind it: models, health, draining, metrics."""

from __future__ import annotations

import asyncio
import socket

import httpx
import openai
import pytest

from gateway.__main__ import build_server
from gateway.served import Readiness
from gateway.settings import Settings
from tests.fakes import (
    MODEL_ID,
    FakeFleet,
    alphabet,
    eventually,
)
from tests.gateways import (
    COMPLETIONS,
    build,
    gateway,
    listening_gateway,
    official_client,
    text_of,
)

pytestmark = pytest.mark.usefixtures("quiet_logs")


async def test_the_model_answers_to_its_own_name_and_to_tandem() -> None:
    async with official_client(alphabet) as (client, served):
        listed = (await client.models.list()).data
        assert [model.id for model in listed] == [MODEL_ID, "tandem"]
        for name in (MODEL_ID, "tandem"):
            assert (await client.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")
        # I5: an absent model is the served one.
        assert (await served.post(COMPLETIONS, {"prompt": "a"})).json()["model"] == MODEL_ID


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (Readiness("ready"), 200),
        (Readiness("degraded", ("draft x: down",)), 200),
        (Readiness("unavailable", ("target x: down",)), 503),
    ],
)
async def test_j11_liveness_and_readiness_are_different_answers(state: Readiness, status: int) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.state = state
    async with gateway(fleet) as served:
        response = await served.http.get("/health/ready")
        assert response.status_code == status
        assert response.json() == {"status": state.status, "reasons": list(state.reasons)}
        assert (await served.http.get("/health/live")).status_code == 200
        assert await served.metric("tandem_backend_up", backend="target") == (status == 200)


async def test_b14_while_draining_answers_go_on_and_new_requests_are_503() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet) as served:
        running = asyncio.create_task(served.events(COMPLETIONS, {"prompt": "a", "max_tokens": 5}))
        await eventually(lambda: served.admission.running == 1)
        served.admission.drain()
        assert (await served.http.get("/health/ready")).status_code == 503
        refused = await served.post(COMPLETIONS, {"prompt": "b"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert not await served.admission.idle(within_seconds=0.01)
        fleet.target.gate.set()
        assert text_of(await running) == "bcdef"
        assert await served.admission.idle(within_seconds=1)


async def test_b14_after_sigterm_a_stream_ends_well_and_readiness_says_no() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    app, _, admission = build(fleet)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = build_server(Settings(), app, admission)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await eventually(lambda: server.started)
        async with httpx.AsyncClient(base_url=url) as http:
            answer = asyncio.create_task(
                http.post(COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": 3}, timeout=10)
            )
            await eventually(lambda: admission.running == 1)
            server.should_exit = True  # what uvicorn does on SIGTERM
            await eventually(lambda: admission.draining)
            assert (await http.get("/health/ready")).status_code == 503
            assert (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503
            fleet.target.gate.set()
            assert (await answer).text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(running, 5)
    assert fleet.calls == ["start", "close"]


async def test_b14_when_the_grace_is_over_a_stream_is_cut_not_ended() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()  # never set
    app, _, admission = build(fleet)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = build_server(Settings(shutdown_grace_seconds=0.1), app, admission)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await eventually(lambda: server.started)
        async with httpx.AsyncClient(base_url=url, timeout=10) as http:
            async with http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
                server.should_exit = True
                with pytest.raises(httpx.RemoteProtocolError):
                    await response.aread()
        await asyncio.wait_for(running, 5)
    assert (fleet.target.num_open, fleet.drafts.num_open) == (0, 0)


async def test_k6_unknown_paths_make_one_series() -> None:
    async with gateway(alphabet) as served:
        before = (await served.http.get("/metrics")).text.count("\n")
        for number in range(20):
            await served.http.get(f"/nope/{number}")
            await served.post(COMPLETIONS, {"model": f"nope-{number}", "prompt": "a"})
            await served.http.get(f"/v1/models/nope-{number}")
        assert (await served.http.get("/metrics")).text.count("\n") == before
        assert await served.metric("tandem_http_requests_total", route="other", status="4xx") == 20
        assert await served.metric("tandem_http_requests_total", route="/v1/models/{model_id}", status="4xx") == 20


async def test_k8_token_counters_equal_the_sums_of_usage() -> None:
    async with gateway(alphabet) as served:
        bodies = [{"prompt": "a" * (index + 1), "max_tokens": index + 1} for index in range(8)]
        answers = await asyncio.gather(*(served.post(COMPLETIONS, body) for body in bodies))
        usages = [answer.json()["usage"] for answer in answers]
        for counter, field in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
            assert await served.metric(f"tandem_{counter}_tokens_total") == sum(usage[field] for usage in usages)
        assert await served.metric("tandem_time_to_first_token_seconds_count") == 8


async def test_metrics_come_in_the_format_that_is_asked_for() -> None:
    async with gateway(alphabet) as served:
        text = await served.http.get("/metrics")
        openmetrics = await served.http.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert text.headers["content-type"].startswith("text/plain")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


async def test_the_fleet_starts_and_closes_with_the_application() -> None:
    async with listening_gateway(alphabet) as served:
        assert served.fleet.calls == ["start"]
    assert served.fleet.calls == ["start", "close"]


def test_settings_refuse_what_cannot_work() -> None:
    for bad in (
        {"port": -1},
        {"request_timeout_seconds": 0},
        {"target_addresses": ""},
        {"target_addresses": "nohost"},
        {"num_draft_tokens": 20},
        {"max_n": 50},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Settings(**bad)
    assert Settings(draft_addresses="a:1, b:2").draft_addresses == ("a:1", "b:2")
    assert Settings(draft_addresses="").draft_addresses == ()
