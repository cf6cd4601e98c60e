"""The HTTP endpoints, and OpenAI's documents and chunks.

One id, one `created` and one `model` per response. In a stream the role comes in a chat choice's first chunk only,
`finish_reason` is null until the choice's last chunk, and that chunk carries no text. `speculation` stands at the top
of the document or, in a stream, of the last chunk with a finish_reason. What vLLM adds on request (token_ids,
prompt_token_ids) stands where vLLM has it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from gateway.admission import Admission
from gateway.answer import AnswerToken, Delta
from gateway.generate import Generation
from gateway.jobs import Job, JobMaker
from gateway.metrics import GatewayMetrics
from gateway.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.served import Backends, Readiness, ServedModel
from gateway.settings import Settings
from gateway.sse import EventStream, encode_event, until_disconnect
from tandem.errors import UnknownModel

MODEL_ALIAS = "tandem"


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail


class Reply:
    """How the deltas of one job are written: OpenAI's document or chunks, for a chat or for completions."""

    def __init__(self, body: GenerationBody, job: Job, deltas: AsyncGenerator[tuple[int, Delta]]) -> None:
        self._body = body
        self._job = job
        self._deltas = deltas
        self._is_chat = isinstance(body, ChatBody)
        self._num_tokens = 0
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or job.served.model_id,
        }

    async def document(self) -> dict[str, Any]:
        """The whole response, once all answers are complete."""
        texts = [""] * len(self._job.choices)
        tokens: list[list[AnswerToken]] = [[] for _ in self._job.choices]
        reasons = [""] * len(self._job.choices)
        async with aclosing(self._deltas) as deltas:
            async for index, delta in deltas:
                texts[index] += delta.text
                tokens[index].extend(delta.tokens)
                if delta.finish_reason is not None:
                    reasons[index] = delta.finish_reason.value
        self._num_tokens = sum(map(len, tokens))
        choices: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            choice = {"index": index, **said, "logprobs": None, "finish_reason": reasons[index]}
            choice |= self._token_fields(tokens[index])
            if not self._is_chat:
                choice |= self._prompt_ids(index)
            choices.append(choice)
        document = {**self._head, "choices": choices, "usage": self._usage(), "speculation": self._speculation()}
        if self._is_chat:
            document |= {"object": "chat.completion"} | self._prompt_ids(0)
        return document

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as a stream's events, the closing [DONE] not among them."""
        begun: set[int] = set()
        unfinished = len(self._job.choices)
        options = self._body.stream_options
        async with aclosing(self._deltas) as deltas:
            async for index, delta in deltas:
                if index not in begun and self._is_chat:
                    yield self._chunk(index, {"role": "assistant", "content": ""}, top=self._prompt_ids(index))
                self._num_tokens += len(delta.tokens)
                first = {} if index in begun or self._is_chat else self._prompt_ids(index)
                begun.add(index)
                tokens: Sequence[AnswerToken] = delta.tokens
                if delta.text:
                    yield self._chunk(index, delta.text, tokens=tokens, extra=first)
                    first, tokens = {}, ()
                if delta.finish_reason is not None:
                    unfinished -= 1
                    top = {} if unfinished else {"speculation": self._speculation()}
                    reason = delta.finish_reason.value
                    yield self._chunk(index, "", tokens=tokens, extra=first, finish_reason=reason, top=top)
        if options.include_usage:
            yield encode_event(self._stream_head() | {"choices": [], "usage": self._usage()})

    def _chunk(
        self,
        index: int,
        said: str | dict[str, str],
        *,
        tokens: Sequence[AnswerToken] = (),
        extra: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        top: dict[str, Any] | None = None,
    ) -> bytes:
        """One chunk with one choice. `said` is text, or a chat's delta."""
        if self._is_chat:
            delta = said if isinstance(said, dict) else {"content": said} if said else {}
            choice: dict[str, Any] = {"index": index, "delta": delta}
        else:
            choice = {"index": index, "text": said}
        choice |= {"logprobs": None, "finish_reason": finish_reason} | self._token_fields(tokens) | (extra or {})
        chunk = self._stream_head() | {"choices": [choice]} | (top or {})
        options = self._body.stream_options
        if options.include_usage:
            chunk["usage"] = self._usage() if options.continuous_usage_stats else None
        return encode_event(chunk)

    def _stream_head(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def _token_fields(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["token_ids"] = [token.token_id for token in tokens]
        if self._body.speculation.trace:
            fields["trace"] = [
                {
                    "token_id": token.token_id,
                    "text": token.text,
                    "origin": token.origin.value,
                    "round": token.round,
                    "position": token.position,
                }
                for token in tokens
            ]
        return fields

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._job.choices[index].start.token_ids} if self._body.return_token_ids else {}

    def _usage(self) -> dict[str, int]:
        """Tokens so far. The end token counts, what a round held beyond the end does not."""
        num_prompt = self._job.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
        }

    def _speculation(self) -> dict[str, Any]:
        return self._job.tally.report(seed=self._job.seed)


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
) -> APIRouter:
    """All endpoints, over the given objects."""
    errors: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorDocument}, "5XX": {"model": ErrorDocument}}
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    router = APIRouter(route_class=_JsonRoute, responses=errors)

    async def reply(request: Request, body: GenerationBody, job: Job) -> Response:
        writer = Reply(body, job, generation.run(job))
        if body.stream:
            return EventStream(
                writer.events(),
                request_id=request.state.request_id,
                ping_interval_seconds=settings.ping_interval_seconds,
                write_timeout_seconds=settings.write_timeout_seconds,
            )
        return _json(await until_disconnect(request.receive, writer.document()))

    @router.post("/v1/completions", responses={200: {"content": stream}}, tags=["openai"])
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue one prompt or several."""
        _check_model(body.model, backends.served())
        state = request.state
        return await reply(
            request, body, await jobs.completion(body, request_id=state.request_id, arrived=state.arrived)
        )

    @router.post("/v1/chat/completions", responses={200: {"content": stream}}, tags=["openai"])
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer the last message of a chat."""
        _check_model(body.model, backends.served())
        state = request.state
        return await reply(request, body, await jobs.chat(body, request_id=state.request_id, arrived=state.arrived))

    @router.get("/v1/models", tags=["openai"])
    async def list_models() -> Response:
        """The model that is served, under its own name and as `tandem`."""
        served = backends.served()
        cards = [_model_card(name, served) for name in (served.model_id, MODEL_ALIAS)]
        return _json({"object": "list", "data": cards})

    @router.get("/v1/models/{model_id:path}", tags=["openai"])
    async def get_model(model_id: str) -> Response:
        served = backends.served()
        _check_model(model_id, served)
        return _json(_model_card(model_id, served))

    @router.get("/health/live", tags=["health"])
    async def live() -> Response:
        """200 while the process answers at all."""
        return _json({"status": "live"})

    @router.get("/health/ready", tags=["health"])
    async def ready() -> Response:
        """200 while requests are served, `degraded` where by plain decoding only; 503 otherwise."""
        state = backends.readiness()
        if admission.draining:
            state = Readiness("unavailable", ("the gateway is shutting down", *state.reasons))
        content = {"status": state.status, "reasons": state.reasons}
        return _json(content, status_code=503 if state.status == "unavailable" else 200)

    @router.get("/metrics", tags=["health"], response_class=Response)
    async def scrape(request: Request) -> Response:
        """Prometheus' page, as text or OpenMetrics."""
        page, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    return router


def _check_model(name: str | None, served: ServedModel) -> None:
    """Absent means the served one."""
    if name not in (None, MODEL_ALIAS, served.model_id):
        raise UnknownModel(f"the model {name[:200]!r} does not exist here; {served.model_id!r} does")


def _model_card(name: str, served: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "tandem",
        "root": served.model_id,
        "parent": None,
        "max_model_len": served.context_length,
    }


def _json(content: object, *, status_code: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status_code, media_type="application/json")
