"""Running a plan against a gateway that is a function: order, pairs, failures, conversations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tandem.bench.arms import BASELINE, ON
from tandem.bench.client import BenchClient
from tandem.bench.plan import Group, Sampling, plan_groups, tickets
from tandem.bench.processes import Processes
from tandem.bench.session import CLIENT, Records, Session
from tandem.bench.workload import Workload, parse_workload
from tandem.errors import TandemError

Answer = Callable[[dict[str, Any]], httpx.Response]


class Gateway:
    """Keeps what it was asked. Its CPU time goes up by one second with each look at its metrics."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answer = answer
        self._cpu_seconds = itertools.count(1)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            page = f"process_cpu_seconds_total {next(self._cpu_seconds)}\nprocess_resident_memory_bytes 5e6\n"
            return httpx.Response(200, text=page)
        self.bodies.append(json.loads(request.content))
        return self._answer(self.bodies[-1])


def fine(body: dict[str, Any]) -> httpx.Response:
    drafted = 2 * body["speculation"]["enabled"]
    speculation = {
        "rounds": 2, "draftless_rounds": 1, "drafted": drafted, "accepted": 0, "accepted_per_position": [0],
        "draft_seconds": 0.0, "verify_seconds": 0.0, "network_seconds": 0.0, "bytes_sent": 0,
    }  # fmt: skip
    chunks = [
        {"choices": [{"delta": {"content": "said"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "speculation": speculation},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    return httpx.Response(200, text="".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")


def planned(count: int, *, concurrency: int = 1, turns: int = 1) -> list[Group]:
    lines = [json.dumps({"turns": [f"p{i} t{t}" for t in range(turns)], "category": "c"}) for i in range(count)]
    workload = Workload(name="w", prompts=parse_workload("w", lines))
    return plan_groups(workload, (BASELINE, ON), levels=(concurrency,), repeats=1)


async def run(
    gateway: Gateway, groups: list[Group], *, shared_prefix: bool = False, warm_up: bool = False
) -> tuple[Records, int]:
    """The records, and how often a conversation was told to be done."""
    transport = httpx.MockTransport(gateway)
    done: list[None] = []
    async with (
        BenchClient("http://gateway", api_key=None, concurrency=4, transport=transport) as client,
        Processes({"gateway": "http://gateway/metrics"}, transport=transport) as processes,
    ):
        session = Session(
            client,
            processes,
            Sampling(max_tokens=8, temperature=0.0, seed=None),
            tickets=None if shared_prefix else tickets(1),
        )
        if warm_up:
            await session.warm_up(groups, done=lambda: done.append(None))
            return Records(num_groups=0), len(done)
        records = await session.measure(groups, in_time=lambda: True, done=lambda: done.append(None))
    return records, len(done)


async def test_the_same_prompt_is_asked_in_both_arms_one_after_the_other() -> None:
    gateway = Gateway(fine)
    records, num_done = await run(gateway, planned(4))
    asked = [
        (body["messages"][0]["content"].split("\n\n")[1], body["speculation"]["enabled"]) for body in gateway.bodies
    ]
    assert asked == [
        ("p0 t0", False), ("p0 t0", True), ("p1 t0", True), ("p1 t0", False),
        ("p2 t0", False), ("p2 t0", True), ("p3 t0", True), ("p3 t0", False),
    ]  # fmt: skip
    assert (num_done, len(records.observations), records.num_groups_done) == (8, 8, 4)
    assert not records.failures


async def test_no_two_requests_begin_alike_but_with_a_shared_prefix() -> None:
    for shared_prefix, expected in ((False, 8), (True, 4)):
        gateway = Gateway(fine)
        await run(gateway, planned(4), shared_prefix=shared_prefix)
        assert len({body["messages"][0]["content"] for body in gateway.bodies}) == expected


async def test_each_group_has_its_tokens_and_what_the_processes_used() -> None:
    records, _ = await run(Gateway(fine), planned(4, concurrency=4))
    assert [(run.arm, run.num_tokens, run.complete) for run in records.runs] == [("off", 8, True), ("on", 8, True)]
    assert [run.cpu_seconds["gateway"] for run in records.runs] == [1.0, 1.0]
    assert all(run.cpu_seconds[CLIENT] >= 0.0 for run in records.runs)
    assert all(run.resident_bytes == {"gateway": 5e6} for run in records.runs)


async def test_a_conversation_goes_on_with_what_was_said() -> None:
    gateway = Gateway(fine)
    records, num_done = await run(gateway, planned(1, turns=2), shared_prefix=True)
    assert [message["content"] for message in gateway.bodies[1]["messages"]] == ["p0 t0", "said", "p0 t1"]
    assert [(each.arm, each.turn) for each in records.observations] == [("off", 0), ("off", 1), ("on", 0), ("on", 1)]
    assert num_done == 2


async def test_a_failure_is_kept_and_the_run_goes_on() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        broken = "p1" in body["messages"][0]["content"] and body["speculation"]["enabled"]
        return httpx.Response(503, text="busy") if broken else fine(body)

    records, num_done = await run(Gateway(answer), planned(3))
    assert [(failure.arm, failure.prompt) for failure in records.failures] == [("on", "w:2")]
    assert "503: busy" in records.failures[0].message
    assert (len(records.observations), num_done, records.num_groups_done) == (5, 6, 3)
    assert [run.complete for run in records.runs].count(False) == 1


async def test_a_run_in_which_everything_fails_is_given_up() -> None:
    gateway = Gateway(lambda _: httpx.Response(503))
    records, _ = await run(gateway, planned(40))
    assert records.stopped == "20 requests had failed"
    assert len(gateway.bodies) == 20


async def test_a_warm_up_that_is_refused_names_the_arm() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(400, text="unknown key") if body["speculation"]["enabled"] else fine(body)

    with pytest.raises(TandemError, match=r"arm on: .*400: unknown key"):
        await run(Gateway(answer), planned(2), warm_up=True)
    _, num_done = await run(Gateway(fine), planned(2), warm_up=True)
    assert num_done == 4


async def test_no_group_begins_when_the_time_is_up() -> None:
    gateway = Gateway(fine)
    transport = httpx.MockTransport(gateway)
    looks = itertools.count()
    async with (
        BenchClient("http://gateway", api_key=None, concurrency=1, transport=transport) as client,
        Processes({}, transport=transport) as processes,
    ):
        session = Session(client, processes, Sampling(max_tokens=8, temperature=0.0, seed=None), tickets=None)
        records = await session.measure(planned(5), in_time=lambda: next(looks) < 2, done=lambda: None)
    assert (records.stopped, records.num_groups_done, len(gateway.bodies)) == ("the time was up", 2, 4)
