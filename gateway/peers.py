"""The model services as the gateway sees them: who they are, whether they answer, how busy they are."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import grpc
import structlog

from gateway.breaker import Breaker
from gateway.pace import Pace
from tandem.errors import Mismatch, TandemError, TimedOut, Unavailable
from tandem.rpc.channel import open_channel
from tandem.rpc.status import to_error

Info = TypeVar("Info")

_MISSES = 2  # questions in a row without an answer in time, after which a service counts as gone
_DOUBTFUL_INTERVAL_SECONDS = 0.5  # between questions to one that is gone, or may be


class PeerState(enum.Enum):
    """Whether a peer can take sessions."""

    DOWN = "down"
    UP = "up"
    MISMATCH = "mismatch"


class Peer(Generic[Info]):
    """One service at one address. A task of its own asks it, again and again, whether it still answers.

    A broken stream or a refused connection says that it is gone at once. An answer that does not come says so the
    second time only: a busy machine can keep one question waiting. What sessions see counts as well: their answers as
    life, those that do not come as a first miss.
    """

    def __init__(
        self,
        address: str,
        *,
        role: str,
        describe: Callable[[grpc.aio.Channel], Awaitable[Info]],
        accept: Callable[[Info, grpc.aio.Channel], Awaitable[None]],
        probe_interval_seconds: float,
        probe_timeout_seconds: float,
        longest_rest_seconds: float,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`describe` asks the peer who it is; `accept` is given the answer when the peer comes up, and raises
        Mismatch when it does not belong here. After faults it rests for `longest_rest_seconds` at most."""
        self.address = address
        self.role = role
        self._channel: grpc.aio.Channel | None = None  # made by `start`: it belongs to the running event loop
        self.state = PeerState.DOWN
        self.reason = f"{role} {address}: not reached yet"
        self.info: Info | None = None
        self.num_sessions = 0  # of ours, open
        self.rounds = Pace()
        self.first_rounds = Pace()  # prefill included; a unit is a token
        self.last_up = -math.inf  # monotonic seconds: when it was last known to be up
        self._describe = describe
        self._accept = accept
        self._breaker = Breaker(longest_seconds=longest_rest_seconds)
        self._misses = 0
        self._last_answer = -math.inf  # monotonic seconds
        self._interval = probe_interval_seconds
        self._timeout = probe_timeout_seconds
        self._credentials = credentials
        self._watching: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def up(self) -> bool:
        return self.state is PeerState.UP

    @property
    def doubtful(self) -> bool:
        """Up, perhaps, but the last news was bad, and it is not time to try it again."""
        return self._misses > 0 or not self._breaker.allows(time.monotonic())

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise Unavailable(f"{self.role} {self.address}: not started yet")
        return self._channel

    def start(self) -> None:
        self._channel = open_channel(self.address, self._credentials)
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self.role} {self.address}")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    def begin_session(self) -> None:
        self.num_sessions += 1
        self._breaker.begin(time.monotonic())

    def end_session(self) -> None:
        self.num_sessions -= 1

    def answered(self) -> None:
        """A session got what it asked for."""
        self._last_answer = time.monotonic()
        self._misses = 0
        self._breaker.success()

    def failed(self, error: TandemError) -> None:
        """A session did not get what it asked for, by the peer's fault. A peer that is gone takes no more until it
        answers a probe, any other one rests. The probe is sent at once."""
        self._breaker.fault(time.monotonic())
        if isinstance(error, Unavailable):
            self._set(PeerState.DOWN, error.message)
        elif isinstance(error, TimedOut):
            self._misses = max(1, self._misses)
        self.probe_soon()

    def probe_soon(self) -> None:
        """Ask the peer now, not only after the interval."""
        self._wake.set()

    async def _watch(self) -> None:
        while True:
            await self._probe()
            self._wake.clear()
            try:
                async with asyncio.timeout(self._pause_seconds()):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(min(0.1, self._interval))  # woken by failures: at most ten probes a second

    def _pause_seconds(self) -> float:
        certain = self.state is not PeerState.DOWN and not self._misses
        return self._interval if certain else min(self._interval, _DOUBTFUL_INTERVAL_SECONDS)

    async def _probe(self) -> None:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                info = await self._describe(self.channel)
            if not self.up or info != self.info:
                await self._accept(info, self.channel)
                self.info = info
        except TimeoutError:
            self._missed(asked_at)
        except grpc.aio.AioRpcError as error:
            self._set(PeerState.DOWN, to_error(error, peer=f"{self.role} {self.address}").message)
        except Mismatch as error:
            self._set(PeerState.MISMATCH, f"{self.role} {self.address}: {error.message}")
        except TandemError as error:
            self._set(PeerState.DOWN, f"{self.role} {self.address}: {error.message}")
        except Exception:  # noqa: BLE001 - a fault of ours must not end the watching
            structlog.get_logger().exception("probe_failed", role=self.role, address=self.address)
            self._set(PeerState.DOWN, f"{self.role} {self.address}: probe failed; see the log")
        else:
            self._misses = 0
            self._set(PeerState.UP, "")

    def _missed(self, asked_at: float) -> None:
        if self._last_answer > asked_at:  # busy, but alive
            return
        self._misses += 1
        if self._misses >= _MISSES or not self.up:
            self._set(PeerState.DOWN, f"{self.role} {self.address}: no answer within {self._timeout:g} s")

    def _set(self, state: PeerState, reason: str) -> None:
        if state is not self.state:
            log = structlog.get_logger()
            event = log.info if state is PeerState.UP else log.warning
            event("peer_" + state.value, role=self.role, address=self.address, reason=reason)
            if state is PeerState.UP:
                self._breaker.retry_at_once()
        if self.up or state is PeerState.UP:
            self.last_up = time.monotonic()
        self.state = state
        self.reason = reason


def best(peers: Sequence[Peer[Info]]) -> Peer[Info]:
    """Of the peers that are up, a doubtful one last, then the one with the fewest sessions of ours, then the fastest.

    Raises Unavailable with every peer's reason.
    """
    candidates = [peer for peer in peers if peer.up]
    if not candidates:
        raise Unavailable("; ".join(peer.reason for peer in peers) or "no address is configured")
    return min(candidates, key=lambda peer: (peer.doubtful, peer.num_sessions, peer.rounds.mean_seconds))
