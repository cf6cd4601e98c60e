"""SIGKILL and SIGSTOP of each model service at random points of seeded requests: every text is the fault-free one.

Two target replicas, real processes. The target's logits do not depend on the batch (tests/steady_target), so the
equality has no exceptions.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest

from tests.gauges import base_of, check_nothing_leaked
from tests.seeded import Progress, Question, in_parallel, questions
from tests.stack import Service, Stack
from tests.steady import steady_stack

AT_ONCE = 5
LIMIT_SECONDS = 150.0  # a killed service takes a while to start on a busy machine
SETTINGS = {
    # Late after a tenth of these.
    "TANDEM_GATEWAY_VERIFY_TIMEOUT_SECONDS": "10",
    "TANDEM_GATEWAY_FIRST_TOKEN_TIMEOUT_SECONDS": "30",
    "TANDEM_GATEWAY_DRAFT_FIRST_TIMEOUT_SECONDS": "5",
    # Longer than a start takes: should both targets be gone, one comes back in time.
    "TANDEM_GATEWAY_FAILOVER_TIMEOUT_SECONDS": "100",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with steady_stack(tmp_path_factory.mktemp("faults"), settings=SETTINGS, num_targets=2) as running:
        yield running


@pytest.fixture(scope="module")
def asked(stack: Stack) -> list[Question]:
    return questions(stack, 12, num_tokens=(60, 250))


@pytest.fixture(scope="module")
def many_asked(stack: Stack) -> list[Question]:
    return questions(stack, 40, num_tokens=(60, 250))


def _busiest(services: list[Service]) -> Service:
    return max((one for one in services if one.running), key=lambda one: one.metric("tandem_sessions_open"))


def _hurt(stack: Stack, asked: list[Question], *, role: str, number: signal.Signals, num_requests: int) -> float:
    """Ask so many requests, `AT_ONCE` at a time, and one fault with each lot; how many faults sessions found."""
    choose = random.Random(f"{role} {number.name}")
    services = stack.targets if role == "target" else stack.drafts
    found = "tandem_failovers_total" if role == "target" else "tandem_draft_faults_total"
    base, before = base_of(stack), stack.gateway.metric(found)
    errors = stack.gateway.metric("tandem_requests_total", 'finish_reason="error"')
    for _ in range(num_requests // AT_ONCE):
        stack.wait_until("ready")
        lot = choose.sample(asked, AT_ONCE)
        after = choose.randrange(sum(len(one.answer) for one in lot) // 3)

        def fault(seen: Progress, after: int = after) -> None:
            seen.wait_for(after, timeout_seconds=LIMIT_SECONDS)
            victim = _busiest(services)
            if number is signal.SIGKILL:
                victim.kill()
                victim.start()
            else:
                victim.send(signal.SIGSTOP)
                # Long enough to be found out, for all that the service's gauges say afterwards.
                time.sleep(choose.uniform(1.5, 3.0))
                victim.send(signal.SIGCONT)

        endings = in_parallel(stack, lot, fault, limit_seconds=LIMIT_SECONDS)
        for one, ending in zip(lot, endings, strict=True):
            assert ending.error is None, ending
            assert ending.token_ids == one.answer
    stack.wait_until("ready")
    check_nothing_leaked(stack, base)
    assert stack.gateway.metric("tandem_requests_total", 'finish_reason="error"') == errors
    return stack.gateway.metric(found) - before


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_j9_ten_seeded_requests_are_answered_as_without_the_fault(
    stack: Stack, asked: list[Question], role: str, number: signal.Signals
) -> None:
    assert _hurt(stack, asked, role=role, number=number, num_requests=10) > 0


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_two_hundred_seeded_requests_are_answered_as_without_the_fault(
    stack: Stack, many_asked: list[Question], role: str, number: signal.Signals
) -> None:
    assert _hurt(stack, many_asked, role=role, number=number, num_requests=200) > 30  # of 40 kills or stops


def test_j9_j11_a_stopped_target_is_not_ready_and_liveness_stays(stack: Stack) -> None:
    for victim in stack.targets:
        victim.send(signal.SIGSTOP)
    try:
        stack.wait_until("unavailable", timeout_seconds=30)
        assert stack.client.get(f"{stack.url}/health/live").status_code == 200
    finally:
        for victim in stack.targets:
            victim.send(signal.SIGCONT)
    stack.wait_until("ready", timeout_seconds=30)


def test_with_one_target_left_and_that_one_killed_the_stream_goes_on_when_it_is_back(
    stack: Stack, asked: list[Question]
) -> None:
    """The last test of this stack: the second target stays away."""
    (longest,) = sorted(asked, key=lambda one: len(one.answer))[-1:]

    def fault(seen: Progress) -> None:
        seen.wait_for(10, timeout_seconds=LIMIT_SECONDS)
        for victim in stack.targets:
            victim.kill()
        stack.target.start()

    (ending,) = in_parallel(stack, [longest], fault, limit_seconds=LIMIT_SECONDS)
    assert ending.token_ids == longest.answer


@pytest.fixture(scope="module", autouse=True)
def _logs_hold_no_text(stack: Stack) -> Iterator[None]:
    """Failing over is logged; what the request says is not."""
    yield
    text = stack.gateway.log.read_text()
    assert "failover" in text
    assert "once upon" not in text
