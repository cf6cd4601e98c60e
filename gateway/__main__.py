"""`python -m gateway`: reads the settings, wires everything together, serves until told to stop.

On SIGTERM or SIGINT readiness turns 503 and new requests are refused with 503, while the answers in flight go on for
the grace that the settings allow; then listening ends, and what is left is cut.
"""

from __future__ import annotations

import functools
import math
import socket
import sys
import time
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from gateway.access import ApiKeys
from gateway.admission import Admission
from gateway.app import create_app
from gateway.fleet import Fleet
from gateway.grpc_backends import Deadlines
from gateway.http_protocol import BoundedProtocol
from gateway.lookup_drafts import LookupDrafts
from gateway.metrics import GatewayMetrics
from gateway.recorder import PromptRecorder
from gateway.settings import Settings
from tandem.models.bundled import BUNDLED
from tandem.models.bundled_table import find_table
from tandem.rpc.launch import run_process
from tandem.rpc.tls import channel_credentials, check_certificate
from tandem.scrapes import serve_metrics
from tandem.settings import TracingSettings
from tandem.tracing import start_tracing

_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
_KEEP_ALIVE_SECONDS = 75  # longer than the usual 60 s of proxies, so that the proxy closes first


class DrainingServer(uvicorn.Server):
    """uvicorn closes its listener first and so cannot answer "not ready". This one drains before."""

    def __init__(self, config: uvicorn.Config, *, admission: Admission, grace_seconds: float) -> None:
        super().__init__(config)
        self._admission = admission
        self._grace_seconds = grace_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the drain, a second one ends it. uvicorn would also raise the signal again at the
        end, which makes an orderly exit look like a crash."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._admission.drain()
        deadline = time.monotonic() + self._grace_seconds
        structlog.get_logger().info("draining", running=self._admission.running, waiting=self._admission.waiting)
        while not self.force_exit and time.monotonic() < deadline:
            if await self._admission.idle(within_seconds=0.1):
                break
        await super().shutdown(sockets)


def build_server(settings: Settings, app: FastAPI, admission: Admission) -> DrainingServer:
    """Raises InvalidRequest where the certificate and key that the settings name cannot be used."""
    if settings.tls_certificate_file is not None and settings.tls_key_file is not None:
        check_certificate(settings.tls_certificate_file, settings.tls_key_file)
    protocol = functools.partial(
        BoundedProtocol,
        max_header_bytes=settings.max_header_bytes,
        header_timeout_seconds=settings.header_timeout_seconds,
        body_timeout_seconds=settings.body_timeout_seconds,
        write_timeout_seconds=settings.write_timeout_seconds,
        max_connections=settings.max_connections,
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol,  # type: ignore[arg-type]  # it is called as the class would be
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.tls_certificate_file,
        ssl_keyfile=settings.tls_key_file,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        # After the drain: time for responses that are complete to be written out.
        timeout_graceful_shutdown=max(1, math.ceil(min(settings.shutdown_grace_seconds, 5.0))),
    )
    return DrainingServer(config, admission=admission, grace_seconds=settings.shutdown_grace_seconds)


def _lookup(settings: Settings) -> LookupDrafts | None:
    """What drafts without a draft service. Raises InvalidRequest for a table that cannot be read."""
    if settings.draft_addresses or not settings.lookup:
        return None
    return LookupDrafts(
        # Which target it is, is known when that is reached; until then it may be the bundled one.
        table=find_table(settings.table, target_model=BUNDLED),
        only_its_model=settings.table == "auto",
        max_draft_tokens=settings.max_num_draft_tokens,
    )


def serve() -> None:
    """Serve until a signal. Raises TandemError and pydantic's ValidationError where the settings do not allow it."""
    settings = Settings()
    log = structlog.get_logger()
    keys = None if settings.api_keys_file is None else ApiKeys(settings.api_keys_file)
    if keys is None and settings.host not in _THIS_MACHINE:
        log.warning("open_to_everyone", host=settings.host, remedy="TANDEM_GATEWAY_API_KEYS_FILE")
    metrics = GatewayMetrics(max_num_draft_tokens=settings.max_num_draft_tokens)
    fleet = Fleet(
        targets=settings.target_addresses,
        drafts=settings.draft_addresses,
        deadlines=Deadlines(
            request_seconds=settings.request_timeout_seconds,
            first_seconds=settings.first_token_timeout_seconds,
            verify_seconds=settings.verify_timeout_seconds,
            draft_first_seconds=settings.draft_first_timeout_seconds,
            draft_seconds=settings.draft_timeout_seconds,
            draft_retry_seconds=settings.draft_retry_seconds,
        ),
        probe_interval_seconds=settings.probe_interval_seconds,
        probe_timeout_seconds=settings.probe_timeout_seconds,
        failover_seconds=settings.failover_timeout_seconds,
        observe_failover=metrics.observe_failover,
        observe_draft_fault=metrics.observe_draft_fault,
        lookup=_lookup(settings),
        credentials=channel_credentials(
            ca_file=settings.rpc_ca_file,
            certificate_file=settings.rpc_certificate_file,
            key_file=settings.rpc_key_file,
        ),
    )
    admission = Admission(
        max_running=settings.max_concurrent_requests,
        max_queued=settings.max_queued_requests,
        replicas=fleet.replicas,
    )
    tracing = start_tracing("gateway", TracingSettings())
    recorder = None
    if settings.record_prompts is not None:
        recorder = PromptRecorder(settings.record_prompts, most=settings.record_max_prompts)
        log.warning("recording_prompts", file=str(settings.record_prompts), most=settings.record_max_prompts)
    app = create_app(settings, fleet, metrics, admission=admission, keys=keys, tracing=tracing, recorder=recorder)
    server = build_server(settings, app, admission)
    metrics.watch_connections(lambda: len(server.server_state.connections))
    if settings.metrics_port is not None:
        port = serve_metrics(metrics.registry, host=settings.host, port=settings.metrics_port)
        log.info("serving_metrics", port=port)
    log.info("starting", host=settings.host, port=settings.port, tls=settings.tls_certificate_file is not None)
    try:
        server.run()
    finally:
        tracing.close()
        if recorder is not None:
            recorder.close()


if __name__ == "__main__":
    sys.exit(run_process("gateway", serve))
