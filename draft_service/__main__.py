"""The draft service's composition root: `python -m draft_service`, settings from TANDEM_DRAFT_*."""

from __future__ import annotations

import asyncio
import sys

import structlog

from draft_service.drafters.auto import AutoDrafter
from draft_service.drafters.base import Drafter
from draft_service.metrics import PreparationMetrics
from draft_service.servicer import DraftServicer
from draft_service.settings import DraftSettings
from tandem.errors import InvalidRequest
from tandem.lookup.drafter import lookup_drafters
from tandem.models.bundled_table import find_table, table_info
from tandem.ngram_table import NgramTable
from tandem.rpc.launch import launch
from tandem.rpc.server import RpcServer
from tandem.rpc.sessions import SessionSlots
from tandem.rpc.tls import server_credentials
from tandem.service_metrics import ServiceMetrics
from tandem.settings import TracingSettings
from tandem.tracing import start_tracing
from tandem.types import DraftInfo, ModelInfo
from tandem.v1 import draft_pb2, draft_pb2_grpc


async def serve() -> None:
    """Load the model, if there is one, serve until a signal, drain."""
    settings = DraftSettings()
    log = structlog.get_logger()
    credentials = server_credentials(settings)
    tracing = start_tracing("draft", TracingSettings())
    metrics = ServiceMetrics()
    metrics_port = metrics.serve(host=settings.host, port=settings.metrics_port)
    table = find_table(settings.table, target_model=settings.target_model)
    if table is not None:
        log.info("table", contexts=table.num_contexts, answer_tokens=table.origin.num_answer_tokens)
    lookups = lookup_drafters(table, min_match=settings.min_ngram, least_certainty=settings.least_certainty)
    drafters: dict[str, Drafter] = {**lookups}
    engine = pulse = None
    if settings.model:
        # Imported here: without a model nothing needs torch, and the service starts in half a second, in 70 MB.
        from draft_service.drafters.model import ModelDrafter
        from tandem.engine.factory import start_engine
        from tandem.engine.pulse import ModelPulse

        log.info("loading", model=settings.model, num_layers=settings.num_layers)
        engine = await asyncio.to_thread(
            start_engine,
            settings.model,
            settings,
            name="draft-model",
            max_programs=2 * settings.max_sessions,  # a session's text may go on while its prefill waits
            metrics=metrics,
            num_layers=settings.num_layers,
            is_draft=True,
            progress=lambda message: log.info("preparing", step=message),
        )
        model = ModelDrafter(
            engine.worker,
            law_size=settings.law_size,
            prepared_branches=settings.prepared_branches,
            observer=PreparationMetrics(metrics.registry),
        )
        drafters["model" if settings.num_layers is None else "layer_skip"] = model
        drafters["auto"] = AutoDrafter(lookup=lookups["ngram"], model=model, min_match=settings.auto_match)
    model_info = _model_info(None if engine is None else engine.info, table)
    metrics.describe(model_info, threads=settings.threads, drafters=tuple(drafters))
    try:
        if engine is not None:
            pulse = ModelPulse(engine.worker, stall_seconds=settings.stall_timeout_seconds)
            await pulse.first()
        info = DraftInfo(
            model=model_info,
            drafters=tuple(drafters),
            default_drafter="auto" if "auto" in drafters else "ngram",
            max_draft_tokens=settings.max_draft_tokens,
            max_sessions=settings.max_sessions,
        )
        servicer = DraftServicer(
            info=info,
            drafters=drafters,
            slots=SessionSlots(max_sessions=settings.max_sessions, metrics=metrics),
            check=_always_well if pulse is None else pulse.check,
        )
        server = RpcServer(
            host=settings.host,
            port=settings.port,
            add_services=lambda added: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, added),
            service_names=(draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,),
            shutdown_grace_seconds=settings.shutdown_grace_seconds,
            credentials=credentials,
            tracing=tracing,
        )
        log.info(
            "serving",
            address=f"{settings.host}:{server.port}",
            metrics_port=metrics_port,
            drafters=",".join(drafters),
            model=settings.model or None,
        )
        await server.serve_until_signal(None if pulse is None else pulse.watch)
    finally:
        if engine is not None:
            engine.worker.close()
        tracing.close()


def _always_well() -> None:
    """n-grams have no device that could hang."""


def _model_info(model: ModelInfo | None, table: NgramTable | None) -> ModelInfo | None:
    """What the gateway compares with the target. Raises InvalidRequest for a table and a model that do not match."""
    if table is None:
        return model
    if model is None:
        return table_info(table)
    if table.origin.tokenizer_fingerprint != model.tokenizer_fingerprint:
        raise InvalidRequest(
            f"the table's tokenizer ({table.origin.model_id}: {table.origin.tokenizer_fingerprint}) is not the model's "
            f"({model.model_id}: {model.tokenizer_fingerprint})",
            param="table",
        )
    return model


if __name__ == "__main__":
    sys.exit(launch("draft", serve))
