"""The formulas against hand-computed values and simulated rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.speedup import (
    Costs,
    acceptance_rate,
    best_speedup,
    break_even,
    expected_tokens,
    expected_tokens_at,
    geometric,
    overlapped_seconds,
    seconds_at,
    serial_seconds,
    speedup,
)


@pytest.mark.parametrize(("rate", "k", "tokens"), [(0.5, 3, 1.875), (0.0, 5, 1.0), (1.0, 4, 5.0), (0.8, 1, 1.8)])
def test_expected_tokens_by_hand(rate: float, k: int, tokens: float) -> None:
    """0.5, k = 3: 1 + 1/2 + 1/4 + 1/8."""
    assert expected_tokens_at(rate, k) == pytest.approx(tokens)
    assert expected_tokens(geometric(rate, k))[k] == pytest.approx(tokens)


@pytest.mark.parametrize(("rate", "k", "factor"), [(0.6, 2, 1.96), (0.7, 3, 2.533), (0.8, 5, 3.689), (0.9, 10, 6.862)])
def test_a_free_draft_gains_what_a_round_brings(rate: float, k: int, factor: float) -> None:
    """(1 - 0.6^3) / 0.4 = 1.96, (1 - 0.7^4) / 0.3 = 2.533, (1 - 0.8^6) / 0.2 = 3.689, (1 - 0.9^11) / 0.1 = 6.862."""
    assert speedup(rate, k, Costs(draft=0.0)) == pytest.approx(factor, abs=5e-4)


def test_speed_up_with_every_cost_by_hand() -> None:
    """k = 2 at 0.5: 1.75 tokens. A round: 1 + 2 x 0.1 + 2 x 0.15 + 0.25 = 1.75 steps; none faster than plain.

    Always prepared: the longer of 1.45 and 0.30. Prepared in half of the rounds: 1.60.
    """
    costs = Costs(draft=0.15, verify_slope=0.1, overhead=0.25)
    assert speedup(0.5, 2, costs) == pytest.approx(1.0)
    assert overlapped_seconds(verify=1.2, draft=0.3, wait=0.25, hit_rate=1.0) == pytest.approx(1.45)
    assert overlapped_seconds(verify=1.2, draft=0.3, wait=0.25, hit_rate=0.5) == pytest.approx(1.60)
    assert overlapped_seconds(verify=1.2, draft=2.0, wait=0.25, hit_rate=1.0) == pytest.approx(2.0)
    assert overlapped_seconds(verify=1.2, draft=0.3, wait=0.25, hit_rate=0.0) == serial_seconds(
        verify=1.2, draft=0.3, wait=0.25
    )
    assert speedup(0.9, 0, costs) == 1.0  # plain decoding asks no draft, so it waits for none


def test_the_best_k_of_known_cases() -> None:
    """alpha 0.8, c 0.05: S(7) = 3.082, S(8) = 3.092, S(9) = 3.078."""
    k, gain = best_speedup(0.8, Costs(draft=0.05), most=32)
    assert (k, round(gain, 2)) == (8, 3.09)
    k, gain = best_speedup(0.6, Costs(draft=0.2), most=32)
    assert (k, round(gain, 2)) == (2, 1.4)


@given(c=st.floats(0.01, 0.95))
def test_without_slope_and_overhead_break_even_is_at_the_cost_of_a_draft_token(c: float) -> None:
    """Leviathan et al. 2022, corollary 3.9: any rate above c gains."""
    assert break_even(Costs(draft=c), most=16) == pytest.approx(c, abs=1e-4)


def test_break_even_with_costs_and_where_there_is_none() -> None:
    """k = 1: 1 + alpha = 1 + 0.1 + 0.2 + 0.1, so 0.4; a longer draft needs more of it."""
    assert break_even(Costs(draft=0.2, verify_slope=0.1, overhead=0.1), most=1) == pytest.approx(0.4, abs=1e-4)
    assert break_even(Costs(draft=1.2), most=16) is None
    assert break_even(Costs(draft=0.0), most=16) == 0.0


@pytest.mark.parametrize("rate", [0.2, 0.65, 0.93])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_simulated_rounds_agree(rate: float, k: int) -> None:
    """A million rounds: the mean's error is at most 4.1 / 1000, six of which are not met by chance (2e-9)."""
    rng = np.random.default_rng(7)
    accepted = np.minimum(rng.geometric(1.0 - rate, 1_000_000) - 1, k)
    tokens = 1.0 + accepted.mean()
    error = 6.0 * accepted.std() / 1000.0
    assert tokens == pytest.approx(expected_tokens_at(rate, k), abs=error)
    by_position = [float(np.mean(accepted >= j)) for j in range(1, k + 1)]
    assert expected_tokens(by_position)[k] == pytest.approx(tokens)
    found = acceptance_rate(float(accepted.sum()), float(np.sum(accepted < k)))
    assert found == pytest.approx(rate, abs=0.006)  # of 6e5 trials or more: ten times its error
    assert found != pytest.approx(rate + 0.02, abs=0.006)  # the negative control


def test_simulated_time_agrees() -> None:
    """Rounds with hits and misses, their seconds added one by one; 200,000 rounds, 0.5 % are more than ten errors."""
    rng = np.random.default_rng(3)
    k, rate = 5, 0.7
    costs = Costs(draft=0.3, verify_slope=0.05, overhead=0.1, hit_rate=0.6)
    tokens = 1 + np.minimum(rng.geometric(1.0 - rate, 200_000) - 1, k)
    hit = rng.random(200_000) < costs.hit_rate
    seconds = np.where(hit, max(1.35, 1.5), 1.35 + 1.5)  # verify 1 + 5 x 0.05, wait 0.1; draft 5 x 0.3
    assert tokens.sum() / seconds.sum() == pytest.approx(speedup(rate, k, costs), rel=0.005)


def test_the_table_in_the_documentation_is_what_the_formulas_say() -> None:
    """docs/choosing-a-draft.md: a row for each rate, a column for each cost, `speed-up (k)`."""
    lines = (Path(__file__).parents[2] / "docs" / "choosing-a-draft.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    start = next(index for index, row in enumerate(rows) if row[1:2] == ["c = 0"])
    costs = [
        Costs(draft=float(cell.removeprefix("c = ")), verify_slope=0.05, overhead=0.05) for cell in rows[start][1:]
    ]
    for row in rows[start + 2 : start + 6]:
        found = [best_speedup(float(row[0]), each, most=16) for each in costs]
        assert row[1:] == [f"{gain:.2f} ({k})" for k, gain in found]
    assert rows[start + 6][1:] == [f"{break_even(each, most=16):.2f}" for each in costs]


def test_times_between_and_beyond_what_is_known() -> None:
    known = [10.0, 12.0, 12.5]
    assert [seconds_at(known, n) for n in (0, 0.5, 1, 2, 4)] == pytest.approx([10.0, 11.0, 12.0, 12.5, 13.5])


def test_no_probability_and_nothing_are_told() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        geometric(1.2, 3)
    assert acceptance_rate(0, 0) is None
