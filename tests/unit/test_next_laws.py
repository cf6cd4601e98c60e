"""What a target's draft head says, from its hidden state to the draft: to whom, of what, for how many at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tandem.draft_law import SparseLaw, listed, pack
from tandem.engine.programs import Joint
from tandem.engine.session import Session
from tandem.engine.worker import Feed, Program
from tandem.errors import InternalError
from tandem.lookup.drafter import LookupDrafter
from tandem.lookup.law import mixed
from tandem.rpc import codec
from tandem.types import Draft, DraftWish, PackedLaw, SamplingParams, SessionStart, Verdict, Verification
from target_service.verifier import Verifier
from tests.in_process import InProcessDrafts, InProcessTarget, speak
from tests.toy_models import ToyHead, ToyModel, ToyRunner, working
from tests.worker_programs import MODEL, assert_scores, gated, soon, until

TARGET = ToyModel(vocab_size=6, seed=3, scale=1.5)
PROMPT = (0, 3, 1, 5, 2)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def start_of(*, next_laws: bool = True, temperature: float = 1.0, **fields: object) -> SessionStart:
    start = SessionStart(
        token_ids=PROMPT,
        prompt_length=len(PROMPT),
        sampling=SamplingParams(temperature=temperature),
        seed=5,
        next_laws=next_laws,
    )
    return replace(start, **fields)  # type: ignore[arg-type]


def assert_law_after(verdict: Verdict, text: tuple[int, ...]) -> None:
    """Of the token behind `text`, which ends with the verdict's own."""
    assert text[-1] == verdict.token_id
    said = listed(verdict.next_law)
    expected = TARGET.logits(text).softmax(dim=-1)
    assert dict(said) == pytest.approx(dict(enumerate(expected.tolist())))
    assert [prob for _, prob in said] == sorted((prob for _, prob in said), reverse=True)


@pytest.mark.parametrize("num_right", [0, 1, 2])
async def test_a_verdict_says_what_may_follow_its_own_token(num_right: int) -> None:
    """Whether drafted tokens stood before it or not: its state is that of the last one that did."""
    head = ToyHead(TARGET)
    with working(ToyRunner(TARGET)) as worker:
        session = Verifier(worker, head=head).open(start_of(temperature=0.0))
        first = await session.first()
        text = (*PROMPT, first.token_id)
        assert_law_after(first, text)
        right = TARGET.greedy(text, 2)
        draft = [*right[:num_right], *((token + 1) % 6 for token in right[num_right:])]
        verdict = await session.verify(len(PROMPT), (first.token_id,), Draft(tuple(draft)))
        assert verdict.num_accepted == num_right
        assert_law_after(verdict, (*text, *right[:num_right], verdict.token_id))
        session.close()


@pytest.mark.parametrize(("has_head", "asks"), [(True, False), (False, True)])
async def test_without_a_head_or_a_wish_nothing_is_computed(has_head: bool, asks: bool) -> None:
    head = ToyHead(TARGET)
    with working(ToyRunner(TARGET)) as worker:
        session = Verifier(worker, head=head if has_head else None).open(start_of(next_laws=asks))
        assert (await session.first()).next_law is None
        assert head.calls == []
        session.close()


async def test_sessions_of_one_step_are_computed_at_once() -> None:
    head = ToyHead(MODEL)
    async with gated() as (worker, runner):
        verifier = Verifier(worker, head=head)
        sessions = [verifier.open(start_of(seed=seed)) for seed in range(3)]
        answers = [asyncio.create_task(session.first()) for session in sessions]
        await until(lambda: worker.num_programs == 3)
        runner.open()
        verdicts = await asyncio.gather(*answers)
        assert sum(head.calls) == 3
        assert len(head.calls) < 3  # the first may have found itself alone
        for verdict in verdicts:
            expected = MODEL.logits((*PROMPT, verdict.token_id)).softmax(dim=-1)
            assert dict(listed(verdict.next_law)) == pytest.approx(dict(enumerate(expected.tolist())))
        for session in sessions:
            session.close()


