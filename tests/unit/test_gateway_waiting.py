"""The gateway over a real socket, with scripted services behind it: clients that leave, queues, time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from gateway.admission import Admission, Grant
from gateway.generate import Generation
from gateway.jobs import Job, JobMaker
from gateway.kv_room import AnswerSize, Replica
from gateway.metrics import GatewayMetrics
from gateway.schemas import CompletionBody
from gateway.settings import Settings
from tandem.types import KvCache
from tests.fakes import (
    FakeFleet,
    alphabet,
    eventually,
    says,
)
from tests.gateways import (
    CHAT,
    COMPLETIONS,
    HELLO,
    gateway,
    listening_gateway,
    open_stream,
    text_of,
)

pytestmark = pytest.mark.usefixtures("quiet_logs")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_j1_j2_a_client_that_leaves_before_the_first_token_stops_both_services(path: str, stream: bool) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()  # a prefill without end
    async with listening_gateway(fleet) as served:
        body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
        async with httpx.AsyncClient(base_url=served.url) as http:
            task = asyncio.create_task(http.post(path, json={**body, "max_tokens": 50, "stream": stream}))
            await eventually(lambda: fleet.target.num_open == fleet.drafts.num_open == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: fleet.target.num_open == fleet.drafts.num_open == 0)
        assert await served.metric("tandem_requests_total", finish_reason="cancelled") == 1
        assert await served.metric("tandem_http_requests_total", route=path, status="4xx") == 1  # nginx's 499


async def test_j1_a_client_that_leaves_stops_all_answers_to_its_request() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.seconds = 0.01
    async with listening_gateway(fleet) as served:
        async with open_stream(served, COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 400}) as response:
            await anext(response.aiter_lines())
            assert fleet.target.num_open == 3
        await eventually(lambda: fleet.target.num_open == fleet.drafts.num_open == 0)
        assert await served.metric("tandem_requests_total", finish_reason="cancelled") == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_j1_a_client_that_leaves_in_the_middle_stops_both_services(stream: bool) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.seconds = 0.02
    async with listening_gateway(fleet) as served:
        body = {"prompt": "a", "max_tokens": 400, "speculation": {"num_draft_tokens": 1}}
        if stream:
            async with open_stream(served, COMPLETIONS, body) as response:
                await anext(response.aiter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                async with httpx.AsyncClient(base_url=served.url, timeout=0.2) as http:
                    await http.post(COMPLETIONS, json=body)
        await eventually(lambda: fleet.target.num_open == 0)
        calls = fleet.target.num_calls
        await asyncio.sleep(0.1)
        assert fleet.target.num_calls == calls


async def test_a_full_queue_is_a_429_with_retry_after_streaming_or_not() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with gateway(fleet, max_concurrent_requests=1, max_queued_requests=1, max_n=1) as served:
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "a"}))
        await eventually(lambda: served.admission.running == 1)
        queued = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "b"}))
        await eventually(lambda: served.admission.waiting == 1)
        assert await served.metric("tandem_requests_running") == 1
        assert await served.metric("tandem_requests_waiting") == 1
        for stream in (False, True):
            refused = await served.post(COMPLETIONS, {"prompt": "c", "stream": stream})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        fleet.target.gate.set()
        assert (await running).status_code == (await queued).status_code == 200
    assert [start.token_ids[-1] for start in fleet.target.starts] == [*b"ab"]


async def test_j4_j5_queued_clients_that_leave_are_never_started_and_harm_nobody() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet, max_concurrent_requests=1, max_n=1) as served:
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 5}))
        await eventually(lambda: served.admission.running == 1)
        async with httpx.AsyncClient(base_url=served.url) as http:
            queued = [
                asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "q", "stream": stream}))
                for stream in (False, True)
            ]
            await eventually(lambda: served.admission.waiting == 2)
            for task in queued:
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
        await eventually(lambda: served.admission.waiting == 0)
        fleet.target.gate.set()
        assert (await running).json()["choices"][0]["text"] == "bcdef"
        await asyncio.sleep(0.05)
    assert len(fleet.target.starts) == 1


SMALL = AnswerSize(prompt=0, num_prompt_tokens=1, num_answer_tokens=1)


async def waits(admission: Admission, count: int) -> asyncio.Task[Grant]:
    """A task that asks for `count` places, as far as it comes by itself."""
    task = asyncio.create_task(admission.acquire([SMALL] * count))
    await asyncio.sleep(0)
    return task


async def test_j4_leaving_the_queue_takes_no_place_from_anyone() -> None:
    admission = Admission(max_running=1, max_queued=9)
    held = await admission.acquire([SMALL] * 1)
    first, second = await waits(admission, 1), await waits(admission, 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (admission.running, admission.waiting, second.done()) == (1, 1, False)
    admission.release(held)
    await second
    assert (admission.running, admission.waiting) == (1, 0)


async def test_who_leaves_the_queue_lets_a_smaller_request_behind_it_in() -> None:
    admission = Admission(max_running=2, max_queued=9)
    await admission.acquire([SMALL] * 1)
    large, small = await waits(admission, 2), await waits(admission, 1)
    assert not small.done()
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await asyncio.wait_for(small, 1)
    assert (admission.running, admission.waiting) == (2, 0)


async def test_a_place_granted_to_who_leaves_in_that_moment_is_given_back() -> None:
    admission = Admission(max_running=1, max_queued=9)
    held = await admission.acquire([SMALL] * 1)
    leaving, next_one = await waits(admission, 1), await waits(admission, 1)
    admission.release(held)  # grants it to `leaving`, which has not run since
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.wait_for(next_one, 1)
    assert (admission.running, admission.waiting) == (1, 0)


def target_with(num_blocks: int) -> Replica:
    return Replica(address="10.0.0.1:50051", kv_cache=KvCache(num_blocks=num_blocks, block_size=16))


async def test_a_request_whose_blocks_are_not_free_waits_and_the_next_one_gets_a_429() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    fleet.targets = [target_with(4)]
    async with gateway(fleet, max_queued_requests=1) as served:
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 40}))
        await eventually(lambda: served.admission.running == 1)
        assert await served.metric("tandem_kv_promised_tokens") == 48
        queued = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "b", "max_tokens": 40}))
        await eventually(lambda: served.admission.waiting == 1)
        refused = await served.post(COMPLETIONS, {"prompt": "c", "max_tokens": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert fleet.target.num_open == 1
        fleet.target.gate.set()
        assert (await running).status_code == (await queued).status_code == 200
        assert await served.metric("tandem_kv_promised_tokens") == 0
    assert fleet.placed == ["10.0.0.1:50051"] * 2


async def test_a_request_that_no_target_could_ever_hold_is_refused_with_what_to_change() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.targets = [target_with(32)]
    async with gateway(fleet) as served:
        refused = await served.post(COMPLETIONS, {"prompt": "a", "n": 2, "max_tokens": 400})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "n", "context_length_exceeded")
        assert "512" in error["message"]
        assert (await served.post(COMPLETIONS, {"prompt": "a", "n": 2, "max_tokens": 200})).status_code == 200


async def test_a_chat_without_max_tokens_is_promised_an_answer_of_usual_length_not_the_whole_context() -> None:
    fleet = FakeFleet.following(says("hello"))
    fleet.target.gate = asyncio.Event()
    fleet.targets = [target_with(32)]  # the context, 512 tokens, in all
    async with gateway(fleet, assumed_answer_tokens=100) as served:
        asking = [asyncio.create_task(served.post(CHAT, {"messages": HELLO})) for _ in range(3)]
        await eventually(lambda: served.admission.running == 3)
        fleet.target.gate.set()
        assert {(await one).status_code for one in asking} == {200}


async def job_of(fleet: FakeFleet, **fields: Any) -> tuple[Generation, Job]:
    chosen = Settings()
    generation = Generation(
        settings=chosen,
        backends=fleet,
        metrics=GatewayMetrics(max_num_draft_tokens=16),
        admission=Admission(max_running=8, max_queued=0),
    )
    body = CompletionBody.model_validate(fields)
    maker = JobMaker(settings=chosen, backends=fleet)
    return generation, await maker.completion(body, request_id="r", arrived=0.0)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_sessions_are_closed_before_the_end_of_an_answer_is_told(prompt: object) -> None:
    fleet = FakeFleet.following(alphabet)
    generation, job = await job_of(fleet, prompt=prompt, max_tokens=9)
    unfinished = len(job.choices)
    async with contextlib.aclosing(generation.run(job)) as deltas:
        async for _, delta in deltas:
            unfinished -= delta.finish_reason is not None
            assert fleet.target.num_open <= unfinished
            assert fleet.drafts.num_open <= unfinished


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_j14_sessions_are_closed_when_closing_a_run_returns_not_some_time_later(prompt: object) -> None:
    fleet = FakeFleet.following(alphabet)
    generation, job = await job_of(fleet, prompt=prompt, max_tokens=90)
    deltas = generation.run(job)
    await anext(deltas)
    assert fleet.target.num_open == len(job.choices)
    await deltas.aclose()
    assert (fleet.target.num_open, fleet.drafts.num_open) == (0, 0)


async def test_the_queue_is_first_come_first_served() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with gateway(fleet, max_concurrent_requests=2, max_n=2) as served:
        tasks = []
        for number, prompt in enumerate((["a"], ["b", "c"], ["d"])):  # b and c need both places, d waits behind them
            tasks.append(asyncio.create_task(served.post(COMPLETIONS, {"prompt": prompt})))
            await eventually(lambda: served.admission.running + served.admission.waiting > number)  # noqa: B023
        assert len(fleet.target.starts) == 1
        fleet.target.gate.set()
        await asyncio.gather(*tasks)
    assert [start.token_ids[-1] for start in fleet.target.starts] == [*b"abcd"]


async def test_a_request_that_takes_too_long_is_a_504_and_in_a_stream_an_error() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet, request_timeout_seconds=0.3) as served:
        assert (await served.post(COMPLETIONS, {"prompt": "a"})).status_code == 504
        async with open_stream(served, COMPLETIONS, {"prompt": "a"}) as response:
            assert response.status_code == 200
            body = await response.aread()
        assert b'"code":"timeout"' in body
        assert b"[DONE]" not in body


async def test_b18_a_slow_prefill_gets_headers_at_once_and_then_pings() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.gate = asyncio.Event()
    async with listening_gateway(fleet, ping_interval_seconds=0.1) as served:
        async with open_stream(served, COMPLETIONS, {"prompt": "a"}) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": ping"
            fleet.target.gate.set()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]


async def test_a8_j7_concurrent_streams_do_not_mix() -> None:
    async with listening_gateway(FakeFleet.following(alphabet, wrong_at=lambda position: position % 4 == 1)) as served:
        prompts = [chr(ord("a") + index) for index in range(16)]
        body = {"max_tokens": 40}
        streams = await asyncio.gather(*(served.events(COMPLETIONS, {"prompt": p, **body}) for p in prompts))
        alone = [(await served.post(COMPLETIONS, {"prompt": p, **body})).json()["choices"][0]["text"] for p in prompts]
    assert [text_of(events) for events in streams] == alone
