"""A draft may come and go, or be another one; a client may leave. Real processes, real signals."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tandem.rpc.healthcheck import is_serving
from tests.stack import Stack
from tests.tiny_models import write_draft, write_target

PROMPT = "Once upon a time, there was a fox. "
RECOVERY_SECONDS = 5.0  # from a draft's return to the first of its tokens that the target accepts


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A target whose text cycles, and n-gram drafts, which start fast enough to come back within one answer. A second
    draft, a model, has an address and is not started. Each test leaves the target and the first draft running."""
    folder = tmp_path_factory.mktemp("own")
    target = write_target(folder / "target", context_length=8192, attention=0.01)
    with Stack(
        folder=folder,
        target_model=str(target),
        num_drafts=2,
        num_spare_drafts=1,
        settings={
            "TANDEM_GATEWAY_FAILOVER_TIMEOUT_SECONDS": "2",
            "TANDEM_DRAFT_SHUTDOWN_GRACE_SECONDS": "0.5",
        },
    ) as running:
        (spare,) = running.spare_drafts
        model = write_draft(target, folder / "draft", noise=0.02)
        spare.environment = {**spare.environment, "TANDEM_DRAFT_MODEL": str(model)}
        yield running


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _body(**more: Any) -> dict[str, Any]:
    return {"model": "tandem", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


@dataclass
class Streamed:
    """An answer as it comes, read on a thread of its own."""

    ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    last_accepted: float = 0.0  # monotonic seconds
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self, stack: Stack, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=120) as response:
            for event in _events(response):
                assert "error" not in event, event
                with self.changed:
                    for choice in event["choices"]:
                        self.ids += choice.get("token_ids") or []
                        new = [token["origin"] for token in choice.get("trace") or []]
                        self.origins += new
                        if "accepted" in new:
                            self.last_accepted = time.monotonic()
                    self.changed.notify_all()

    def wait_for_tokens(self, count: int) -> None:
        self.wait_until(lambda: len(self.ids) >= count)

    def wait_for_accepted_after(self, moment: float) -> None:
        self.wait_until(lambda: self.last_accepted > moment)

    def wait_until(self, condition: Callable[[], bool], *, timeout_seconds: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_seconds), (len(self.ids), self.origins[-50:])


def test_a_draft_that_is_killed_costs_speed_only_and_is_used_again_within_5_seconds_of_its_return(
    own_stack: Stack,
) -> None:
    """Twice in one answer, at random points of it."""
    choose = random.Random(6)
    body = _body(max_tokens=5000, speculation={"num_draft_tokens": 1, "trace": True}, stream=True)
    seen = Streamed()
    took: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(seen.read, own_stack, body)
        for _ in range(2):
            wanted = len(seen.ids) + choose.randrange(20, 600)
            seen.wait_for_tokens(wanted)
            own_stack.draft.kill()
            own_stack.wait_until("degraded", timeout_seconds=10)
            own_stack.draft.start()
            while not is_serving(f"127.0.0.1:{own_stack.draft_port}", timeout_seconds=1.0):
                assert not reading.done(), "the answer ended before the draft was back"
                time.sleep(0.02)
            back = time.monotonic()
            seen.wait_for_accepted_after(back)
            took.append(seen.last_accepted - back)
        reading.result()
    print("used again after", [round(seconds, 2) for seconds in took], "s")
    assert max(took) < RECOVERY_SECONDS
    plain = own_stack.complete(**_body(max_tokens=5000, speculation={"enabled": False}))["choices"][0]["token_ids"]
    assert seen.ids == plain
    longest_without = max(len(run) for run in "".join(origin[0] for origin in seen.origins).split("a"))
    assert longest_without > 50, "the draft was never missed"


def test_without_a_draft_service_requests_are_served_and_readiness_says_degraded(own_stack: Stack) -> None:
    own_stack.draft.kill()
    own_stack.wait_until("degraded", timeout_seconds=10)
    answer = own_stack.complete(**_body(max_tokens=20))
    assert answer["speculation"]["drafted"] == 0
    assert answer["usage"]["completion_tokens"] == 20
    own_stack.draft.start()
    own_stack.wait_until("ready")


