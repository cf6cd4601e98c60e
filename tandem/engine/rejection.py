"""The rejection rule of speculative sampling: what comes out follows the target's law exactly.

Leviathan et al. 2022 (arXiv 2211.17192, Algorithm 1) and Chen et al. 2023 (arXiv 2302.01318, Algorithm 2), with
p = target_probs and q = draft_probs: accept the drafted x with probability min(1, p(x) / q(x)); on the first
rejection draw from normalise(max(0, p - q)); if all stand, draw one more from p. For any q whatever, one position's
output law is min(p, q) + (1 - sum min(p, q)) * normalise(max(0, p - q)) = p, provided x was drawn from q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from tandem.draft_law import SparseLaw
from tandem.engine import device_rejection
from tandem.engine.outcome import Outcome, origin_of
from tandem.engine.sampling import draw, law, lazy_laws, likeliest, on_host
from tandem.randomness import Purpose, uniform
from tandem.types import SamplingParams


class RejectionRule(Protocol):
    """The signature of `verify`. Another rule is given by tests only: those that must catch a wrong one."""

    def __call__(
        self,
        logits: torch.Tensor,
        drafted: Sequence[int],
        laws: Sequence[SparseLaw] | None,
        params: SamplingParams,
        *,
        seed: int,
        position: int,
    ) -> Outcome: ...


def verify(
    logits: torch.Tensor,
    drafted: Sequence[int],
    laws: Sequence[SparseLaw] | None,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
) -> Outcome:
    """Apply the rule to adjusted logits [k + 1, vocab], whose first row is the law at absolute `position`.

    `drafted` has k ids and `laws` the k laws they were drawn from; None means a deterministic drafter (one-hot).
    """
    if params.greedy:
        # Both laws are one-hot: accepted iff equal, and the residual after a rejection is the argmax itself.
        choices = likeliest(logits)
        num_accepted = _first_difference(drafted, choices)
        return Outcome(num_accepted, choices[num_accepted], origin_of(num_accepted, len(drafted)))
    if not on_host(logits):
        return _verify_on_device(law(logits, params), drafted, laws, seed=seed, position=position)
    target_probs = lazy_laws(logits, params)
    num_accepted = _num_accepted(target_probs, drafted, laws, seed=seed, position=position)
    weights = target_probs(num_accepted)
    if num_accepted < len(drafted):
        weights = _residual(weights, drafted[num_accepted], None if laws is None else laws[num_accepted])
    token_id = draw(weights, uniform(seed, position + num_accepted, Purpose.TARGET))
    return Outcome(num_accepted, token_id, origin_of(num_accepted, len(drafted)))


def _verify_on_device(
    target_probs: torch.Tensor, drafted: Sequence[int], laws: Sequence[SparseLaw] | None, *, seed: int, position: int
) -> Outcome:
    """The same rule with the same numbers, in one go."""
    positions = range(position, position + len(drafted) + 1)
    num_accepted, token_id = device_rejection.accept(
        target_probs,
        drafted,
        laws,
        accept_uniforms=[uniform(seed, at, Purpose.ACCEPT) for at in positions[:-1]],
        target_uniforms=[uniform(seed, at, Purpose.TARGET) for at in positions],
    )
    return Outcome(num_accepted, token_id, origin_of(num_accepted, len(drafted)))


def _num_accepted(
    target_probs: Callable[[int], torch.Tensor],
    drafted: Sequence[int],
    laws: Sequence[SparseLaw] | None,
    *,
    seed: int,
    position: int,
) -> int:
    for i, token_id in enumerate(drafted):
        p = float(target_probs(i)[token_id])
        q = 1.0 if laws is None else float(laws[i].probs[laws[i].token_ids == token_id][0])
        if not uniform(seed, position + i, Purpose.ACCEPT) * q < p:
            return i
    return len(drafted)


def _residual(target_probs: torch.Tensor, token_id: int, draft_law: SparseLaw | None) -> torch.Tensor:
    """max(0, p - q) [vocab], not normalised."""
    residual = target_probs.clone()
    if draft_law is None:
        residual[token_id] = 0.0
    else:
        ids = torch.from_numpy(draft_law.token_ids.astype(np.int64)).to(residual.device)
        residual[ids] -= torch.from_numpy(draft_law.probs.astype(np.float32)).to(residual.device)
        residual.clamp_(min=0.0)
    # Equal laws leave nothing; a rejection is then a matter of rounding, and p itself is the law.
    return residual if float(residual.sum()) > 0.0 else target_probs


def _first_difference(drafted: Sequence[int], choices: Sequence[int]) -> int:
    for i, token_id in enumerate(drafted):
        if token_id != choices[i]:
            return i
    return len(drafted)
