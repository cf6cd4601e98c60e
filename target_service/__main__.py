"""The target service's composition root: `python -m target_service`, settings from TANDEM_TARGET_*."""

from __future__ import annotations

import asyncio
import sys
import time

import structlog

from tandem.engine.factory import start_draft_head, start_engine
from tandem.engine.pulse import ModelPulse
from tandem.engine.rejection import RejectionRule, verify
from tandem.rpc.launch import launch
from tandem.rpc.server import RpcServer
from tandem.rpc.sessions import SessionSlots
from tandem.rpc.tls import server_credentials
from tandem.service_metrics import ServiceMetrics
from tandem.settings import TracingSettings
from tandem.tracing import start_tracing
from tandem.types import KvCache, TargetInfo
from tandem.v1 import target_pb2, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings
from target_service.verifier import Verifier


async def serve(*, rejection_rule: RejectionRule = verify) -> None:
    """Load the model, serve until a signal, drain. Only test builds give another rule than the right one."""
    settings = TargetSettings()
    log = structlog.get_logger()
    credentials = server_credentials(settings)
    tracing = start_tracing("target", TracingSettings())
    metrics = ServiceMetrics()
    metrics_port = metrics.serve(host=settings.host, port=settings.metrics_port)
    log.info("loading", model=settings.model)
    began = time.monotonic()
    engine = await asyncio.to_thread(
        start_engine,
        settings.model,
        settings,
        name="target-model",
        max_programs=settings.max_sessions,
        metrics=metrics,
        progress=lambda message: log.info("preparing", step=message),
    )
    metrics.describe(engine.info, threads=settings.threads)
    try:
        head = None
        if settings.draft_head is not None:
            head = await asyncio.to_thread(start_draft_head, settings.draft_head, engine, threads=settings.threads)
        pulse = ModelPulse(engine.worker, stall_seconds=settings.stall_timeout_seconds)
        await pulse.first()
        pool = engine.worker.pool
        info = TargetInfo(
            model=engine.info,
            end_token_ids=engine.end_token_ids,
            max_sessions=settings.max_sessions,
            kv_cache=KvCache(num_blocks=pool.num_blocks, block_size=pool.block_size),
        )
        servicer = TargetServicer(
            info=info,
            tokenizer_files=engine.tokenizer_files,
            verifier=Verifier(engine.worker, head=head, rejection_rule=rejection_rule),
            slots=SessionSlots(max_sessions=settings.max_sessions, metrics=metrics),
            check=pulse.check,
        )
        server = RpcServer(
            host=settings.host,
            port=settings.port,
            add_services=lambda added: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, added),
            service_names=(target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,),
            shutdown_grace_seconds=settings.shutdown_grace_seconds,
            credentials=credentials,
            tracing=tracing,
        )
        log.info(
            "serving",
            address=f"{settings.host}:{server.port}",
            metrics_port=metrics_port,
            model=engine.info.model_id,
            engine=engine.info.engine,
            dtype=engine.info.dtype,
            device=engine.info.device,
            context_length=engine.info.context_length,
            draft_head=None if settings.draft_head is None else settings.draft_head.name,
            load_seconds=round(time.monotonic() - began, 2),
        )
        await server.serve_until_signal(pulse.watch)
    finally:
        engine.worker.close()
        tracing.close()


if __name__ == "__main__":
    sys.exit(launch("target", serve))
