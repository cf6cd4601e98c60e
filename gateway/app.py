"""The gateway as an ASGI application: routes, error handlers, and small pure-ASGI middlewares.

No BaseHTTPMiddleware: it hides a client's disconnect from the handler, which would then generate for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access import Access, ApiKeys
from gateway.admission import Admission
from gateway.errors import error_response, http_error_response, on_http_error, on_invalid_body, on_tandem_error
from gateway.generate import Generation
from gateway.jobs import JobMaker
from gateway.metrics import GatewayMetrics
from gateway.openapi import describe
from gateway.page_routes import build_page_router
from gateway.recorder import PromptRecorder
from gateway.routes import build_router
from gateway.schemas import GenerationBody
from gateway.served import Backends
from gateway.settings import Settings
from gateway.sse import ClientGone
from tandem import __version__
from tandem.errors import InternalError, TandemError
from tandem.rpc.metadata import is_harmless, outgoing_metadata
from tandem.tracing import NoTracing, Tracing

_TRACED_PATHS = "/v1/"
_QUIET_ROUTES = ("/health", "/health/live", "/health/ready", "/metrics")
_CLIENT_GONE_STATUS = 499  # nginx's word for it; only the log and the metrics see it


def create_app(
    settings: Settings,
    fleet: Backends,
    metrics: GatewayMetrics,
    *,
    admission: Admission | None = None,
    keys: ApiKeys | None = None,
    tracing: Tracing | None = None,
    recorder: PromptRecorder | None = None,
) -> FastAPI:
    """The application. `admission` is given by who must stop it gracefully, see gateway/__main__.py. Without `keys`
    everyone is let in; without `tracing` there are no traces, and without a `recorder` no prompt is stored."""
    traced = tracing or NoTracing()
    places = admission or Admission(
        max_running=settings.max_concurrent_requests,
        max_queued=settings.max_queued_requests,
        replicas=fleet.replicas,
    )
    generation = Generation(settings=settings, backends=fleet, metrics=metrics, admission=places, tracing=traced)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        metrics.watch_tasks(lambda: len(asyncio.all_tasks(loop)))  # of any thread: scrapes have their own
        await fleet.start()
        try:
            yield
        finally:
            await fleet.close()

    app = FastAPI(title="Tandem", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    router = build_router(
        settings=settings,
        backends=fleet,
        jobs=JobMaker(settings=settings, backends=fleet),
        generation=generation,
        admission=places,
        metrics=metrics,
        record=_forget if recorder is None else recorder.record,
    )
    page = build_page_router()
    app.include_router(router)
    app.include_router(page)
    app.add_exception_handler(TandemError, on_tandem_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]  # as FastAPI's manual has it
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout_seconds=settings.body_timeout_seconds)
    app.add_middleware(Access, keys=keys)
    app.add_middleware(RequestContext, metrics=metrics, tracing=traced)
    routes = [*router.routes, *page.routes]
    metrics.declare_routes([route.path_format for route in routes if isinstance(route, APIRoute)])
    metrics.watch(
        running=lambda: places.running,
        waiting=lambda: places.waiting,
        promised_tokens=lambda: places.num_promised_tokens,
        target_up=lambda: fleet.readiness().status != "unavailable",
        draft_up=(lambda: fleet.draft_info is not None) if settings.draft_addresses else None,
    )
    return app


def _forget(_body: GenerationBody) -> None:
    """Where prompts are not recorded."""


class RequestContext:
    """Outermost: gives every request an id and an arrival time, and says in log, metrics and trace how it went.

    The id is the client's `x-request-id`, where that is harmless, and goes back in the response's header. Log lines
    hold method, route, status and seconds, and the name of the key's owner; no path, query, header or body.
    """

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics, tracing: Tracing) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if is_harmless(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, arrived=arrived)
        status = _CLIENT_GONE_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with self._context(scope, headers, request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientGone:
                pass
            except Exception as error:
                self._log.error("request_failed", error=type(error).__name__, exc_info=True)
                if status != _CLIENT_GONE_STATUS:
                    raise  # half a response is out: the server must break the connection
                await error_response(InternalError(""), request_id=request_id)(scope, receive, send_with_id)
            finally:
                route = _route_template(scope)
                self._metrics.observe_http(route=route, status=status)
                level = self._log.debug if route in _QUIET_ROUTES else self._log.info
                seconds = round(time.perf_counter() - arrived, 6)
                client = scope["state"].get("client")
                owner = {} if client is None else {"client": client}
                self._tracing.annotate({"http.route": route, "http.response.status_code": status})
                level("request", method=scope["method"], route=route, status=status, seconds=seconds, **owner)

    @contextlib.contextmanager
    def _context(self, scope: Scope, headers: Headers, request_id: str) -> Iterator[None]:
        """In it, log lines, calls to services and spans belong to the request."""
        attributes = {"http.request.method": scope["method"], "tandem.request_id": request_id}
        with contextlib.ExitStack() as stack:
            if scope["path"].startswith(_TRACED_PATHS):
                stack.enter_context(self._tracing.span("request", parent=headers, attributes=attributes))
            carrier = self._tracing.carrier()
            stack.enter_context(outgoing_metadata(request_id, carrier))
            # W3C's traceparent: version, trace, span, flags.
            trace = {"trace_id": carrier["traceparent"].split("-")[1]} if "traceparent" in carrier else {}
            stack.enter_context(structlog.contextvars.bound_contextvars(request_id=request_id, **trace))
            yield


class BodyLimit:
    """Reads a request's body before the application sees it: within a size, and within a time.

    Starlette's own limit answers in plain text where a handler does not read the body, and has no clock; a body is
    needed whole before it can be parsed anyway.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_seconds):
                body = await self._read(Headers(scope=scope), receive)
        except _TooLarge:
            message = f"the request body is larger than {self._max_bytes} bytes"
            # The connection stays open: the server goes on reading, and dropping, what still comes. Closing it would
            # make the kernel reset the connection and the client lose this answer.
            await http_error_response(413, message)(scope, receive, send)
            return
        except TimeoutError:
            message = f"the request body did not arrive within {self._timeout_seconds:g} s"
            await http_error_response(408, message, headers={"Connection": "close"})(scope, receive, send)
            return
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()  # from here on only the disconnect can come
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise _TooLarge
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise _TooLarge
            if not message.get("more_body", False):
                return bytes(body)


class _TooLarge(Exception):
    """The body exceeds the limit."""


def _route_template(scope: Scope) -> str:
    """The matched route's template, a bounded set; "other" where none matched."""
    return getattr(scope.get("route"), "path_format", None) or "other"
