"""What a draft service says of a wish that is out of range, over a real socket."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from draft_service.servicer import DraftServicer
from tandem.draft_law import SparseLaw, pack
from tandem.lookup.drafter import LookupDrafter
from tandem.rpc import codec
from tandem.rpc.sessions import SessionSlots
from tandem.service_metrics import ServiceMetrics
from tandem.types import DraftInfo, SamplingParams, SessionStart
from tandem.v1 import common_pb2, draft_pb2, draft_pb2_grpc

START = SessionStart(token_ids=(5, 6, 5), prompt_length=3, sampling=SamplingParams(temperature=0.0), seed=1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be between 1 and 4, got 0"),
        ({"num_draft_tokens": 5}, "num_draft_tokens must be between 1 and 4, got 5"),
        (
            {"num_draft_tokens": 3, "least_certainties": [0.1, 1.5]},
            "least_certainties must be between 0 and 1, got 1.5",
        ),
        ({"num_draft_tokens": 3, "least_certainties": [float("nan")]}, "between 0 and 1, got nan"),
        ({"num_draft_tokens": 3, "least_certainties": [0.1] * 5}, "least_certainties must be 4 at most, got 5"),
    ],
)
async def test_a_draft_service_names_what_is_out_of_range(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await _answer_to(**asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_draft_service_hears_the_target_s_draft_head() -> None:
    law = pack([SparseLaw(np.array([9, 4], dtype=np.uint32), np.array([0.6, 0.3], dtype=np.float32))])
    told = await _answer_to(num_draft_tokens=1, next_law=codec.law_to_pb(law))
    assert codec.draft_from_pb(told.draft).token_ids == (9,)
    untold = await _answer_to(num_draft_tokens=1)
    assert codec.draft_from_pb(untold.draft).token_ids == (6,)


async def _answer_to(**asked: Any) -> draft_pb2.ProposeResponse:
    """What a service of n-grams answers to a round of these fields."""
    servicer = DraftServicer(
        info=DraftInfo(model=None, drafters=("ngram",), default_drafter="ngram", max_draft_tokens=4, max_sessions=1),
        drafters={"ngram": LookupDrafter(least_certainty=0.0)},
        slots=SessionSlots(max_sessions=1, metrics=ServiceMetrics()),
    )
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Propose(timeout=10)
            opening = draft_pb2.DraftOpen(session=codec.start_to_pb(START), drafter="ngram")
            await call.write(draft_pb2.ProposeRequest(open=opening))
            advance = common_pb2.Advance(keep_length=3)
            await call.write(draft_pb2.ProposeRequest(round=draft_pb2.ProposeRound(advance=advance, **asked)))
            response = await call.read()
            assert isinstance(response, draft_pb2.ProposeResponse)
            return response
    finally:
        await server.stop(None)
