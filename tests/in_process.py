"""The gateway's Target and Drafts over real engine parts in one process: all of `grpc_backends.py` but the sockets.

Every message goes through the codec both ways, and `PeerText` says what changes, as over gRPC. Beside them: drafters
that do what no drafter should, and `speak`, which runs the real loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from draft_service.drafters.base import Drafter, DrafterSession
from gateway.backends import Proposal, Target
from gateway.draft_length import FixedLength
from gateway.peer_text import Change, PeerText
from gateway.speculate import Round, SpeculationPlan, speculate
from tandem.engine.runner import AheadRunner, ModelRunner, RaggedBatch
from tandem.engine.worker import Worker
from tandem.errors import OutOfStep, TandemError, Unavailable
from tandem.rpc import codec
from tandem.types import (
    NO_DRAFT,
    Draft,
    Drafted,
    DraftlessReason,
    DraftWish,
    PackedLaw,
    SessionStart,
    TokenLogprob,
    Verdict,
)
from target_service.verifier import Verifier
from tests.toy_models import StepLog


@dataclass
class InProcessTarget:
    """gateway.backends.Target."""

    verifier: Verifier

    def open(self, start: SessionStart) -> _TargetSession:
        message = codec.target_open_to_pb(start)
        return _TargetSession(self.verifier, codec.target_open_from_pb(message, vocab_size=self.verifier.vocab_size))


class _TargetSession:
    def __init__(self, verifier: Verifier, start: SessionStart) -> None:
        self._session = verifier.open(start)
        self._text = PeerText(len(start.token_ids))
        self._open = True

    async def first(self) -> Verdict:
        return self._wired(await self._session.first())

    async def verify(self, token_ids: Sequence[int], draft: Draft) -> Verdict:
        change = _wired_change(self._text.change_to(token_ids))
        sent = codec.draft_from_pb(codec.draft_to_pb(draft)) if draft.token_ids else NO_DRAFT
        verdict = self._wired(await self._session.verify(change.keep_length, change.new_tokens, sent))
        self._text.guess(() if verdict.draft_error else draft.token_ids)
        return verdict

    def close(self) -> None:
        if self._open:
            self._open = False
            self._session.close()

    def _wired(self, verdict: Verdict) -> Verdict:
        return codec.verdict_from_pb(codec.verdict_to_pb(verdict, length=self._session.length))


@dataclass
class InProcessDrafts:
    """gateway.backends.Drafts. After a fault the session is reopened at once, from the text so far."""

    drafters: Mapping[str, Drafter]
    vocab_size: int | None = None
    max_draft_tokens: int = 16
    num_opened: int = 0

    def open(self, start: SessionStart, *, drafter: str) -> _DraftSession:
        return _DraftSession(self, start, drafter=drafter)


class _DraftSession:
    def __init__(self, drafts: InProcessDrafts, start: SessionStart, *, drafter: str) -> None:
        self._drafts = drafts
        self._start = start
        self._drafter = drafter
        self._link: _DraftLink | None = self._opened(start.token_ids)

    async def propose(self, token_ids: Sequence[int], wish: DraftWish) -> Proposal:
        if self._link is None:
            self._link = self._opened(token_ids)
        try:
            most = min(wish.num_draft_tokens, self._drafts.max_draft_tokens)
            drafted = await self._link.propose(token_ids, replace(wish, num_draft_tokens=most))
        except TandemError as error:
            self.close()
            down = isinstance(error, Unavailable)
            return Proposal(NO_DRAFT, DraftlessReason.DOWN if down else DraftlessReason.ERROR)
        reason = None if drafted.draft.token_ids else DraftlessReason.EMPTY
        return Proposal(drafted.draft, reason, prepared=drafted.prepared)

    def close(self) -> None:
        if self._link is not None:
            self._link.session.close()
            self._link = None

    def _opened(self, token_ids: Sequence[int]) -> _DraftLink:
        self._drafts.num_opened += 1
        message = codec.start_to_pb(replace(self._start, token_ids=tuple(token_ids)))
        start = codec.start_from_pb(message, vocab_size=self._drafts.vocab_size)
        return _DraftLink(self._drafts.drafters[self._drafter].open(start), PeerText(len(token_ids)))


@dataclass
class _DraftLink:
    session: DrafterSession
    text: PeerText

    async def propose(self, token_ids: Sequence[int], wish: DraftWish) -> Drafted:
        change = _wired_change(self.text.change_to(token_ids))
        drafted = await self.session.propose(change.keep_length, change.new_tokens, wish)
        draft = codec.draft_from_pb(codec.draft_to_pb(drafted.draft))
        self.text.guess(draft.token_ids)
        return replace(drafted, draft=draft)


def _wired_change(change: Change) -> Change:
    return Change(change.keep_length, codec.unpack_ids(codec.pack_ids(change.new_tokens), field="token_ids"))


@contextmanager
def working_on(
    runner: ModelRunner,
    *,
    max_step_tokens: int = 64,
    log: StepLog | None = None,
    ahead: AheadRunner | None = None,
) -> Iterator[Worker]:
    """A running worker on any runner, closed at the end."""
    worker = Worker(
        runner,
        name="in-process",
        max_step_tokens=max_step_tokens,
        max_programs=4096,
        observer=StepLog() if log is None else log,
        ahead=ahead,
    )
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


@dataclass
class Jittered:
    """A runner whose logits are off by up to `size` at random: texts that this changes hang on a tie."""

    runner: ModelRunner
    size: float
    seed: int = 0
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def context_length(self) -> int:
        return self.runner.context_length

    @property
    def block_size(self) -> int:
        return self.runner.block_size

    @property
    def num_blocks(self) -> int:
        return self.runner.num_blocks

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        logits = self.runner.forward(batch)
        return logits + self.size * (2.0 * torch.rand(logits.shape, generator=self._generator) - 1.0)

    def step_size(self, num_sequences: int, *, tokens_each: int) -> int:
        return self.runner.step_size(num_sequences, tokens_each=tokens_each)

    @property
    def last_step_size(self) -> int:
        return self.runner.last_step_size

    @property
    def last_states(self) -> torch.Tensor:
        return self.runner.last_states

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self.runner.copy_blocks(sources, destinations)


@dataclass(frozen=True)
class Spoken:
    """What a request said, and by which rounds."""

    token_ids: list[int]  # without the start's
    rounds: list[Round]

    @property
    def drafted(self) -> int:
        return sum(one.num_drafted for one in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(one.num_accepted for one in self.rounds)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [logprob for one in self.rounds for logprob in one.logprobs]


async def rounds_of(
    start: SessionStart,
    *,
    num_tokens: int,
    target: Target,
    drafts: InProcessDrafts | None = None,
    drafter: str = "",
    k: int = 0,
) -> AsyncGenerator[Round]:
    """The real loop's rounds, until `num_tokens` tokens follow the start's or the consumer closes."""
    plan = SpeculationPlan(num_draft_tokens=k, drafter=drafter)
    loop = speculate(
        start,
        max_length=len(start.token_ids) + num_tokens,
        plan=plan,
        length=FixedLength(k),
        target=target,
        drafts=drafts or InProcessDrafts({}),
    )
    async with aclosing(loop):
        async for one in loop:
            yield one


async def speak(
    start: SessionStart,
    *,
    num_tokens: int,
    target: Target,
    drafts: InProcessDrafts | None = None,
    drafter: str = "",
    k: int = 0,
) -> Spoken:
    """The whole answer; without a drafter (k = 0) by plain decoding."""
    rounds = [
        one async for one in rounds_of(start, num_tokens=num_tokens, target=target, drafts=drafts, drafter=drafter, k=k)
    ]
    return Spoken([token_id for one in rounds for token_id in one.token_ids], rounds)


@dataclass(frozen=True)
class Question:
    """What a drafter is asked: go on with `text` by `k` tokens, for the `number`-th time in this session."""

    start: SessionStart
    text: tuple[int, ...]
    k: int
    number: int


@dataclass
class FunctionDrafter:
    """A Drafter that is a function of the text, in step with the gateway whatever it answers."""

    answer: Callable[[Question], Draft]

    def open(self, start: SessionStart) -> _FunctionSession:
        return _FunctionSession(start, self.answer)


class _FunctionSession:
    def __init__(self, start: SessionStart, answer: Callable[[Question], Draft]) -> None:
        self._start = start
        self._answer = answer
        self._tokens = list(start.token_ids)
        self._number = 0

    @property
    def length(self) -> int:
        return len(self._tokens)

    async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
        if keep_length > len(self._tokens):
            raise OutOfStep("more to keep than there is")
        self._tokens[keep_length:] = new_tokens
        question = Question(self._start, tuple(self._tokens), wish.num_draft_tokens, self._number)
        self._number += 1
        draft = self._answer(question)
        self._tokens += draft.token_ids
        return Drafted(draft)

    def close(self) -> None:
        pass


Script = Mapping[str, Sequence[int]]  # whole texts, by request id


def _ahead(script: Script, question: Question) -> list[int]:
    """What the script says next, padded with token 0."""
    begin = len(question.text)
    ahead = list(script[question.start.request_id][begin : begin + question.k])
    return ahead + [0] * (question.k - len(ahead))


def _one_hot(token_ids: Sequence[int]) -> PackedLaw:
    return packed_law([{token_id: 1.0} for token_id in token_ids])


def packed_law(laws: Sequence[Mapping[int, float]]) -> PackedLaw:
    """Any law, sound or not, as it crosses the wire."""
    return PackedLaw(
        np.asarray([len(law) for law in laws], dtype="<u4").tobytes(),
        np.asarray([token_id for law in laws for token_id in law], dtype="<u4").tobytes(),
        np.asarray([prob for law in laws for prob in law.values()], dtype="<f4").tobytes(),
    )


def adversaries(script: Script, *, vocab_size: int) -> dict[str, Drafter]:
    """Drafters at their best and at their worst. `script`: what plain decoding says; they may look."""

    def off(token_id: int, by: int = 1) -> int:
        return (token_id + by) % vocab_size

    def knowing(question: Question) -> Draft:
        return Draft(tuple(_ahead(script, question)))

    def always_wrong(question: Question) -> Draft:
        return Draft(tuple(off(token_id) for token_id in _ahead(script, question)))

    def wrong_in_the_middle(question: Question) -> Draft:
        ahead = _ahead(script, question)
        middle = question.number % question.k
        ahead[middle] = off(ahead[middle], 1 + question.number % (vocab_size - 1))
        return Draft(tuple(ahead))

    def forbidden(question: Question) -> Draft:
        """Banned ids, end tokens before their time, ids with a bias of -100; else the highest id."""
        params = question.start.sampling
        ids = [*params.banned_token_ids, *params.end_token_ids, *(i for i, bias in params.logit_bias if bias <= -100)]
        ids = ids or [vocab_size - 1]
        return Draft(tuple(ids[(question.number + i) % len(ids)] for i in range(question.k)))

    def outside_its_law(question: Question) -> Draft:
        ahead = _ahead(script, question)
        return Draft(tuple(ahead), packed_law([{off(token_id): 1.0} for token_id in ahead]))

    def malformed(question: Question) -> Draft:
        """Each time another break of the contract."""
        ahead = _ahead(script, question)
        good = _one_hot(ahead)
        breaks = (
            replace(good, sizes=good.sizes[:-1]),
            replace(good, probs=good.probs[:-4]),
            replace(good, sizes=good.sizes + b"\1\0\0\0"),
            packed_law([{token_id: 0.5} for token_id in ahead]),
            packed_law([{token_id: 2.0, off(token_id): -1.0} for token_id in ahead]),
            packed_law([{token_id: float("nan")} for token_id in ahead]),
            packed_law([{token_id: 0.5, vocab_size + 7: 0.5} for token_id in ahead]),
            packed_law([{token_id: 1.0} for token_id in ahead[1:]]),
        )
        if question.number % (len(breaks) + 1) == len(breaks):
            return Draft((*ahead[:-1], vocab_size + question.number))
        return Draft(tuple(ahead), breaks[question.number % (len(breaks) + 1)])

    def too_many(question: Question) -> Draft:
        return knowing(replace(question, k=2 * question.k + 1))

    def dying(question: Question) -> Draft:
        if question.number % 3 == 2:
            raise Unavailable("the draft service is gone")
        return wrong_in_the_middle(question)

    def empty_or_full(question: Question) -> Draft:
        return NO_DRAFT if question.number % 2 else knowing(question)

    def repeating(question: Question) -> Draft:
        return Draft(tuple(question.text[-1:] * question.k))

    answers = (
        knowing,
        always_wrong,
        wrong_in_the_middle,
        forbidden,
        outside_its_law,
        malformed,
        too_many,
        dying,
        empty_or_full,
        repeating,
    )
    return {answer.__name__: FunctionDrafter(answer) for answer in answers}
