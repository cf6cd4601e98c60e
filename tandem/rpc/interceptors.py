"""Around every session of a model service: its request's id in every log line, a line when it ends, and its span."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from tandem.rpc.metadata import REQUEST_ID, is_harmless
from tandem.tracing import Tracing

Context = grpc.aio.ServicerContext[Any, Any]


class SessionContext(grpc.aio.ServerInterceptor):
    """For streams that write their answers, as sessions do; other calls pass as they are."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        behaviour: Any = handler.stream_stream
        if not asyncio.iscoroutinefunction(behaviour):  # one answer only, or a generator: health, reflection
            return handler
        method = handler_call_details.method.rpartition("/")[2]

        async def session(requests: AsyncIterator[Any], context: Context) -> None:
            await self._observed(method, context, behaviour(requests, context))

        return grpc.stream_stream_rpc_method_handler(
            session,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _observed(self, method: str, context: Context, work: Awaitable[None]) -> None:
        sent = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        given = sent.get(REQUEST_ID, "")
        bound = {"request_id": given} if is_harmless(given) else {}
        began = time.perf_counter()
        ended = "error"
        with (
            structlog.contextvars.bound_contextvars(**bound),
            self._tracing.span(method, parent=sent, attributes={"tandem.request_id": given} if bound else {}),
        ):
            try:
                await work
                ended = "closed"
            except asyncio.CancelledError:  # the gateway's close may look like its end of the stream, or like this
                ended = "closed"
                raise
            except grpc.aio.AbortError:
                code: Any = context.code()  # a StatusCode, which the stubs do not say
                ended = code.name if isinstance(code, grpc.StatusCode) else "aborted"
                raise
            finally:
                self._tracing.annotate({"tandem.ended": ended})
                log = structlog.get_logger()
                level = log.info if ended == "closed" else log.warning
                level("session", method=method, ended=ended, seconds=round(time.perf_counter() - began, 6))
