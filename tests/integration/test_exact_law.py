"""Without a seed, speculation changes no law: the joint law of an answer's first three tokens is plain decoding's.

Everything is the real thing but the model, a table (ToyRunner) whose law after any text can be enumerated: by
`ToyModel.law`, float64 and plain loops, which shares no code with the engine. Each test draws NUM_TRIALS answers with
random request seeds (from a fixed generator, so a test passes or fails for good) and compares the 64 counts with the
exact law by chi-square. FALSE_ALARM (1e-6) is the probability that right code would fail with other seeds; an error
of VISIBLE in total variation is found with probability 0.99 (asserted below), and so are the wrong rules at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import target_service.verifier
from draft_service.drafters.base import Drafter
from draft_service.drafters.model import ModelDrafter
from tandem.draft_law import SparseLaw
from tandem.engine import rejection
from tandem.engine.outcome import Outcome, origin_of
from tandem.engine.rejection import RejectionRule
from tandem.engine.sampling import adjusted_logits, draw, law
from tandem.lookup.drafter import LookupDrafter
from tandem.randomness import Purpose, uniform
from tandem.types import Draft, SamplingParams, SessionStart, Verification
from target_service.verifier import Verifier
from tests.in_process import FunctionDrafter, InProcessDrafts, InProcessTarget, Question, rounds_of, working_on
from tests.toy_models import FALSE_ALARM, FloatArray, ToyHead, ToyModel, ToyRunner, misfit, smallest_visible_error
from tests.toy_tables import table_of

VOCAB_SIZE = 4
PROMPT = (0, 3, 1, 0, 3)
NUM_TRIALS = 1_000
VISIBLE = 0.175

TARGET = ToyModel(vocab_size=VOCAB_SIZE, seed=11, scale=1.2)
MODELS = {
    "good": (TARGET.like(weight=0.8, seed=12), 50),
    "bad": (ToyModel(vocab_size=VOCAB_SIZE, seed=13, scale=1.5), 50),
    "prepared": (TARGET.like(weight=0.8, seed=12), 50),  # the good one, which also prepares drafts
    "sparse": (TARGET.like(weight=0.8, seed=14), 2),  # samples from its two most likely tokens only
}

# Of answers of a model that is not quite the target, so that laws of the table are near its and never equal.
TABLE = table_of(TARGET.like(weight=0.8, seed=15), num_answers=60, longest=2)

HEAD = ToyHead(TARGET.like(weight=0.1, seed=16))  # farther from it, or a wrong rule would not show

# One value for each parameter, strong enough to matter within three tokens (asserted below).
VALUES: dict[str, dict[str, Any]] = {
    "no parameter": {},
    "low temperature": {"temperature": 0.5},
    "high temperature": {"temperature": 2.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.5},
    "repetition_penalty": {"repetition_penalty": 4.0},
    "logit_bias": {"logit_bias": ((1, 1.5), (2, -1.0))},
    "banned_token_ids": {"banned_token_ids": (2,)},
    "min_tokens": {"min_tokens": 2, "end_token_ids": (1, 2)},
}


def _combined(*names: str) -> SamplingParams:
    merged: dict[str, Any] = {}
    for name in names:
        merged |= VALUES[name]
    return SamplingParams(**merged)


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def exact_triples(params: SamplingParams) -> FloatArray:
    """Plain decoding's joint law of the first three tokens [vocab, vocab, vocab]."""
    triples = np.zeros((VOCAB_SIZE,) * 3)
    length = len(PROMPT)
    first = TARGET.law(PROMPT, params, prompt_length=length)
    for one in range(VOCAB_SIZE):
        second = TARGET.law((*PROMPT, one), params, prompt_length=length)
        for two in range(VOCAB_SIZE):
            third = TARGET.law((*PROMPT, one, two), params, prompt_length=length)
            triples[one, two] = first[one] * second[two] * third
    return triples


def _own_text(question: Question) -> Draft:
    """A stubborn deterministic draft: the prompt over again."""
    return Draft(tuple(islice(PROMPT, question.k)))


class Tally:
    def __init__(self) -> None:
        self.triples = np.zeros((VOCAB_SIZE,) * 3, dtype=np.int64)
        self.drafted = 0
        self.accepted = 0


def sample(
    params: SamplingParams,
    *,
    drafter: str,
    k: int,
    rule: RejectionRule = rejection.verify,
    num_trials: int = NUM_TRIALS,
) -> Tally:
    """The first three tokens of many answers, 32 at a time on one worker."""
    return asyncio.run(_sample(params, drafter=drafter, k=k, rule=rule, num_trials=num_trials))


