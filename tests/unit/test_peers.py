"""When a service counts as up, as doubtful, as gone; and which of several is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from gateway.peers import Peer, PeerState, best
from tandem.errors import InternalError, Mismatch, TimedOut, Unavailable
from tests.fakes import eventually

TIMEOUT_SECONDS = 0.1


class Service:
    """What the peer asks: answers, keeps silent, or fails, as told."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.num_asked = 0
        self.name = "model"

    async def describe(self, _: grpc.aio.Channel) -> str:
        self.num_asked += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return self.name


async def accept_all(_: str, __: grpc.aio.Channel) -> None:
    pass


@asynccontextmanager
async def watched(
    service: Service,
    *,
    accept: Callable[[str, grpc.aio.Channel], Awaitable[None]] = accept_all,
    interval_seconds: float = 0.05,
) -> AsyncIterator[Peer[str]]:
    peer = new_peer(service, accept=accept, interval_seconds=interval_seconds)
    peer.start()
    try:
        yield peer
    finally:
        await peer.close()


def new_peer(
    service: Service,
    *,
    address: str = "127.0.0.1:1",
    accept: Callable[[str, grpc.aio.Channel], Awaitable[None]] = accept_all,
    interval_seconds: float = 0.05,
) -> Peer[str]:
    return Peer(
        address,
        role="target",
        describe=service.describe,
        accept=accept,
        probe_interval_seconds=interval_seconds,
        probe_timeout_seconds=TIMEOUT_SECONDS,
        longest_rest_seconds=1.0,
    )


async def test_one_answer_that_does_not_come_makes_it_doubtful_a_second_one_gone() -> None:
    service = Service()
    async with watched(service) as peer:
        await eventually(lambda: peer.up)
        service.answers.clear()
        await eventually(lambda: peer.doubtful)
        assert peer.up
        await eventually(lambda: not peer.up)
        assert "no answer within 0.1 s" in peer.reason
        service.answers.set()
        await eventually(lambda: peer.up and not peer.doubtful)


async def test_sessions_that_are_answered_count_as_life() -> None:
    service = Service()
    async with watched(service) as peer:
        await eventually(lambda: peer.up)
        service.answers.clear()
        for _ in range(50):  # as long as five questions
            peer.answered()
            await asyncio.sleep(0.01)
        assert peer.up
        await eventually(lambda: not peer.up)


async def test_a_sessions_answer_that_does_not_come_is_a_first_miss() -> None:
    service = Service()
    async with watched(service, interval_seconds=60.0) as peer:
        await eventually(lambda: peer.up)
        service.answers.clear()
        peer.failed(TimedOut("target did not answer"))
        assert peer.up
        assert peer.doubtful
        num_asked = service.num_asked
        await eventually(lambda: not peer.up)
        assert service.num_asked == num_asked + 1  # at once, not after the interval; and one miss was enough


async def test_a_stream_that_breaks_makes_it_gone_at_once_until_it_answers() -> None:
    service = Service()
    async with watched(service, interval_seconds=60.0) as peer:
        await eventually(lambda: peer.up)
        peer.failed(Unavailable("target ended the session"))
        assert peer.state is PeerState.DOWN
        assert peer.reason == "target ended the session"
        await eventually(lambda: peer.up)
        assert not peer.doubtful  # it may be another process


async def test_a_fault_of_its_own_makes_it_rest_and_a_session_that_works_ends_that() -> None:
    service = Service()
    async with watched(service, interval_seconds=60.0) as peer:
        await eventually(lambda: peer.up)
        peer.failed(InternalError("a forward failed"))
        assert peer.up
        assert peer.doubtful
        peer.answered()
        assert not peer.doubtful


async def test_one_that_is_gone_is_asked_more_often_than_one_that_is_up() -> None:
    service = Service()
    service.error = Unavailable("connection refused")
    async with watched(service, interval_seconds=60.0) as peer:
        await eventually(lambda: service.num_asked >= 3, seconds=5.0)
        service.error = None
        await eventually(lambda: peer.up)


async def test_one_that_does_not_belong_here_is_told_apart_and_asked_again() -> None:
    service = Service()

    async def accept(name: str, _: grpc.aio.Channel) -> None:
        if name != "model":
            raise Mismatch(f"serves {name}")

    async with watched(service, accept=accept) as peer:
        await eventually(lambda: peer.up)
        service.name = "another"
        await eventually(lambda: peer.state is PeerState.MISMATCH)
        assert peer.reason == "target 127.0.0.1:1: serves another"
        service.name = "model"
        await eventually(lambda: peer.up)


async def test_when_it_was_last_up_is_known_when_it_is_gone() -> None:
    service = Service()
    async with watched(service, interval_seconds=60.0) as peer:
        assert peer.last_up == -float("inf")
        await eventually(lambda: peer.up)
        first = peer.last_up
        await asyncio.sleep(0.05)
        service.error = Unavailable("connection refused")
        peer.failed(Unavailable("target ended the session"))
        assert peer.last_up >= first + 0.05


async def test_the_best_is_up_not_doubtful_least_busy_and_fastest_in_this_order() -> None:
    peers = [new_peer(Service(), address=f"127.0.0.1:{number}") for number in range(4)]
    with pytest.raises(Unavailable, match=r"not reached yet.*not reached yet"):
        best(peers)
    for peer in peers:
        peer.state = PeerState.UP
        peer.rounds.observe(0.02)
    peers[2].rounds.observe(0.01)
    assert best(peers) is peers[2]  # the fastest
    peers[2].begin_session()
    assert best(peers) is not peers[2]  # it is busier
    for peer in peers[:2]:
        peer.begin_session()
        peer.begin_session()
    assert best(peers) is peers[3]
    peers[3].failed(InternalError("a forward failed"))
    assert best(peers) is peers[2]
    peers[2].state = PeerState.DOWN
    peers[0].failed(InternalError("a forward failed"))
    assert best(peers) is peers[1]
    peers[1].failed(InternalError("a forward failed"))
    assert best(peers) is peers[3]  # better a doubtful one than none; of these, the least busy
