"""A model service's gRPC server: health, reflection, bounds, and a drain that lets open sessions end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.engine.worker import Worker
from tandem.rpc import codec
from tandem.rpc.healthcheck import is_serving
from tandem.rpc.server import RpcServer
from tandem.rpc.sessions import SessionSlots
from tandem.service_metrics import ServiceMetrics
from tandem.types import ModelInfo, SamplingParams, SessionStart, TargetInfo
from tandem.v1 import target_pb2, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier
from tests.toy_models import ToyModel, ToyRunner, working

NAME = "tandem.v1.TargetService"
START = SessionStart(token_ids=(1, 2, 3), prompt_length=3, sampling=SamplingParams(temperature=0.0), seed=1)
INFO = ModelInfo(
    model_id="toy",
    revision="1",
    vocab_size=30,
    tokenizer_fingerprint="t",
    context_length=8192,
    device="cpu",
    dtype="float32",
    engine="toy",
)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with working(ToyRunner(ToyModel(vocab_size=30, seed=1))) as running:
        yield running


def _server(worker: Worker, *, port: int = 0, max_sessions: int = 8, grace_seconds: float = 5.0) -> RpcServer:
    servicer = TargetServicer(
        info=TargetInfo(model=INFO, end_token_ids=(0,), max_sessions=max_sessions),
        tokenizer_files={"tokenizer.json": b"x" * 3_000_000, "empty": b""},
        verifier=Verifier(worker),
        slots=SessionSlots(max_sessions=max_sessions, metrics=ServiceMetrics()),
    )
    return RpcServer(
        host="127.0.0.1",
        port=port,
        add_services=lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server),
        service_names=(NAME,),
        shutdown_grace_seconds=grace_seconds,
    )


@asynccontextmanager
async def _channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


@asynccontextmanager
async def _serving(worker: Worker, *, max_sessions: int = 8) -> AsyncIterator[RpcServer]:
    """Not a fixture: pytest would hold the server longer than its event loop lives, which grpc.aio complains about."""
    server = _server(worker, max_sessions=max_sessions)
    await server.start()
    yield server
    await server.stop()


def _open(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse]:
    return target_pb2_grpc.TargetServiceStub(channel).Verify(None, timeout=10)


async def _refusal(
    call: grpc.aio.StreamStreamCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    request: target_pb2.VerifyRequest,
) -> grpc.StatusCode:
    """The status that ends the call. It may arrive before the message is written, or after."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(request)
        await call.read()
    return await call.code()


async def _answer(
    call: grpc.aio.StreamStreamCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
) -> target_pb2.VerifyResponse:
    response = await call.read()
    assert isinstance(response, target_pb2.VerifyResponse)
    return response


async def test_health_is_serving_by_name_and_for_the_whole(worker: Worker) -> None:
    async with _serving(worker) as server, _channel(server) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        assert await asyncio.to_thread(is_serving, f"127.0.0.1:{server.port}", timeout_seconds=3)
    assert not await asyncio.to_thread(is_serving, "127.0.0.1:1", timeout_seconds=3)


async def test_reflection_names_the_service(worker: Worker) -> None:
    async with _serving(worker) as server, _channel(server) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        async for response in call:
            assert NAME in {service.name for service in response.list_services_response.service}
            break


async def test_tokenizer_files_arrive_whole_in_chunks(worker: Worker) -> None:
    files: dict[str, bytes] = {}
    async with _serving(worker) as server, _channel(server) as channel:
        async for part in target_pb2_grpc.TargetServiceStub(channel).FetchTokenizer(target_pb2.FetchTokenizerRequest()):
            assert len(part.chunk) <= 1 << 20
            files[part.file_name] = files.get(part.file_name, b"") + part.chunk
    assert files == {"tokenizer.json": b"x" * 3_000_000, "empty": b""}


@pytest.mark.parametrize(
    ("requests", "code"),
    [
        ([target_pb2.VerifyRequest(round=target_pb2.VerifyRound())], grpc.StatusCode.INVALID_ARGUMENT),
        ([target_pb2.VerifyRequest(open=target_pb2.TargetOpen())], grpc.StatusCode.INVALID_ARGUMENT),
        (
            [
                target_pb2.VerifyRequest(open=codec.target_open_to_pb(START)),
                target_pb2.VerifyRequest(open=codec.target_open_to_pb(START)),
            ],
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
    ids=["round first", "empty", "opened twice"],
)
async def test_a_stream_that_breaks_the_protocol_ends_with_the_right_status(
    worker: Worker, requests: list[target_pb2.VerifyRequest], code: grpc.StatusCode
) -> None:
    async with _serving(worker) as server, _channel(server) as channel:
        call = _open(channel)
        for request in requests[:-1]:
            await call.write(request)
            await _answer(call)
        assert await _refusal(call, requests[-1]) is code


async def test_keeping_tokens_that_the_session_does_not_hold_is_aborted(worker: Worker) -> None:
    async with _serving(worker) as server, _channel(server) as channel:
        call = _open(channel)
        await call.write(target_pb2.VerifyRequest(open=codec.target_open_to_pb(START)))
        await call.read()
        round_ = target_pb2.VerifyRound()
        round_.advance.keep_length = 99
        await call.write(target_pb2.VerifyRequest(round=round_))
        with pytest.raises(grpc.aio.AioRpcError, match="99") as ended:
            await call.read()
    assert ended.value.code() is grpc.StatusCode.ABORTED


async def test_one_session_too_many_is_resource_exhausted_and_the_next_fits_again(worker: Worker) -> None:
    async with _serving(worker, max_sessions=1) as server, _channel(server) as channel:
        opening = target_pb2.VerifyRequest(open=codec.target_open_to_pb(START))
        first = _open(channel)
        await first.write(opening)
        await first.read()
        # Opened only now: a stream takes its place when it is opened, not when it is written to.
        assert await _refusal(_open(channel), opening) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        third = _open(channel)
        await third.write(opening)
        await third.read()
        third.cancel()


async def test_a_drain_says_not_serving_and_lets_open_sessions_end(worker: Worker) -> None:
    server = _server(worker)
    await server.start()
    async with _channel(server) as channel, _channel(server) as watching:
        health = health_pb2_grpc.HealthStub(watching).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = _open(channel)
        await call.write(target_pb2.VerifyRequest(open=codec.target_open_to_pb(START)))
        first = await _answer(call)
        stopping = asyncio.create_task(server.stop())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        health.cancel()
        round_ = target_pb2.VerifyRound()
        round_.advance.keep_length = 3
        round_.advance.token_ids = codec.pack_ids([first.token_id])
        await call.write(target_pb2.VerifyRequest(round=round_))
        assert (await _answer(call)).length == 4
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 4)


def test_a_taken_port_is_one_line_in_the_log_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = {"TANDEM_DRAFT_PORT": str(port), "TANDEM_DRAFT_METRICS_PORT": "0", "TANDEM_LOG_FORMAT": "json"}
        ended = subprocess.run(
            [sys.executable, "-m", "draft_service"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_wrong_setting_is_named_and_exit_code_2() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "draft_service"],
        env={**os.environ, "TANDEM_DRAFT_MAX_SESSIONS": "-1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "max_sessions" in ended.stderr
    assert "Traceback" not in ended.stderr
