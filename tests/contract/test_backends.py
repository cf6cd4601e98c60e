"""What the speculative loop relies on, asked of the fakes and of real services behind real sockets alike.

A fake that passes is a fake to trust; the suite therefore uses nothing but `gateway/backends.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest

from draft_service.drafters.model import ModelDrafter
from draft_service.servicer import DraftServicer
from gateway.backends import Drafts, Target
from gateway.draft_length import FixedLength
from gateway.fleet import Fleet
from gateway.speculate import SpeculationPlan, speculate
from tandem.lookup.drafter import LookupDrafter
from tandem.rpc.sessions import SessionSlots
from tandem.service_metrics import ServiceMetrics
from tandem.types import (
    NO_DRAFT,
    Draft,
    DraftInfo,
    DraftWish,
    SamplingParams,
    SessionStart,
    TargetInfo,
    TokenOrigin,
)
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier
from tests.fakes import ScriptedDrafts, ScriptedTarget, alphabet, tokenizer_files
from tests.toy_models import ToyRunner, working
from tests.toy_services import DEADLINES, DRAFT, INFO, MODEL

PROMPT = tuple(b"abc")


@dataclass(frozen=True)
class Pair:
    """A target, drafts that guess well, and what the target says after the prompt, greedily.

    `draft_says`: the draft's own next token after a text, if it prepares drafts.
    """

    target: Target
    drafts: Drafts
    answer: Sequence[int]
    num_target_sessions: Callable[[], int]
    draft_says: Callable[[Sequence[int]], int] | None = None


@asynccontextmanager
async def scripted() -> AsyncIterator[Pair]:
    target = ScriptedTarget(alphabet)
    start = SessionStart(token_ids=PROMPT, prompt_length=3, sampling=SamplingParams(temperature=0.0), seed=1)
    yield Pair(target, ScriptedDrafts(alphabet), list(alphabet(start))[:100], lambda: target.num_open)


@asynccontextmanager
async def real() -> AsyncIterator[Pair]:
    """Both servicers on a gRPC server each, over toy models that can be computed by hand."""
    target_metrics = ServiceMetrics()
    with working(ToyRunner(MODEL)) as target_worker, working(ToyRunner(DRAFT)) as draft_worker:
        target = TargetServicer(
            info=TargetInfo(model=INFO, end_token_ids=(265,), max_sessions=8),
            tokenizer_files=tokenizer_files(),
            verifier=Verifier(target_worker),
            slots=SessionSlots(max_sessions=8, metrics=target_metrics),
        )
        drafts = DraftServicer(
            info=DraftInfo(
                model=INFO, drafters=("model", "ngram"), default_drafter="model", max_draft_tokens=16, max_sessions=8
            ),
            drafters={
                "model": ModelDrafter(draft_worker, law_size=50, prepared_branches=4),
                "ngram": LookupDrafter(least_certainty=0.0),
            },
            slots=SessionSlots(max_sessions=8, metrics=ServiceMetrics()),
        )
        servers = [grpc.aio.server(), grpc.aio.server()]
        target_pb2_grpc.add_TargetServiceServicer_to_server(target, servers[0])
        draft_pb2_grpc.add_DraftServiceServicer_to_server(drafts, servers[1])
        addresses = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for server in servers]
        for server in servers:
            await server.start()
        fleet = Fleet(
            targets=addresses[:1],
            drafts=addresses[1:],
            deadlines=replace(DEADLINES, draft_retry_seconds=0.1),
            probe_interval_seconds=0.2,
            probe_timeout_seconds=5,
            failover_seconds=5,
            observe_failover=lambda _: None,
            observe_draft_fault=lambda _: None,
        )
        await fleet.start()
        await _until(lambda: fleet.readiness().status == "ready")
        try:
            yield Pair(
                fleet.target,
                fleet.drafts,
                MODEL.greedy(PROMPT, 100),
                lambda: int(target_metrics.registry.get_sample_value("tandem_sessions_open") or 0),
                lambda text: DRAFT.greedy(text, 1)[0],
            )
        finally:
            await fleet.close()
            for server in servers:
                await server.stop(None)


@pytest.fixture(params=[scripted, real], ids=["fake", "grpc"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with request.param() as made:
        yield made


def _start() -> SessionStart:
    return SessionStart(token_ids=PROMPT, prompt_length=3, sampling=SamplingParams(temperature=0.0), seed=1)


async def test_the_first_token_is_plain(pair: Pair) -> None:
    session = pair.target.open(_start())
    verdict = await session.first()
    session.close()
    assert (verdict.num_accepted, verdict.token_id, verdict.origin) == (0, pair.answer[0], TokenOrigin.PLAIN)


async def test_a_right_draft_stands_whole_and_is_followed_by_a_bonus_token(pair: Pair) -> None:
    session = pair.target.open(_start())
    await session.first()
    verdict = await session.verify([*PROMPT, pair.answer[0]], Draft(tuple(pair.answer[1:4])))
    session.close()
    assert (verdict.num_accepted, verdict.token_id, verdict.origin) == (3, pair.answer[4], TokenOrigin.BONUS)


async def test_a_wrong_token_ends_the_draft_and_is_replaced(pair: Pair) -> None:
    session = pair.target.open(_start())
    await session.first()
    wrong = (pair.answer[2] + 1) % 200
    verdict = await session.verify([*PROMPT, pair.answer[0]], Draft((pair.answer[1], wrong, pair.answer[3])))
    assert (verdict.num_accepted, verdict.token_id, verdict.origin) == (1, pair.answer[2], TokenOrigin.RECOVERED)
    verdict = await session.verify([*PROMPT, *pair.answer[:3]], NO_DRAFT)
    session.close()
    assert (verdict.num_accepted, verdict.token_id, verdict.origin) == (0, pair.answer[3], TokenOrigin.PLAIN)


async def test_a_draft_never_exceeds_what_was_asked_for_and_follows_the_text(pair: Pair) -> None:
    session = pair.drafts.open(_start(), drafter="")
    text = list(PROMPT)
    for num_draft_tokens in (1, 4, 2, 3):
        text.append(pair.answer[len(text) - 3])
        proposal = await session.propose(text, DraftWish(num_draft_tokens))
        assert proposal.reason is None
        assert 1 <= len(proposal.draft.token_ids) <= num_draft_tokens
    session.close()


async def test_a_draft_that_was_prepared_says_so(pair: Pair) -> None:
    """The fake never prepares; the real one does, for what it thinks likely and if it is given the time."""
    session = pair.drafts.open(_start(), drafter="")
    text = [*PROMPT, pair.answer[0]]
    seen = []
    for _ in range(20):
        proposal = await session.propose(text, DraftWish(1))
        seen.append(proposal.prepared)
        text += proposal.draft.token_ids
        # All accepted, and then the draft's own next token: at temperature 0 the likeliest outcome.
        text.append(pair.draft_says(text) if pair.draft_says else 0)
        await asyncio.sleep(0.05)
    session.close()
    assert not seen[0]
    assert any(seen) == (pair.draft_says is not None)


async def test_the_price_of_a_token_reaches_the_drafter() -> None:
    """After 5 the text said 6, 7, 5. How sure that is, nobody knows yet: 0.26, then 0.55, then 0.62."""
    async with real() as pair:
        text = [5, 6, 7, 5]
        session = pair.drafts.open(replace(_start(), token_ids=tuple(text)), drafter="ngram")
        drafted = []
        for least_certainties in ((), (0.0,), (0.1,), (0.2,), (0.9,), (0.0, 0.1, 0.2), (0.0, 0.9)):
            proposal = await session.propose(text, DraftWish(3, least_certainties))
            drafted.append(proposal.draft.token_ids)
        session.close()
        assert [len(one) for one in drafted] == [3, 3, 2, 1, 0, 2, 1]
        assert drafted[0] == (6, 7, 5)


async def test_closing_frees_the_session_and_may_be_repeated(pair: Pair) -> None:
    target, drafts = pair.target.open(_start()), pair.drafts.open(_start(), drafter="")
    await target.first()
    assert pair.num_target_sessions() == 1
    for session in (target, target, drafts, drafts):
        session.close()
    await _until(lambda: pair.num_target_sessions() == 0)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
async def test_the_loop_says_what_plain_decoding_says(pair: Pair, num_draft_tokens: int) -> None:
    emitted: list[int] = []
    plan, length = SpeculationPlan(num_draft_tokens=num_draft_tokens), FixedLength(num_draft_tokens)
    async for outcome in speculate(
        _start(), max_length=63, plan=plan, length=length, target=pair.target, drafts=pair.drafts
    ):
        emitted += outcome.token_ids
    assert emitted == list(pair.answer[:60])
    await _until(lambda: pair.num_target_sessions() == 0)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - another process's gauge has no event to wait for
            await asyncio.sleep(0.01)
