"""A gRPC server's life: start, health, reflection, graceful drain on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from tandem.errors import TandemError
from tandem.rpc.interceptors import SessionContext
from tandem.tracing import NoTracing, Tracing

# Streams are mostly quiet between rounds, so both ends ping; a peer that vanished is noticed within 40 s.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),  # a second service on a taken port must fail, not share it
)

# Calls its argument when the service becomes unable to do its work, with the reason, and able again, with None.
Watch = Callable[[Callable[[str | None], Awaitable[None]]], Coroutine[Any, Any, None]]


class RpcServer:
    """Serves the given services on `host:port`; `port` 0 takes a free one. Without credentials, without TLS."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        add_services: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        shutdown_grace_seconds: float,
        credentials: grpc.ServerCredentials | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=(SessionContext(tracing or NoTracing()),))
        self._grace_seconds = shutdown_grace_seconds
        self._health = health_aio.HealthServicer()
        add_services(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._served = ("", *service_names)
        address = f"{host}:{port}"
        try:
            self.port = (
                self._server.add_insecure_port(address)
                if credentials is None
                else self._server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise TandemError(f"cannot listen on {host}:{port}: is another process using the port?") from error

    async def start(self) -> None:
        """Listen and report SERVING. The model must be ready before."""
        await self._server.start()
        await self.set_serving(serving=True)

    async def set_serving(self, *, serving: bool) -> None:
        """What health reports from now on. Once `stop` has begun, nothing changes it."""
        status = health_pb2.HealthCheckResponse
        for name in self._served:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Report NOT_SERVING, refuse new calls, give open streams the grace period, then cut them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._grace_seconds)

    async def serve_until_signal(self, watch: Watch | None = None) -> None:
        """Start, wait for SIGTERM or SIGINT, drain. A second signal ends the grace period at once.

        `watch` runs meanwhile, and says when the service can do its work and when not.
        """
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        await self.start()
        gc.freeze()  # the model libraries' million objects stay for good: no collection need look at them again
        log = structlog.get_logger()

        async def changed(fault: str | None) -> None:
            if fault is None:
                log.info("ready")
            else:
                log.error("not_ready", reason=fault)
            await self.set_serving(serving=fault is None)

        watching = None if watch is None else asyncio.create_task(watch(changed))
        received = await signals.get()
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        log.info("draining", signal=signal.Signals(received).name, grace_seconds=self._grace_seconds)
        stopping = asyncio.create_task(self.stop())
        again = asyncio.create_task(signals.get())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not stopping.done():
            await self._server.stop(None)
        await stopping
        log.info("stopped")
