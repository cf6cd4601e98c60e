"""Random faults under load: every request ends in time, with the right answer or a clear error, and nothing is left.

TANDEM_SOAK_SECONDS sets how long (default 1800), TANDEM_SOAK_SEED which faults (default: others each time).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault_proxy import Fault, FaultProxy
from tests.gauges import base_of, check_nothing_leaked
from tests.seeded import Question, ask, leave, questions
from tests.stack import Service, Stack
from tests.steady import KV_BYTES_PER_TOKEN, steady_stack

SOAK_SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "1800"))
SEED = os.environ.get("TANDEM_SOAK_SEED") or str(random.SystemRandom().getrandbits(32))
CLIENTS = 6
REQUEST_SECONDS = 60.0
LIMIT_SECONDS = REQUEST_SECONDS + 10.0
SETTINGS = {
    "TANDEM_GATEWAY_REQUEST_TIMEOUT_SECONDS": str(REQUEST_SECONDS),
    "TANDEM_GATEWAY_VERIFY_TIMEOUT_SECONDS": "10",
    "TANDEM_GATEWAY_FIRST_TOKEN_TIMEOUT_SECONDS": "20",
    "TANDEM_GATEWAY_DRAFT_FIRST_TIMEOUT_SECONDS": "5",
    "TANDEM_GATEWAY_MAX_CONCURRENT_REQUESTS": "4",
    "TANDEM_GATEWAY_MAX_N": "4",
    # Little, at each target: requests wait for blocks, and after a failover blocks are taken away.
    "TANDEM_TARGET_KV_CACHE_BYTES": str(2048 * KV_BYTES_PER_TOKEN),
    "TANDEM_GATEWAY_WRITE_TIMEOUT_SECONDS": "5",
    "TANDEM_GATEWAY_HEADER_TIMEOUT_SECONDS": "5",
    "TANDEM_GATEWAY_BODY_TIMEOUT_SECONDS": "5",
}
# Error codes that tell a client what happened and when to come again.
CLEAR = {"unavailable", "timeout", "overloaded"}


@dataclass
class Proxied:
    """A stack with a proxy before each model service."""

    stack: Stack
    proxies: list[FaultProxy]  # in the order of targets, then drafts

    @property
    def services(self) -> list[Service]:
        return [*self.stack.targets, *self.stack.drafts]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder: Path = tmp_path_factory.mktemp("soak")
    proxies: list[FaultProxy] = []
    with ExitStack() as open_ones:

        def between(port: int) -> int:
            proxies.append(open_ones.enter_context(FaultProxy(port)))
            return proxies[-1].port

        with steady_stack(folder, settings=SETTINGS, num_targets=2, num_drafts=2, between=between) as stack:
            stack.wait_until("ready")
            yield Proxied(stack, proxies)


def _break_something(proxied: Proxied, choose: random.Random) -> str:
    """One fault, over when this returns; at a service or before it."""
    number = choose.randrange(len(proxied.services))
    service, proxy = proxied.services[number], proxied.proxies[number]
    what = choose.choice(["delay", "trickle", "freeze", "drop", "cut", "cut", "refuse", "stop", "kill"])
    seconds = choose.uniform(0.2, 4.0)
    if what == "cut":
        proxy.cut()
    elif what == "refuse":
        proxy.refuse(refusing=True)
        time.sleep(seconds)
        proxy.refuse(refusing=False)
    elif what == "stop":
        service.send(signal.SIGSTOP)
        time.sleep(seconds)
        service.send(signal.SIGCONT)
    elif what == "kill":
        service.kill()
        service.start()
    else:
        proxy.set(Fault(what))
        time.sleep(seconds)
        proxy.set(Fault.NONE)
    return f"{what} a {'target' if number < len(proxied.stack.targets) else 'draft'}"


@pytest.mark.prove
@pytest.mark.timeout(SOAK_SECONDS + 900)
def test_every_request_ends_well_or_clearly_whatever_breaks(proxied: Proxied) -> None:
    stack = proxied.stack
    print(f"TANDEM_SOAK_SEED={SEED}")
    asked = questions(stack, 40, num_tokens=(5, 200))
    with ThreadPoolExecutor(CLIENTS) as pool:  # what the first requests load stays
        list(pool.map(lambda one: ask(stack.url, one.body, stream=True, limit_seconds=LIMIT_SECONDS), asked))
    base, before = base_of(stack), _counts(stack)
    end = time.monotonic() + SOAK_SECONDS
    broken: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    counting = threading.Lock()

    def client(number: int) -> None:
        choose = random.Random(f"{SEED} client {number}")
        while time.monotonic() < end:
            outcome = _ask_or_leave(stack, choose.choice(asked), choose)
            with counting:
                ended[outcome] += 1
            if outcome.startswith("error"):
                time.sleep(0.5)  # as Retry-After says, more or less

    choose = random.Random(f"{SEED} faults")
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, number) for number in range(CLIENTS)]
        while time.monotonic() < end and all(not one.done() or one.exception() is None for one in running):
            time.sleep(choose.uniform(0.0, 4.0))
            broken[_break_something(proxied, choose)] += 1
        for one in running:
            one.result()
    print("faults:", dict(sorted(broken.items())))
    print("requests:", dict(sorted(ended.items())))
    counted = {name: count - before[name] for name, count in _counts(stack).items()}
    print("counted:", counted)
    stack.wait_until("ready")
    _check_counts(ended, counted)
    assert ended["right"] > 0.8 * (ended.total() - ended["left"]), "hardly anything was answered"
    check_nothing_leaked(stack, base, within_seconds=60.0, growth=0.5)
    last = ask(stack.url, asked[0].body, stream=False, limit_seconds=LIMIT_SECONDS)
    assert last.token_ids == asked[0].answer


def _ask_or_leave(stack: Stack, one: Question, choose: random.Random) -> str:
    """How it ended. Raises AssertionError for a wrong answer, one that just stops, or none in time."""
    if choose.random() < 0.1:
        leave(stack, one.body, choose)
        return "left"
    began = time.monotonic()
    ending = ask(stack.url, one.body, stream=choose.random() < 0.6, limit_seconds=LIMIT_SECONDS)
    assert time.monotonic() - began < LIMIT_SECONDS
    assert ending.token_ids == one.answer[: len(ending.token_ids)], "a wrong token"
    if ending.error is None:
        assert ending.token_ids == one.answer
        return "right"
    assert ending.error["code"] in CLEAR, ending
    assert ending.error["message"], ending
    return f"error {ending.error['code']}"


def _counts(stack: Stack) -> dict[str, float]:
    names = {
        **{ending: f'finish_reason="{ending}"' for ending in ("stop", "length", "cancelled", "error")},
    }
    found = {name: stack.gateway.metric("tandem_requests_total", labels) for name, labels in names.items()}
    for reason in ("unavailable", "timeout", "error", "overloaded"):
        found[f"failover {reason}"] = stack.gateway.metric("tandem_failovers_total", f'reason="{reason}"')
    for reason in ("down", "timeout", "error"):
        found[f"draft {reason}"] = stack.gateway.metric("tandem_draft_faults_total", f'reason="{reason}"')
    return found


def _check_counts(ended: Counter[str], counted: dict[str, float]) -> None:
    """What clients saw is what was counted; only how those ended who left is theirs to know."""
    left = ended["left"]
    assert ended["right"] <= counted["length"] + counted["stop"] <= ended["right"] + left
    # A full queue, or no target for long, refuses before an answer is begun, which counts as none.
    errors = sum(count for name, count in ended.items() if name.startswith("error"))
    assert counted["error"] <= errors + left
    assert counted["cancelled"] <= left
    # Nothing but streams that broke and answers that did not come was injected.
    assert counted["failover error"] == counted["failover overloaded"] == counted["draft error"] == 0
