"""Errors as HTTP answers: one table for Tandem's own tree, and OpenAI's body for everything that can go wrong.

`{"error": {"message", "type", "param", "code"}}`, always, whatever the status: clients look for `error` and nothing
else. Messages name fields and limits, never what a prompt says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tandem.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    Mismatch,
    OutOfStep,
    Overloaded,
    TandemError,
    TimedOut,
    Unavailable,
    UnknownModel,
)

RETRY_AFTER_SECONDS = 1
_MAX_REPORTED = 3  # of a body with many faults


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """How one class of errors looks from outside. `shows_message` is False where it would tell of our insides."""

    status: int
    type: str
    code: str | None = None
    shows_message: bool = True
    retry: bool = False


_INTERNAL = ErrorShape(status=500, type="server_error", code="internal_error", shows_message=False)

_SHAPES: Mapping[type[TandemError], ErrorShape] = {
    InvalidRequest: ErrorShape(status=400, type="invalid_request_error"),
    ContextTooLong: ErrorShape(status=400, type="invalid_request_error", code="context_length_exceeded"),
    UnknownModel: ErrorShape(status=404, type="invalid_request_error", code="model_not_found"),
    OutOfStep: _INTERNAL,
    Mismatch: ErrorShape(status=503, type="server_error", code="mismatch"),
    Overloaded: ErrorShape(status=429, type="rate_limit_error", code="overloaded", retry=True),
    Unavailable: ErrorShape(status=503, type="server_error", code="unavailable", retry=True),
    TimedOut: ErrorShape(status=504, type="server_error", code="timeout"),
    InternalError: _INTERNAL,
}

_HTTP_CODES: Mapping[int, str] = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
    503: "unavailable",
}


def unmapped(tree: type[TandemError] = TandemError) -> set[type[TandemError]]:
    """The classes below `tree` that the table has no line of their own for."""
    found: set[type[TandemError]] = set()
    for error_class in tree.__subclasses__():
        if error_class not in _SHAPES:
            found.add(error_class)
        found |= unmapped(error_class)
    return found


def shape_of(error: BaseException) -> ErrorShape:
    """The line of the nearest class that the table knows; anything that is not ours is an internal error."""
    for error_class in type(error).__mro__:
        if error_class in _SHAPES:
            return _SHAPES[error_class]
    return _INTERNAL


def error_body(error: BaseException, *, request_id: str = "") -> dict[str, Any]:
    """OpenAI's error object for `error`, as an answer's body or as a stream's last event."""
    shape = shape_of(error)
    if isinstance(error, TandemError) and shape.shows_message:
        message = error.message
    else:
        message = f"internal error; the server's log has more under request id {request_id or 'unknown'}"
    param = error.param if isinstance(error, InvalidRequest) else None
    if isinstance(error, UnknownModel):
        param = "model"
    return _body(message, type=shape.type, param=param, code=shape.code)


def error_response(error: BaseException, *, request_id: str = "") -> Response:
    shape = shape_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if shape.retry else None
    return _json(shape.status, error_body(error, request_id=request_id), headers)


def http_error_response(status: int, message: str, *, headers: Mapping[str, str] | None = None) -> Response:
    """For what HTTP itself refuses: no key, no such path, wrong method, too large, wrong content type, too slow."""
    return _json(status, http_error_body(status, message), headers)


def http_error_body(status: int, message: str) -> dict[str, Any]:
    """The same error's body alone."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _body(message, type=kind, param=None, code=_HTTP_CODES.get(status))


async def on_tandem_error(request: Request, error: Exception) -> Response:
    return error_response(error, request_id=request.state.request_id)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"no such path: {request.method} {request.url.path}", 405: f"{request.method} is not allowed here"}
    message = messages.get(error.status_code, str(error.detail))
    return http_error_response(error.status_code, message, headers=error.headers)


async def on_invalid_body(request: Request, error: Exception) -> Response:
    """A body that is not JSON, not an object, or holds fields of the wrong shape: 400 with the fields' names."""
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    if any(fault["type"] == "json_invalid" for fault in faults):
        reason = faults[0].get("ctx", {}).get("error", "syntax error")
        return error_response(InvalidRequest(f"the request body is not valid JSON: {reason}"))
    if not _is_json(request.headers.get("content-type", "")) and request.method == "POST":
        return http_error_response(415, "send the request body as JSON, with the header content-type: application/json")
    return error_response(invalid_request(faults))


def invalid_request(faults: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """pydantic's faults as one error that names the first field. What the fields held is not repeated."""
    param = field_name(faults[0]["loc"])
    if not param:
        return InvalidRequest("the request body must be a JSON object")
    messages = [f"{field_name(fault['loc'])}: {_plain(fault['msg'])}" for fault in faults[:_MAX_REPORTED]]
    if len(faults) > _MAX_REPORTED:
        messages.append(f"and {len(faults) - _MAX_REPORTED} more")
    return InvalidRequest("; ".join(messages), param=param)


def field_name(location: Sequence[int | str]) -> str:
    """("body", "messages", 0, "role") as messages[0].role."""
    name = ""
    for part in location[1:] if tuple(location[:1]) == ("body",) else location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def _body(message: str, *, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _json(status: int, content: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status_code=status, headers=headers, media_type="application/json")