async def _sample(params: SamplingParams, *, drafter: str, k: int, rule: RejectionRule, num_trials: int) -> Tally:
    seeds = np.random.default_rng(20).integers(0, 2**64, num_trials, dtype=np.uint64).tolist()
    tally = Tally()
    with ExitStack() as stack:
        worker = stack.enter_context(working_on(ToyRunner(TARGET, num_blocks=1024), max_step_tokens=256))
        target = InProcessTarget(Verifier(worker, head=HEAD, rejection_rule=rule))
        drafters: dict[str, Drafter] = {
            "ngram": LookupDrafter(least_certainty=0.0, hears_head=False),
            "table": LookupDrafter(min_match=None, table=TABLE, least_certainty=0.0, hears_head=False),
            "ngram and table": LookupDrafter(table=TABLE, least_certainty=0.2, hears_head=False),  # of all lengths
            "head": LookupDrafter(min_match=100, least_certainty=0.0),
            "all": LookupDrafter(table=TABLE, least_certainty=0.2),
            "stubborn": FunctionDrafter(_own_text),
        }
        if drafter in MODELS:
            model, law_size = MODELS[drafter]
            draft = stack.enter_context(working_on(ToyRunner(model, num_blocks=1024), max_step_tokens=256))
            branches = 5 if drafter == "prepared" else 0
            drafters[drafter] = ModelDrafter(draft, law_size=law_size, prepared_branches=branches)
        drafts = InProcessDrafts(drafters, vocab_size=VOCAB_SIZE)

        async def one(seed: int) -> None:
            start = SessionStart(
                token_ids=PROMPT,
                prompt_length=len(PROMPT),
                sampling=params,
                seed=seed,
                verification=Verification.REJECTION,
                next_laws=True,
            )
            said: list[int] = []
            # Room for more than three tokens, so that drafts are not cut short by the end.
            loop = rounds_of(start, num_tokens=3 + k, target=target, drafts=drafts, drafter=drafter, k=k)
            async with aclosing(loop):
                async for outcome in loop:
                    said += outcome.token_ids
                    tally.drafted += outcome.num_drafted
                    tally.accepted += outcome.num_accepted
                    if len(said) >= 3:
                        break
            tally.triples[tuple(said[:3])] += 1

        for begin in range(0, num_trials, 32):
            await asyncio.gather(*(one(seed) for seed in seeds[begin : begin + 32]))
    return tally


def test_the_power_is_what_this_file_says() -> None:
    assert smallest_visible_error(num_cells=VOCAB_SIZE**3, num_trials=NUM_TRIALS) < VISIBLE


def test_every_parameter_changes_the_law_by_more_than_what_can_be_seen() -> None:
    """Or ignoring it would not be noticed."""
    bare = exact_triples(SamplingParams())
    for name in list(VALUES)[1:]:
        assert 0.5 * np.abs(exact_triples(_combined(name)) - bare).sum() > VISIBLE, name


DRAFTERS = ["good", "bad", "sparse", "ngram", "stubborn"]
CASES = [
    ("no parameter", "sparse", 3),
    ("no parameter", "good", 1),
    *((name, DRAFTERS[i % 5], 1 + i % 4) for i, name in enumerate(list(VALUES)[1:])),
    ("presence_penalty+top_p", "good", 3),
    ("frequency_penalty+high temperature", "sparse", 2),
    ("repetition_penalty+min_p", "bad", 2),
    ("min_tokens+low temperature", "good", 4),
    ("logit_bias+top_k", "ngram", 3),
    ("banned_token_ids+frequency_penalty", "stubborn", 2),
    ("no parameter", "prepared", 1),
    ("presence_penalty+top_p", "prepared", 3),
    ("no parameter", "table", 3),
    ("low temperature", "table", 2),
    ("min_tokens+top_k", "table", 3),
    ("logit_bias+top_p", "table", 4),
    ("no parameter", "ngram and table", 4),
    ("frequency_penalty+high temperature", "ngram and table", 3),
    ("banned_token_ids+min_p", "ngram and table", 2),
    ("no parameter", "head", 1),
    ("low temperature", "head", 3),
    ("min_tokens+top_k", "head", 2),
    ("no parameter", "all", 4),
    ("frequency_penalty+high temperature", "all", 3),
]


