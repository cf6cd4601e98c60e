"""The speculative loop: propose, verify, emit. It knows token ids only: no text, no transport, no web framework.

One request's life here:

1. Both sessions are opened, so target and draft prefill at the same time.
2. The target returns the first token of its own: a draftless round, so that the first token comes as soon as in
   plain decoding.
3. `propose`: the draft guesses up to k tokens. No guess, for whatever reason, means k = 0.
4. `verify`: the target checks all of them in one pass and adds one token of its own.
5. The round's 1 to k + 1 tokens are yielded; the consumer decides when to stop, by closing the generator.
6. Both sessions are closed, whatever happened.

The acceptance test itself runs in the target service (`tandem/engine/rejection.py`), next to the logits.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Protocol

from gateway.backends import Drafts, DraftSession, Proposal, Target
from tandem.types import (
    NO_DRAFT,
    DraftlessReason,
    DraftWish,
    ServiceTimes,
    SessionStart,
    TokenLogprob,
    TokenOrigin,
    Verdict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """How to speculate for one request: `num_draft_tokens` a round (0: plain decoding), by `drafter`.

    `automatic`: that many at most, as many as pay.
    """

    num_draft_tokens: int
    drafter: str = ""
    automatic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round's outcome: `token_ids` to emit, each with its origin, and what the round cost."""

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    num_drafted: int
    num_accepted: int
    draftless_reason: DraftlessReason | None  # None: the round had a draft
    draft_seconds: float = 0.0  # waiting for the draft, network included
    draft_service_seconds: float = 0.0  # of these, inside the draft service
    verify_seconds: float = 0.0  # waiting for the target, network included
    verify_times: ServiceTimes = field(default_factory=ServiceTimes)
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token, where asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first round, where asked for
    num_bytes: int = 0  # of draft messages on the wire, both hops
    prepared: bool = False  # the draft was ready when it was asked for
    drafted_by: str = ""  # the model, or what else drafts, of the service that was asked


class DraftLength(Protocol):
    """How many tokens to draft, round by round (gateway/draft_length.py)."""

    def next(self) -> DraftWish:
        """For the round to come; of 0 tokens: none."""

    def learn(self, outcome: Round) -> None:
        """A round is over."""


async def speculate(
    start: SessionStart, *, max_length: int, plan: SpeculationPlan, length: DraftLength, target: Target, drafts: Drafts
) -> AsyncGenerator[Round]:
    """Yield rounds that together continue `start`, until the text is `max_length` tokens long or the consumer closes.

    Every token follows the target's law exactly (see docs/exactness.md). Raises TandemError only for what the target
    does; a draft's fault makes draftless rounds. The last round never overshoots `max_length`.
    """
    token_ids = list(start.token_ids)
    verifier = target.open(start)
    proposer: DraftSession | None = None
    try:
        if plan.num_draft_tokens > 0 and max_length - len(token_ids) > 2:
            proposer = drafts.open(start, drafter=plan.drafter)
        began = time.perf_counter()
        verdict = await verifier.first()
        proposal = Proposal(NO_DRAFT, DraftlessReason.FIRST if proposer else DraftlessReason.OFF)
        while True:
            outcome = _round(proposal, verdict, verify_seconds=time.perf_counter() - began)
            token_ids.extend(outcome.token_ids)
            length.learn(outcome)
            yield outcome
            remaining = max_length - len(token_ids)
            if remaining <= 0:
                return
            wish = replace(length.next(), next_law=verdict.next_law)
            proposal = await _propose(proposer, token_ids, wish, most=remaining - 1)
            began = time.perf_counter()
            verdict = await verifier.verify(token_ids, proposal.draft)
    finally:
        verifier.close()
        if proposer is not None:
            proposer.close()


async def _propose(proposer: DraftSession | None, token_ids: list[int], wish: DraftWish, *, most: int) -> Proposal:
    """At most `most` guesses: the verify adds one token itself, for which that leaves room."""
    if proposer is None:
        return Proposal(NO_DRAFT, DraftlessReason.OFF)
    if wish.num_draft_tokens == 0:
        return Proposal(NO_DRAFT, DraftlessReason.UNPROFITABLE)
    if most == 0:
        return Proposal(NO_DRAFT, DraftlessReason.LIMIT)
    wish = replace(wish, num_draft_tokens=min(wish.num_draft_tokens, most))
    proposal = await proposer.propose(token_ids, wish)
    if len(proposal.draft.token_ids) > wish.num_draft_tokens:  # it would overshoot the limit, or the target's context
        return replace(proposal, draft=NO_DRAFT, reason=DraftlessReason.MALFORMED)
    if not proposal.draft.token_ids and proposal.reason is None:
        return replace(proposal, reason=DraftlessReason.EMPTY)
    return proposal


def _round(proposal: Proposal, verdict: Verdict, *, verify_seconds: float) -> Round:
    """Join what was proposed and what stood into the tokens to emit."""
    drafted = proposal.draft.token_ids
    accepted = drafted[: verdict.num_accepted]
    malformed = verdict.draft_error is not None
    return Round(
        token_ids=(*accepted, verdict.token_id),
        origins=(*(TokenOrigin.ACCEPTED for _ in accepted), verdict.origin),
        num_drafted=0 if malformed else len(drafted),
        num_accepted=verdict.num_accepted,
        draftless_reason=DraftlessReason.MALFORMED if malformed else proposal.reason,
        draft_seconds=proposal.seconds,
        draft_service_seconds=proposal.service_seconds,
        verify_seconds=verify_seconds,
        verify_times=verdict.times,
        logprobs=verdict.logprobs,
        prompt_logprobs=verdict.prompt_logprobs,
        num_bytes=proposal.num_bytes,
        prepared=proposal.prepared and not malformed,
        drafted_by=proposal.drafted_by,
    )
