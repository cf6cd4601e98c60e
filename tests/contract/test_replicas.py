"""Targets and drafts that are cut off, freeze or hang, some behind a proxy: the text goes on, and is the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace

import pytest

from gateway.draft_length import FixedLength
from gateway.failover import FailoverReason
from gateway.speculate import Round, SpeculationPlan, speculate
from tandem.errors import Unavailable
from tandem.types import DraftlessReason, KvCache, SamplingParams, SessionStart, TargetInfo, TokenOrigin, Verification
from tests.fakes import eventually
from tests.fault_proxy import Fault, FaultProxy
from tests.toy_services import DEADLINES, INFO, ToyFleet, toy_fleet

PROMPT = tuple(b"abc")
# What is late after a tenth of it: a second; and of a first draft, of which nothing is known, after two.
IMPATIENT = replace(DEADLINES, draft_first_seconds=2)


def _start(*, seed: int = 1, verification: Verification = Verification.REJECTION) -> SessionStart:
    sampling = SamplingParams(temperature=0.8)
    return SessionStart(
        token_ids=PROMPT, prompt_length=3, sampling=sampling, seed=seed, verification=verification, request_id="r"
    )


async def _rounds(toys: ToyFleet, start: SessionStart, *, num_tokens: int, k: int = 3) -> AsyncGenerator[Round]:
    loop = speculate(
        start,
        max_length=len(PROMPT) + num_tokens,
        plan=SpeculationPlan(num_draft_tokens=k),
        length=FixedLength(k),
        target=toys.fleet.target,
        drafts=toys.fleet.drafts,
    )
    async with aclosing(loop):
        async for one in loop:
            yield one


async def _tokens(toys: ToyFleet, start: SessionStart, *, num_tokens: int = 60, k: int = 3) -> list[int]:
    return [token_id async for one in _rounds(toys, start, num_tokens=num_tokens, k=k) for token_id in one.token_ids]


@contextmanager
def _proxies() -> Iterator[tuple[Callable[[int], int], list[FaultProxy]]]:
    with ExitStack() as stack:
        made: list[FaultProxy] = []

        def between(port: int) -> int:
            made.append(stack.enter_context(FaultProxy(port)))
            return made[-1].port

        yield between, made


@pytest.fixture
def proxies() -> Iterator[tuple[Callable[[int], int], list[FaultProxy]]]:
    with _proxies() as made:
        yield made


@pytest.mark.parametrize("verification", Verification)
@pytest.mark.parametrize("num_targets", [1, 2])
async def test_a_target_that_is_cut_off_again_and_again_costs_no_token(
    proxies: tuple[Callable[[int], int], list[FaultProxy]], verification: Verification, num_targets: int
) -> None:
    between, made = proxies
    async with toy_fleet(num_targets=num_targets, between=between) as toys:
        start = _start(verification=verification)
        right = await _tokens(toys, start)
        said: list[int] = []
        async for one in _rounds(toys, start, num_tokens=60):
            said += one.token_ids
            if len(toys.failovers) < 4 and len(said) > 10 * (len(toys.failovers) + 1):
                for proxy in made[:num_targets]:
                    proxy.cut()
        assert said == right
        assert set(toys.failovers) == {FailoverReason.UNAVAILABLE}
        assert len(toys.failovers) >= 4
        await eventually(lambda: not any(service.num_sessions for service in (*toys.targets, *toys.drafts)))


async def test_bytes_that_are_late_or_trickle_cost_time_only(
    proxies: tuple[Callable[[int], int], list[FaultProxy]],
) -> None:
    between, made = proxies
    async with toy_fleet(between=between) as toys:
        right = await _tokens(toys, _start(), num_tokens=30)
        for fault in (Fault.DELAY, Fault.TRICKLE):
            for proxy in made:
                proxy.set(fault)
            assert await _tokens(toys, _start(), num_tokens=30) == right
        assert toys.failovers == []
        assert toys.draft_faults == []


async def test_a_target_that_hangs_is_left_for_another_one() -> None:
    async with toy_fleet(num_targets=2, num_drafts=0, wait_for="degraded", deadlines=IMPATIENT) as toys:
        right = await _tokens(toys, _start(), num_tokens=200, k=0)
        said: list[int] = []
        async for one in _rounds(toys, _start(), num_tokens=200, k=0):
            said += one.token_ids
            if len(said) == 40:
                busy = next(service for service in toys.targets if service.num_sessions)
                busy.hang()
        assert said == right
        assert set(toys.failovers) == {FailoverReason.TIMEOUT}  # on a busy machine the other one may seem late as well
        # A new session does not try it at once, though it still says who it is.
        before = len(toys.failovers)
        assert await _tokens(toys, _start(), k=0) == right[:60]
        assert len(toys.failovers) == before


async def test_a_target_that_hangs_in_the_prefill_is_left_as_well() -> None:
    async with toy_fleet(num_targets=2, num_drafts=0, wait_for="degraded", deadlines=IMPATIENT) as toys:
        right = await _tokens(toys, _start(), k=0)
        await asyncio.gather(*(_tokens(toys, _start(), num_tokens=10, k=0) for _ in range(2)))  # both are known now
        toys.targets[0].hang()
        said = await asyncio.gather(*(_tokens(toys, _start(), k=0) for _ in range(4)))
        assert said == [right] * 4
        assert toys.failovers == [FailoverReason.TIMEOUT] * 2


async def test_a_target_without_another_one_beside_it_is_waited_for() -> None:
    """To begin again would lose what it has computed, and win nothing."""
    async with toy_fleet(num_drafts=0, wait_for="degraded", deadlines=IMPATIENT) as toys:
        right = await _tokens(toys, _start(), k=0)
        said: list[int] = []
        async for one in _rounds(toys, _start(), num_tokens=60, k=0):
            said += one.token_ids
            if len(said) == 20:
                toys.targets[0].hang()
                asyncio.get_running_loop().call_later(2.0, toys.targets[0].go_on)
        assert said == right
        assert toys.failovers == []


async def test_a_target_that_never_comes_back_is_an_error_after_the_limit(
    proxies: tuple[Callable[[int], int], list[FaultProxy]],
) -> None:
    between, made = proxies
    async with toy_fleet(num_drafts=0, wait_for="degraded", between=between, failover_seconds=0.5) as toys:
        rounds = _rounds(toys, _start(), num_tokens=60, k=0)
        await anext(rounds)
        made[0].refuse(refusing=True)
        with pytest.raises(Unavailable, match="target 127"):
            async for _ in rounds:
                pass
        assert toys.failovers == [FailoverReason.UNAVAILABLE]
        with pytest.raises(Unavailable):  # by now none has been up for longer than that
            await _tokens(toys, _start(), k=0)


async def test_sessions_go_where_there_are_fewest() -> None:
    async with toy_fleet(num_targets=3, num_drafts=0, wait_for="degraded") as toys:
        rounds = [_rounds(toys, _start(), num_tokens=60, k=0) for _ in range(6)]
        for one in rounds:
            await anext(one)
        assert [service.num_sessions for service in toys.targets] == [2, 2, 2]
        for one in rounds:
            await one.aclose()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_id": "other"}, "its model is other@1, theirs toy@1"),
        ({"revision": "2"}, "its model is toy@2, theirs toy@1"),
        ({"tokenizer_fingerprint": "u"}, "its tokenizer is u, theirs t"),
        ({"vocab_size": 265}, "its vocabulary is 265, theirs 266"),
        ({"context_length": 100}, "its context is 100, theirs 8192"),
    ],
)
async def test_a_target_that_is_no_replica_is_refused_by_name(change: dict[str, str], named: str) -> None:
    served = TargetInfo(model=INFO, end_token_ids=(265,), max_sessions=64)
    other = replace(served, model=replace(INFO, **change))  # type: ignore[arg-type]
    async with toy_fleet(num_targets=2, num_drafts=0, infos=(served, other), wait_for="degraded") as toys:
        await eventually(lambda: any("no replica" in reason for reason in toys.fleet.readiness().reasons), seconds=5.0)
        (reason,) = (reason for reason in toys.fleet.readiness().reasons if "no replica" in reason)
        # Whichever is reached first is served; the other one is named.
        served_id = toys.fleet.served().info.model
        assert f"127.0.0.1:{toys.targets[1 if served_id == INFO else 0].port}" in reason
        assert named in reason or served_id != INFO
        await _tokens(toys, _start(), num_tokens=20)
        assert toys.targets[1 if served_id == INFO else 0].runner.num_forwards == 0


async def test_each_replicas_kv_cache_is_known_and_answers_begin_where_they_were_promised_room() -> None:
    caches = (KvCache(num_blocks=512, block_size=4), KvCache(num_blocks=100, block_size=4))
    infos = [TargetInfo(model=INFO, end_token_ids=(265,), max_sessions=64, kv_cache=cache) for cache in caches]
    async with toy_fleet(num_targets=2, num_drafts=0, infos=infos, wait_for="degraded") as toys:
        fleet = toys.fleet
        await eventually(lambda: len(fleet.replicas()) == 2, seconds=5.0)
        addresses = [f"127.0.0.1:{service.port}" for service in toys.targets]
        assert {one.address: one.kv_cache for one in fleet.replicas()} == dict(zip(addresses, caches, strict=True))
        for address, service in zip(addresses, toys.targets, strict=True):
            sessions = [fleet.target_at(address).open(_start()) for _ in range(3)]
            for session in sessions:
                await session.first()
            assert service.num_sessions == 3
            for session in sessions:
                session.close()
        await toys.targets[0].stop()
        await eventually(lambda: len(fleet.replicas()) == 1, seconds=5.0)
        assert len(fleet.known_replicas()) == 2
        session = fleet.target_at(addresses[0]).open(_start())  # gone: the other one does it
        await session.first()
        assert toys.targets[1].num_sessions == 1
        session.close()


# --- drafts


async def test_a_draft_that_is_cut_off_costs_a_few_draftless_rounds(
    proxies: tuple[Callable[[int], int], list[FaultProxy]],
) -> None:
    between, made = proxies
    async with toy_fleet(between=between, step_seconds=0.005) as toys:
        start = _start(verification=Verification.COUPLED)
        right = await _tokens(toys, start, num_tokens=400)
        rounds: list[Round] = []
        async for one in _rounds(toys, start, num_tokens=400):
            rounds.append(one)
            if len(rounds) == 20:
                made[1].cut()
        assert [token_id for one in rounds for token_id in one.token_ids] == right
        reasons = [one.draftless_reason for one in rounds]
        assert DraftlessReason.DOWN in reasons
        assert reasons[-10:-3] == [None] * 7  # back long before the end
        assert toys.draft_faults == [DraftlessReason.DOWN]


@pytest.mark.parametrize("num_tokens_before", [0, 40])
async def test_a_draft_that_hangs_is_waited_for_once_and_tried_beside_the_rounds(num_tokens_before: int) -> None:
    """In the middle of a request, and before its first draft."""
    async with toy_fleet(step_seconds=0.005, deadlines=IMPATIENT) as toys:
        start = _start(verification=Verification.COUPLED)
        right = await _tokens(toys, start, num_tokens=900)
        rounds: list[Round] = []
        num_tokens = 0
        if not num_tokens_before:
            toys.drafts[0].hang()
        async for one in _rounds(toys, start, num_tokens=900):
            rounds.append(one)
            num_tokens += len(one.token_ids)
            if num_tokens_before and num_tokens >= num_tokens_before:
                toys.drafts[0].hang()
                num_tokens_before = 0
            if num_tokens > 300:
                toys.drafts[0].go_on()
        assert [token_id for one in rounds for token_id in one.token_ids] == right
        reasons = [one.draftless_reason for one in rounds]
        assert reasons.count(DraftlessReason.TIMEOUT) == 1
        assert reasons.count(DraftlessReason.DOWN) > 50
        assert all(one.draft_seconds == 0.0 for one in rounds if one.draftless_reason is DraftlessReason.DOWN)
        assert rounds[-20].origins[0] is TokenOrigin.ACCEPTED or reasons[-20] is None  # drafts are back
        assert set(toys.draft_faults) == {DraftlessReason.TIMEOUT}
    assert not any(service.num_sessions for service in toys.drafts)


async def test_a_request_that_ends_while_it_tries_a_draft_leaves_nothing() -> None:
    async with toy_fleet(step_seconds=0.005, deadlines=IMPATIENT) as toys:
        toys.drafts[0].hang()
        await _tokens(toys, _start(), num_tokens=400)
        await eventually(lambda: not any(service.num_sessions for service in (*toys.targets, *toys.drafts)))
        toys.drafts[0].go_on()


async def test_of_two_drafts_the_other_one_goes_on() -> None:
    async with toy_fleet(num_drafts=2, step_seconds=0.005, deadlines=IMPATIENT) as toys:
        start = _start(verification=Verification.COUPLED)
        right = await _tokens(toys, start, num_tokens=300)
        rounds: list[Round] = []
        async for one in _rounds(toys, start, num_tokens=300):
            rounds.append(one)
            if len(rounds) == 20:
                next(service for service in toys.drafts if service.num_sessions).hang()
        assert [token_id for one in rounds for token_id in one.token_ids] == right
        reasons = [one.draftless_reason for one in rounds]
        assert reasons.count(DraftlessReason.TIMEOUT) == 1
        assert reasons.count(DraftlessReason.DOWN) < 20  # until the other one has computed the text
        assert reasons[-10:-3] == [None] * 7


async def test_j11_a_target_whose_model_hangs_is_not_ready_though_its_process_answers() -> None:
    """J11: health was green for 85 minutes while the engine computed nothing."""
    async with toy_fleet(stall_seconds=0.5) as toys:
        toys.targets[0].hang()
        await eventually(lambda: toys.fleet.readiness().status == "unavailable", seconds=5.0)
        (reason,) = toys.fleet.readiness().reasons
        assert "has not finished a step" in reason
        toys.targets[0].go_on()
        await eventually(lambda: toys.fleet.readiness().status == "ready", seconds=5.0)
        assert toys.targets[0].health == [False, True]
        assert len(await _tokens(toys, _start(), num_tokens=20)) == 20


async def test_a_session_leaves_a_target_whose_model_hangs_for_one_whose_model_does_not() -> None:
    async with toy_fleet(num_targets=2, num_drafts=0, wait_for="degraded", stall_seconds=0.5) as toys:
        right = await _tokens(toys, _start(), num_tokens=40, k=0)
        victim = toys.targets[0]
        victim.hang()
        await eventually(lambda: victim.health == [False], seconds=5.0)
        await eventually(lambda: len(toys.fleet.replicas()) == 1, seconds=5.0)
        assert await _tokens(toys, _start(), num_tokens=40, k=0) == right
        assert toys.failovers == []


async def test_a_draft_whose_model_hangs_is_left_out_until_it_goes_on() -> None:
    async with toy_fleet(stall_seconds=0.5) as toys:
        toys.drafts[0].hang()
        await eventually(lambda: toys.fleet.readiness().status == "degraded", seconds=5.0)
        assert "has not finished a step" in toys.fleet.readiness().reasons[0]
        assert len(await _tokens(toys, _start(), num_tokens=20)) == 20
        assert toys.draft_faults == []  # nobody had to wait for it to find out
        toys.drafts[0].go_on()
        await eventually(lambda: toys.fleet.readiness().status == "ready", seconds=5.0)
