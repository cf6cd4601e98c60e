"""gRPC to verifier and back: nothing is decided here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from tandem.errors import InvalidRequest
from tandem.rpc import codec
from tandem.rpc.sessions import SessionSlots
from tandem.rpc.status import errors_as_status
from tandem.types import NO_DRAFT, TargetInfo
from tandem.v1 import target_pb2, target_pb2_grpc
from target_service.verifier import Verifier

_CHUNK_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """The target's three calls."""

    def __init__(
        self,
        *,
        info: TargetInfo,
        tokenizer_files: Mapping[str, bytes],
        verifier: Verifier,
        slots: SessionSlots,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises Unavailable while the model does not compute."""
        self._info = codec.target_info_to_pb(info)
        self._files = tokenizer_files
        self._verifier = verifier
        self._slots = slots
        self._check = check

    async def Describe(  # noqa: N802 - the name is the proto's
        self, request: target_pb2.TargetServiceDescribeRequest, context: Context
    ) -> target_pb2.TargetServiceDescribeResponse:
        async with errors_as_status(context):
            self._check()
        return self._info

    async def FetchTokenizer(  # noqa: N802
        self, request: target_pb2.FetchTokenizerRequest, context: Context
    ) -> AsyncIterator[target_pb2.FetchTokenizerResponse]:
        for name, content in self._files.items():
            for begin in range(0, max(len(content), 1), _CHUNK_BYTES):
                chunk = content[begin : begin + _CHUNK_BYTES]
                yield target_pb2.FetchTokenizerResponse(file_name=name, chunk=chunk)

    # Writes instead of yielding: a generator left at a yield by a vanished client is closed only when collected,
    # and its session would live as long. The stubs know the yielding form alone.
    async def Verify(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> None:
        async with errors_as_status(context), self._slots.take():
            opened = await anext(requests, None)
            if opened is None or opened.WhichOneof("step") != "open":
                raise InvalidRequest("the first message of a stream must be `open`", param="open")
            session = self._verifier.open(codec.target_open_from_pb(opened.open, vocab_size=self._verifier.vocab_size))
            try:
                await context.write(codec.verdict_to_pb(await session.first(), length=session.length))
                async for request in requests:
                    if request.WhichOneof("step") != "round":
                        raise InvalidRequest("a session is opened once", param="open")
                    new_tokens = codec.unpack_ids(request.round.advance.token_ids, field="advance.token_ids")
                    codec.check_ids(new_tokens, vocab_size=self._verifier.vocab_size)
                    draft = codec.draft_from_pb(request.round.draft) if request.round.HasField("draft") else NO_DRAFT
                    verdict = await session.verify(request.round.advance.keep_length, new_tokens, draft)
                    self._slots.count_round()
                    await context.write(codec.verdict_to_pb(verdict, length=session.length))
            finally:
                session.close()