async def test_joint_work_that_fails_ends_its_programs_and_no_others() -> None:
    def broken(items: list[int]) -> list[int]:
        raise RuntimeError("no such thing")

    def program(session: Session) -> Program[int]:
        yield Feed(session, 1)
        answer: int = yield Joint(session, broken, 1)
        return answer

    with working(ToyRunner(MODEL)) as worker:
        session, other = worker.new_session([1, 2]), worker.new_session([3])
        with pytest.raises(InternalError, match="no such thing"):
            await soon(worker.run(program(session)))
        await assert_scores(worker, other)
        await assert_scores(worker, session)


async def test_joint_work_needs_no_step() -> None:
    def program(session: Session) -> Program[int]:
        answer: int = yield Joint(session, lambda items: [2 * item for item in items], 21)
        return answer

    with working(ToyRunner(MODEL)) as worker:
        session = worker.new_session([1])
        assert await soon(worker.run(program(session))) == 42


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.COUPLED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_what_the_target_itself_says_is_nearly_always_right(
    verification: Verification, temperature: float
) -> None:
    """A head that is the target: every draft of one token stands, sampled, seeded or greedy."""
    start = start_of(temperature=temperature, verification=verification)
    with working(ToyRunner(TARGET)) as worker:
        target = InProcessTarget(Verifier(worker, head=ToyHead(TARGET)))
        drafts = InProcessDrafts({"head": LookupDrafter(min_match=100, least_certainty=0.0)}, vocab_size=6)
        spoken = await speak(start, num_tokens=60, target=target, drafts=drafts, drafter="head", k=1)
        assert spoken.accepted == spoken.drafted >= 29
        plain = await speak(replace(start, next_laws=False), num_tokens=60, target=target)
        if temperature == 0.0 or verification is Verification.COUPLED:
            assert spoken.token_ids == plain.token_ids


async def test_a_drafter_that_does_not_hear_it_drafts_without() -> None:
    law = pack([SparseLaw(np.array([4], dtype=np.uint32), np.array([0.9], dtype=np.float32))])
    wish = DraftWish(2, next_law=law)
    for hears, expected in ((True, (4,)), (False, ())):
        session = LookupDrafter(hears_head=hears, least_certainty=0.1).open(start_of(temperature=0.0))
        assert (await session.propose(len(PROMPT), (), wish)).draft.token_ids == expected


def test_a_head_and_a_table_are_weighed() -> None:
    head, table = [(3, 0.5), (1, 0.25)], [(1, 0.8), (2, 0.2)]
    both = mixed(table, head)
    assert [token for token, _ in both] == sorted(dict(both), key=lambda token: -dict(both)[token])
    assert sum(prob for _, prob in both) == pytest.approx(0.8 * 0.75 + 0.2 * 1.0)
    assert mixed([], head) == head
    assert mixed(table, []) == table


def test_it_crosses_the_wire() -> None:
    law = pack([SparseLaw(np.array([4, 2], dtype=np.uint32), np.array([0.5, 0.25], dtype=np.float32))])
    opened = codec.target_open_from_pb(codec.target_open_to_pb(start_of()), vocab_size=6)
    assert opened.next_laws
    with_law = codec.law_from_pb(codec.law_to_pb(law) or pytest.fail("no message"))
    assert with_law == law
    assert listed(with_law) == [(4, 0.5), (2, 0.25)]
    assert codec.law_to_pb(None) is None


@pytest.mark.parametrize(
    "broken",
    [
        PackedLaw(b"", b"", b""),
        PackedLaw(b"\x02\x00\x00\x00", b"\x01\x00\x00\x00", b"\x00\x00\x80\x3f"),
        PackedLaw(b"\x01\x00\x00\x00", b"\x01\x00\x00\x00", b"\x00\x00\xc0\x7f"),  # not a number
        PackedLaw(b"\x01\x00\x00\x00", b"\x01\x00\x00\x00", b"\x00\x00\x80\xbf"),  # -1
        PackedLaw(b"\xff\xff\xff\xff", b"", b""),
    ],
)
def test_what_is_no_law_says_nothing(broken: PackedLaw) -> None:
    assert listed(broken) == []
