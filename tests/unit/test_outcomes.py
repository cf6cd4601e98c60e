"""Which outcomes of a verification drafts are prepared for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.outcomes import Acceptance, likely_outcomes


def outcomes(*arguments: object, most: int = 10) -> list[tuple[int, int, float]]:
    drafted, guesses, reached = arguments
    found = likely_outcomes(drafted, guesses, reached, most=most)  # type: ignore[arg-type]
    return [(one.num_accepted, one.token_id, round(one.likelihood, 6)) for one in found]


def test_by_hand() -> None:
    """Drafted 5, 6. After nothing the draft thinks 5 or 8, after 5 it thinks 6 or 9, after 5 6 it thinks 7 or 5."""
    guesses = [[(5, 0.6), (8, 0.3)], [(6, 0.9), (9, 0.1)], [(7, 0.8), (5, 0.2)]]
    assert outcomes([5, 6], guesses, [1.0, 0.8, 0.5]) == [
        (2, 7, 0.4),  # both accepted, bonus 7
        (0, 8, 0.3),  # 5 rejected, recovered 8
        (2, 5, 0.1),
        (1, 9, 0.08),
    ]
    assert outcomes([5, 6], guesses, [1.0, 0.8, 0.5], most=2) == [(2, 7, 0.4), (0, 8, 0.3)]


def test_before_the_last_position_is_known_only_rejections_are_foreseen() -> None:
    assert outcomes([5, 6], [[(5, 0.6), (8, 0.3)]], [1.0, 0.8, 0.5]) == [(0, 8, 0.3)]


def test_a_bonus_token_may_be_the_drafted_ones_like() -> None:
    assert outcomes([5], [[(5, 1.0)], [(5, 1.0)]], [1.0, 0.7]) == [(1, 5, 0.7)]


def test_what_hardly_ever_comes_is_not_prepared_for() -> None:
    assert outcomes([5], [[(5, 0.99), (6, 0.01)], [(7, 0.02), (8, 0.03)]], [1.0, 0.9]) == [(1, 8, 0.027)]


def test_of_equally_likely_outcomes_the_earlier_come_first() -> None:
    guesses = [[(1, 0.5), (2, 0.25), (3, 0.25)], [(4, 0.25)]]
    assert [pair[:2] for pair in outcomes([1], guesses, [1.0, 1.0], most=2)] == [(0, 2), (0, 3)]


def test_without_a_draft_any_guess_may_come_next() -> None:
    assert outcomes([], [[(1, 0.5)]], [1.0]) == [(0, 1, 0.5)]


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
