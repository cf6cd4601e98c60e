"""The draft service's composition root: `python -m draft_service`, settings from TANDEM_DRAFT_*."""

from __future__ import annotations

import asyncio
import sys

import structlog

from draft_service.drafters.auto import AutoDrafter
from draft_service.drafters.base import Drafter
from draft_service.drafters.ngram import NgramDrafter
from draft_service.metrics import PreparationMetrics
from draft_service.servicer import DraftServicer
from draft_service.settings import DraftSettings
from tandem.rpc.launch import launch
from tandem.rpc.server import RpcServer
from tandem.rpc.sessions import SessionSlots
from tandem.service_metrics import ServiceMetrics
from tandem.types import DraftInfo
from tandem.v1 import draft_pb2, draft_pb2_grpc


async def serve() -> None:
    """Load the model, if there is one, serve until a signal, drain."""
    settings = DraftSettings()
    log = structlog.get_logger()
    metrics = ServiceMetrics()
    metrics_port = metrics.serve(host=settings.host, port=settings.metrics_port)
    ngram = NgramDrafter(min_ngram=settings.min_ngram, tokens_per_match=settings.tokens_per_match)
    drafters: dict[str, Drafter] = {"ngram": ngram}
    engine = None
    if settings.model:
        # Imported here: without a model nothing needs torch, and the service starts in half a second, in 70 MB.
        from draft_service.drafters.model import ModelDrafter
        from tandem.engine.factory import start_engine

        log.info("loading", model=settings.model, num_layers=settings.num_layers)
        engine = await asyncio.to_thread(
            start_engine,
            settings.model,
            settings,
            name="draft-model",
            max_programs=2 * settings.max_sessions,  # a session's text may go on while its prefill waits
            metrics=metrics,
            num_layers=settings.num_layers,
            progress=lambda message: log.info("preparing", step=message),
        )
        model = ModelDrafter(
            engine.worker,
            law_size=settings.law_size,
            prepared_branches=settings.prepared_branches,
            observer=PreparationMetrics(metrics.registry),
        )
        drafters["model" if settings.num_layers is None else "layer_skip"] = model
        drafters["auto"] = AutoDrafter(ngram=ngram, model=model, min_match=settings.auto_match)
    metrics.describe(None if engine is None else engine.info, threads=settings.threads, drafters=tuple(drafters))
    try:
        info = DraftInfo(
            model=None if engine is None else engine.info,
            drafters=tuple(drafters),
            default_drafter="ngram" if engine is None else "auto",
            max_draft_tokens=settings.max_draft_tokens,
            max_sessions=settings.max_sessions,
        )
        servicer = DraftServicer(
            info=info,
            drafters=drafters,
            slots=SessionSlots(max_sessions=settings.max_sessions, metrics=metrics),
        )
        server = RpcServer(
            host=settings.host,
            port=settings.port,
            add_services=lambda added: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, added),
            service_names=(draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,),
            shutdown_grace_seconds=settings.shutdown_grace_seconds,
        )
        log.info(
            "serving",
            address=f"{settings.host}:{server.port}",
            metrics_port=metrics_port,
            drafters=",".join(drafters),
            model=settings.model or None,
        )
        await server.serve_until_signal()
    finally:
        if engine is not None:
            engine.worker.close()


if __name__ == "__main__":
    sys.exit(launch("draft", serve))
