"""The model services as the gateway sees them: who they are, whether they answer, how busy they are."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import grpc
import structlog

from tandem.errors import Mismatch, TandemError, Unavailable
from tandem.rpc.channel import open_channel
from tandem.rpc.status import to_error

Info = TypeVar("Info")


class PeerState(enum.Enum):
    """Whether a peer can take sessions."""

    DOWN = "down"
    UP = "up"
    MISMATCH = "mismatch"


class Peer(Generic[Info]):
    """One service at one address. A task of its own asks it, again and again, whether it still answers."""

    def __init__(
        self,
        address: str,
        *,
        role: str,
        describe: Callable[[grpc.aio.Channel], Awaitable[Info]],
        accept: Callable[[Info, grpc.aio.Channel], Awaitable[None]],
        probe_interval_seconds: float,
        probe_timeout_seconds: float,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`describe` asks the peer who it is; `accept` is given the answer when the peer comes up, and raises
        Mismatch when it does not belong here."""
        self.address = address
        self.role = role
        self._channel: grpc.aio.Channel | None = None  # made by `start`: it belongs to the running event loop
        self.state = PeerState.DOWN
        self.reason = f"{role} {address}: not reached yet"
        self.info: Info | None = None
        self.num_sessions = 0
        self._describe = describe
        self._accept = accept
        self._interval = probe_interval_seconds
        self._timeout = probe_timeout_seconds
        self._credentials = credentials
        self._watching: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def up(self) -> bool:
        return self.state is PeerState.UP

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

    def failed(self, error: TandemError) -> None:
        """A session found the peer gone: take no more until it answers a probe again, which is sent at once."""
        self._set(PeerState.DOWN, error.message)
        self.probe_soon()

    def probe_soon(self) -> None:
        """Ask the peer now, not only after the interval."""
        self._wake.set()

    async def _watch(self) -> None:
        while True:
            await self._probe()
            self._wake.clear()
            try:
                async with asyncio.timeout(self._interval):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(min(0.1, self._interval))  # woken by failures: at most ten probes a second

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                info = await self._describe(self.channel)
            if not self.up or info != self.info:
                await self._accept(info, self.channel)
                self.info = info
        except TimeoutError:
            self._set(PeerState.DOWN, f"{self.role} {self.address}: no answer within {self._timeout:g} s")
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
            self._set(PeerState.UP, "")

    def _set(self, state: PeerState, reason: str) -> None:
        if state is not self.state:
            log = structlog.get_logger()
            event = log.info if state is PeerState.UP else log.warning
            event("peer_" + state.value, role=self.role, address=self.address, reason=reason)
        self.state = state
        self.reason = reason


def least_busy(peers: Sequence[Peer[Info]]) -> Peer[Info]:
    """The peer that is up and has the fewest sessions of ours. Raises Unavailable with every peer's reason."""
    candidates = [peer for peer in peers if peer.up]
    if not candidates:
        raise Unavailable("; ".join(peer.reason for peer in peers) or "no address is configured")
    return min(candidates, key=lambda peer: peer.num_sessions)
