"""The law of a looked-up guess: against the engine's own, and its draws against it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.draft_law import SparseLaw, unpack
from tandem.engine.coupled import choose
from tandem.engine.sampling import adjusted_logits, law
from tandem.lookup.drafter import LookupDrafter
from tandem.lookup.law import draw, shaped
from tandem.types import DraftWish, SamplingParams, SessionStart, Verification
from tests.toy_models import FALSE_ALARM, ToyModel, misfit
from tests.toy_tables import table_of

SEEDED = settings(max_examples=200, deadline=None, derandomize=True, database=None)
VOCAB = 12
LAW = SparseLaw(np.array([7, 2, 9], dtype=np.uint32), np.array([0.5, 0.3, 0.2], dtype=np.float32))


def start(*, seed: int = 0, verification: Verification = Verification.REJECTION) -> SessionStart:
    return SessionStart(
        token_ids=(1, 2), prompt_length=2, sampling=SamplingParams(), seed=seed, verification=verification
    )


params = st.builds(
    SamplingParams,
    temperature=st.floats(0.1, 2.0),
    top_k=st.integers(0, 4),
    top_p=st.floats(0.2, 1.0),
    min_p=st.floats(0.0, 0.5),
    logit_bias=st.lists(
        st.tuples(st.integers(0, VOCAB - 1), st.floats(-3, 3)), max_size=2, unique_by=lambda e: e[0]
    ).map(tuple),
    banned_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    min_tokens=st.integers(0, 3),
    end_token_ids=st.just((3, 4)),
)


@SEEDED
@given(
    weights=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(0.01, 1.0), min_size=1, max_size=6),
    params=params,
    num_generated=st.integers(0, 4),
)
def test_a_law_is_the_one_that_the_engine_makes_of_it(
    weights: dict[int, float], params: SamplingParams, num_generated: int
) -> None:
    """With the tokens that the table does not name impossible. Ties at a border may be cut here, and are kept there."""
    total = sum(weights.values()) * 1.1
    said = sorted(((token, weight / total) for token, weight in weights.items()), key=lambda one: -one[1])
    logits = torch.full((1, VOCAB), -torch.inf)
    for token, share in said:
        logits[0, token] = np.log(share)
    tokens = [0] * (2 + num_generated)
    adjusted = adjusted_logits(logits, params, tokens, prompt_length=2)
    ours = shaped(said, params, num_generated=num_generated)
    if not bool(torch.isfinite(adjusted).any()):
        assert ours is None
        return
    assert ours is not None
    expected = law(adjusted, params)[0].numpy()
    found = np.zeros(VOCAB, dtype=np.float32)
    found[ours.token_ids] = ours.probs
    assert found.sum() == pytest.approx(1.0, abs=1e-6)
    same_support = set(np.flatnonzero(found)) == set(np.flatnonzero(expected))
    at_a_border = len(np.unique(np.round(expected[expected > 0], 5))) < np.count_nonzero(expected) or params.top_p < 1
    assert same_support or at_a_border
    if same_support:
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_nothing_may_follow() -> None:
    assert shaped([], SamplingParams(), num_generated=0) is None
    assert shaped([(3, 0.9)], SamplingParams(banned_token_ids=(3,)), num_generated=0) is None


def test_a_draw_follows_the_law() -> None:
    """By chi-square; an error of 0.05 in total variation is found with probability 0.99."""
    for verification in Verification:
        drawn = Counter(
            draw(LAW, start(seed=seed, verification=verification), position=5, text_length=4) for seed in range(12_000)
        )
        assert misfit([drawn[7], drawn[2], drawn[9]], [0.5, 0.3, 0.2]) > FALSE_ALARM
        assert misfit([drawn[7], drawn[2], drawn[9]], [0.55, 0.25, 0.2]) < FALSE_ALARM


def test_each_round_draws_anew_and_the_same_round_the_same() -> None:
    """Else the length of a draft would tell of numbers that are drawn on again (renewed_uniform)."""

    def drawn(text_length: int) -> list[int]:
        return [draw(LAW, start(seed=seed), position=9, text_length=text_length) for seed in range(400)]

    assert drawn(5) == drawn(5)
    together = Counter(zip(drawn(5), drawn(6), strict=True))
    probs = dict(zip(LAW.token_ids.tolist(), LAW.probs.tolist(), strict=True))
    cells = [(one, other) for one in probs for other in probs]
    assert misfit([together[cell] for cell in cells], [probs[one] * probs[other] for one, other in cells]) > FALSE_ALARM


def test_under_the_coupled_rule_the_positions_noise_chooses() -> None:
    dense = torch.zeros(50)
    dense[torch.from_numpy(LAW.token_ids.astype(np.int64))] = torch.from_numpy(LAW.probs)
    for seed in range(500):
        begin = start(seed=seed, verification=Verification.COUPLED)
        for text_length in (3, 4):
            assert draw(LAW, begin, position=8, text_length=text_length) == choose(dense, seed=seed, position=8)


async def test_a_draft_sends_the_laws_it_was_drawn_from_and_none_under_the_coupled_rule() -> None:
    """A match of many tokens is certain, and one-hot, where the table's laws are not."""
    table = table_of(ToyModel(vocab_size=4, seed=3, scale=1.0), num_answers=40, longest=1)
    tokens = (0, 1, 2, 3, 3, 2, 1, 0, 1, 1, 2, 2, 3, 0, 0, 3)
    text = (*tokens, *tokens)
    begin = SessionStart(token_ids=text, prompt_length=len(text), sampling=SamplingParams(), seed=0)
    drafter = LookupDrafter(table=table, least_certainty=0.0)
    from_text = (await drafter.open(begin).propose(len(text), (), DraftWish(3))).draft
    assert from_text.law is None
    only_table = LookupDrafter(min_match=None, table=table, least_certainty=0.0)
    draft = (await only_table.open(begin).propose(len(text), (), DraftWish(3))).draft
    laws = unpack(draft, vocab_size=4)
    assert laws is not None
    assert len(laws) == 3
    context = list(text)
    for one, token_id in zip(laws, draft.token_ids, strict=True):
        expected = shaped(table.law(context), SamplingParams(), num_generated=0)
        assert expected is not None
        np.testing.assert_array_equal(one.token_ids, expected.token_ids)
        np.testing.assert_array_equal(one.probs, expected.probs)
        context.append(token_id)
    coupled = replace(begin, verification=Verification.COUPLED)
    assert (await only_table.open(coupled).propose(len(text), (), DraftWish(3))).draft.law is None
