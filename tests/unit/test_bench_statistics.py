"""Medians, pairs and intervals, against what can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.bench.statistics import MIN_UNITS, median_ratio, paired_ratios, ratio_of_rates, spread


def test_a_spread_is_median_quartiles_and_95th_percentile() -> None:
    found = spread([float(value) for value in (5, 1, 4, 2, 3)])  # 1 2 3 4 5: the quarter points are values themselves
    assert found is not None
    assert (found.count, found.median, found.lower_quartile, found.upper_quartile) == (5, 3.0, 2.0, 4.0)
    assert found.p95 == pytest.approx(4.8)  # 0.95 of the way from the first to the last of five: place 3.8
    assert spread([]) is None


def test_ratios_are_of_the_same_prompt_and_repeat_and_repeats_become_one() -> None:
    values = {("a", 0): 4.0, ("a", 1): 9.0, ("a", 2): 5.0, ("b", 0): 3.0, ("lonely", 0): 1.0}
    baseline = {("a", 0): 2.0, ("a", 1): 3.0, ("a", 2): 1.0, ("b", 0): 6.0, ("other", 0): 1.0}
    assert paired_ratios(values, baseline) == {"a": 3.0, "b": 0.5}  # a: 2, 3 and 5


def test_a_baseline_of_zero_is_no_pair() -> None:
    assert paired_ratios({("a", 0): 1.0}, {("a", 0): 0.0}) == {}


def test_the_median_of_ratios_has_no_interval_where_none_can_be_had() -> None:
    few = median_ratio([1.0, 2.0, 3.0, 4.0, 5.0])
    assert few is not None
    assert (few.count, few.estimate, few.low, few.high) == (MIN_UNITS - 1, 3.0, None, None)
    assert median_ratio([]) is None


def test_equal_ratios_have_an_interval_without_width() -> None:
    found = median_ratio([1.5] * 10)
    assert found is not None
    assert (found.estimate, found.low, found.high) == (1.5, 1.5, 1.5)


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    """Of 101 values 0, 1, ..., 100 the bootstrap median lies below value r when more than half of 101 draws do:
    binomial(101, r / 101) has 2.5 % of that at r = 41 and 97.5 % at r = 60, give or take one for 5,000 draws."""
    found = median_ratio([float(value) for value in range(101)])
    assert found is not None
    assert found.estimate == 50.0
    assert found.low is not None
    assert found.high is not None
    assert abs(found.low - 40.5) <= 1.5
    assert abs(found.high - 59.5) <= 1.5


def test_intervals_hold_the_true_median_as_often_as_they_promise() -> None:
    """400 samples of 20 from a normal law. A coverage of 0.95 gives fewer than 0.90 with probability below 1e-4; the
    seed is fixed, so that it does or does not for ever."""
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        found = median_ratio(list(random.normal(1.0, 0.2, 20)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / 400 <= 0.99


def test_the_same_data_have_the_same_interval() -> None:
    values = list(np.random.default_rng(1).normal(2.0, 0.5, 30))
    assert median_ratio(values) == median_ratio(values)


def test_a_ratio_of_rates_is_of_totals_not_a_mean_of_ratios() -> None:
    """Ours: 30 tokens in 3 s, theirs: 20 in 4 s. 10 / 5 = 2, while the groups' own ratios are 3 and 1.5."""
    found = ratio_of_rates([(15, 5), (15, 15)], [(1.0, 1.0), (2.0, 3.0)])
    assert found is not None
    assert (found.count, found.low) == (2, None)
    assert found.estimate == pytest.approx(2.0)
    assert ratio_of_rates([], []) is None


def test_groups_are_drawn_again_as_pairs() -> None:
    """Groups differ from each other a hundredfold, their ratio is the same: the interval has no width."""
    sizes = [1.0, 3.0, 10.0, 20.0, 50.0, 100.0]
    found = ratio_of_rates([(2 * size, size) for size in sizes], [(size, size) for size in sizes])
    assert found is not None
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def test_many_units_are_drawn_in_pieces() -> None:
    found = median_ratio([1.0, 3.0] * 1500)
    assert found is not None
    assert found.count == 3000
    assert found.low in (1.0, 2.0)
    assert found.high in (2.0, 3.0)
