"""A draft may come and go; a client may leave. Real processes, real signals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import Stack
from tests.tiny_models import write_target

PROMPT = "Once upon a time, there was a fox. "


@pytest.fixture
def own_stack(tmp_path: Path, target_folder: Path, draft_folder: Callable[[float], Path]) -> Iterator[Stack]:
    with Stack(
        folder=tmp_path,
        target_model=str(target_folder),
        draft_model=str(draft_folder(0.02)),
        settings={"TANDEM_GATEWAY_FAILOVER_TIMEOUT_SECONDS": "2"},
    ) as running:
        yield running


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _body(**more: Any) -> dict[str, Any]:
    return {"model": "tandem", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


def test_killing_the_draft_in_mid_stream_costs_speed_only_and_speculation_resumes(tmp_path: Path) -> None:
    """The draft is an n-gram one on a text that cycles: it starts fast enough to come back within one answer."""
    target = write_target(tmp_path / "target", context_length=8192, attention=0.01)
    with Stack(folder=tmp_path, target_model=str(target)) as stack:
        body = _body(max_tokens=6000, speculation={"num_draft_tokens": 1, "trace": True}, stream=True)
        ids: list[int] = []
        origins: list[str] = []
        killed_at = 0
        with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=120) as response:
            for event in _events(response):
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
                    origins += [token["origin"] for token in choice.get("trace") or []]
                report = event.get("speculation")
                if len(ids) > 1000 and not killed_at:
                    killed_at = len(ids)
                    stack.draft.kill()
                    stack.wait_until("degraded", timeout_seconds=10)
                    stack.draft.start()
                    stack.wait_until("ready")
        plain = stack.complete(**_body(max_tokens=6000, speculation={"enabled": False}))["choices"][0]["token_ids"]
    assert ids == plain
    assert "accepted" in origins[:killed_at]
    longest_without = max(len(run) for run in "".join(o[0] for o in origins[killed_at:]).split("a"))
    assert longest_without > 50, "the draft was never missed"
    assert "accepted" in origins[-500:], (killed_at, report)


def test_without_a_draft_service_requests_are_served_and_readiness_says_degraded(own_stack: Stack) -> None:
    own_stack.draft.kill()
    own_stack.wait_until("degraded", timeout_seconds=10)
    answer = own_stack.complete(**_body(max_tokens=20))
    assert answer["speculation"]["drafted"] == 0
    assert answer["usage"]["completion_tokens"] == 20


def test_without_a_target_readiness_is_503_and_requests_get_503(own_stack: Stack) -> None:
    own_stack.target.kill()
    own_stack.wait_until("unavailable", timeout_seconds=10)
    assert httpx.get(f"{own_stack.url}/health/ready").status_code == 503
    assert httpx.get(f"{own_stack.url}/health/live").status_code == 200
    response = httpx.post(f"{own_stack.url}/v1/completions", json=_body(max_tokens=5), timeout=30.0)
    assert response.status_code == 503
    assert "target" in response.json()["error"]["message"]
    own_stack.target.start()
    own_stack.wait_until("ready")
    assert own_stack.complete(**_body(max_tokens=5))["usage"]["completion_tokens"] == 5


def _wait_for_zero(stack: Stack, *, within_seconds: float) -> float:
    """Seconds until both services have no session and hold no block."""
    began = time.monotonic()
    while time.monotonic() - began < within_seconds:
        gauges = [
            stack.metric(service, name)
            for service in ("target", "draft")
            for name in ("tandem_sessions_open", "tandem_kv_blocks_held")
        ]
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


def test_sigterm_lets_streams_finish_and_exits_cleanly(own_stack: Stack) -> None:
    """B14: a stream that runs when the gateway is told to stop ends with its last token and [DONE]."""
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
