"""What the target does: continue a text, one round at a time. No transport, and no tensors in sight."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.draft_law import MalformedDraft, SparseLaw, unpack
from tandem.engine.rejection import Outcome, verify
from tandem.engine.sampling import adjusted_logits
from tandem.engine.worker import Feed, Program, Worker
from tandem.errors import ContextTooLong
from tandem.types import NO_DRAFT, Draft, SessionStart, Verdict


class Verifier:
    """Opens sessions on one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def vocab_size(self) -> int:
        return self._worker.runner.vocab_size

    def open(self, start: SessionStart) -> VerifierSession:
        """A session, to be closed by the caller. Nothing is computed yet. Raises ContextTooLong."""
        if len(start.token_ids) >= self._worker.runner.context_length:
            raise ContextTooLong(
                f"{len(start.token_ids)} tokens leave no room in the context of {self._worker.runner.context_length}"
            )
        return VerifierSession(self._worker, start)


class VerifierSession:
    """One text at the target. Calls come one at a time."""

    def __init__(self, worker: Worker, start: SessionStart) -> None:
        self._worker = worker
        self._start = start
        self._session = worker.new_session(start.token_ids)

    @property
    def length(self) -> int:
        """Tokens the session holds, drafted ones included."""
        return len(self._session.tokens)

    async def first(self) -> Verdict:
        """Prefill, and the first token, as a draftless round."""
        return await self.verify(self.length, (), NO_DRAFT)

    async def verify(self, keep_length: int, new_tokens: Sequence[int], draft: Draft) -> Verdict:
        """Keep `keep_length` tokens, append `new_tokens`, then check `draft` behind them.

        A malformed draft makes the round a draftless one and is named in the verdict. Raises OutOfStep,
        ContextTooLong, Overloaded, Unavailable, InternalError.
        """
        runner = self._worker.runner
        if keep_length + len(new_tokens) + len(draft.token_ids) > runner.context_length:
            raise ContextTooLong(f"the round exceeds the context of {runner.context_length} tokens")
        draft_error: str | None = None
        laws: list[SparseLaw] | None = None
        try:
            laws = unpack(draft, vocab_size=runner.vocab_size)
        except MalformedDraft as error:
            draft, draft_error = NO_DRAFT, str(error)
        completed = await self._worker.run(self._program(keep_length, new_tokens, draft.token_ids, laws))
        outcome = completed.value
        return Verdict(
            num_accepted=outcome.num_accepted,
            token_id=outcome.token_id,
            origin=outcome.origin,
            draft_error=draft_error,
            times=completed.times,
        )

    def close(self) -> None:
        """Free the session's cache."""
        self._worker.end_session(self._session)

    def _program(
        self, keep_length: int, new_tokens: Sequence[int], drafted: Sequence[int], laws: Sequence[SparseLaw] | None
    ) -> Program[Outcome]:
        session, start = self._session, self._start
        session.advance(keep_length, new_tokens)
        position = len(session.tokens)
        session.guess(drafted)
        logits = yield Feed(session, num_rows=len(drafted) + 1)
        logits = adjusted_logits(logits, start.sampling, session.tokens, prompt_length=start.prompt_length)
        return verify(logits, drafted, laws, start.sampling, seed=start.seed, position=position)
