"""Which outcomes of a verification drafts are prepared for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.outcomes import Acceptance, Outcome, bonuses, recoveries

# Drafted 5, 6. In place of the first the draft thinks of 5, 8, 9, of the second, 6, 9.
GUESSES = [[(5, 0.6), (8, 0.3), (9, 0.1)], [(6, 0.8), (9, 0.2)]]
REACHED = [1.0, 0.8, 0.5]


def pairs(outcomes: Sequence[Outcome]) -> list[tuple[int, int]]:
    return [(outcome.num_accepted, outcome.token_id) for outcome in outcomes]


def test_rejections_by_hand() -> None:
    """8, 9 in place of 5: 0.3 and 0.1. 9 in place of 6: 0.8 * 0.2 = 0.16. The drafted ones themselves are none."""
    assert pairs(recoveries([5, 6], GUESSES, REACHED, most=10)) == [(0, 8), (0, 9), (1, 9)]
    assert pairs(recoveries([5, 6], GUESSES, REACHED, most=2)) == [(0, 8), (0, 9)]
    assert recoveries([5, 6], GUESSES, REACHED, most=0) == []
    assert recoveries([], [], [1.0], most=3) == []


def test_bonus_tokens_by_hand() -> None:
    """0.5 * 0.7 = 0.35; 0.5 * 0.2 = 0.1; 0.5 * 0.09 is too little. A bonus token may be one that was drafted."""
    guesses = [(6, 0.7), (5, 0.2), (7, 0.09)]
    assert pairs(bonuses(2, guesses, REACHED, most=10)) == [(2, 6), (2, 5)]
    assert pairs(bonuses(2, guesses, REACHED, most=1)) == [(2, 6)]
    assert bonuses(2, guesses, REACHED, most=0) == []
    assert bonuses(2, guesses, [1.0, 0.3, 0.05], most=10) == []


def test_what_hardly_ever_comes_is_not_prepared_for() -> None:
    assert recoveries([5, 6], GUESSES, [1.0, 0.2, 0.1], most=10) == [Outcome(0, 8), Outcome(0, 9)]
    assert recoveries([5], [[(5, 0.97), (8, 0.03)]], [1.0, 0.9], most=10) == []


_probs = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3)


@given(
    shared=st.lists(st.tuples(st.integers(0, 2), _probs), max_size=4),
    tails=st.lists(st.lists(st.tuples(st.integers(0, 2), _probs), max_size=4), min_size=2, max_size=2),
    reached=st.lists(st.floats(0.0, 1.0), min_size=10, max_size=10),
    most=st.integers(0, 6),
)
def test_whether_an_outcome_is_prepared_for_depends_on_nothing_behind_it(
    shared: list[tuple[int, list[float]]],
    tails: list[list[tuple[int, list[float]]]],
    reached: list[float],
    most: int,
) -> None:
    """Two drafts that begin alike: the same rejections up to where they part."""
    found = []
    for tail in tails:
        draft = [*shared, *tail]
        outcomes = recoveries(
            [token_id for token_id, _ in draft],
            [sorted(enumerate(probs), key=lambda guess: -guess[1]) for _, probs in draft],
            reached,
            most=most,
        )
        found.append([outcome for outcome in outcomes if outcome.num_accepted < len(shared)])
    assert found[0] == found[1]


def test_acceptance_is_hopeful_then_what_was_seen() -> None:
    acceptance = Acceptance()
    assert acceptance.reached(2) == pytest.approx([1.0, 0.7, 0.49])
    for _ in range(200):
        acceptance.learn(3, 1)  # the first always, the second never, the third is never reached
    assert acceptance.reached(0) == [1.0]
    reached = acceptance.reached(4)
    # Of a decayed count of 20 and a hope of 0.7 (then: of the position before) that weighs 2:
    first = (20 + 2 * 0.7) / 22
    second = 2 * first / 22
    assert reached == pytest.approx([1.0, first, first * second, first * second**2, first * second**3], rel=1e-3)


def test_acceptance_follows_a_text_that_changes() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.learn(1, 0)
    assert acceptance.reached(1)[1] < 0.1
    for _ in range(40):
        acceptance.learn(1, 1)
    assert acceptance.reached(1)[1] > 0.8


@given(rounds=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40), asked=st.integers(0, 10))
def test_reaching_further_is_never_likelier(rounds: list[tuple[int, int]], asked: int) -> None:
    acceptance = Acceptance()
    for num_drafted, num_accepted in rounds:
        acceptance.learn(num_drafted, min(num_drafted, num_accepted))
    reached = acceptance.reached(asked)
    assert len(reached) == asked + 1
    assert reached[0] == 1.0
    assert all(0.0 <= later <= earlier for earlier, later in pairwise(reached))
