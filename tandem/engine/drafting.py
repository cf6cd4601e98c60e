"""How a model drafts a token: one way for all, so that a token prepared ahead is the one that asking would bring.

Each token is a function of the text before it, the model, the request's parameters and its seed, and of nothing else;
see docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.draft_law import SparseLaw, draw_sparse, pack
from tandem.engine.coupled import scores
from tandem.engine.runner import Choosing
from tandem.engine.sampling import adjusted_logits, law, likeliest, on_host, top_law
from tandem.engine.session import Session
from tandem.engine.worker import Feed, Program
from tandem.randomness import Purpose, uniform
from tandem.types import Draft, SessionStart, Verification

Guess = tuple[int, float]  # a token, and how likely it is, of those that are likely at all

_NUM_GUESSES = 5  # a position
_LEAST_RATIO = 0.01  # a token less likely than this part of the likeliest is not worth a guess


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A token; the law it was drawn from, where it was drawn; and what the draft thinks of its position."""

    token_id: int
    law: SparseLaw | None
    guesses: tuple[Guess, ...]  # likeliest first, the drafted token among them; empty where nobody asks


class Drafting:
    """Draws each token under the request's sampling parameters: from the model's own top-`law_size` law, or, under the
    coupled rule, with the noise that the target will use at that position.

    `with_guesses`: says what else the target may choose in a drafted token's place.
    """

    def __init__(self, start: SessionStart, *, law_size: int, with_guesses: bool) -> None:
        self._start = start
        self._law_size = law_size
        self._num_guesses = _NUM_GUESSES if with_guesses else 0

    def extend(self, session: Session, drafted: list[DraftedToken], num_tokens: int) -> Program[None]:
        """Draft on until `drafted`, which the session has as its last tokens, are `num_tokens`."""
        while len(drafted) < num_tokens:
            length = len(session.tokens)
            choosing = self._choosing(range(length, length + num_tokens - len(drafted) - 1))
            logits = yield Feed(session, num_rows=1, choosing=choosing)
            gone_on = session.tokens[length:]
            for row in range(len(logits)):
                one = self._draw(logits[row : row + 1], session.tokens[: length + row])
                drafted.append(one)
                if gone_on[row : row + 1] != [one.token_id]:
                    session.truncate(length + row)
                    session.guess((one.token_id,))
                    break

    def _choosing(self, positions: range) -> Choosing | None:
        """How the tokens at `positions` will be drawn, where that is simple enough to be told."""
        params = self._start.sampling
        depends_on_prefix = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1.0)
        if not positions or any(depends_on_prefix) or params.logit_bias or params.banned_token_ids or params.min_tokens:
            return None
        if params.greedy:
            return Choosing(0.0, 1, (0.0,) * len(positions))
        cut = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        if cut or self._start.verification is Verification.COUPLED:
            return None
        uniforms = (uniform(self._start.seed, position, Purpose.DRAFT) for position in positions)
        return Choosing(params.temperature, self._law_size, tuple(uniforms))

    def guesses(self, logits: torch.Tensor, tokens: Sequence[int]) -> list[tuple[Guess, ...]]:
        """What may follow each of the last R `tokens`, by their logits [R, vocab]."""
        first = len(tokens) - len(logits) + 1
        return [self._draw(logits[row : row + 1], tokens[: first + row]).guesses for row in range(len(logits))]

    def _draw(self, logits: torch.Tensor, tokens: Sequence[int]) -> DraftedToken:
        """What follows `tokens`, by their last one's logits [1, vocab]."""
        params, position = self._start.sampling, len(tokens)
        logits = adjusted_logits(logits, params, tokens, prompt_length=self._start.prompt_length)
        # An argmax is deterministic: its law is one-hot and need not be sent. The coupled rule looks at ids only.
        if params.greedy:
            return DraftedToken(likeliest(logits)[0], None, self._likeliest_few(logits[0]))
        probs = law(logits, params)[0]
        if self._start.verification is Verification.COUPLED:
            noisy = scores(probs, seed=self._start.seed, position=position)
            guesses = self._likeliest_few(noisy.log()) if self._num_guesses else ()
            return DraftedToken(likeliest(noisy[None])[0], None, guesses)
        draft_law = top_law(probs, self._law_size)
        token_id = draw_sparse(draft_law, uniform(self._start.seed, position, Purpose.DRAFT))
        few = slice(self._num_guesses)
        pairs = zip(draft_law.token_ids[few].tolist(), draft_law.probs[few].tolist(), strict=True)
        return DraftedToken(token_id, draft_law, tuple(pairs))

    def _likeliest_few(self, logits: torch.Tensor) -> tuple[Guess, ...]:
        """By logits [vocab] of any origin: the largest, and the probability of each beside the others near it."""
        if self._num_guesses == 0:
            return ()
        if on_host(logits):
            row = logits.numpy()
            ids = np.flatnonzero(row >= row.max() + np.log(_LEAST_RATIO))
            ids = ids[np.argsort(-row[ids], kind="stable")]
            values = row[ids]
        else:
            top = logits.topk(2 * self._num_guesses)
            ids, values = top.indices.cpu().numpy(), top.values.cpu().numpy()
        weights = np.exp((values - values[0]).astype(np.float64))
        probs = weights / weights.sum()
        few = slice(self._num_guesses)
        return tuple(zip(ids[few].tolist(), probs[few].tolist(), strict=True))


def as_draft(drafted: Sequence[DraftedToken]) -> Draft:
    """As it crosses the wire."""
    laws = [one.law for one in drafted if one.law is not None]
    return Draft(tuple(one.token_id for one in drafted), pack(laws) if laws else None)