@pytest.mark.parametrize(("names", "drafter", "k"), CASES)
def test_the_first_three_tokens_follow_plain_decodings_law(names: str, drafter: str, k: int) -> None:
    params = _combined(*names.split("+"))
    tally = sample(params, drafter=drafter, k=k)
    assert 0 < tally.accepted < tally.drafted
    assert misfit(tally.triples, exact_triples(params)) > FALSE_ALARM


# --- wrong rules must fail ----------------------------------------------------------------------------------------


def _with(
    logits: torch.Tensor,
    drafted: Sequence[int],
    laws: Sequence[SparseLaw] | None,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    accepts: Any,
    recovers: Any,
) -> Outcome:
    """The rule in plain words, with two holes for a fault."""
    probs = law(logits, params)
    for i, token_id in enumerate(drafted):
        draft_probs = torch.zeros(probs.shape[-1])
        if laws is None:
            draft_probs[token_id] = 1.0
        else:
            draft_probs[torch.from_numpy(laws[i].token_ids.astype(np.int64))] = torch.from_numpy(laws[i].probs.copy())
        u = uniform(seed, position + i, Purpose.ACCEPT)
        if not accepts(u, float(probs[i, token_id]), float(draft_probs[token_id])):
            weights = recovers(probs[i], draft_probs)
            chosen = draw(weights, uniform(seed, position + i, Purpose.TARGET))
            return Outcome(i, chosen, origin_of(i, len(drafted)))
    i = len(drafted)
    return Outcome(i, draw(probs[i], uniform(seed, position + i, Purpose.TARGET)), origin_of(i, i))


def _ratio(u: float, p: float, q: float) -> bool:
    return u * q < p


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    left = (p - q).clamp(min=0.0)
    return left if float(left.sum()) > 0 else p


def rule_of(accepts: Any = _ratio, recovers: Any = _residual) -> RejectionRule:
    def rule(
        logits: torch.Tensor,
        drafted: Sequence[int],
        laws: Sequence[SparseLaw] | None,
        params: SamplingParams,
        *,
        seed: int,
        position: int,
    ) -> Outcome:
        return _with(logits, drafted, laws, params, seed=seed, position=position, accepts=accepts, recovers=recovers)

    return rule


WRONG: Mapping[str, tuple[RejectionRule, str]] = {
    "recovers from the target's whole law": (rule_of(recovers=lambda p, q: p), "bad"),
    "recovers the argmax": (rule_of(recovers=lambda p, q: (p == p.max()).float()), "bad"),
    "accepts with probability p": (rule_of(accepts=lambda u, p, q: u < p), "good"),
    "accepts what it finds likely enough": (rule_of(accepts=lambda u, p, q: p > 0.3), "bad"),
    "accepts everything": (rule_of(accepts=lambda u, p, q: True), "bad"),
    "takes a deterministic draft for certain": (rule_of(accepts=lambda u, p, q: p > 0.0), "ngram"),
    "takes a law of a table for one-hot": (rule_of(accepts=lambda u, p, q: u < p), "table"),
    "recovers what a law of a table left": (rule_of(recovers=lambda p, q: p), "table"),
    "takes a law of a head for one-hot": (rule_of(accepts=lambda u, p, q: u < p), "head"),
    "recovers what a law of a head left": (rule_of(recovers=lambda p, q: p), "head"),
}


def test_the_rule_in_plain_words_passes_so_that_its_faults_are_what_fails_below() -> None:
    tally = sample(SamplingParams(), drafter="good", k=3, rule=rule_of())
    assert misfit(tally.triples, exact_triples(SamplingParams())) > FALSE_ALARM


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str) -> None:
    rule, drafter = WRONG[name]
    tally = sample(SamplingParams(), drafter=drafter, k=3, rule=rule)
    assert misfit(tally.triples, exact_triples(SamplingParams())) < FALSE_ALARM


def test_penalties_that_forget_the_drafted_tokens_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int], *, prompt_length: int
    ) -> torch.Tensor:
        first = tokens[: len(tokens) - len(logits) + 1]
        return torch.cat([adjusted_logits(row[None], params, first, prompt_length=prompt_length) for row in logits])

    monkeypatch.setattr(target_service.verifier, "adjusted_logits", forgetful)
    params = replace(_combined("frequency_penalty"), frequency_penalty=-2.0)
    tally = sample(params, drafter="good", k=3)
    assert misfit(tally.triples, exact_triples(params)) < FALSE_ALARM
