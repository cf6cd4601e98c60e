"""How a model drafts a token: one way for all, so that a token prepared ahead is the one that asking would bring.

Each token is a function of the text before it, the model, the request's parameters and its seed, and of nothing else;
see docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.draft_law import SparseLaw, draw_sparse, pack
from tandem.engine.coupled import scores
from tandem.engine.runner import Choosing
from tandem.engine.sampling import adjusted_logits, law, likeliest, on_host, top_laws
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
            for row, one in enumerate(self._draw(logits, session.tokens)):
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
        return [one.guesses for one in self._draw(logits, tokens)]

    def _draw(self, logits: torch.Tensor, tokens: Sequence[int]) -> list[DraftedToken]:
        """What follows each of the last R `tokens`, by their logits [R, vocab]."""
        params, seed = self._start.sampling, self._start.seed
        positions = range(len(tokens) - len(logits) + 1, len(tokens) + 1)
        logits = adjusted_logits(logits, params, tokens, prompt_length=self._start.prompt_length)
        # An argmax is deterministic: its law is one-hot and need not be sent. The coupled rule looks at ids only.
        if params.greedy:
            return self._without_law(logits, logits)
        probs = law(logits, params)
        if self._start.verification is Verification.COUPLED:
            pairs = zip(probs, positions, strict=True)
            noisy = torch.stack([scores(row, seed=seed, position=position) for row, position in pairs])
            return self._without_law(noisy, noisy.log() if self._num_guesses else noisy)
        laws = top_laws(probs, self._law_size)
        return [
            DraftedToken(draw_sparse(one, uniform(seed, position, Purpose.DRAFT)), one, self._first_few(one))
            for one, position in zip(laws, positions, strict=True)
        ]

    def _without_law(self, values: torch.Tensor, logits: torch.Tensor) -> list[DraftedToken]:
        """The largest of each row of `values` [R, vocab], with guesses by `logits`."""
        pairs = zip(likeliest(values), self._likeliest_few(logits), strict=True)
        return [DraftedToken(token_id, None, guesses) for token_id, guesses in pairs]

    def _first_few(self, one: SparseLaw) -> tuple[Guess, ...]:
        few = slice(self._num_guesses)
        return tuple(zip(one.token_ids[few].tolist(), one.probs[few].tolist(), strict=True))

    def _likeliest_few(self, logits: torch.Tensor) -> list[tuple[Guess, ...]]:
        """By logits [R, vocab] of any origin: each row's largest, and the probability of each beside those near it."""
        if self._num_guesses == 0:
            return [()] * len(logits)
        if on_host(logits):
            return [self._weighed(*_near_the_top(row)) for row in logits.numpy()]
        top = logits.topk(2 * self._num_guesses)
        return [self._weighed(*pair) for pair in zip(top.indices.cpu().numpy(), top.values.cpu().numpy(), strict=True)]

    def _weighed(self, ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> tuple[Guess, ...]:
        """The first few of these ids, the likeliest first, with the softmax of all values."""
        weights = np.exp((values - values[0]).astype(np.float64))
        probs = weights / weights.sum()
        few = slice(self._num_guesses)
        return tuple(zip(ids[few].tolist(), probs[few].tolist(), strict=True))


def _near_the_top(row: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Ids and values [vocab] that are worth a guess, the largest first."""
    ids = np.flatnonzero(row >= row.max() + np.log(_LEAST_RATIO))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return ids, row[ids]


def as_draft(drafted: Sequence[DraftedToken]) -> Draft:
    """As it crosses the wire."""
    laws = [one.law for one in drafted if one.law is not None]
    return Draft(tuple(one.token_id for one in drafted), pack(laws) if laws else None)
