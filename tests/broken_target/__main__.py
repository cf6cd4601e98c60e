"""A target service whose acceptance rule is wrong: `python -m tests.broken_target`. What tests for it must catch.

TANDEM_BROKEN_RULE chooses the fault. Everything but the rule is the real service.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch

from tandem.draft_law import SparseLaw
from tandem.engine.outcome import Outcome, origin_of
from tandem.engine.rejection import RejectionRule, verify
from tandem.engine.sampling import draw, law
from tandem.randomness import Purpose, uniform
from tandem.rpc.launch import launch
from tandem.types import SamplingParams, TokenOrigin
from target_service.__main__ import serve


def recovered_from_the_whole_law(
    logits: torch.Tensor,
    drafted: Sequence[int],
    laws: Sequence[SparseLaw] | None,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
) -> Outcome:
    """Recovered tokens from the target's law in place of the residual. Drafted tokens come too often."""
    outcome = verify(logits, drafted, laws, params, seed=seed, position=position)
    if outcome.origin is not TokenOrigin.RECOVERED:
        return outcome
    probs = law(logits, params)[outcome.num_accepted]
    token_id = draw(probs, uniform(seed, position + outcome.num_accepted, Purpose.TARGET))
    return Outcome(outcome.num_accepted, token_id, outcome.origin)


def accepted_twice_as_easily(
    logits: torch.Tensor,
    drafted: Sequence[int],
    laws: Sequence[SparseLaw] | None,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
) -> Outcome:
    """Accepted with probability min(1, 2 p / q): a "lenience" that makes good figures."""
    probs = law(logits, params)
    stand = 0
    while stand < len(drafted):
        token_id = drafted[stand]
        q = 1.0 if laws is None else float(laws[stand].probs[laws[stand].token_ids == token_id][0])
        if not uniform(seed, position + stand, Purpose.ACCEPT) * q < 2.0 * float(probs[stand, token_id]):
            break
        stand += 1
    rest = verify(logits[stand:], drafted[stand:], laws and laws[stand:], params, seed=seed, position=position + stand)
    return Outcome(stand + rest.num_accepted, rest.token_id, origin_of(stand + rest.num_accepted, len(drafted)))


def coupled_but_lenient(
    logits: torch.Tensor, drafted: Sequence[int], params: SamplingParams, *, seed: int, position: int
) -> Outcome:
    """Drafted tokens that the target thinks more likely than not are taken, whatever the noise says."""
    from tandem.engine.coupled import verify_coupled

    probs = law(logits, params)
    outcome = verify_coupled(logits, drafted, params, seed=seed, position=position)
    stand = outcome.num_accepted
    if stand == len(drafted) or float(probs[stand, drafted[stand]]) < 0.5:
        return outcome
    rest = verify_coupled(logits[stand + 1 :], drafted[stand + 1 :], params, seed=seed, position=position + stand + 1)
    stand += 1 + rest.num_accepted
    return Outcome(stand, rest.token_id, origin_of(stand, len(drafted)))


RULES: Mapping[str, RejectionRule] = {
    "whole-law": recovered_from_the_whole_law,
    "twice": accepted_twice_as_easily,
    "coupled": verify,
}

if __name__ == "__main__":
    fault = os.environ["TANDEM_BROKEN_RULE"]
    coupled = mock.patch("target_service.verifier.verify_coupled", coupled_but_lenient)
    with coupled if fault == "coupled" else nullcontext():
        sys.exit(launch("target", partial(serve, rejection_rule=RULES[fault])))
