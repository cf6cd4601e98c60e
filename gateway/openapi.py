"""What /openapi.json says of answers: the documents of a success, the events of a stream, every error that occurs.

These models are documentation: answers are written as dicts, which is faster. A test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Document):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(_Document):
    """Every answer that is not a success."""

    error: ErrorDetail


class Usage(_Document):
    """Each prompt counts once; the tokens of all its answers count, end tokens too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TraceRound(_Document):
    """One call of the target. Seconds as in the whole report."""

    prefill: Annotated[bool, Field(description="an answer's first round, whose time is that of its prompt")]
    drafted: int
    accepted: int
    prepared: Annotated[bool, Field(description="its draft was ready when it was asked for")]
    draft_seconds: float
    verify_seconds: float
    network_seconds: float


class SpeculationReport(_Document):
    """How well speculation worked, over all answers to the request. Ratios of nothing are null."""

    verification: Literal["rejection", "coupled"]
    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    acceptance_length: float | None
    accepted_per_position: list[int]
    draftless_rounds: int
    prepared_hits: int
    seed: int
    draft_seconds: float
    verify_seconds: float
    network_seconds: float
    bytes_sent: int
    round_trace: Annotated[list[TraceRound] | None, Field(description="with speculation.trace")] = None


class TraceToken(_Document):
    token_id: int
    text: str
    origin: Literal["accepted", "recovered", "bonus", "plain"]
    round: Annotated[int, Field(description="call of the target, from 0, the prefill's")]
    position: Annotated[int, Field(description="in the answer, from 0")]
    drafted: Annotated[int, Field(description="drafted tokens that the target tested in this round")]


class CompletionLogprobs(_Document):
    """Of the raw model. A prompt's first token has null for both values."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatAlternative(_Document):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatAlternative):
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(_Document):
    content: list[ChatToken]
    refusal: None


class _Choice(_Document):
    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: Annotated[list[int] | None, Field(description="with return_token_ids")] = None
    trace: Annotated[list[TraceToken] | None, Field(description="with speculation.trace")] = None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: Annotated[list[int] | None, Field(description="with return_token_ids")] = None


class ChatAnswer(_Document):
    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    message: ChatAnswer
    logprobs: ChatLogprobs | None


class _Answer(_Document):
    id: str
    created: int
    model: str
    usage: Usage
    speculation: SpeculationReport


class CompletionDocument(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatDocument(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: Annotated[list[int] | None, Field(description="with return_token_ids")] = None


class SpeculationOffer(_Document):
    """What a request's `speculation` may ask for at present."""

    drafters: Annotated[list[str], Field(description="empty while there is no draft service")]
    draft_model: Annotated[str | None, Field(description="null where drafts need no model")]
    num_draft_tokens: Annotated[int | Literal["auto"], Field(description="where a request does not say")]
    max_num_draft_tokens: int


class ModelCard(_Document):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    speculation: SpeculationOffer


class ModelList(_Document):
    object: Literal["list"]
    data: list[ModelCard]


class ReadinessDocument(_Document):
    status: Literal["ready", "degraded", "unavailable"]
    reasons: list[str]


Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    401: "No API key, or one that is not known, where the server asks for one",
    400: "A field is wrong, is not supported, or the context is too short; `param` names the field",
    404: "No such model",
    408: "The request's body did not arrive in time",
    413: "The request's body is too large",
    415: "The request's body is not declared as JSON",
    429: "The queue is full; Retry-After says when to come back",
    500: "A fault of the server's own",
    503: "The target cannot be reached, or the gateway is shutting down; Retry-After says when to come back",
    504: "The answer was not complete in time",
}
GENERATION_ERRORS = tuple(_ERRORS)
_RETRY = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}


def success(document: type[BaseModel]) -> Responses:
    return {200: {"model": document}}


def errors(*statuses: int) -> Responses:
    """The entries for these errors."""
    return {
        status: {"model": ErrorDocument, "description": _ERRORS[status]}
        | ({"headers": _RETRY} if status in (429, 503) else {})
        for status in statuses
    }


def generated(document: type[BaseModel]) -> Responses:
    """The entries of an endpoint that answers with `document`, or with events."""
    answer = {
        "model": document,
        "description": "The answer; with `stream`, server-sent events, each `data:` one chunk, the last one [DONE]",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
    return {200: answer} | errors(*GENERATION_ERRORS)


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document. FastAPI adds a 422 to whatever takes input; here a wrong body is a 400.

    Whether keys are asked for is up to who runs the server, so the document says that they may be.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"bearer": []}]
    return document
