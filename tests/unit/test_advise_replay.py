"""A smaller k's rounds out of a larger one's: by hand, and against simulated drafters asked with both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.advise.replay import Outcome, num_tokens, positions, replay, within


def test_by_hand() -> None:
    """Four drafted, three accepted, with k = 1: a a', a a' (the rejected one): two rounds of two tokens each."""
    assert replay([Outcome(4, 3)], asked=4, k=1) == [Outcome(1, 1), Outcome(1, 1)]
    assert replay([Outcome(4, 2)], asked=4, k=1) == [Outcome(1, 1), Outcome(1, 0)]
    assert replay([Outcome(4, 0)], asked=4, k=2) == [Outcome(2, 0)]
    assert replay([Outcome(0, 0)], asked=4, k=2) == [Outcome(0, 0)]
    # The drafter ended it after two: with k = 1 the target's own token comes where the draft had ended.
    assert replay([Outcome(2, 2)], asked=4, k=1) == [Outcome(1, 1), Outcome(0, 0)]


def test_rounds_that_only_k_has_parted_are_one_text() -> None:
    """Nine tokens in a row were right: k = 2 has them in three rounds, which end where no round of k = 4 did."""
    rounds = [Outcome(4, 4), Outcome(4, 3)]
    assert replay(rounds, asked=4, k=2) == [Outcome(2, 2), Outcome(2, 2), Outcome(2, 2)]
    # Here the text changed where the long round ended, as the next one's first token shows.
    assert replay([Outcome(4, 4), Outcome(4, 0)], asked=4, k=2) == [Outcome(2, 2), Outcome(2, 1), Outcome(2, 0)]


@given(st.data())
def test_every_k_brings_the_same_tokens_and_the_measured_one_the_same_rounds(data: st.DataObject) -> None:
    asked = data.draw(st.integers(1, 8))
    drafted = data.draw(st.lists(st.integers(0, asked), max_size=12))
    rounds = [Outcome(n, data.draw(st.integers(0, n))) for n in drafted]
    assert replay(rounds, asked=asked, k=asked) == rounds
    for k in range(1, asked + 1):
        shorter = replay(rounds, asked=asked, k=k)
        assert num_tokens(shorter) == num_tokens(rounds)
        assert all(0 <= each.accepted <= each.drafted <= k for each in shorter)


def spoken(right: Sequence[bool], k: int) -> list[Outcome]:
    """What a drafter whose guess at each place of a text is right or wrong makes with k."""
    place, rounds = 0, []
    while place + k < len(right):
        accepted = 0
        while accepted < k and right[place + accepted]:
            accepted += 1
        rounds.append(Outcome(k, accepted))
        place += accepted + 1
    return rounds


@pytest.mark.parametrize("stays", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_bursts_are_foretold_where_positions_alone_mislead(stays: float, k: int) -> None:
    """Right and wrong places in runs: each place is like the one before it with probability `stays`.

    40,000 places: tokens a round differ by less than 1 % between seeds. By position, at stays = 0.98 and k = 2, one
    would be off by more than 10 %: the reason for replaying.
    """
    rng = np.random.default_rng(5)
    right = np.logical_xor.accumulate(rng.random(40_000) > stays)
    truth = spoken(list(right), k)
    told = replay(spoken(list(right), 16), asked=16, k=k)
    length = num_tokens(truth) / len(truth)
    assert num_tokens(told) / len(told) == pytest.approx(length, rel=0.03)
    by_position = 1.0 + sum(positions(spoken(list(right), 16), asked=16).accepted[:k])
    if stays == 0.98 and k == 2:
        assert by_position < 0.9 * length


def test_the_rounds_end_with_the_answer() -> None:
    """A stop in the middle of a round: what it brought beyond that is no gain."""
    rounds = [Outcome(4, 4), Outcome(4, 4)]
    assert within(rounds, num_tokens=7) == [Outcome(4, 4), Outcome(4, 1)]
    assert within(rounds, num_tokens=5) == [Outcome(4, 4)]
    assert within(rounds, num_tokens=10) == rounds
    assert within(rounds, num_tokens=0) == []


def test_positions_are_shares_of_all_rounds() -> None:
    found = positions([Outcome(2, 1), Outcome(0, 0), Outcome(1, 1), Outcome(3, 0)], asked=3)
    assert found.drafted == (0.75, 0.5, 0.25)
    assert found.accepted == (0.5, 0.0, 0.0)
    assert positions([], asked=2).accepted == (0.0, 0.0)


def test_a_larger_k_than_was_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to 4"):
        replay([Outcome(4, 4)], asked=4, k=5)
