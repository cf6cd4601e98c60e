"""The next draft, prepared while the target verifies this one.

For each of a few likely outcomes of the verification (outcomes.py) a *branch*, a fork of the session, drafts what would
be drafted if that outcome came, in the model's spare steps, all branches in one batch. A branch is a cache and nothing
else: it is drafted by the same code, from the same text, with the same randomness as on request (drafting.py), so
whether it is there changes when a draft comes, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafters.base import PreparationObserver
from draft_service.drafters.outcomes import Acceptance, Outcome, bonuses, recoveries
from tandem.engine.drafting import DraftedToken, Drafting, Guess
from tandem.engine.planning import MAX_BACKGROUND_FEEDS
from tandem.engine.session import Session
from tandem.engine.worker import Feed, Program, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparer:
    """What all preparations of one session have in common."""

    worker: Worker
    session: Session
    drafting: Drafting
    observer: PreparationObserver
    num_branches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A draft whose verification is under way: `drafted`, behind the session's first `length` tokens.

    `known`: what the draft thinks of the tokens in their places, as far as it has looked. `with_bonus`: whether it is
    worth while to prepare for the case that all are accepted.
    """

    length: int
    drafted: tuple[int, ...]
    known: Sequence[Sequence[Guess]]
    num_draft_tokens: int  # of a branch
    acceptance: Acceptance
    with_bonus: bool


@dataclass(slots=True, eq=False)
class _Branch:
    """A fork that goes on as if one outcome had come, and what it has drafted so far."""

    session: Session
    drafted: list[DraftedToken] = field(default_factory=list)
    seconds: float = 0.0  # of the forwards for them


class Preparation:
    """Of the round that follows one draft.

    `program` and `settle` are for the worker's thread, the rest for the session's own. That one only reads what grows
    on the other: branches, and each one's tokens, are added one whole entry at a time.
    """

    def __init__(self, preparer: Preparer, drawn: Drawn) -> None:
        self._preparer = preparer
        self._drawn = drawn
        self._branches: dict[tuple[int, ...], _Branch] = {}  # by the tokens behind the session's first `length`
        self._left_out = False

    @property
    def left_out(self) -> bool:
        """Whether others had work for the model, so that nothing was prepared."""
        return self._left_out

    def ready(self, keep_length: int, new_tokens: Sequence[int]) -> list[DraftedToken]:
        """What has been drafted for the outcome that the session's next message tells of; may be nothing."""
        branch = self._find(keep_length, new_tokens)
        return [] if branch is None else branch.drafted[:]

    def learn(self, keep_length: int) -> None:
        """The session's next message has come."""
        num_accepted = min(keep_length - self._drawn.length, len(self._drawn.drafted))
        if num_accepted >= 0:
            self._drawn.acceptance.learn(len(self._drawn.drafted), num_accepted)

    def program(self) -> Program[None]:
        """Start the branches, where all is known at once, else when the rest is. A background program."""
        preparer, drawn = self._preparer, self._drawn
        if preparer.worker.has_urgent_work or preparer.worker.num_background > MAX_BACKGROUND_FEEDS:
            self._left_out = True
            return
        drafted, known = drawn.drafted, list(drawn.known)
        reached = drawn.acceptance.reached(len(drafted))
        # Half of the branches at least are for the bonus token. It is the likeliest to come of drafts that pay.
        most = preparer.num_branches // 2 if drawn.with_bonus else preparer.num_branches
        is_ready = len(known) == len(drafted)
        if is_ready:
            self._start_branches(recoveries(drafted, known, reached, most=most))
        rest = Feed(preparer.session, num_rows=len(drafted) + 1 - len(known))
        if not self._is_cheap(rest):
            return
        logits = yield rest
        known += preparer.drafting.guesses(logits, preparer.session.tokens)
        if not is_ready:
            self._start_branches(recoveries(drafted, known[:-1], reached, most=most))
        if drawn.with_bonus:
            left = preparer.num_branches - len(self._branches)
            self._start_branches(bonuses(len(drafted), known[-1], reached, most=left))

    def settle(self, keep_length: int, new_tokens: Sequence[int], *, most: int) -> list[DraftedToken]:
        """The session has the text of its next message: let it take over what was drafted for it, at most `most`
        tokens, and end the branches. Those tokens."""
        preparer = self._preparer
        branch = self._find(keep_length, new_tokens)
        used: list[DraftedToken] = []
        if branch is not None:
            used = branch.drafted[:most]
            branch.session.truncate(len(preparer.session.tokens) + len(used))
            preparer.session.take_over(branch.session)
            if used:
                preparer.observer.tokens_used(seconds=branch.seconds * len(used) / len(branch.drafted))
        preparer.worker.end_background(preparer.session)
        self._count_wasted(but=len(used))
        return used

    def closing_program(self) -> Program[None]:
        """Count what was drafted for nothing, when the session has ended. A background program."""
        self._count_wasted(but=0)
        yield from ()

    def _count_wasted(self, *, but: int) -> None:
        self._preparer.observer.tokens_wasted(sum(len(branch.drafted) for branch in self._branches.values()) - but)

    def _find(self, keep_length: int, new_tokens: Sequence[int]) -> _Branch | None:
        num_accepted = keep_length - self._drawn.length
        if not 0 <= num_accepted <= len(self._drawn.drafted):
            return None
        return self._branches.get((*self._drawn.drafted[:num_accepted], *new_tokens))

    def _start_branches(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._start_branch((*self._drawn.drafted[: outcome.num_accepted], outcome.token_id), outcome.num_accepted)

    def _start_branch(self, tokens: tuple[int, ...], num_accepted: int) -> None:
        worker, drawn = self._preparer.worker, self._drawn
        room = worker.runner.context_length - drawn.length - len(tokens)
        if room < 1:
            return
        fork = worker.fork(self._preparer.session)
        fork.truncate(drawn.length + num_accepted)
        fork.guess(tokens[num_accepted:])
        if not self._is_cheap(Feed(fork, num_rows=1)):
            worker.end_fork(fork)
            return
        branch = self._branches[tokens] = _Branch(fork)
        worker.run_in_background(self._branch_program(branch, min(drawn.num_draft_tokens, room)))

    def _branch_program(self, branch: _Branch, num_tokens: int) -> Program[None]:
        preparer = self._preparer
        for count in range(1, num_tokens + 1):
            yield from preparer.drafting.extend(branch.session, branch.drafted, count)
            branch.seconds += preparer.worker.last_step_seconds
            preparer.observer.token_prepared()

    def _is_cheap(self, feed: Feed) -> bool:
        """Not where the cache was given up, or is not there yet: a prefill by way of trial costs too much."""
        return feed.is_round(block_size=self._preparer.worker.runner.block_size)
