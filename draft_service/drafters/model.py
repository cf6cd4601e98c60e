"""Drafts from a smaller model of the target's tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from draft_service.drafters.base import Drafted
from tandem.engine.coupled import choose
from tandem.engine.draft_law import SparseLaw, draw_sparse, pack, top_law
from tandem.engine.randomness import Purpose, uniform
from tandem.engine.sampling import adjusted_logits, law, likeliest
from tandem.engine.worker import Feed, Program, Worker
from tandem.errors import OutOfStep
from tandem.types import NO_DRAFT, Draft, SessionStart, Verification


class ModelDrafter:
    """Draws each token under the request's sampling parameters: from the model's own top-`law_size` law, or, under the
    coupled rule, with the noise that the target will use at that position."""

    def __init__(self, worker: Worker, *, law_size: int) -> None:
        self._worker = worker
        self._law_size = law_size

    def open(self, start: SessionStart) -> ModelDrafterSession:
        return ModelDrafterSession(self._worker, start, law_size=self._law_size)


class ModelDrafterSession:
    """The session's prefill runs from the start; the first `propose` waits for it."""

    def __init__(self, worker: Worker, start: SessionStart, *, law_size: int) -> None:
        self._worker = worker
        self._start = start
        self._law_size = law_size
        self._session = worker.new_session(start.token_ids, prompt_length=start.prompt_length)
        self._prefill: asyncio.Task[object] | None = None
        if self.length < worker.runner.context_length:
            self._prefill = asyncio.create_task(worker.run(self._prefill_program()))

    @property
    def length(self) -> int:
        return len(self._session.tokens)

    async def propose(self, keep_length: int, new_tokens: Sequence[int], num_draft_tokens: int) -> Drafted:
        if self._prefill is not None:
            prefill, self._prefill = self._prefill, None
            await prefill
        if keep_length + len(new_tokens) < self._start.prompt_length:
            raise OutOfStep(f"a round must keep the prompt's {self._start.prompt_length} tokens")
        # The draft's context may be shorter than the target's: near its end there is less, then nothing to draft.
        room = self._worker.runner.context_length - keep_length - len(new_tokens)
        num_draft_tokens = min(num_draft_tokens, room)
        if num_draft_tokens < 1:
            await self._worker.run(self._advance_program(keep_length, new_tokens))
            return Drafted(NO_DRAFT)
        completed = await self._worker.run(self._program(keep_length, new_tokens, num_draft_tokens))
        return Drafted(completed.value, completed.times)

    def close(self) -> None:
        if self._prefill is not None:
            self._prefill.cancel()
        self._worker.end_session(self._session)

    def _advance_program(self, keep_length: int, new_tokens: Sequence[int]) -> Program[None]:
        """Sessions belong to the worker's thread, even where there is nothing to compute."""
        self._session.advance(keep_length, new_tokens)
        yield from ()

    def _prefill_program(self) -> Program[None]:
        yield Feed(self._session, num_rows=1)

    def _program(self, keep_length: int, new_tokens: Sequence[int], num_draft_tokens: int) -> Program[Draft]:
        session, params = self._session, self._start.sampling
        coupled = self._start.verification is Verification.COUPLED
        session.advance(keep_length, new_tokens)
        token_ids: list[int] = []
        laws: list[SparseLaw] = []
        for _ in range(num_draft_tokens):
            position = len(session.tokens)
            logits = yield Feed(session, num_rows=1)
            logits = adjusted_logits(logits, params, session.tokens, prompt_length=self._start.prompt_length)
            if params.greedy:
                token_id = likeliest(logits)[0]
            elif coupled:
                token_id = choose(law(logits, params)[0], seed=self._start.seed, position=position)
            else:
                draft_law = top_law(law(logits, params)[0], self._law_size)
                token_id = draw_sparse(draft_law, uniform(self._start.seed, position, Purpose.DRAFT))
                laws.append(draft_law)
            session.guess((token_id,))
            token_ids.append(token_id)
        # An argmax is deterministic: its law is one-hot and need not be sent. The coupled rule looks at ids only.
        return Draft(tuple(token_ids), pack(laws) if laws else None)
