"""The one table between Tandem's errors and gRPC status codes, used in both directions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

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

CODES: dict[type[TandemError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ContextTooLong: grpc.StatusCode.OUT_OF_RANGE,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    OutOfStep: grpc.StatusCode.ABORTED,
    Mismatch: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    InternalError: grpc.StatusCode.INTERNAL,
}
_ERRORS = {code: error for error, code in CODES.items()}
# gRPC takes 8 KiB of trailers; more arrives as RESOURCE_EXHAUSTED. A character takes up to 12 bytes of them.
_MAX_MESSAGE_CHARACTERS = 500
_PARAM = "tandem-param"  # trailing metadata: the field that InvalidRequest names


def to_error(error: grpc.aio.AioRpcError, *, peer: str) -> TandemError:
    """What a failed call means to the caller; `peer` names the service in the message."""
    code = error.code()
    message = f"{peer}: {error.details() or code.name}"
    kind = _ERRORS.get(code, InternalError)
    if issubclass(kind, InvalidRequest):
        return kind(message, param=_named_param(error))
    return kind(message)


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the right status when the block raises. Unknown errors are logged, their text is not sent."""
    try:
        yield
    except TandemError as error:
        if isinstance(error, InternalError):
            structlog.get_logger().error("call_failed", error=error.message, exc_info=error.__cause__)
        param = error.param if isinstance(error, InvalidRequest) else None
        trailing = ((_PARAM, param),) if param else ()
        code = CODES.get(type(error), grpc.StatusCode.INTERNAL)
        await context.abort(code, error.message[:_MAX_MESSAGE_CHARACTERS], trailing)
    except grpc.aio.AbortError:
        raise
    except Exception:  # noqa: BLE001 - logged here, so that its text need not be sent
        structlog.get_logger().exception("call_failed")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log has the details")


def _named_param(error: grpc.aio.AioRpcError) -> str | None:
    trailing: Any = error.trailing_metadata()  # pairs, which the stubs do not say
    return next((str(value) for key, value in trailing or () if key == _PARAM), None)
