"""Errors between processes: raised in a service, carried by a real gRPC server, raised again as the same class."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tandem import errors
from tandem.errors import ContextTooLong, InternalError, InvalidRequest, TandemError, Unavailable
from tandem.rpc.channel import open_channel
from tandem.rpc.status import CODES, errors_as_status, to_error

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, TandemError) and value is not TandemError
]


def all_subclasses(root: type[TandemError]) -> set[type[TandemError]]:
    return {root}.union(*(all_subclasses(child) for child in root.__subclasses__()))


def test_every_error_class_has_a_status_code_of_its_own() -> None:
    """Both ways: no class without a code, no code for two classes, so that the way back is unambiguous."""
    assert set(CODES) == set(CLASSES) == all_subclasses(TandemError) - {TandemError}
    assert len(set(CODES.values())) == len(CODES)
    assert grpc.StatusCode.OK not in CODES.values()


def test_codes_that_clients_retry_are_those_of_errors_worth_retrying() -> None:
    """gRPC's own machinery retries UNAVAILABLE; a caller's fault must not look like it."""
    assert CODES[Unavailable] is grpc.StatusCode.UNAVAILABLE
    assert CODES[InvalidRequest] is grpc.StatusCode.INVALID_ARGUMENT


class Raiser:
    """A service with one unary and one streaming call; both do what they were made to do."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    async def unary(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        async with errors_as_status(context):
            self._act()
        return b"fine"

    async def streaming(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with errors_as_status(context):
            async for request in requests:
                await context.write(request)
                self._act()


def identity(message: bytes) -> bytes:
    return message


@asynccontextmanager
async def serving(act: Callable[[], None]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server on a free port whose calls end in `act`."""
    raiser = Raiser(act)
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(raiser.unary),
        "Streaming": grpc.stream_stream_rpc_method_handler(raiser.streaming),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Raiser", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(None)


async def call_once(channel: grpc.aio.Channel, method: str) -> None:
    unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/test.Raiser/{method}")
    await unary(b"", timeout=10)


async def exchange_and_read_on(channel: grpc.aio.Channel, method: str) -> None:
    stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/test.Raiser/{method}")
    call = stream(None, timeout=10)
    await call.write(b"first")
    assert await call.read() == b"first"
    await call.read()


async def failure(channel: grpc.aio.Channel, *, method: str = "Unary") -> TandemError:
    """The error that a call ends in, as the other side's code sees it."""
    call = exchange_and_read_on if method == "Streaming" else call_once
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, method)
    return to_error(failed.value, peer="target 127.0.0.1")


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("method", ["Unary", "Streaming"])
@pytest.mark.parametrize("kind", CLASSES)
async def test_an_error_arrives_as_the_same_class_with_its_message(kind: type[TandemError], method: str) -> None:
    async with serving(raising(kind("the reason why"))) as channel:
        error = await failure(channel, method=method)
    assert type(error) is kind
    assert error.message == "target 127.0.0.1: the reason why"


@pytest.mark.parametrize("kind", [InvalidRequest, ContextTooLong])
@pytest.mark.parametrize("param", ["top_p", None])
async def test_the_name_of_the_offending_field_arrives_too(kind: type[InvalidRequest], param: str | None) -> None:
    for method in ("Unary", "Streaming"):
        async with serving(raising(kind("no", param=param))) as channel:
            error = await failure(channel, method=method)
        assert isinstance(error, InvalidRequest)
        assert error.param == param


@pytest.mark.parametrize("message", ["größer als 1: 漢字 🙂", "two\nlines\r\n", "100 % sure, 50%25", ""])
async def test_any_text_arrives(message: str) -> None:
    async with serving(raising(InvalidRequest(message))) as channel:
        error = await failure(channel)
    assert type(error) is InvalidRequest
    assert error.message == f"target 127.0.0.1: {message or 'INVALID_ARGUMENT'}"


@pytest.mark.parametrize("kind", [InvalidRequest, InternalError])
async def test_a_very_long_message_arrives_as_the_same_class(kind: type[TandemError]) -> None:
    """Details travel in HTTP/2 trailers, of which gRPC takes 8 KiB and turns more into RESOURCE_EXHAUSTED: a caller's
    fault, or a model's long stack of errors, would look like overload."""
    async with serving(raising(kind("reason " + "é" * 20_000))) as channel:
        error = await failure(channel)
    assert type(error) is kind
    assert "reason" in error.message


async def test_an_unexpected_exception_is_internal_and_its_text_stays_in_the_log() -> None:
    with capture_logs() as logs:
        async with serving(raising(KeyError("a secret"))) as channel:
            error = await failure(channel)
    assert type(error) is InternalError
    assert "secret" not in error.message
    assert [entry["event"] for entry in logs] == ["call_failed"]


async def test_a_fault_of_our_own_is_logged_with_its_cause_and_a_callers_fault_is_not() -> None:
    fault = InternalError("the model failed")
    fault.__cause__ = ValueError("why")
    with capture_logs() as logs:
        async with serving(raising(fault)) as channel:
            await failure(channel)
        async with serving(raising(InvalidRequest("no"))) as channel:
            await failure(channel)
    assert [(entry["event"], entry["exc_info"]) for entry in logs] == [("call_failed", fault.__cause__)]


async def test_an_error_without_a_class_of_its_own_is_internal() -> None:
    async with serving(raising(TandemError("of no kind"))) as channel:
        error = await failure(channel)
    assert type(error) is InternalError
    assert "KeyError" not in error.message


async def test_an_abort_by_the_service_itself_is_left_alone() -> None:
    class Context:
        async def abort(self, *args: object) -> None:
            raise AssertionError("aborted twice")

    with pytest.raises(grpc.aio.AbortError):
        async with errors_as_status(Context()):  # type: ignore[arg-type]  # all of it that is needed
            raise grpc.aio.AbortError


async def test_a_client_that_leaves_is_no_error() -> None:
    started = asyncio.Event()
    ended: list[BaseException] = []

    class Context:
        async def abort(self, *args: object) -> None:
            raise AssertionError("nobody is there to be told")

    async def call() -> None:
        try:
            async with errors_as_status(Context()):  # type: ignore[arg-type]
                started.set()
                await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            ended.append(error)
            raise

    with capture_logs() as logs:
        task = asyncio.create_task(call())
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(ended) == 1
    assert logs == []


async def test_a_call_that_the_service_does_not_have_is_internal_and_names_the_peer() -> None:
    async with serving(lambda: None) as channel:
        error = await failure(channel, method="Other")
    assert type(error) is InternalError
    assert error.message.startswith("target 127.0.0.1: ")


async def test_nobody_at_the_address_is_unavailable() -> None:
    channel = open_channel("127.0.0.1:1")
    try:
        assert type(await failure(channel)) is Unavailable
    finally:
        await channel.close()
