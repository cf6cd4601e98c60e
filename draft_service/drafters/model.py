"""Drafts from a model of the target's tokenizer: a smaller one, or the target's own first layers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from draft_service.drafters.base import PreparationObserver, PreparedOutcome
from draft_service.drafters.outcomes import Acceptance
from draft_service.drafters.preparation import Drawn, Preparation, Preparer
from tandem.engine.drafting import DraftedToken, Drafting, as_draft
from tandem.engine.worker import Completed, Feed, Program, Worker
from tandem.errors import OutOfStep
from tandem.types import NO_DRAFT, Drafted, DraftWish, SessionStart


class Unobserved:
    """A PreparationObserver that nobody asks."""

    def token_prepared(self) -> None:
        """Not counted."""

    def tokens_used(self, *, seconds: float) -> None:
        """Not counted."""

    def tokens_wasted(self, num_tokens: int) -> None:
        """Not counted."""

    def prepared(self, outcome: PreparedOutcome) -> None:
        """Not counted."""


class ModelDrafter:
    """Drafts as drafting.py says. After each draft it prepares the next one (preparation.py) for `prepared_branches`
    outcomes of the verification at most; 0: it does not."""

    def __init__(
        self,
        worker: Worker,
        *,
        law_size: int,
        prepared_branches: int = 0,
        observer: PreparationObserver | None = None,
    ) -> None:
        self._worker = worker
        self._law_size = law_size
        self._prepared_branches = prepared_branches
        self._observer = observer or Unobserved()

    def open(self, start: SessionStart) -> ModelDrafterSession:
        preparer = Preparer(
            worker=self._worker,
            session=self._worker.new_session(start.token_ids, prompt_length=start.prompt_length),
            drafting=Drafting(start, law_size=self._law_size, with_guesses=self._prepared_branches > 0),
            observer=self._observer,
            num_branches=self._prepared_branches,
        )
        return ModelDrafterSession(preparer, prompt_length=start.prompt_length, length=len(start.token_ids))


class ModelDrafterSession:
    """The session's prefill runs from the start; the first `propose` waits for it.

    The engine's session belongs to the worker's thread, and is changed by programs only. They start in the order in
    which they are submitted, so a prepared draft can be handed out before the session has caught up with it.
    """

    def __init__(self, preparer: Preparer, *, prompt_length: int, length: int) -> None:
        self._preparer = preparer
        self._worker, self._session = preparer.worker, preparer.session
        self._prompt_length = prompt_length
        self._length = length
        self._acceptance, self._others_acceptance = Acceptance(), Acceptance()
        self._preparation: Preparation | None = None
        self._settling: list[Future[Completed[list[DraftedToken]]]] = []
        self._prefill: asyncio.Task[object] | None = None
        if length < self._worker.runner.context_length:
            self._prefill = asyncio.create_task(self._worker.run(self._prefill_program()))

    @property
    def length(self) -> int:
        return self._length

    async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
        # How far a model drafts is the gateway's choice of k: what it draws cannot be left out for being unlikely, or
        # what is left would follow another law than the one sent.
        if self._prefill is not None:
            prefill, self._prefill = self._prefill, None
            await prefill
        for settling in self._settling:  # done long ago: only their faults, if any, are still to be heard of
            await asyncio.wrap_future(settling)
        self._settling.clear()
        self._check(keep_length, new_tokens)
        length = keep_length + len(new_tokens)
        # The draft's context may be shorter than the target's: near its end there is less, then nothing to draft.
        num_draft_tokens = max(0, min(wish.num_draft_tokens, self._worker.runner.context_length - length))
        preparation, self._preparation = self._preparation, None
        ready = self._look_up(preparation, keep_length, new_tokens)[:num_draft_tokens]
        program = self._program(preparation, keep_length, new_tokens, num_draft_tokens)
        is_hit = 0 < len(ready) == num_draft_tokens
        if preparation is not None:
            found: PreparedOutcome = "hit" if is_hit else "partial" if ready else "miss"
            self._count(preparation, found if num_draft_tokens else "cancelled")
        if is_hit:
            self._settling.append(self._worker.submit(program))
            drafted, known = Drafted(as_draft(ready), prepared=True), ready
        else:
            completed = await self._worker.run(program)
            known = completed.value
            drafted = Drafted(as_draft(known) if known else NO_DRAFT, completed.times)
        self._length = length + len(known)
        if known:
            self._prepare(
                Drawn(
                    length=length,
                    drafted=drafted.draft.token_ids,
                    known=[one.guesses for one in known],
                    num_draft_tokens=num_draft_tokens,
                    acceptance=self._acceptance,
                    with_bonus=True,
                )
            )
        return drafted

    def follow(
        self, keep_length: int, new_tokens: Sequence[int], guesses: Sequence[int], num_draft_tokens: int
    ) -> bool:
        """Take over a text and another drafter's guesses, and compute them in spare steps.

        For outcomes in which a guess is rejected, drafts of `num_draft_tokens` tokens are prepared. False, with nothing
        changed: nothing is prepared here, or it does not fit the model's context.
        """
        length = keep_length + len(new_tokens)
        context_length = self._worker.runner.context_length
        if not self._preparer.num_branches or length + len(guesses) > context_length:
            return False
        self._check(keep_length, new_tokens)
        while self._settling and self._settling[0].done():
            self._settling.pop(0).result()
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.learn(keep_length)
            self._count(preparation, "cancelled")
        self._settling.append(self._worker.submit(self._follow_program(preparation, keep_length, new_tokens, guesses)))
        self._length = length + len(guesses)
        self._prepare(
            Drawn(
                length=length,
                drafted=tuple(guesses),
                known=(),
                num_draft_tokens=num_draft_tokens,
                acceptance=self._others_acceptance,
                with_bonus=False,  # the other drafter will go on itself
            )
        )
        return True

    def close(self) -> None:
        if self._prefill is not None:
            self._prefill.cancel()
        self._worker.end_session(self._session)
        if self._preparation is not None:
            self._count(self._preparation, "cancelled")
            self._worker.run_in_background(self._preparation.closing_program())
            self._preparation = None

    def _check(self, keep_length: int, new_tokens: Sequence[int]) -> None:
        if keep_length + len(new_tokens) < self._prompt_length:
            raise OutOfStep(f"a round must keep the prompt's {self._prompt_length} tokens")

    def _prepare(self, drawn: Drawn) -> None:
        if self._preparer.num_branches:
            self._preparation = Preparation(self._preparer, drawn)
            self._worker.run_in_background(self._preparation.program())

    def _look_up(
        self, preparation: Preparation | None, keep_length: int, new_tokens: Sequence[int]
    ) -> list[DraftedToken]:
        if preparation is None:
            return []
        preparation.learn(keep_length)
        return preparation.ready(keep_length, new_tokens)

    def _count(self, preparation: Preparation, outcome: PreparedOutcome) -> None:
        self._preparer.observer.prepared("busy" if preparation.left_out else outcome)

    def _prefill_program(self) -> Program[None]:
        yield Feed(self._session, num_rows=1)

    def _program(
        self, preparation: Preparation | None, keep_length: int, new_tokens: Sequence[int], num_draft_tokens: int
    ) -> Program[list[DraftedToken]]:
        self._session.advance(keep_length, new_tokens)
        drafted: list[DraftedToken] = []
        if preparation is not None:
            drafted = preparation.settle(keep_length, new_tokens, most=num_draft_tokens)
        yield from self._preparer.drafting.extend(self._session, drafted, num_draft_tokens)
        return drafted

    def _follow_program(
        self, preparation: Preparation | None, keep_length: int, new_tokens: Sequence[int], guesses: Sequence[int]
    ) -> Program[list[DraftedToken]]:
        drafted = yield from self._program(preparation, keep_length, new_tokens, 0)
        self._session.guess(guesses)
        return drafted
