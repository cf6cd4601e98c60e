"""gRPC to drafters and back: nothing is decided here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from draft_service.drafters.base import Drafter, DrafterSession
from tandem.errors import InvalidRequest, UnknownModel
from tandem.rpc import codec
from tandem.rpc.sessions import SessionSlots
from tandem.rpc.status import errors_as_status
from tandem.types import DraftInfo, DraftWish
from tandem.v1 import draft_pb2, draft_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The draft service's two calls."""

    def __init__(
        self,
        *,
        info: DraftInfo,
        drafters: Mapping[str, Drafter],
        slots: SessionSlots,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises Unavailable while the model does not compute."""
        self._info = info
        self._drafters = drafters
        self._slots = slots
        self._check = check

    async def Describe(  # noqa: N802 - the name is the proto's
        self, request: draft_pb2.DraftServiceDescribeRequest, context: Context
    ) -> draft_pb2.DraftServiceDescribeResponse:
        async with errors_as_status(context):
            self._check()
        return codec.draft_info_to_pb(self._info)

    # Writes instead of yielding, as the target's Verify does.
    async def Propose(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> None:
        async with errors_as_status(context), self._slots.take():
            session = self._open(await anext(requests, None))
            try:
                async for request in requests:
                    if request.WhichOneof("step") != "round":
                        raise InvalidRequest("a session is opened once", param="open")
                    drafted = await session.propose(
                        request.round.advance.keep_length,
                        self._ids(request.round.advance.token_ids, field="advance.token_ids"),
                        self._wish(request.round),
                    )
                    self._slots.count_round()
                    await context.write(
                        draft_pb2.ProposeResponse(
                            draft=codec.draft_to_pb(drafted.draft),
                            length=session.length,
                            queue_seconds=drafted.times.queue_seconds,
                            forward_seconds=drafted.times.forward_seconds,
                            prepared=drafted.prepared,
                        )
                    )
            finally:
                session.close()

    def _open(self, request: draft_pb2.ProposeRequest | None) -> DrafterSession:
        if request is None or request.WhichOneof("step") != "open":
            raise InvalidRequest("the first message of a stream must be `open`", param="open")
        name = request.open.drafter or self._info.default_drafter
        drafter = self._drafters.get(name)
        if drafter is None:
            raise UnknownModel(f"no drafter {name!r} here; there are: {', '.join(self._drafters)}")
        return drafter.open(codec.start_from_pb(request.open.session, vocab_size=self._vocab_size))

    @property
    def _vocab_size(self) -> int | None:
        return None if self._info.model is None else self._info.model.vocab_size

    def _ids(self, packed: bytes, *, field: str) -> tuple[int, ...]:
        token_ids = codec.unpack_ids(packed, field=field)
        if self._vocab_size is not None:
            codec.check_ids(token_ids, vocab_size=self._vocab_size)
        return token_ids

    def _wish(self, asked: draft_pb2.ProposeRound) -> DraftWish:
        most = self._info.max_draft_tokens
        if not 1 <= asked.num_draft_tokens <= most:
            message = f"num_draft_tokens must be between 1 and {most}, got {asked.num_draft_tokens}"
            raise InvalidRequest(message, param="num_draft_tokens")
        next_law = codec.law_from_pb(asked.next_law) if asked.HasField("next_law") else None
        wish = DraftWish(asked.num_draft_tokens, tuple(asked.least_certainties), next_law)
        if len(wish.least_certainties) > most:
            message = f"least_certainties must be {most} at most, got {len(wish.least_certainties)}"
            raise InvalidRequest(message, param="least_certainties")
        for one in wish.least_certainties:
            if not 0.0 <= one <= 1.0:  # what is not a number is not, either
                message = f"least_certainties must be between 0 and 1, got {one:g}"
                raise InvalidRequest(message, param="least_certainties")
        return wish
