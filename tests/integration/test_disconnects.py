"""Clients that leave anywhere, do not read, or never finish asking, under load: nothing is left of them."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gauges import base_of, check_nothing_leaked, held
from tests.seeded import Question, ask, leave, questions
from tests.stack import Stack
from tests.steady import KV_BYTES_PER_TOKEN, steady_stack

LEAVERS = 8
LIMIT_SECONDS = 60.0
SETTINGS = {
    "TANDEM_GATEWAY_MAX_CONCURRENT_REQUESTS": "4",  # fewer than clients: some leave the queue
    "TANDEM_GATEWAY_MAX_N": "4",
    # The largest requests, of three long answers, wait for each other's blocks.
    "TANDEM_TARGET_KV_CACHE_BYTES": str(8192 * KV_BYTES_PER_TOKEN),
    "TANDEM_GATEWAY_WRITE_TIMEOUT_SECONDS": "2",
    "TANDEM_GATEWAY_HEADER_TIMEOUT_SECONDS": "2",
    "TANDEM_GATEWAY_BODY_TIMEOUT_SECONDS": "2",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with steady_stack(tmp_path_factory.mktemp("disconnects"), settings=SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def asked(stack: Stack) -> list[Question]:
    return questions(stack, 10, num_tokens=(20, 200))


def _leave_and_stay(stack: Stack, asked: list[Question], *, num_leaving: int, seed: int) -> None:
    """So many clients leave, while two others ask on and must get what is right. Then all is as before."""
    base = base_of(stack)
    places: Counter[str] = Counter()
    over = threading.Event()

    def go(number: int) -> None:
        choose = random.Random(seed * 1_000_003 + number)
        body = choose.choice(asked).body | {"max_tokens": choose.choice([5, 100, 1500])}
        if choose.random() < 0.2:
            body |= {"n": 3}
        places[leave(stack, body, choose)] += 1

    def stay(number: int) -> int:
        choose, count = random.Random(number), 0
        while not over.is_set():
            one = choose.choice(asked)
            ending = ask(stack.url, one.body, stream=bool(number), limit_seconds=LIMIT_SECONDS)
            assert ending.token_ids == one.answer, ending
            count += 1
        return count

    with ThreadPoolExecutor(2) as stayers, ThreadPoolExecutor(LEAVERS) as leavers:
        staying = [stayers.submit(stay, number) for number in range(2)]
        try:
            list(leavers.map(go, range(num_leaving)))
        finally:
            over.set()
        answered = [one.result() for one in staying]
    print(f"{places.total()} left:", dict(sorted(places.items())), "answered meanwhile:", answered)
    assert len(places) > 6
    assert all(answered)
    check_nothing_leaked(stack, base)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_j1_j7_thirty_clients_that_leave_anywhere_leave_nothing_behind(stack: Stack, asked: list[Question]) -> None:
    _leave_and_stay(stack, asked, num_leaving=30, seed=1)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_a_thousand_clients_that_leave_anywhere_leave_nothing_behind(stack: Stack, asked: list[Question]) -> None:
    _leave_and_stay(stack, asked, num_leaving=100, seed=2)  # memory that only the first ones take
    _leave_and_stay(stack, asked, num_leaving=1000, seed=3)


def test_a_client_that_does_not_read_holds_its_session_no_longer_than_it_may(
    stack: Stack, asked: list[Question]
) -> None:
    """Its answers, 10 MB with all log-probabilities, are more than the buffers between take. Its socket stays open."""
    base = base_of(stack)
    raw = json.dumps(
        {
            "model": "tandem",
            "messages": [{"role": "user", "content": "Tell me."}],
            "max_tokens": 1900,
            "n": 4,
            "logprobs": True,
            "top_logprobs": 20,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", stack.gateway_port))
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
        _wait_until_held(stack, anything=True)
        _wait_until_held(stack, anything=False)
        assert stack.gateway.metric("tandem_requests_total", 'finish_reason="cancelled"') >= 1
        check_nothing_leaked(stack, base)  # its descriptor is free as well, while the client still has its own


def test_l7_half_open_clients_are_closed_and_keep_nobody_waiting(stack: Stack, asked: list[Question]) -> None:
    base = base_of(stack)
    halves = (
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n{",
    )
    open_ones = [socket.create_connection(("127.0.0.1", stack.gateway_port)) for _ in range(200)]
    try:
        for number, connection in enumerate(open_ones):
            connection.sendall(halves[number % len(halves)])
        ending = ask(stack.url, asked[0].body, stream=True, limit_seconds=LIMIT_SECONDS)
        assert ending.token_ids == asked[0].answer
        check_nothing_leaked(stack, base)
    finally:
        for connection in open_ones:
            connection.close()


def _wait_until_held(stack: Stack, *, anything: bool) -> None:
    end = time.monotonic() + 60
    while any(held(stack).values()) is not anything:
        assert time.monotonic() < end, held(stack)
        time.sleep(0.02)
