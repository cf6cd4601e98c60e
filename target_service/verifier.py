"""What the target does: continue a text, one round at a time. No transport, and no tensors in sight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tandem.draft_law import MalformedDraft, SparseLaw, pack, unpack
from tandem.engine.coupled import verify_coupled
from tandem.engine.draft_head import Chosen, DraftHead, next_laws
from tandem.engine.logprobs import token_logprobs
from tandem.engine.outcome import Outcome
from tandem.engine.rejection import RejectionRule, verify
from tandem.engine.sampling import adjusted_logits
from tandem.engine.worker import Feed, Joint, Program, Worker
from tandem.errors import ContextTooLong, OutOfStep
from tandem.types import NO_DRAFT, Draft, SessionStart, TokenLogprob, Verdict, Verification

# Rows of logits wanted at once for a prompt's log-probabilities: 32 of 49,152 are 6 MB.
_PROMPT_ROWS = 32


class Verifier:
    """Opens sessions on one worker. With a `head`, verdicts say what may follow, to those who ask."""

    def __init__(
        self, worker: Worker, *, head: DraftHead | None = None, rejection_rule: RejectionRule = verify
    ) -> None:
        self._worker = worker
        self._next_laws = None if head is None else partial(next_laws, head)
        self._rejection_rule = rejection_rule

    @property
    def vocab_size(self) -> int:
        return self._worker.runner.vocab_size

    def open(self, start: SessionStart) -> VerifierSession:
        """A session, to be closed by the caller. Nothing is computed yet. Raises ContextTooLong."""
        if len(start.token_ids) >= self._worker.runner.context_length:
            raise ContextTooLong(
                f"{len(start.token_ids)} tokens leave no room in the context of {self._worker.runner.context_length}"
            )
        return VerifierSession(
            self._worker,
            start,
            next_laws=self._next_laws if start.next_laws else None,
            rejection_rule=self._rejection_rule,
        )


class VerifierSession:
    """One text at the target. Calls come one at a time."""

    def __init__(
        self,
        worker: Worker,
        start: SessionStart,
        *,
        next_laws: Callable[[list[Chosen]], list[SparseLaw]] | None,
        rejection_rule: RejectionRule,
    ) -> None:
        self._worker = worker
        self._start = start
        self._next_laws = next_laws
        self._rejection_rule = rejection_rule
        self._session = worker.new_session(start.token_ids, prompt_length=start.prompt_length)

    @property
    def length(self) -> int:
        """Tokens the session holds, drafted ones included."""
        return len(self._session.tokens)

    async def first(self) -> Verdict:
        """Prefill, and the first token, as a draftless round; with the prompt's log-probabilities where asked for."""
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if self._start.prompt_logprobs:
            completed = await self._worker.run(self._prompt_program())
            prompt_logprobs = completed.value
        verdict = await self.verify(self.length, (), NO_DRAFT)
        return replace(verdict, prompt_logprobs=prompt_logprobs)

    async def verify(self, keep_length: int, new_tokens: Sequence[int], draft: Draft) -> Verdict:
        """Keep `keep_length` tokens, append `new_tokens`, then check `draft` behind them.

        A malformed draft makes the round a draftless one and is named in the verdict. Raises OutOfStep,
        ContextTooLong, Overloaded, Unavailable, InternalError.
        """
        runner = self._worker.runner
        if keep_length + len(new_tokens) < self._start.prompt_length:
            raise OutOfStep(f"a round must keep the prompt's {self._start.prompt_length} tokens")
        if keep_length + len(new_tokens) + len(draft.token_ids) > runner.context_length:
            raise ContextTooLong(f"the round exceeds the context of {runner.context_length} tokens")
        draft_error: str | None = None
        laws: list[SparseLaw] | None = None
        try:
            if len(draft.token_ids) >= self._worker.max_rows:
                raise MalformedDraft(f"a draft has {self._worker.max_rows - 1} tokens at most")
            laws = unpack(draft, vocab_size=runner.vocab_size)
        except MalformedDraft as error:
            draft, draft_error = NO_DRAFT, str(error)
        completed = await self._worker.run(self._program(keep_length, new_tokens, draft.token_ids, laws))
        outcome, logprobs, next_law = completed.value
        return Verdict(
            num_accepted=outcome.num_accepted,
            token_id=outcome.token_id,
            origin=outcome.origin,
            draft_error=draft_error,
            logprobs=logprobs,
            times=completed.times,
            next_law=None if next_law is None else pack([next_law]),
        )

    def close(self) -> None:
        """Free the session's cache."""
        self._worker.end_session(self._session)

    def _program(
        self, keep_length: int, new_tokens: Sequence[int], drafted: Sequence[int], laws: Sequence[SparseLaw] | None
    ) -> Program[tuple[Outcome, tuple[TokenLogprob, ...], SparseLaw | None]]:
        session, start = self._session, self._start
        session.advance(keep_length, new_tokens)
        position = len(session.tokens)
        session.guess(drafted)
        raw = yield Feed(session, num_rows=len(drafted) + 1)
        logits = adjusted_logits(raw, start.sampling, session.tokens, prompt_length=start.prompt_length)
        if start.verification is Verification.COUPLED and not start.sampling.greedy:  # an argmax needs no noise
            outcome = verify_coupled(logits, drafted, start.sampling, seed=start.seed, position=position)
        else:
            outcome = self._rejection_rule(logits, drafted, laws, start.sampling, seed=start.seed, position=position)
        logprobs: tuple[TokenLogprob, ...] = ()
        if start.num_logprobs is not None:
            emitted = (*drafted[: outcome.num_accepted], outcome.token_id)
            logprobs = token_logprobs(raw, emitted, num_top=start.num_logprobs)
        if self._next_laws is None:
            return outcome, logprobs, None
        state = self._worker.last_states[outcome.num_accepted]
        next_law = yield Joint(session, self._next_laws, (state, outcome.token_id))
        return outcome, logprobs, next_law

    def _prompt_program(self) -> Program[tuple[TokenLogprob, ...]]:
        """Log-probabilities of the prompt's tokens from the second on, a few rows of logits at a time."""
        session, start = self._session, self._start
        prompt = start.token_ids[: start.prompt_length]
        logprobs: list[TokenLogprob] = []
        session.truncate(0)
        for begin in range(0, len(prompt), _PROMPT_ROWS):
            chunk = prompt[begin : begin + _PROMPT_ROWS]
            session.advance(begin, chunk)
            logits = yield Feed(session, num_rows=len(chunk))
            following = prompt[begin + 1 : begin + len(chunk) + 1]
            logprobs += token_logprobs(logits, following, num_top=start.num_logprobs or 0)
        session.advance(len(prompt), start.token_ids[len(prompt) :])
        return tuple(logprobs)