def test_another_draft_takes_over_live_without_an_error_on_any_stream(own_stack: Stack) -> None:
    """One replica with another model joins, the other one leaves; three clients ask on all the while."""
    (other,) = own_stack.spare_drafts
    body = _body(max_tokens=200, speculation={"num_draft_tokens": 4}, stream=True)
    plain = own_stack.complete(**_body(max_tokens=200, speculation={"enabled": False}))["choices"][0]["token_ids"]
    over = threading.Event()

    def rounds(draft: str) -> float:
        return own_stack.gateway.metric("tandem_draft_rounds_total", f'draft="{draft}"')

    def ask_on() -> int:
        count = 0
        while not over.is_set():
            answer = Streamed()
            answer.read(own_stack, body)
            assert answer.ids == plain
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask_on) for _ in range(3)]
        try:
            other.start()
            own_stack.wait_until("ready")  # both
            for drafter in ("ngram", "model"):  # the second one is the newcomer's alone
                own_stack.complete(**_body(max_tokens=5, speculation={"drafter": drafter}))
            assert own_stack.draft.stop() == 0  # as an operator would: SIGTERM
            own_stack.wait_until("ready")
            before = rounds("draft")
            end = time.monotonic() + 20
            while rounds("draft") < before + 50:
                assert time.monotonic() < end, "the second draft is not used"
                time.sleep(0.1)
        finally:
            over.set()
        assert all(one.result() > 0 for one in asking)
    assert rounds("ngram") > 0
    assert own_stack.gateway.metric("tandem_requests_total", 'finish_reason="error"') == 0
    (card, _) = own_stack.client.get(f"{own_stack.url}/v1/models").json()["data"]
    assert card["speculation"]["draft_model"] == "draft"
    own_stack.draft.start()
    own_stack.wait_until("ready")
    other.kill()
    own_stack.wait_until("ready")


def test_j12_without_a_target_readiness_is_503_and_requests_get_503(own_stack: Stack) -> None:
    own_stack.target.kill()
    own_stack.wait_until("unavailable", timeout_seconds=10)
    assert httpx.get(f"{own_stack.url}/health/ready").status_code == 503
    assert httpx.get(f"{own_stack.url}/health/live").status_code == 200
    response = httpx.post(f"{own_stack.url}/v1/completions", json=_body(max_tokens=5), timeout=30.0)
    assert response.status_code == 503
    assert "target" in response.json()["error"]["message"]
    own_stack.target.start()
    own_stack.wait_until("ready")
    # It has computed a token before it said that it serves, and before anybody asked.
    assert own_stack.target.metric("tandem_model_step_tokens_sum") >= 1
    assert own_stack.target.metric("tandem_sessions_total") == 0
    assert own_stack.complete(**_body(max_tokens=5))["usage"]["completion_tokens"] == 5


def test_sigterm_lets_streams_finish_and_exits_cleanly(own_stack: Stack) -> None:
    """B14: a stream that runs when the gateway is told to stop ends with its last token and [DONE]. The last test of
    this stack: it ends with it."""
    with httpx.stream(
        "POST", f"{own_stack.url}/v1/completions", json=_body(max_tokens=600, stream=True), timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert own_stack.gateway.process is not None
        own_stack.gateway.process.terminate()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert own_stack.gateway.process.wait(30) == 0
    assert own_stack.target.stop() == 0
    assert own_stack.draft.stop() == 0


def _wait_for_zero(stack: Stack, *, within_seconds: float) -> float:
    """Seconds until both services have no session and hold no block."""
    began = time.monotonic()
    while time.monotonic() - began < within_seconds:
        gauges = [
            stack.metric(service, name)
            for service in ("target", "draft")
            for name in ("tandem_sessions_open", "tandem_kv_blocks_held")
        ] + [stack.metric("gateway", "tandem_kv_promised_tokens")]
        if not any(gauges):
            return time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"still open after {within_seconds:g} s: {gauges}")


def _leave_in_mid_stream(stack: Stack) -> None:
    body = _body(max_tokens=1900, stream=True)
    with httpx.Client() as client, client.stream("POST", f"{stack.url}/v1/completions", json=body) as response:
        chunks = response.iter_bytes()
        for _ in range(3):
            next(chunks)
        assert stack.metric("target", "tandem_sessions_open") == 1
        held = stack.metric("target", "tandem_kv_blocks_held") / stack.metric("target", "tandem_kv_blocks")
        # The target told the gateway how much it has, and the gateway promised enough of it.
        assert 1900 <= stack.metric("gateway", "tandem_kv_promised_tokens") < 2048
        assert 0 < held < 1


def _give_up_waiting(stack: Stack) -> None:
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{stack.url}/v1/completions", json=_body(max_tokens=1900))


@pytest.mark.parametrize("leave", [_leave_in_mid_stream, _give_up_waiting])
def test_j1_a_client_that_disconnects_frees_both_sessions_within_a_second(
    stack: Stack, leave: Callable[[Stack], None]
) -> None:
    for _ in range(3):
        leave(stack)
        _wait_for_zero(stack, within_seconds=1.0)
