"""The HTTP endpoints. What they answer is written in gateway/replies.py, what they document in gateway/openapi.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from gateway.admission import Admission
from gateway.generate import Generation
from gateway.jobs import Job, JobMaker, drafter_names
from gateway.metrics import GatewayMetrics
from gateway.openapi import (
    ChatDocument,
    CompletionDocument,
    ModelCard,
    ModelList,
    ReadinessDocument,
    Responses,
    errors,
    generated,
    success,
)
from gateway.replies import Reply
from gateway.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.served import Backends, Readiness, ServedModel
from gateway.settings import Settings
from gateway.sse import EventStream, until_disconnect
from tandem.errors import UnknownModel

MODEL_ALIAS = "tandem"


class _JsonRoute(APIRoute):
    """Parses bodies with orjson, which is faster than the standard library, and refuses NaN and half characters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def parse_with_orjson(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return parse_with_orjson


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return orjson.loads(await self.body())
        except orjson.JSONDecodeError as error:
            # Without the document, which would travel with the error.
            raise json.JSONDecodeError(error.msg, "", 0) from None


def build_router(
    *,
    settings: Settings,
    backends: Backends,
    jobs: JobMaker,
    generation: Generation,
    admission: Admission,
    metrics: GatewayMetrics,
    record: Callable[[GenerationBody], None],
) -> APIRouter:
    """All endpoints, over the given objects. `record` is shown every request that is in order."""
    readiness: Responses = {200: {"model": ReadinessDocument}, 503: {"model": ReadinessDocument}}
    router = APIRouter(route_class=_JsonRoute, responses=errors(500))

    async def reply(request: Request, body: GenerationBody, job: Job) -> Response:
        record(body)
        writer = Reply(body, job, generation.run(job))
        if body.stream:
            return EventStream(
                writer.events(),
                request_id=request.state.request_id,
                ping_interval_seconds=settings.ping_interval_seconds,
                write_timeout_seconds=settings.write_timeout_seconds,
            )
        return _json(await until_disconnect(request.receive, writer.document()))

    def offer() -> dict[str, Any]:
        info = backends.draft_info
        return {
            "drafters": [] if info is None else list(drafter_names(info)),
            "draft_model": None if info is None or info.model is None else info.model.model_id,
            "num_draft_tokens": settings.num_draft_tokens,
            "max_num_draft_tokens": settings.max_num_draft_tokens,
        }

    @router.post("/v1/completions", responses=generated(CompletionDocument), tags=["openai"])
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue one prompt or several."""
        _check_model(body.model, backends.served())
        state = request.state
        return await reply(
            request, body, await jobs.completion(body, request_id=state.request_id, arrived=state.arrived)
        )

    @router.post("/v1/chat/completions", responses=generated(ChatDocument), tags=["openai"])
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer the last message of a chat."""
        _check_model(body.model, backends.served())
        state = request.state
        return await reply(request, body, await jobs.chat(body, request_id=state.request_id, arrived=state.arrived))

    @router.get("/v1/models", responses=success(ModelList) | errors(401, 503), tags=["openai"])
    async def list_models() -> Response:
        """The model that is served, under its own name and as `tandem`."""
        served = backends.served()
        cards = [_model_card(name, served, offer()) for name in (served.model_id, MODEL_ALIAS)]
        return _json({"object": "list", "data": cards})

    @router.get("/v1/models/{model_id:path}", responses=success(ModelCard) | errors(401, 404, 503), tags=["openai"])
    async def get_model(model_id: str) -> Response:
        """One model, by either name."""
        served = backends.served()
        _check_model(model_id, served)
        return _json(_model_card(model_id, served, offer()))

    @router.get("/health/live", tags=["health"])
    async def live() -> Response:
        """200 while the process answers at all."""
        return _json({"status": "live"})

    @router.get("/health", responses=readiness, tags=["health"], include_in_schema=False)  # where load tools look
    @router.get("/health/ready", responses=readiness, tags=["health"])
    async def ready(request: Request) -> Response:
        """200 while requests are served, `degraded` where by plain decoding only; 503 otherwise.

        The reasons name services and their addresses: where keys are asked for, only who has one sees them.
        """
        state = backends.readiness()
        if admission.draining:
            state = Readiness("unavailable", ("the gateway is shutting down", *state.reasons))
        content = {"status": state.status, "reasons": state.reasons if request.state.trusted else ()}
        return _json(content, status_code=503 if state.status == "unavailable" else 200)

    @router.get("/metrics", responses=errors(401), tags=["health"], response_class=Response)
    async def scrape(request: Request) -> Response:
        """Prometheus' page, as text or OpenMetrics."""
        page, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    return router


def _check_model(name: str | None, served: ServedModel) -> None:
    """Absent means the served one."""
    if name not in (None, MODEL_ALIAS, served.model_id):
        raise UnknownModel(f"the model {name[:200]!r} does not exist here; {served.model_id!r} does")


def _model_card(name: str, served: ServedModel, offer: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "tandem",
        "root": served.model_id,
        "parent": None,
        "max_model_len": served.context_length,
        "speculation": offer,
    }


def _json(content: object, *, status_code: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status_code, media_type="application/json")
